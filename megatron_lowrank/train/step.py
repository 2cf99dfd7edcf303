"""One optimizer step: forward and backward over the micro-batches, gradients, update, and numbers for every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lowrank.config import RunConfig
from megatron_lowrank.layers.canonical import current_device
from megatron_lowrank.train.loss import summed_loss
from megatron_lowrank.train.optimizer import learning_rate

Batch = dict[str, torch.Tensor]
"""tokens, labels [B, S] int64; loss_mask [B, S] float32; position_ids [B, S] int64."""

Check = Callable[[float, float], None]
"""Called with loss and gradient norm before the update; it may raise, on every rank alike."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did; equal on every rank."""

    loss: float
    """Mean over the step's tokens, before the update."""
    tokens: int
    """Tokens that counted."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """Of this update."""
    rows: int
    """Rows of the global batch."""


def run_schedule(
    run: RunConfig,
    chunks: list[DistributedDataParallel],
    batches: Sequence[Iterator[Batch]],
    count: int,
    forward_only: bool,
) -> tuple[float, int]:
    """Runs megatron-core's schedule over `count` micro-batches; a collective over the world.

    Args:
        run: The run.
        chunks: Of this rank.
        batches: One iterator per chunk over the same micro-batches of this data-parallel rank: the chunks of an
            interleaved schedule walk through them at their own pace.
        count: Micro-batches.
        forward_only: True for evaluation.

    Returns:
        Sum of the token losses and number of tokens over all micro-batches and data-parallel ranks, on every rank.
    """
    device = current_device()

    def forward_step(source: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(source).items()}
        output = chunk(batch["tokens"], batch["position_ids"], None)
        return output, functools.partial(
            summed_loss, labels=batch["labels"], loss_mask=batch["loss_mask"], vocab_size=run.model.vocab_size
        )

    assert len(batches) == len(chunks)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(batches) if len(chunks) > 1 else batches[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=run.train.sequence_length,
        micro_batch_size=run.train.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(2, dtype=torch.float64, device=device)
    # Only the last stage has reports, and all of its tensor-parallel ranks have the same ones.
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        total[0] = torch.stack([report["loss_sum"] for report in reports]).sum()
        total[1] = torch.stack([report["tokens"] for report in reports]).sum()
    dist.all_reduce(total)
    return float(total[0]), round(float(total[1]))


def train_step(
    run: RunConfig,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Sequence[Iterator[Batch]],
    rows: int,
    check: Check | None = None,
) -> StepResult:
    """One optimizer step over a global batch.

    Args:
        run: The run.
        chunks: Of this rank.
        optimizer: From `build_optimizer`.
        scheduler: From `build_scheduler`.
        batches: One iterator per chunk over this data-parallel rank's micro-batches of the step.
        rows: Size of the global batch.
        check: Sees loss and gradient norm before the update. megatron-core looks for infinities with fp16 only: in
            bf16 and fp32 a NaN would go straight into the weights.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    count = rows // (run.train.micro_batch_size * parallel_state.get_data_parallel_world_size())
    loss_sum, tokens = run_schedule(run, chunks, batches, count, forward_only=False)
    loss = loss_sum / max(tokens, 1)
    if check is not None:
        # The same two calls open optimizer.step(); repeating them is idempotent and costs one pass over the gradients.
        optimizer.prepare_grads()
        check(loss, float(optimizer.get_grad_norm()))
    rate = learning_rate(optimizer)
    updated, grad_norm, _ = optimizer.step()
    assert updated, "megatron-core leaves an update out under fp16 loss scaling alone, which no config asks for"
    scheduler.step(increment=rows)
    return StepResult(loss=loss, tokens=tokens, grad_norm=float(grad_norm or 0.0), learning_rate=rate, rows=rows)
