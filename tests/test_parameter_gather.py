"""`parallel.overlap_param_gather`: a parameter is read only after the module that owns it was called.

megatron-core waits for the gathering of updated parameters in a hook in front of each module's forward, for the
parameters that the module itself owns. Whoever reads a weight past its module would read the value before the update.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from training_steps import LENGTH, small_run, start

from megatron_lowrank.config import RunConfig
from megatron_lowrank.model import all_parts, build_model
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import initialize, run_ranks
from megatron_lowrank.train.optimizer import gathered_parameters

PLACEMENTS = ("vanilla", "vanilla_replicated", "btp", "btp_sp")
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
UNEQUAL: dict[str, Any] = {"dense_layers": (1,), "rank_overrides": {"0.v": 8, "mlp": 32}}


def models(tp: int) -> dict[str, RunConfig]:
    """Every placement, with its products stacked or one by one, plain or rebuilt, tied or not; with biases."""
    found: dict[str, RunConfig] = {}
    switches = itertools.product(PLACEMENTS, (True, False), ("none", "latent"), (True, False))
    for placement, grouping, recompute, tied in switches:
        found[f"{placement}, grouping {grouping}, {recompute}, tied {tied}"] = small_run(
            tp=tp, model={**BIASES, "tie_embeddings": tied}, lowrank=UNEQUAL if tied else {},
            parallel={"placement": placement, "grouping": grouping}, train={"recompute": recompute},
        )  # fmt: skip
    found["keep attention"] = small_run(tp=tp, model=BIASES, train={"recompute": "latent_keep_attention"})
    found["sharded store"] = small_run(tp=tp, model=BIASES, train={"recompute": "latent", "latent_store": "sharded"})
    found["whole layers"] = small_run(tp=tp, model=BIASES, train={"recompute": "full"})
    found["dense roles"] = small_run(tp=tp, model=BIASES, lowrank={"dense_roles": ("q", "down")})
    found["dense"] = small_run("dense_debug", tp=tp, model=BIASES)
    return found


def assert_called_before_read(run: RunConfig, name: str) -> None:
    """The logits are the same when every parameter is NaN until the module that owns it is called."""
    (chunk,) = build_model(run)
    for part in all_parts([chunk]):
        if part.key.endswith("bias"):  # they start as zeros
            part.block.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, run.model.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    wanted = chunk(tokens, torch.arange(LENGTH)[None], None).detach().clone()
    values = {parameter: parameter.detach().clone() for parameter in chunk.parameters()}
    waiting = dict.fromkeys(values)

    def arrive(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.copy_(values[parameter])
            waiting.pop(parameter, None)

    for module in chunk.modules():
        module.register_forward_pre_hook(arrive)
    for parameter in values:
        parameter.data.fill_(float("nan"))
    found = chunk(tokens, torch.arange(LENGTH)[None], None)
    names = {parameter: key for key, parameter in chunk.named_parameters()}
    assert not waiting, f"{name}: the modules of {[names[parameter] for parameter in waiting]} were never called"
    assert_equal(found.detach(), wanted, f"{name}: logits")


@pytest.mark.parametrize("tp", [1, 2])
def test_every_module_is_called_before_its_parameters_are_read(tp: int) -> None:
    def ranks() -> None:
        initialize(tp)
        for name, run in models(tp).items():
            assert_called_before_read(run, name)

    run_ranks(tp, ranks, timeout=120)


OVERLAPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "btp_sp": (2, {"train": {"recompute": "latent"}}),
    "btp, one by one": (
        2, {"train": {"recompute": "latent"}, "parallel": {"placement": "btp", "grouping": False}}
    ),
    "btp, TP 2": (4, {"tp": 2, "train": {"recompute": "latent"}, "parallel": {"placement": "btp"}}),
    "btp_sp, TP 2, tied": (
        4, {"tp": 2, "train": {"recompute": "latent"}, "model": {"tie_embeddings": True, **BIASES}, "lowrank": UNEQUAL}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPPED)
def test_overlap_changes_no_bit_of_training(case: str) -> None:
    """DP 2, two micro-batches, many buckets; losses of four steps and the weights behind them."""
    world, fields = OVERLAPPED[case]

    def trained(optimizer: dict[str, Any], **overlap: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
        parallel = {**fields.get("parallel", {}), **{k: v for k, v in overlap.items() if k != "overlap"}}
        run = small_run(
            **{**fields, "parallel": parallel, "optimizer": optimizer}, overlap=overlap.get("overlap", False)
        )
        training = start(run)
        assert parallel_state.get_data_parallel_world_size() == 2
        losses = training.steps(4)
        with gathered_parameters(training.chunks):
            weights = {part.key: part.block.clone() for part in all_parts(c.module for c in training.chunks)}
        buckets = sum(len(buffer.buckets) for chunk in training.chunks for buffer in chunk.buffers)
        return losses, weights, buckets

    def ranks() -> None:
        # Buckets decide how the sum of a gradient norm is dealt out, so clipping compares equal buckets only.
        for optimizer, plain in (({"clip_grad": 0.0}, {}), ({"clip_grad": 0.5}, {"overlap": True})):
            losses, weights, _ = trained(optimizer, **plain)
            again, other, buckets = trained(optimizer, overlap=True, overlap_param_gather=True)
            assert buckets > 5
            assert again == losses
            for key, weight in weights.items():
                assert_equal(other[key], weight, key)

    run_ranks(world, ranks, timeout=120)
