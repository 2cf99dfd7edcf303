"""DDP around the chunks, AdamW on fp32 main parameters, and the learning-rate schedule, all of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_lowrank.config import RunConfig
from megatron_lowrank.train.batch import Batches


def wrap_for_ddp(
    run: RunConfig, models: Sequence[nn.Module], bucket_size: int | None = None
) -> list[DistributedDataParallel]:
    """Puts each model chunk into megatron-core's DDP, with fp32 gradient buffers.

    The chunks' TransformerConfig, which they share, learns how to finish gradients and how to skip their reduction
    between micro-batches.

    Args:
        run: The run.
        models: Chunks of this rank.
        bucket_size: Parameters per bucket of gradients, where they are reduced while backward runs. Default:
            megatron-core's.
    """
    parallel = run.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=bucket_size,
    )
    config: Any = models[0].config
    chunks = [
        # Chunks behind the first are ready late in backward anyway: one bucket each, as in Megatron.
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return chunks


def build_optimizer(run: RunConfig, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW with decoupled decay; a collective over the world.

    Args:
        run: The run.
        chunks: Wrapped by `wrap_for_ddp`.
    """
    o, bf16 = run.optimizer, run.train.precision == "bf16"
    config = CoreOptimizerConfig(
        optimizer="adam", decoupled_weight_decay=True, lr=o.lr, min_lr=o.lr * o.min_lr_ratio,
        weight_decay=o.weight_decay, adam_beta1=o.beta1, adam_beta2=o.beta2, adam_eps=o.eps, clip_grad=o.clip_grad,
        bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
        overlap_param_gather=run.parallel.overlap_param_gather,
    )  # fmt: skip
    # An empty table: every parameter decays. None: megatron-core's own, which spares one-dimensional ones.
    return get_megatron_optimizer(config, chunks, config_overrides={} if o.decay_norms_and_biases else None)


def build_scheduler(
    run: RunConfig, optimizer: MegatronOptimizer, batches: Batches | None = None
) -> OptimizerParamScheduler:
    """Learning rate as a function of the rows consumed, so that it follows a batch-size ramp.

    The config's steps are turned into the rows that those steps consume, or have consumed before a resumption. Values
    of a checkpoint never override the config; only its position in the schedule is taken.

    Args:
        run: The run.
        optimizer: From `build_optimizer`.
        batches: Rows of the run's steps. Default: of a run that starts.

    Raises:
        ValueError: warm-up and decay do not fit into each other.
    """
    s, o, train = run.schedule, run.optimizer, run.train
    end = s.decay_steps if s.decay_steps is not None else train.steps
    tail = s.wsd_decay_steps if s.wsd_decay_steps is not None else max(1, end // 10)
    if s.decay == "constant" or (s.decay_steps is None and s.decay != "wsd"):
        # A run may end inside its warm-up (a preset cut short), and `constant` has no end; megatron-core wants one.
        end = max(end, s.warmup_steps + 1)
    if s.warmup_steps >= end:
        raise ValueError(
            f"schedule.warmup_steps: found {s.warmup_steps}, allowed: less than the {end} steps at which the decay ends"
        )
    if s.decay == "wsd" and s.warmup_steps + tail > end:
        raise ValueError(
            f"schedule.wsd_decay_steps: found {tail}, allowed: at most {end - s.warmup_steps}, the steps between "
            "schedule.warmup_steps and the end of the decay"
        )
    rows_after = (Batches.of(train) if batches is None else batches).rows_after
    rows = rows_after(end)
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=o.lr, min_lr=o.lr * o.min_lr_ratio,
        lr_warmup_steps=rows_after(s.warmup_steps), lr_decay_steps=rows,
        lr_decay_style="WSD" if s.decay == "wsd" else s.decay,
        wsd_decay_steps=rows - rows_after(end - tail) if s.decay == "wsd" else None,
        lr_wsd_decay_style=s.wsd_decay,
        start_wd=o.weight_decay, end_wd=o.weight_decay, wd_incr_steps=rows, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Learning rate of the next step; every group of a rank has the same."""
    return float(optimizer.param_groups[0]["lr"])


@contextmanager
def gathered_parameters(chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every parameter holds its newest value, also under `overlap_param_gather`.

    There, only the next training forward gathers the values of the last step; evaluation and saving come before it.
    """
    hooked = [chunk for chunk in chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in hooked:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
