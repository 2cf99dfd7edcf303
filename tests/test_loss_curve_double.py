"""One loss curve in fp64, whatever the placement, layout, grouping and recompute: nothing but rounding differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.model import build_model
from megatron_lowrank.testing.ranks import initialize, run_ranks
from megatron_lowrank.testing.whole_model import _to_double

STEPS, ROWS, LENGTH = 100, 2, 16
FEW_STEPS = 20
"""Of a layout with four ranks, which take seconds for every ten steps on two cores; all STEPS in the extended tier."""
TEXT = (Path(__file__).parent.parent / "LICENSE").read_bytes()
TOLERANCE = 1e-9
"""Relative, of every loss and gradient norm; `pytest -rP` shows what was measured."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "vanilla, TP 2": {"placement": "vanilla", "tp": 2},
    "vanilla, TP 4, one by one, latent": {"placement": "vanilla", "tp": 4, "grouping": False, "recompute": "latent"},
    "vanilla_replicated, TP 2, one by one": {"placement": "vanilla_replicated", "tp": 2, "grouping": False},
    "vanilla_replicated, TP 4, full": {"placement": "vanilla_replicated", "tp": 4, "recompute": "full"},
    "btp, TP 2, latent": {"placement": "btp", "tp": 2, "recompute": "latent"},
    "btp, TP 4, one by one": {
        "placement": "btp", "tp": 4, "grouping": False, "recompute": "latent_keep_attention",
        "overlap_latent_grad": True,
    },
    "btp, TP 2, PP 2": {"placement": "btp", "tp": 2, "pp": 2},
    "btp_sp, TP 2, one by one, sharded store": {
        "placement": "btp_sp", "tp": 2, "grouping": False, "recompute": "latent", "latent_store": "sharded"
    },
    "btp_sp, TP 4, latent": {"placement": "btp_sp", "tp": 4, "recompute": "latent"},
    "btp_sp, TP 2, DP 2, keep attention": {
        "placement": "btp_sp", "tp": 2, "dp": 2, "recompute": "latent_keep_attention"
    },
    "btp_sp, one rank, latent": {"placement": "btp_sp", "recompute": "latent"},
}  # fmt: skip


class Curve(NamedTuple):
    """One entry per step; equal on every rank."""

    losses: list[float]
    norms: list[float]


def debug_run(*, tp: int = 1, pp: int = 1, dp: int = 1, **fields: Any) -> RunConfig:
    """The debug preset, cut as asked."""
    run = preset("debug")
    train = {name: fields.pop(name) for name in ("recompute", "latent_store") if name in fields}
    micro = 1 if pp * dp > 1 else ROWS
    return replace(
        run,
        parallel=replace(run.parallel, tensor_parallel_size=tp, pipeline_parallel_size=pp, **fields),
        train=replace(run.train, sequence_length=LENGTH, micro_batch_size=micro, global_batch_size=ROWS, **train),
    )


def rows_of(step: int) -> torch.Tensor:
    """[ROWS, LENGTH + 1], the text from its beginning, around its end."""
    span = ROWS * (LENGTH + 1)
    return torch.tensor([TEXT[(step * span + i) % len(TEXT)] for i in range(span)]).view(ROWS, LENGTH + 1)


def curve(run: RunConfig, steps: int) -> Curve:
    """Trains on this rank in fp64: megatron-core's DDP and schedule, clipping to a global norm, torch's AdamW."""
    p, o = run.parallel, run.optimizer
    initialize(p.tensor_parallel_size, p.pipeline_parallel_size)
    (chunk,) = build_model(run)
    _to_double(chunk, run)
    chunk.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(overlap_grad_reduce=False), chunk)
    parameters = list(chunk.parameters())
    adam = torch.optim.AdamW(parameters, o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay)
    found = Curve([], [])
    for step in range(steps):
        ddp.zero_grad_buffer()
        found.losses.append(mean_loss(run, ddp, rows_of(step)))
        found.norms.append(gradient_norm(parameters))
        for parameter in parameters:
            assert parameter.main_grad.dtype == torch.float64  # type: ignore[attr-defined]
            parameter.grad = parameter.main_grad * min(1.0, o.clip_grad / found.norms[-1])  # type: ignore[attr-defined]
        adam.step()
        adam.zero_grad()
    return found


def mean_loss(run: RunConfig, ddp: Any, rows: torch.Tensor) -> float:
    """One forward and backward pass over a batch."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micro = rows[replica::replicas].split(run.train.micro_batch_size)

    def loss_of(labels: torch.Tensor, output: torch.Tensor) -> Any:
        logits = gather_from_tensor_model_parallel_region(output)[..., : run.model.vocab_size]
        losses = torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None]).squeeze(-1)
        return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {"loss": losses.detach().sum()}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        rows = next(iterator)
        return chunk(rows[:, :-1], torch.arange(LENGTH)[None], None), partial(loss_of, rows[:, 1:])

    reports = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(micro), model=ddp, num_microbatches=len(micro),
        seq_length=LENGTH, micro_batch_size=run.train.micro_batch_size,
    )  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        total += sum(report["loss"] for report in reports)
    dist.all_reduce(total)
    return float(total) / (ROWS * LENGTH)


def gradient_norm(parameters: list[Any]) -> float:
    """Global norm by the attributes that megatron-core counts by: every element once."""
    square = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            square += parameter.main_grad.square().sum()
    dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
    return float(square.sqrt())


def world_of(layout: dict[str, Any]) -> int:
    """Ranks of a layout."""
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)  # type: ignore[no-any-return]


def curves_of(layout: dict[str, Any], steps: int = STEPS) -> list[Curve]:
    """The curve as each rank of a layout sees it."""
    return run_ranks(world_of(layout), curve, debug_run(**layout), steps, timeout=240)


def distance(found: list[float], expected: list[float]) -> float:
    """Largest relative difference, over the steps that were taken."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected[: len(found)], strict=True))


@pytest.fixture(scope="module")
def alone() -> Curve:
    """The curve of one rank without recompute."""
    return curves_of({"placement": "btp_sp"})[0]


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        *((name, STEPS) for name, layout in LAYOUTS.items() if world_of(layout) < 4),
        *((name, FEW_STEPS) for name in LAYOUTS if "btp" in name and "TP 4" in name),
        *(
            pytest.param(name, STEPS, marks=pytest.mark.extended)
            for name, layout in LAYOUTS.items()
            if world_of(layout) == 4
        ),
    ],
)
def test_every_layout_trains_along_one_curve(layout: str, steps: int, alone: Curve) -> None:
    """From one set of initial weights; the global gradient norm of a step enters its update, which is clipped."""
    clip = preset("debug").optimizer.clip_grad
    assert len(alone.losses) == STEPS and alone.losses[-1] < alone.losses[0] - 1.5
    assert sum(norm > clip for norm in alone.norms) > STEPS // 2, "clipping is at work"
    ranks = curves_of(LAYOUTS[layout], steps)
    assert len(ranks[0].losses) == steps
    assert all(rank == ranks[0] for rank in ranks)
    found = ranks[0]
    losses, norms = distance(found.losses, alone.losses), distance(found.norms, alone.norms)
    print(f"{steps} steps: losses {losses:.1e}, gradient norms {norms:.1e}")
    assert losses < TOLERANCE and norms < TOLERANCE, f"losses {losses:.1e}, gradient norms {norms:.1e}"
    assert distance(found.norms[:1], alone.norms) < 1e-12, "gradient norm at the initial weights"
