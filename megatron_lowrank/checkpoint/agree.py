"""An error of one rank becomes the same error on every rank: `agreed`, `on_every_rank` and `on_rank_0`.

A rank that raises alone leaves the others in their next collective until the timeout. Every step that can fail locally
(a file, a wrong config) therefore ends in an exchange of outcomes, before anything collective starts. Nothing here
imports megatron-core: `train.launch` needs these errors before the CPU platform is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

USER_MISTAKE, FAILED = 2, 1
"""Exit codes: the config, a path or the launch is wrong; something broke."""

T = TypeVar("T")
Failure = tuple[str, int]
"""Message and exit code."""


class AgreedError(ValueError):
    """An error that every rank raises together; in a program rank 0 prints it, and its code becomes the exit code."""

    def __init__(self, message: str, code: int = USER_MISTAKE) -> None:
        super().__init__(message)
        self.code = code


def as_agreed(error: BaseException) -> AgreedError:
    """The error in a form that a program ends with; code 2 for a ValueError, OSError or ImportError, else 1."""
    if isinstance(error, AgreedError):
        return error
    if isinstance(error, (ValueError, OSError, ImportError)):
        return AgreedError(str(error), USER_MISTAKE)
    if failures := getattr(error, "failures", None):
        # torch's CheckpointException: it has gathered all ranks' failures already, and its text is their tracebacks.
        rank, (inner, _) = next(iter(failures.items()))
        inner = as_agreed(inner)
        return AgreedError(f"{inner} (rank {rank})", inner.code)
    return AgreedError(f"{type(error).__name__}: {error}", FAILED)


@contextmanager
def agreed() -> Iterator[None]:
    """Runs a local phase, one without collectives, and raises its error on every rank. Collective over the world.

    Raises:
        AgreedError: holds the error of the lowest failing rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    _exchange(None, error, "", None)


def on_every_rank(step: Callable[[], T], *, what: str, code: int | None = None) -> list[T]:
    """Runs a step on each rank and waits for all of them.

    Args:
        step: May fail, and may be collective if it fails on all ranks or on none. Its value, which is exchanged, is
            small.
        what: What is being done, for the message.
        code: Exit code of any failure. Default: by the kind of error, see `as_agreed`.

    Returns:
        The value of each rank, in rank order.

    Raises:
        AgreedError: It raised on some rank.
    """
    value, error = _attempt(step)
    return _exchange(value, error, what, code)


def on_rank_0(step: Callable[[], T], *, what: str, code: int | None = None) -> T:
    """Runs a step on rank 0 only and hands its value to every rank.

    Args:
        step: May fail; must not be collective.
        what: What is being done, for the message.
        code: Exit code of any failure. Default: by the kind of error, see `as_agreed`.

    Raises:
        AgreedError: It raised.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    value, error = _attempt(step) if first else (None, None)
    outcome: list[Any] = [(value, _failure(error))]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome[0]
    if failure is not None:
        _fail([failure], what, code, error)
    return value  # type: ignore[no-any-return]


def _attempt(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return step(), None
    except BaseException as error:
        if not isinstance(error, Exception) and not hasattr(error, "failures"):
            raise  # torch derives its CheckpointException from BaseException, as Python does KeyboardInterrupt
        return None, error


def _failure(error: BaseException | None) -> Failure | None:
    if error is None:
        return None
    known = as_agreed(error)
    return str(known), known.code


def _exchange(value: Any, error: BaseException | None, what: str, code: int | None) -> list[Any]:
    outcomes: list[Any] = [(value, _failure(error))]
    if dist.is_initialized():
        mine, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, mine)
    failures = [failure for _, failure in outcomes]
    if any(failure is not None for failure in failures):
        _fail(failures, what, code, error)
    return [value for value, _ in outcomes]


def _fail(failures: Sequence[Failure | None], what: str, code: int | None, cause: BaseException | None) -> NoReturn:
    rank, (message, own) = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    where = "" if all(failure == failures[0] for failure in failures) else f"rank {rank} of {len(failures)}: "
    raise AgreedError(f"{f'{what}: ' if what else ''}{where}{message}", own if code is None else code) from cause
