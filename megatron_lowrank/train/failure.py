"""How a run fails: the same error on every rank, one line on the terminal, an exit code that says whose fault it was.

Two kinds of failure need different care. In a phase without collectives (reading the config, opening data, making a
folder) an error on one rank would leave the others waiting: `agreed` turns it into the same error on all of them. In
the middle of training the group may be broken, and all that is left is to leave at once so that the peers' connections
close too; `run_program` does that and lets one rank speak.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist

USER_MISTAKE, FAILED, DIVERGED, INTERRUPTED = 2, 1, 3, 130
"""Exit codes: the config, a path or the launch is wrong; something broke; the loss diverged; Ctrl-C."""

DEBUG = "MEGATRON_LOWRANK_DEBUG"
"""Set to 1, this environment variable shows tracebacks."""

_LOST_PEER = ("closed by peer", "connection reset", "broken pipe", "connection refused", "timed out", "timeout")
_store: list[Any] = []


class AgreedError(Exception):
    """An error that every rank raises together; rank 0 prints it."""

    def __init__(self, message: str, code: int = USER_MISTAKE) -> None:
        super().__init__(message)
        self.code = code


class LaunchError(AgreedError):
    """A rank could not start, or did not meet the others; each rank that sees it says so once."""


def agree(error: Exception | None) -> None:
    """Raises on every rank when `error` is not None on any of them; a collective over the whole world.

    Args:
        error: This rank's, or None.

    Raises:
        AgreedError: holds the error of the lowest failing rank; its code is 2 for a ValueError or OSError, else 1.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        if error is not None:
            raise as_agreed(error) from error
        return
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(failed)
    if not int(failed):
        return
    seen: list[tuple[str, int] | None] = [None] * world
    agreed = None if error is None else as_agreed(error)
    dist.all_gather_object(seen, None if agreed is None else (str(agreed), agreed.code))
    rank = next(rank for rank, found in enumerate(seen) if found is not None)
    found = seen[rank]
    assert found is not None
    message, code = found
    everywhere = all(other == found for other in seen)
    raise AgreedError(message if everywhere else f"rank {rank} of {world}: {message}", code) from error


@contextmanager
def agreed() -> Iterator[None]:
    """Runs a local phase, one without collectives, and raises its error on every rank.

    Raises:
        AgreedError: see `agree`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(error)


def as_agreed(error: Exception) -> AgreedError:
    """The error in a form that a program ends with; code 2 for a ValueError, OSError or ImportError, else 1."""
    if isinstance(error, AgreedError):
        return error
    if isinstance(error, (ValueError, OSError, ImportError)):
        return AgreedError(str(error), USER_MISTAKE)
    return AgreedError(f"{type(error).__name__}: {error}", FAILED)


def speak_through(store: Any) -> None:
    """Names the store through which ranks settle who prints a failure that could not be agreed on."""
    _store[:] = [store]


def run_program(name: str, main: Callable[[list[str]], Any], arguments: list[str]) -> NoReturn:
    """Calls `main(arguments)` and ends the process: 0, or one line on stderr and an exit code.

    On failure the process ends without Python's clean-up, which may wait for ranks that have gone.
    """
    code, line = 0, ""
    rank = int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0
    try:
        main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else FAILED if stop.code else 0
        line = stop.code if isinstance(stop.code, str) else ""
    except KeyboardInterrupt:
        code, line = INTERRUPTED, "interrupted" if rank == 0 else ""
    except AgreedError as error:
        code = error.code
        line = str(error) if rank == 0 or isinstance(error, LaunchError) else ""
        _debug(rank)
    except Exception as error:
        code, line = FAILED, _describe(error, rank) if _is_first() else ""
        _debug(rank)
    if line:
        print(f"{name}: error: {' '.join(line.split())}", file=sys.stderr)
    for output in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe must not hide the exit code
            output.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def _debug(rank: int) -> None:
    if os.environ.get(DEBUG) == "1":
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)


def _describe(error: Exception, rank: int) -> str:
    text = str(error)
    who = f"rank {rank}" if dist.is_initialized() and dist.get_world_size() > 1 else "the run"
    hint = f"({DEBUG}=1 shows the traceback)"
    if isinstance(error, RuntimeError) and any(sign in text.lower() for sign in _LOST_PEER):
        cause = text.strip().splitlines()[0].rpartition("] ")[2][-200:]  # without the source line of the transport
        return f"{who} lost another rank, which was killed or hung; restart from the last checkpoint: {cause} {hint}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"{who} failed at {place}: {type(error).__name__}: {text[:500]} {hint}"


def _is_first() -> bool:
    """Whether this rank is the first to report a failure; True when nobody can be asked."""
    try:
        return not _store or int(_store[0].add("failure_reported", 1)) == 1
    except Exception:
        return True
