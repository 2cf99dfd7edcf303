"""Closed forms against published numbers, against what torch counts, and against what a rank would hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from scripts import load_tool
from torch.utils.flop_counter import FlopCounterMode

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, preset
from megatron_lowrank.estimate import (
    count_parameters,
    dense_equivalent,
    flops_per_step,
    flops_per_token,
    layer_flops,
    model_flops,
    rank_parameters,
    state_bytes,
    summed_parameters,
)
from megatron_lowrank.layers import reference
from megatron_lowrank.layers.init import draw
from megatron_lowrank.names import layer_parameters, pair_std

PARAMETERS = {
    "60m": (42_770_944, 9_994_240, 58_073_600),
    "130m": (93_997_824, 44_826_624, 134_105_856),
    "350m": (185_222_144, 119_635_968, 367_969_280),
    "1b": (609_310_720, 478_138_368, 1_339_082_752),
    "7b": (2_820_935_680, 2_558_525_440, 6_738_415_616),
}
"""size -> total, factors, dense twin."""


@pytest.mark.parametrize("size", PARAMETERS)
def test_initial_factors_have_the_published_scale(size: str) -> None:
    """Sample std of A, of B, and of their product, within 2 %, for one square and one rectangular pair."""
    run = preset(f"cola_{size}")
    drawn = {
        p.name.split(".", 3)[3]: draw(p, 1)
        for p in layer_parameters(run.model, run.lowrank, 0)
        if p.role in ("o", "up")
    }
    for role, a, b in (
        ("o", "self_attention.linear_proj_down_proj.weight", "self_attention.linear_proj_up_proj.weight"),
        ("up", "mlp.linear_fc1_down_proj.up.weight", "mlp.linear_fc1_up_proj.up.weight"),
    ):
        width_in, width_out = run.model.role_widths(role)  # type: ignore[arg-type]
        rank = run.rank_of(0, role)  # type: ignore[arg-type]
        factor = rank**-0.25 * (width_in + width_out) ** -0.25
        assert drawn[a].std().item() == pytest.approx(factor, rel=0.02)
        assert drawn[b].std().item() == pytest.approx(factor, rel=0.02)
        some = drawn[b][:512] @ drawn[a]  # rows enough for 1 % and quick at 7B
        assert some.std().item() == pytest.approx((width_in + width_out) ** -0.5, rel=0.02)


@pytest.mark.parametrize("size", PARAMETERS)
def test_published_parameter_counts(size: str) -> None:
    run = preset(f"cola_{size}")
    actual = count_parameters(run.model, run.lowrank)
    dense = count_parameters(run.model, dense_equivalent(run.lowrank))
    assert (actual.total, actual.factors, dense.total) == PARAMETERS[size]
    assert dense.factors == 0 == actual.dense


def test_parameter_count_of_the_shape_that_tensor_parallelism_can_cut() -> None:
    run = preset("cola_1b_tp")
    assert count_parameters(run.model, run.lowrank).total == 609_716_224


@pytest.mark.parametrize(
    ("size", "layer_256", "model_256", "layer_4096"),
    [("60m", 0.441, 0.650, 0.740), ("130m", 0.553, 0.649, 0.750), ("350m", 0.420, 0.474, 0.637),
     ("1b", 0.408, 0.438, 0.547), ("7b", 0.401, 0.413, 0.481)],
)  # fmt: skip
def test_share_of_the_dense_equivalent_flops(size: str, layer_256: float, model_256: float, layer_4096: float) -> None:
    run = preset(f"cola_{size}")
    dense = dense_equivalent(run.lowrank)

    def layer_share(tokens: int) -> float:
        actual = layer_flops(run.model, run.lowrank, 0, tokens=tokens, attention="full").total
        return actual / layer_flops(run.model, dense, 0, tokens=tokens, attention="full").total

    whole = [model_flops(run.model, low, sequence_length=256, attention="full").total for low in (run.lowrank, dense)]
    found = (layer_share(256), whole[0] / whole[1], layer_share(4096))
    assert tuple(round(value, 3) for value in found) == (layer_256, model_256, layer_4096)


@pytest.mark.parametrize(
    ("size", "square", "mlp", "product_square", "product_mlp"),
    [("60m", 0.05256, 0.04510, 0.03125, 0.02301), ("130m", 0.03993, 0.03432, 0.02552, 0.01884),
     ("350m", 0.03716, 0.03193, 0.02210, 0.01631), ("1b", 0.02628, 0.02258, 0.01562, 0.01154),
     ("7b", 0.01858, 0.01595, 0.01105, 0.00814)],
)  # fmt: skip
def test_published_initial_spread(
    size: str, square: float, mlp: float, product_square: float, product_mlp: float
) -> None:
    run = preset(f"cola_{size}")
    stds = {(p.role, p.kind): p.std for p in layer_parameters(run.model, run.lowrank, 0) if p.role is not None}
    for role, factor, product in (("q", square, product_square), ("o", square, product_square),
                                  ("gate", mlp, product_mlp), ("down", mlp, product_mlp)):  # fmt: skip
        std, rank = stds[role, "a"], run.rank_of(0, role)
        assert std is not None and std == stds[role, "b"] == pair_std(*run.model.role_widths(role), rank)
        assert std == pytest.approx(factor, abs=5.1e-6)
        assert std**2 * rank**0.5 == pytest.approx(product, abs=5.1e-6)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("dense_roles", [(), ("k", "down")])
def test_flops_equal_what_torch_counts(groups: int, rank: int, dense_roles: tuple[Literal["k", "down"], ...]) -> None:
    model = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=168, num_attention_heads=4,
                        num_query_groups=groups)  # fmt: skip
    lowrank = LowRankConfig(method="cola", rank=rank, rank_overrides={"0.up": 24}, dense_roles=dense_roles)
    torch.manual_seed(0)
    tensors = {p.name: torch.randn(p.shape).requires_grad_() for p in layer_parameters(model, lowrank, 0)}
    x = torch.randn(1, 12, 64, requires_grad=True)  # a layer's input needs a gradient as well
    with FlopCounterMode(display=False) as forward:
        y = reference.decoder_layer(model, lowrank, tensors, 0, x)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(y.sum(), [x, *tensors.values()])
    expected = layer_flops(model, lowrank, 0, tokens=12, attention="full")
    assert forward.get_total_flops() == expected.forward
    assert backward.get_total_flops() == expected.backward


def test_closed_forms_of_one_layer_and_of_a_step() -> None:
    run = preset("cola_60m")
    n, h, f, r, v = 256, 512, 1376, 128, 32000
    layer = layer_flops(run.model, run.lowrank, 0, tokens=n, attention="full")
    assert layer.total == 48 * n * h * r + 18 * n * r * (h + f) + 12 * n * n * h
    dense = layer_flops(run.model, dense_equivalent(run.lowrank), 0, tokens=n, attention="full")
    assert dense.total == 24 * n * h * h + 18 * n * h * f + 12 * n * n * h
    causal = layer_flops(run.model, run.lowrank, 0, tokens=n, attention="causal")
    assert layer.total - causal.total == 6 * n * n * h and layer.projections == causal.projections
    whole = model_flops(run.model, run.lowrank, sequence_length=n, attention="causal")
    assert whole.total == 8 * causal.total + 6 * n * h * v
    assert flops_per_token(run.model, run.lowrank, sequence_length=n, attention="causal") * n == whole.total
    step = flops_per_step(run.model, run.lowrank, sequence_length=n, rows=512, attention="causal")
    assert step == 512 * whole.total


def test_parameters_of_the_ranks_add_up() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, ffn_hidden_size=176, vocab_size=131, num_query_groups=2,
                        attention_bias=True, mlp_bias=True)  # fmt: skip
    lowrank = LowRankConfig(rank=16, dense_layers=(1,))
    count = count_parameters(model, lowrank)
    parallel = ParallelConfig(pipeline_parallel_size=2)
    padding = 2 * (model.padded_vocab_size(1) - 131) * 64
    assert sum(rank_parameters(model, lowrank, parallel, stage) for stage in (0, 1)) == count.total + padding
    # What is on both tensor-parallel ranks. The dense layer always cuts its matrices and its biases but those of o and
    # down, 64 wide, and keeps its norms; a layer of pairs has seven factors at the residual of 64 x 16 entries.
    some_biases = 2 * 64
    all_biases = some_biases + 64 + 2 * 32 + 2 * 176
    for placement, per_layer in (
        ("vanilla", 2 * 64 + some_biases),
        ("vanilla_replicated", 2 * 64 + all_biases),
        ("btp", 0),
        ("btp_sp", 2 * 64 + some_biases + 7 * 64 * 16),
    ):
        halved = replace(parallel, tensor_parallel_size=2, placement=placement)
        local = sum(rank_parameters(model, lowrank, halved, stage) for stage in (0, 1))
        on_both = 3 * per_layer + (2 * 64 + some_biases) + 64
        assert 2 * local == count.total + 2 * (model.padded_vocab_size(2) - 131) * 64 + on_both
        summed = sum(
            summed_parameters(RunConfig(model=model, lowrank=lowrank, parallel=halved), stage) for stage in (0, 1)
        )
        assert summed == (0 if placement == "vanilla_replicated" else on_both)
        factors = sum(rank_parameters(model, lowrank, halved, stage, kinds=("a", "b")) for stage in (0, 1))
        assert 2 * factors == count.factors + (3 * 7 * 64 * 16 if placement == "btp_sp" else 0)
    assert summed_parameters(RunConfig(model=model, lowrank=lowrank, parallel=parallel), 0) == 0
    tied = replace(model, tie_embeddings=True)
    both = sum(rank_parameters(tied, lowrank, parallel, stage) for stage in (0, 1))
    assert both == sum(rank_parameters(model, lowrank, parallel, stage) for stage in (0, 1))
    interleaved = replace(parallel, virtual_pipeline_size=2)
    # Layers 0 and 2 are on stage 0 then; the dense layer 1 has moved to stage 1.
    assert rank_parameters(model, lowrank, interleaved, 0) < rank_parameters(model, lowrank, parallel, 0)


def test_state_bytes() -> None:
    run = preset("cola_60m")
    alone = state_bytes(run.model, run.lowrank, ParallelConfig(), precision="bf16")
    assert (alone.weights, alone.gradients, alone.optimizer) == tuple(n * 42_770_944 for n in (2, 4, 12))
    shared = state_bytes(run.model, run.lowrank, ParallelConfig(), precision="bf16", data_parallel_size=8)
    assert shared.total == alone.weights + alone.gradients + alone.optimizer // 8
    whole = ParallelConfig(use_distributed_optimizer=False)
    single = state_bytes(run.model, run.lowrank, whole, precision="fp32", data_parallel_size=8)
    assert single.total == 16 * 42_770_944


@pytest.fixture(scope="module")
def plan() -> Any:
    return load_tool("plan")


def test_the_plan_tool_counts(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["count", "--preset", "cola_1b_tp", "--tp", "2", "--dp", "4", "--tokens", "256", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    run = preset("cola_1b_tp")
    halved = replace(run.parallel, tensor_parallel_size=2)
    assert counted["parameters"] == 609_716_224 == sum(counted["parameters_by_kind"].values())
    assert (
        counted["flops_per_token"] * 256
        == model_flops(run.model, run.lowrank, sequence_length=256, attention="causal").total
    )
    assert counted["dense_equivalent_flops_per_token"] > counted["flops_per_token"]
    held = state_bytes(run.model, run.lowrank, halved, precision="bf16", data_parallel_size=4)
    (row,) = counted["bytes_per_rank"]
    assert row["parameters"] == rank_parameters(run.model, run.lowrank, halved, 0)
    assert (row["weights"], row["optimizer"], row["total"]) == (held.weights, held.optimizer, held.total)


def test_the_plan_tool_takes_fields_and_says_what_is_wrong(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["--parallel.pipeline_parallel_size", "2"]
    assert plan.main(["count", "--preset", "cola_60m", "--lowrank.rank", "64", *stages]) == 0
    text = capsys.readouterr().out
    assert "parameters: 37,773,824 (factors 4,997,120," in text and "dense model of the same shape: 58,073,600" in text
    assert "rank of stage 1: " in text and "rows of 256 tokens" in text
    for arguments, message in ((["--preset", "x"], "preset: found 'x'; allowed"), (["--tp", "3"], "does not divide"),
                               (["--lowrank.rnk", "3"], "did you mean --lowrank.rank?")):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            plan.main(["count", *arguments])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("plan: error: ") and message in error


def test_the_plan_tool_looks_into_a_layer(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["count", "--preset", "cola_7b", "--tp", "4", "--tokens", "16384"]
    assert plan.main([*words, "--placement", "btp", "--recompute", "latent", "--layer", "31", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    d, f, r, n = 4096, 11008, 1024, 16384
    assert (counted["placement"], counted["recompute"], counted["layer"]) == ("btp", "latent", 31)
    assert counted["wire_bytes_per_layer"] == 28 * r * n * 2 * 3 // 4
    assert counted["statistic_wire_bytes_per_layer"] == 2 * 2 * 16 * n * 2 * 3 // 4
    assert counted["collectives_per_layer"] == 8
    assert counted["collectives"]["forward"][0] == {"kind": "all_reduce", "width": 3 * r, "statistic": 16}
    assert [row["width"] for row in counted["collectives"]["backward"]] == [r, 2 * r, r, 3 * r]
    assert counted["saved_elements_per_layer"] == n * (9216 + 2)
    assert sum(elements for _, elements in counted["saved_by_tensor"]) == counted["saved_elements_per_layer"]
    products = 6 * n * d * r + 4 * n * f * r
    assert counted["replay_flops_per_layer"] == products + 4 * n * n * d
    assert counted["replay_flops_causal_per_layer"] == products + 2 * n * n * d
    assert counted["replay_collectives_per_layer"] == 0 == len(counted["replay_collectives"])
    assert counted["forward_flops_per_layer"] == 16 * n * d * r + 6 * n * r * (d + f) + 4 * n * n * d
    assert counted["backward_flops_per_layer"] == 2 * counted["forward_flops_per_layer"]
    (step,) = counted["wire_bytes_per_step"]
    assert step["layers"] == 32 * 512 * counted["wire_bytes_per_layer"] and counted["tokens_per_step"] == 512 * n


def test_the_plan_tool_chooses_and_says_why(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["count", "--preset", "cola_7b", "--tp", "4", "--placement", "auto", "--recompute", "latent"]
    assert plan.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("cola_7b: cola, placement btp_sp, bf16") and "placement btp_sp: " in text
    assert "131072 tokens per step and tensor-parallel group of 4" in text
    assert "layer 0 of 32, one row of 256 tokens, recompute latent" in text
    # The length of the rows counts, and so does the memory that is said.
    memory = ["--parallel.device_memory_gib", "10", "--dp", "8", "--json"]
    assert plan.main([*words, "--tokens", "512", *memory]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["placement"] == "btp" and "32768 tokens per step" in counted["placement_reason"][1]
    for arguments, message in (
        ([*words, "--parallel.device_memory_gib", "1"], "no placement can run"),
        ([*words, "--layer", "32"], "--layer: found 32, allowed: 0 to 31"),
        ([*words, "--tokens", "30"], "a multiple of parallel.tensor_parallel_size 4"),
        (["count", "--placement", "x"], "parallel.placement: found 'x'"),
        (["count", "--recompute", "x"], "train.recompute: found"),
    ):
        with pytest.raises(SystemExit) as caught:
            plan.main(arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("plan: error: ") and message in error
        assert error.count("\n") == 1
