"""How many rows each optimizer step takes: the global batch and its ramp.

megatron-core's microbatch calculator does the same with a process-wide object that has to be created, updated and
destroyed by hand, and cannot answer for a step other than the current one. The schedule needs such answers (rows at the
end of the warm-up), and resuming must not depend on hidden state; so this is a function of the rows consumed so far.
"""

from __future__ import annotations

from megatron_lowrank.config import TrainConfig


def batch_rows(train: TrainConfig, consumed_rows: int) -> int:
    """Rows of the next step, over all ranks.

    With a ramp (start, increment, rows) the sizes start, start + increment, ..., global_batch_size share the first
    `rows` rows equally, as in Megatron: each size but the last is kept for rows / (number of increments) rows.

    Args:
        train: Batch and ramp.
        consumed_rows: Rows of all steps before this one.
    """
    if train.batch_ramp is None:
        return train.global_batch_size
    start, increment, ramp_rows = train.batch_ramp
    increments = (train.global_batch_size - start) // increment
    if increments == 0 or consumed_rows >= ramp_rows:
        return train.global_batch_size
    return min(start + increment * (consumed_rows * increments // ramp_rows), train.global_batch_size)


def rows_after(train: TrainConfig, steps: int) -> int:
    """Rows consumed by the first `steps` steps of a run."""
    rows = 0
    for done in range(steps):
        size = batch_rows(train, rows)
        if size == train.global_batch_size:  # from here on it stays
            return rows + (steps - done) * size
        rows += size
    return rows
