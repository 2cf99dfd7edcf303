"""A small training run on the product's own parts, for tests that need a model with an optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core import parallel_state

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.model import build_model
from megatron_lowrank.testing.ranks import initialize
from megatron_lowrank.train.optimizer import build_optimizer, build_scheduler, wrap_for_ddp
from megatron_lowrank.train.step import train_step

LENGTH, ROWS = 16, 4


def small_run(
    name: str = "debug", *, tp: int = 1, pp: int = 1, vpp: int | None = None, distributed: bool = True,
    overlap: bool = False, precision: Literal["fp32", "bf16"] = "fp32", model: dict[str, Any] | None = None,
    lowrank: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None, train: dict[str, Any] | None = None, seed: int = 42, keep: int = 2,
) -> RunConfig:  # fmt: skip
    """A run of the debug preset's size, cut as asked; its schedule has two steps of warm-up and twenty in all."""
    run = preset(name)
    rates: dict[str, Any] = {"lr": 1e-2, "min_lr_ratio": 0.1, "weight_decay": 0.1, "clip_grad": 1.0}
    return replace(
        run,
        model=replace(run.model, **(model or {})),
        lowrank=replace(run.lowrank, **(lowrank or {})),
        optimizer=replace(run.optimizer, **{**rates, **(optimizer or {})}),
        schedule=replace(run.schedule, decay="cosine", warmup_steps=2, decay_steps=20),
        parallel=replace(
            run.parallel, tensor_parallel_size=tp, pipeline_parallel_size=pp, virtual_pipeline_size=vpp,
            use_distributed_optimizer=distributed, overlap_grad_reduce=overlap, **(parallel or {}),
        ),
        train=replace(
            run.train, precision=precision, sequence_length=LENGTH, micro_batch_size=1, global_batch_size=ROWS,
            batch_ramp=None, seed=seed, **(train or {}),
        ),
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
        batches = [
            {
                "tokens": row[None, :-1], "labels": row[None, 1:], "loss_mask": torch.ones(1, LENGTH),
                "position_ids": torch.arange(LENGTH)[None],
            }
            for row in rows[rank::ranks]
        ]  # fmt: skip
        sources = [iter(batches) for _ in self.chunks]
        self.step += 1
        return train_step(self.run, self.chunks, self.optimizer, self.scheduler, sources, ROWS).loss

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
    p = run.parallel
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize(p.tensor_parallel_size, p.pipeline_parallel_size, p.virtual_pipeline_size)
    chunks = wrap_for_ddp(run, build_model(run), bucket_size=3000)  # many buckets, where they are used at all
    optimizer = build_optimizer(run, chunks)
    return Training(run, list(chunks), optimizer, build_scheduler(run, optimizer))
