"""Reasons to save and leave before the last step, agreed on by all ranks between two steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowrank.config import TrainConfig
from megatron_lowrank.layers.canonical import current_device

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""SIGTERM is sent by Slurm before a kill and by torchrun; SIGUSR1 is what `#SBATCH --signal` usually asks for; SIGHUP
comes when a terminal is closed, SIGINT with Ctrl-C."""


@contextmanager
def signals_survived() -> Iterator[None]:
    """Lets the processes that the body starts survive the exit signals.

    Slurm may signal every process of a step. A checkpoint's writer starts some, and they would die of it: they inherit
    this mask, and the save goes through. This process still notices the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ExitRequests:
    """Collects signals, the clock, the step number and the trigger file; use it as a context manager."""

    def __init__(self, train: TrainConfig) -> None:
        """Starts the clock.

        Args:
            train: When to stop.

        Raises:
            ValueError: the trigger is a folder.
        """
        if train.exit_trigger is not None and os.path.isdir(train.exit_trigger):
            raise ValueError(
                f"train.exit_trigger: {train.exit_trigger} is a folder, allowed: a file that is not there yet"
            )
        self._train, self._started, self._signal = train, time.monotonic(), 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ExitRequests:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT == self._signal:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the end of the step
        self._signal = number

    def reason(self, step: int) -> str | None:
        """Why to stop after this step, the same on every rank; a collective. An honoured trigger file is removed.

        Args:
            step: Number of the step that was just done, from 1.
        """
        train, minutes = self._train, (time.monotonic() - self._started) / 60
        mine = self._signal
        # Clock and file are looked at by rank 0 alone: a thousand ranks need not poll one file system.
        if dist.get_rank() == 0:
            if train.exit_duration_minutes is not None and minutes >= train.exit_duration_minutes:
                mine = max(mine, _DURATION)
            if train.exit_trigger is not None and os.path.exists(train.exit_trigger):
                mine = max(mine, _TRIGGER)
        if train.exit_interval is not None and step % train.exit_interval == 0:
            mine = max(mine, _INTERVAL)
        agreed = torch.tensor(mine, dtype=torch.int64, device=current_device())
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        code = int(agreed)
        if code == _TRIGGER and dist.get_rank() == 0:
            with suppress(OSError):  # it may lie where this job must not write; then it stops the next one too
                os.remove(train.exit_trigger or "")
        if code in _WORDS:
            return _WORDS[code]
        return f"signal {signal.Signals(code).name}" if code else None


_DURATION, _TRIGGER, _INTERVAL = 1001, 1002, 1003  # above every signal number
_WORDS = {_DURATION: "train.exit_duration_minutes", _TRIGGER: "train.exit_trigger", _INTERVAL: "train.exit_interval"}
