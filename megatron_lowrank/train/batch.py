"""How many rows each optimizer step takes: the global batch, its ramp, and what they were before a resumption.

megatron-core's microbatch calculator does the same with a process-wide object that has to be created, updated and
destroyed by hand, and cannot answer for a step other than the current one. The schedule needs such answers (rows at the
end of the warm-up, of the decay), and a run may resume with another batch; so this is a table of the batches that the
run has had, stored with its checkpoints, and a function of that table alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowrank.config import TrainConfig

Ramp = tuple[int, int, int] | None


def batch_rows(size: int, ramp: Ramp, consumed_rows: int) -> int:
    """Rows of the next step, over all ranks.

    With a ramp (start, increment, rows) the sizes start, start + increment, ..., size share the first `rows` rows
    equally, as in Megatron: each size but the last is kept for rows / (number of increments) rows.

    Args:
        size: `train.global_batch_size`.
        ramp: `train.batch_ramp`.
        consumed_rows: Rows of all steps before this one.
    """
    if ramp is None:
        return size
    start, increment, ramp_rows = ramp
    increments = (size - start) // increment
    if increments == 0 or consumed_rows >= ramp_rows:
        return size
    return min(start + increment * (consumed_rows * increments // ramp_rows), size)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with one setting of the batch, up to the next phase."""

    step: int
    """Steps before the first one of the phase."""
    rows: int
    """Rows consumed before it."""
    size: int
    """`train.global_batch_size`."""
    ramp: Ramp
    """`train.batch_ramp`."""

    def rows_after(self, steps: int) -> int:
        """Rows consumed by the first `steps` steps of the run, those of this phase counted with its batch."""
        rows = self.rows
        for done in range(self.step, steps):
            step_rows = batch_rows(self.size, self.ramp, rows)
            if step_rows == self.size:  # from here on it stays
                return rows + (steps - done) * step_rows
            rows += step_rows
        return rows


@dataclass(frozen=True)
class Batches:
    """Rows of every step of a run, of those behind it and those to come."""

    phases: tuple[Phase, ...]
    """In order; the first one begins at step 0."""

    @classmethod
    def of(cls, train: TrainConfig) -> Batches:
        """Those of a run that starts."""
        return cls((Phase(step=0, rows=0, size=train.global_batch_size, ramp=train.batch_ramp),))

    def resumed(self, train: TrainConfig, step: int, rows: int) -> Batches:
        """Goes on with the batch of a config, which may have changed, after `step` steps that consumed `rows` rows."""
        last = self.phases[-1]
        if (last.size, last.ramp) == (train.global_batch_size, train.batch_ramp):
            return self
        kept = tuple(phase for phase in self.phases if phase.step < step)
        return Batches((*kept, Phase(step=step, rows=rows, size=train.global_batch_size, ramp=train.batch_ramp)))

    def rows_of(self, consumed_rows: int) -> int:
        """Rows of the next step, over all ranks, after `consumed_rows` rows."""
        last = self.phases[-1]
        return batch_rows(last.size, last.ramp, consumed_rows)

    def rows_after(self, steps: int) -> int:
        """Rows consumed by the first `steps` steps of the run."""
        phase = next(phase for phase in reversed(self.phases) if phase.step <= steps)
        return phase.rows_after(steps)

    def state(self) -> list[Any]:
        """The table as JSON values."""
        return [[phase.step, phase.rows, phase.size, phase.ramp and list(phase.ramp)] for phase in self.phases]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Batches:
        """Inverse of `state`."""
        return cls(
            tuple(
                Phase(step=int(step), rows=int(rows), size=int(size), ramp=None if ramp is None else (*map(int, ramp),))  # type: ignore[arg-type]
                for step, rows, size, ramp in state
            )
        )
