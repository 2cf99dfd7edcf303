"""A resumed run is the uninterrupted one to the last bit, in every layout; the second step shows a lost Adam step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from training_steps import small_run, start

from megatron_lowrank.checkpoint import load_checkpoint, save_checkpoint
from megatron_lowrank.checkpoint.optimizer import adam_step
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import run_ranks

Layout = dict[str, Any]
UNEVEN = {"rank": 8, "rank_overrides": {"attn": 2}}
LAYOUTS: dict[str, list[Layout]] = {
    "fp32": [
        {"tp": 2},
        {"pp": 2},
        {"model": {"vocab_size": 4000}, "lowrank": UNEVEN},  # DP 2: tiny factors beside a large embedding
        {"tp": 2, "parallel": {"placement": "btp"}, "train": {"recompute": "latent"}},
        {"tp": 2, "distributed": False, "optimizer": {"decay_norms_and_biases": False}},  # two groups of parameters
        {"pp": 2, "model": {"tie_embeddings": True}},
        {"pp": 2, "vpp": 2, "model": {"num_layers": 4}},
    ],
    "bf16": [
        {"tp": 2},
        {"pp": 2, "distributed": False},
        {"model": {"vocab_size": 4000}, "lowrank": UNEVEN},
        {"model": {"vocab_size": 4000}, "lowrank": UNEVEN, "distributed": False},
    ],
}


def draws() -> torch.Tensor:
    """One number of every generator of this rank."""
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(1, dtype=torch.float64)
    outside = torch.rand(1, dtype=torch.float64)
    return torch.cat([inside, outside, torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)])


def resume(folder: Path, layout: Layout) -> None:
    """Trains 2 + 3 steps, and 3 steps from the checkpoint after 2."""
    run = small_run(**layout)
    first = start(run)
    first.steps(2)
    draws()  # so that the generators are not where a start leaves them
    save_checkpoint(folder, 2, run, first.chunks, first.optimizer, first.scheduler, {"step": 2, "rows": [3, 4]})
    drawn = draws()
    losses = first.steps(3)
    other = replace(run, train=replace(run.train, seed=7))
    second = start(other)
    if layout.get("tp") == 2:
        second.steps(1)  # into an optimizer that has a state, too
    progress = load_checkpoint(folder, other, second.chunks, second.optimizer, second.scheduler)
    assert progress == {"step": 2, "rows": [3, 4]}
    assert adam_step(second.optimizer) == 2
    draws_again = draws()
    for number, generator in enumerate(("tensor-parallel tracker", "torch", "python", "numpy")):
        assert_equal(draws_again[number], drawn[number], f"{generator}'s draw after resuming")
    second.step = progress["step"]
    assert second.steps(3) == losses, "losses after resuming"
    for number, (again, before) in enumerate(zip(second.local_state(), first.local_state(), strict=True)):
        assert_equal(again, before, f"{layout}: tensor {number}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_run_equals_the_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    """Losses, weights, main parameters, moments and Adam steps; all layouts of a precision in the same two ranks."""

    def ranks() -> None:
        for number, layout in enumerate(LAYOUTS[precision]):
            resume(tmp_path / str(number), {**layout, "precision": precision})

    run_ranks(2, ranks, timeout=240)


def test_a_run_can_be_saved_before_its_first_step(tmp_path: Path) -> None:
    """Adam has no state then, which megatron-core cannot save."""

    def ranks() -> None:
        for distributed in (True, False):
            run = small_run(distributed=distributed)
            first = start(run)
            folder = tmp_path / str(distributed)
            save_checkpoint(folder, 0, run, first.chunks, first.optimizer, first.scheduler, {})
            losses = first.steps(2)
            second = start(small_run(distributed=distributed, seed=7))
            load_checkpoint(folder, run, second.chunks, second.optimizer, second.scheduler)
            assert second.steps(2) == losses
            third = start(small_run(distributed=not distributed, seed=7))  # the optimizer's form is one for both
            load_checkpoint(folder, run, third.chunks, third.optimizer, third.scheduler)
            assert third.steps(2) == losses
            fourth = start(small_run(distributed=distributed, seed=7))
            assert load_checkpoint(folder, run, fourth.chunks, fourth.optimizer, None, weights_only=True) == {}
            fourth.scheduler.step(0)
            assert fourth.steps(1) == losses[:1]
            assert dist.get_world_size() == 1

    run_ranks(1, ranks, timeout=120)


def test_the_config_wins_over_the_checkpoint(tmp_path: Path) -> None:
    """Another learning rate, betas, epsilon and weight decay; only the position in the schedule is the checkpoint's."""
    changes = {"lr": 3e-3, "min_lr_ratio": 0.5, "beta1": 0.5, "beta2": 0.7, "eps": 1e-5, "weight_decay": 0.3}

    def ranks() -> None:
        for number, (distributed, precision) in enumerate([(True, "fp32"), (False, "fp32"), (True, "bf16")]):
            shape: dict[str, Any] = {"distributed": distributed, "precision": precision}
            first = start(small_run(**shape))
            first.steps(5)
            folder = tmp_path / str(number)
            save_checkpoint(folder, 5, first.run, first.chunks, first.optimizer, first.scheduler, {})
            second = start(small_run(**shape, optimizer=changes))
            for _ in range(5):
                second.scheduler.step(4)
            expected = [{k: v for k, v in g.items() if k != "params"} for g in second.optimizer.param_groups]
            second.scheduler.num_steps = 0
            second.scheduler.step(0)
            load_checkpoint(folder, second.run, second.chunks, second.optimizer, second.scheduler)
            groups = [{k: v for k, v in g.items() if k != "params"} for g in second.optimizer.param_groups]
            assert groups == expected
            for group in groups:
                assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.7), 1e-5, 0.3)
                assert group["max_lr"] == 3e-3 and 1.5e-3 < group["lr"] < 3e-3
            second.step = 5
            second.steps(1)

    run_ranks(1, ranks, timeout=120)
