"""Local steps whose failure on one rank becomes the same error on every rank.

A rank that raises alone leaves the others in their next collective until the timeout. Every step that can fail locally
(a file, a wrong config) therefore ends in an exchange of outcomes, before anything collective starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
Failure = tuple[bool, str]
"""Whether it is an OSError, and the message."""


def on_every_rank(step: Callable[[], T], *, what: str) -> list[T]:
    """Runs a step on each rank and waits for all of them.

    Args:
        step: May fail, and may be collective if it fails on all ranks or on none. Its value, which is exchanged, is
            small.
        what: What is being done, for the message.

    Returns:
        The value of each rank, in rank order.

    Raises:
        OSError: The step raised one on some rank.
        ValueError: It raised anything else on some rank.
    """
    value, error = _attempt(step)
    outcomes: list[Any] = [(value, None if error is None else _describe(error))]
    if dist.is_initialized():
        mine, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, mine)
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failures:
        rank = min(failures)
        where = f" (on rank {rank}; {len(failures)} of {len(outcomes)} ranks failed)" if len(outcomes) > 1 else ""
        _raise(failures[rank], what, where, error)
    return [value for value, _ in outcomes]


def on_rank_0(step: Callable[[], T], *, what: str) -> T:
    """Runs a step on rank 0 only and hands its value to every rank.

    Args:
        step: May fail; must not be collective.
        what: What is being done, for the message.

    Raises:
        OSError: The step raised one.
        ValueError: It raised anything else.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    value, error = _attempt(step) if first else (None, None)
    outcome: list[Any] = [(value, None if error is None else _describe(error))]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome[0]
    if failure is not None:
        _raise(failure, what, "", error)
    return value  # type: ignore[no-any-return]


def _attempt(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return step(), None
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        return None, error


def _describe(error: BaseException) -> Failure:
    if isinstance(error, CheckpointException) and error.failures:
        # torch has gathered the failures of all ranks already; its own text is their tracebacks.
        rank, (inner, _) = next(iter(error.failures.items()))
        is_os, text = _describe(inner)
        return is_os, f"{text} (rank {rank})"
    text = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    # megatron-core writes in another process, of whose error only a text comes back.
    return isinstance(error, OSError) or "Worker failure" in text, text


def _raise(failure: Failure, what: str, where: str, cause: BaseException | None) -> None:
    is_os, text = failure
    kind = OSError if is_os else ValueError
    raise kind(f"{what}: {text}{where}") from cause
