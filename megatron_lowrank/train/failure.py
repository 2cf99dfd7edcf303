"""How a process of a run ends: one line on the terminal, an exit code that says whose fault it was, and at once.

Errors that all ranks share are `checkpoint.agree`'s. In the middle of training the group may be broken, and all that is
left is to leave so that the peers' connections close too; `run_program` does that and lets one rank speak, settled
through the rendezvous store.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_lowrank.checkpoint.agree import FAILED, AgreedError
from megatron_lowrank.train.notices import is_first

DIVERGED, INTERRUPTED = 3, 130
"""Exit codes beside those of `checkpoint.agree`: the loss diverged; Ctrl-C."""

DEBUG = "MEGATRON_LOWRANK_DEBUG"
"""Set to 1, this environment variable shows tracebacks."""

_LOST_PEER = {
    "closed by peer": "connection closed by peer", "connection reset": "connection reset by peer",
    "broken pipe": "broken pipe", "connection refused": "connection refused", "timed out": "timed out",
    "timeout": "timed out",
}  # fmt: skip
"""Part of a transport's error -> what happened. The whole text holds source lines, addresses and jokes."""
_store: list[Any] = []
_checkpoint: list[Any] = []


class LaunchError(AgreedError):
    """A rank could not start, or did not meet the others; each rank that sees it says so once."""


def speak_through(store: Any) -> None:
    """Names the store through which ranks settle who prints a failure that could not be agreed on."""
    _store[:] = [store]


def restart_from(checkpoint: Any) -> None:
    """Names the newest checkpoint of the run, for the message of a lost rank; None: there is none."""
    _checkpoint[:] = [] if checkpoint is None else [checkpoint]


def run_program(name: str, main: Callable[[list[str]], Any], arguments: list[str]) -> NoReturn:
    """Calls `main(arguments)` and ends the process: with the code that it returns, or one line on stderr and a code.

    On failure the process ends without Python's clean-up, which may wait for ranks that have gone.
    """
    code, line = 0, ""
    rank = int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0
    try:
        result = main(arguments)
        code = result if isinstance(result, int) else 0
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
        first = is_first(_store[0] if _store else None, "failure_reported")
        code, line = FAILED, _describe(error, rank) if first else ""
        _debug(rank)
    if line:
        print(f"{name}: error: {' '.join(line.split())}", file=sys.stderr)
    for output in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe must not hide the exit code
            output.flush()
    if code:
        # The writer of checkpoints keeps a helper process for the next save, which would outlive this one for ever.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)
    sys.exit(0)


def _debug(rank: int) -> None:
    if os.environ.get(DEBUG) == "1":
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)


def _describe(error: Exception, rank: int) -> str:
    text = str(error)
    who = f"rank {rank}" if dist.is_initialized() and dist.get_world_size() > 1 else "the run"
    hint = f"({DEBUG}=1 shows the traceback)"
    cause = next((words for sign, words in _LOST_PEER.items() if sign in text.lower()), None)
    if isinstance(error, RuntimeError) and cause is not None:
        back = f"restart from the last checkpoint, {_checkpoint[0]}" if _checkpoint else "there is no checkpoint yet"
        return f"{who} lost another rank, which was killed or hung ({cause}); {back} {hint}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"{who} failed at {place}: {type(error).__name__}: {text[:500]} {hint}"
