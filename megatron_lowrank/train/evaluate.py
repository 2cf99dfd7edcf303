"""Token-mean loss over a fixed set of validation rows, whatever the parallel sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_lowrank.config import RunConfig
from megatron_lowrank.train.optimizer import gathered_parameters
from megatron_lowrank.train.step import Batch, run_schedule


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """One evaluation; equal on every rank."""

    loss: float
    """Sum of token losses / tokens, over all rows."""
    tokens: int
    """Tokens that counted."""


def evaluate(
    run: RunConfig, chunks: list[DistributedDataParallel], batches: Callable[[], Iterator[Batch]], count: int
) -> EvalResult:
    """Evaluates; a collective over the world.

    Args:
        run: The run.
        chunks: Of this rank; they are left in training mode.
        batches: Starts a walk through this data-parallel rank's micro-batches, each [micro_batch_size, S].
        count: Their number, equal on every rank. An interleaved schedule takes multiples of the pipeline's length:
            what is missing is filled with micro-batches that count nothing.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    padded = -(-count // stages) * stages if len(chunks) > 1 else count
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad(), gathered_parameters(chunks):
            walks = [_filled(batches(), count) for _ in chunks]
            loss_sum, tokens = run_schedule(run, chunks, walks, padded, forward_only=True)
    finally:
        for chunk in chunks:
            chunk.train()
    return EvalResult(loss=loss_sum / max(tokens, 1), tokens=tokens)


def _filled(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The first `count` batches, then the last one for ever with an empty loss mask."""
    last: Batch | None = None
    for number, batch in enumerate(batches, start=1):
        last = batch
        yield batch
        if number == count:
            break
    assert last is not None, "an evaluation needs at least one micro-batch"
    while True:
        yield last | {"loss_mask": torch.zeros_like(last["loss_mask"])}
