"""Stops a run whose loss has gone wrong before the update that would spoil the weights."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_lowrank.checkpoint.agree import AgreedError
from megatron_lowrank.train.failure import DIVERGED

_MEMORY, _WARM_UP = 0.9, 20


class Guard:
    """Looks at loss and gradient norm, which every rank knows alike, so every rank raises together.

    megatron-core skips a step with infinite gradients only under fp16 loss scaling. In bf16 and fp32 it clips by a NaN
    norm and writes NaNs into all weights; its own option `check_for_nan_in_grad` raises on one rank alone.
    """

    def __init__(self, spike_factor: float | None) -> None:
        """Starts without a history.

        Args:
            spike_factor: Stop when the loss exceeds this many times its running mean; None: never.
        """
        self._factor, self._mean, self._seen = spike_factor, 0.0, 0

    def check(self, step: int, loss: float, grad_norm: float, last_good: Path | None) -> None:
        """Raises if the step must not be taken.

        Args:
            step: Number of the step, from 1.
            loss: Of this step, before the update.
            grad_norm: Before clipping.
            last_good: Newest checkpoint of the run.

        Raises:
            AgreedError: with exit code 3.
        """
        back = f"last good checkpoint: {last_good}" if last_good is not None else "there is no checkpoint yet"
        if not math.isfinite(loss):
            raise AgreedError(f"loss is {loss} at step {step}; its update was not made; {back}", DIVERGED)
        if not math.isfinite(grad_norm):
            found = f"gradient norm is {grad_norm} at step {step} (loss {loss:.6g})"
            raise AgreedError(f"{found}; its update was not made; {back}", DIVERGED)
        if self._factor is not None and self._seen >= _WARM_UP and loss > self._factor * self._mean:
            raise AgreedError(
                f"loss is {loss:.6g} at step {step}, more than train.spike_factor {self._factor:g} times its running "
                f"mean {self._mean:.6g}; its update was not made; {back}", DIVERGED
            )  # fmt: skip

    def record(self, loss: float) -> None:
        """Adds a step's loss to the running mean."""
        self._mean = loss if self._seen == 0 else _MEMORY * self._mean + (1 - _MEMORY) * loss
        self._seen += 1

    def state_dict(self) -> dict[str, float]:
        """History, as JSON values."""
        return {"mean": self._mean, "seen": self._seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues a history."""
        self._mean, self._seen = float(state["mean"]), int(state["seen"])
