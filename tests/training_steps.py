"""A small training run on megatron-core's own parts, for tests that need a model with an optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.model import build_model
from megatron_lowrank.testing.ranks import initialize

LENGTH, ROWS = 16, 4


def small_run(
    name: str = "debug", *, tp: int = 1, pp: int = 1, vpp: int | None = None, distributed: bool = True,
    overlap: bool = False, precision: Literal["fp32", "bf16"] = "fp32", model: dict[str, Any] | None = None,
    lowrank: dict[str, Any] | None = None, seed: int = 42, keep: int = 2,
) -> RunConfig:  # fmt: skip
    """A run of the debug preset's size, cut as asked."""
    run = preset(name)
    return replace(
        run,
        model=replace(run.model, **(model or {})),
        lowrank=replace(run.lowrank, **(lowrank or {})),
        parallel=replace(
            run.parallel, tensor_parallel_size=tp, pipeline_parallel_size=pp, virtual_pipeline_size=vpp,
            use_distributed_optimizer=distributed, overlap_grad_reduce=overlap,
        ),
        train=replace(run.train, precision=precision, sequence_length=LENGTH, micro_batch_size=1, seed=seed),
        checkpoint=replace(run.checkpoint, keep=keep),
    )  # fmt: skip


@dataclass
class Training:
    """Live objects of a run on this rank."""

    run: RunConfig
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    step: int = 0

    def steps(self, count: int) -> list[float]:
        """Trains on; the mean loss of each step, the same on every rank."""
        return [self._one_step() for _ in range(count)]

    def _one_step(self) -> float:
        data = torch.Generator().manual_seed(self.step)
        rows = torch.randint(0, self.run.model.vocab_size, (ROWS, LENGTH + 1), generator=data)
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        mine = [row[None] for row in rows[rank::ranks]]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=[iter(mine) for _ in self.chunks], model=self.chunks,
            num_microbatches=len(mine), seq_length=LENGTH, micro_batch_size=1,
        )  # fmt: skip
        updated, _, _ = self.optimizer.step()
        assert updated
        self.scheduler.step(1)
        self.step += 1
        total = torch.zeros(())
        for report in reports:
            total += report["loss"]
        # Only the last stage has it, on each of its tensor-parallel ranks.
        dist.all_reduce(total)
        return float(total) / self.run.parallel.tensor_parallel_size / (ROWS * LENGTH)

    def _forward(self, batches: Any, chunk: Any) -> Any:
        row = next(batches)
        out = chunk(row[:, :-1], torch.arange(LENGTH)[None], None)

        def loss(logits: torch.Tensor) -> Any:
            width, first = logits.shape[-1], parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
            padding = torch.arange(first, first + width) >= self.run.model.vocab_size
            logits = logits.float().masked_fill(padding, -1e9).transpose(0, 1).contiguous()
            losses = vocab_parallel_cross_entropy(logits, row[:, 1:].transpose(0, 1).contiguous()).sum()
            return losses, torch.tensor(LENGTH, dtype=torch.int), {"loss": losses.detach().clone()}

        return out, loss

    def local_state(self) -> list[torch.Tensor]:
        """Copies of this rank's weights, main parameters, moments and Adam steps, in a fixed order."""
        tensors = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        for optimizer in self.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.optimizer.state[parameter]
                    tensors += [parameter, *(state[name] for name in sorted(state))]
        return [tensor.detach().clone() for tensor in tensors]


def start(run: RunConfig) -> Training:
    """Sets up the groups, model, DDP, optimizer and scheduler of a run on this rank; earlier groups are given up."""
    p, distributed = run.parallel, run.parallel.use_distributed_optimizer
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize(p.tensor_parallel_size, p.pipeline_parallel_size, p.virtual_pipeline_size)
    models = build_model(run)
    config = models[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=p.overlap_grad_reduce,
        bucket_size=3000,  # many buckets, where they are used at all
    )  # fmt: skip
    chunks = [DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)]
    if p.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, clip_grad=1.0,
            use_distributed_optimizer=distributed, bf16=run.train.precision == "bf16", params_dtype=config.params_dtype,
        ),
        chunks,
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=2, lr_decay_steps=20, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip
    return Training(run, chunks, optimizer, scheduler)
