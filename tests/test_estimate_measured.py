"""The closed forms of a layer equal what real ranks count while they run it: wire, kept tensors and FLOPs, exactly.

Cases of one tensor-parallel size share a world, since starting ranks takes longer than a layer of this size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from scripts import load_tool

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_lowrank.testing import planned
from megatron_lowrank.testing.planned import Pair, measure_layers, small_run

MODEL = ModelConfig(hidden_size=64, ffn_hidden_size=176, num_attention_heads=8, num_query_groups=8, kv_channels=10)
LOW_RANK = LowRankConfig(method="cola", rank=16)
UNEVEN = {"q": 8, "k": 12, "v": 16, "o": 20, "gate": 24, "up": 28, "down": 32}
PAIRS = ("vanilla", "vanilla_replicated", "btp", "btp_sp")
POLICIES = ("none", "latent", "latent_keep_attention", "full")


def _run(
    placement: str, t: int, recompute: Any, *, store: Any = "gathered", grouping: bool = True,
    lowrank: LowRankConfig = LOW_RANK, precision: Any = "fp32", length: int = 32, **model: Any,
) -> RunConfig:  # fmt: skip
    return RunConfig(
        model=replace(MODEL, **model), lowrank=replace(lowrank, method="dense") if placement == "dense" else lowrank,
        parallel=ParallelConfig(placement=placement, tensor_parallel_size=t, grouping=grouping),
        train=TrainConfig(sequence_length=length, recompute=recompute, latent_store=store, precision=precision),
    )  # fmt: skip


def _cases() -> dict[str, RunConfig]:
    cases: dict[str, RunConfig] = {}

    def add(name: str, placement: str, t: int, recompute: str, **more: Any) -> None:
        words = [f"tp{t}", placement, recompute, *([more["store"]] if "store" in more else []), name]
        cases["-".join(word for word in words if word)] = _run(placement, t, recompute, **more)

    for t in (1, 2, 4):
        for recompute in ("none", "full"):
            add("", "dense", t, recompute)
        for placement in PAIRS if t == 2 else ("btp", "btp_sp"):
            for recompute in POLICIES:
                stores = (
                    ("gathered", "sharded") if placement == "btp_sp" and recompute.startswith("latent") else (None,)
                )
                for store in stores:
                    kept = {} if store is None else {"store": store}
                    add("", placement, t, recompute, **kept)
                    if t == 2 and recompute in ("none", "latent"):
                        add("apart", placement, t, recompute, grouping=False, **kept)
    # Without a non-linearity, and with the MLP's own; grouped queries, and a rank per role, so that nothing is alike.
    linear = LowRankConfig(method="svd", rank_overrides=UNEVEN, mlp_activation="keep")
    for placement in PAIRS:
        for recompute in ("none", "latent", "full"):
            add("linear uneven grouped", placement, 2, recompute, lowrank=linear, num_query_groups=2)
        lowrank = replace(LOW_RANK, rank_overrides=UNEVEN, mlp_activation="keep")
        add("uneven keep apart", placement, 4, "latent", lowrank=lowrank, grouping=False, num_query_groups=4)
        add("biases", placement, 2, "latent", attention_bias=True, mlp_bias=True)
        add("dense layer", placement, 2, "latent", lowrank=replace(LOW_RANK, dense_roles=planned.ROLES))
    dropped = replace(linear, mlp_activation="drop")
    add("linear drop apart", "btp_sp", 2, "latent", store="sharded", lowrank=dropped, grouping=False)
    add("linear drop apart", "btp", 2, "none", lowrank=dropped, grouping=False)
    for placement in ("vanilla", "btp_sp"):
        for recompute in ("none", "latent", "latent_keep_attention"):
            add("dense k down", placement, 2, recompute, lowrank=replace(LOW_RANK, dense_roles=("k", "down")))
        add("dense attention", placement, 2, "latent", lowrank=replace(LOW_RANK, dense_roles=("q", "k", "v", "o")))
    for recompute in ("none", "latent", "full"):
        # Limbs of the statistic, 16 columns up to five ranks and 32 with eight; any rank will do.
        add("bf16", "btp", 2, recompute, precision="bf16", lowrank=replace(LOW_RANK, rank=7))
    add("bf16", "btp_sp", 2, "latent", precision="bf16")
    add("bf16", "vanilla", 2, "none", precision="bf16")
    add("bf16", "btp", 8, "latent", precision="bf16")
    add("", "btp_sp", 8, "latent", store="sharded")
    return cases


CASES = _cases()


@cache
def _measured(t: int) -> dict[str, dict[str, Pair]]:
    """Every case of a size, counted in one world."""
    mine = {name: run for name, run in CASES.items() if run.parallel.tensor_parallel_size == t}
    return dict(zip(mine, measure_layers(list(mine.values())), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_counted_as_predicted(name: str) -> None:
    measured = _measured(CASES[name].parallel.tensor_parallel_size)[name]
    differing = {what: pair for what, pair in measured.items() if not pair.equal}
    assert not differing
    assert set(measured) == {
        "wire_elements", "wire_bytes", "collectives", "forward_calls", "backward_calls", "kept_elements", "kept_bytes",
        "forward_flops", "backward_flops", "replayed_flops",
    }  # fmt: skip
    recompute = CASES[name].train.recompute
    assert (measured["replayed_flops"].counted > 0) == (recompute != "none" and "dense layer" not in name)
    assert (measured["wire_bytes"].counted > 0) == (not name.startswith("tp1-"))


def test_the_counts_are_those_of_the_table() -> None:
    """One case by hand, so that two equal mistakes would show: 32 tokens, H 64, R 16, two ranks."""
    measured = _measured(2)["tp2-btp_sp-latent-sharded"]
    forward, again, r = 7 * 16, 5 * 16, 32 * 16
    assert measured["wire_elements"].counted == (2 * forward + again) * 32 // 2
    assert measured["kept_elements"].counted == 32 * (2 * 64 + 7 * 16) // 2
    assert measured["replayed_flops"].counted == (2 * r * (3 * 80 + 2 * 176) + 4 * 32 * 32 * 80) // 2
    assert measured["forward_calls"].counted == [
        ["all_gather", 2 * r, 1], ["all_gather", 3 * r, 1], ["reduce_scatter", r, 2]
    ]  # fmt: skip


HEADS = [(64, 8, 128), (24, 24, None), (48, 24, 64)]


@pytest.mark.parametrize(
    ("heads", "groups", "channels", "t"),
    [(*sizes, t) for sizes in HEADS for t in (1, 2, 3, 4, 6, 8) if sizes[1] % t == 0],
)
@pytest.mark.parametrize("placement", PAIRS)
def test_a_small_run_keeps_the_proportions(
    placement: str, heads: int, groups: int, channels: int | None, t: int
) -> None:
    lowrank = replace(
        LOW_RANK, rank=24 * 32, rank_overrides={"3": 24 * 24, "3.down": 24 * 96}, dense_layers=(1,)
    )  # fmt: skip
    big = _run(
        placement, t, "none", precision="bf16", length=48, lowrank=lowrank, num_layers=4, hidden_size=4608,
        ffn_hidden_size=12288, num_attention_heads=heads, num_query_groups=groups, kv_channels=channels,
    )  # fmt: skip
    for layer in (0, 1, 3):
        small = small_run(big, layer)
        m, hidden = small.model, small.model.hidden_size
        assert 64 <= hidden <= 128 and m.num_attention_heads // m.query_groups == heads // groups
        assert abs(m.ffn_hidden_size / hidden - 12288 / 4608) <= t / hidden
        assert abs(m.query_width / hidden - big.model.query_width / 4608) <= m.num_attention_heads / hidden
        assert small.train.sequence_length % t == 0 and small.train.precision == "fp32"
        for role in planned.ROLES:
            assert small.lowrank.is_dense(0, role) == small.lowrank.is_dense(1, role) == (layer == 1)
            wanted = hidden * big.rank_of(layer, role) / 4608
            assert small.rank_of(1, role) == small.rank_of(0, role) and abs(small.rank_of(0, role) - wanted) <= t


def test_more_ranks_than_a_machine_forks() -> None:
    run = _run("btp", 16, "none", hidden_size=256, num_attention_heads=16, num_query_groups=16)
    with pytest.raises(
        ValueError, match="parallel.tensor_parallel_size: found 16, allowed where ranks are run: 1 to 8"
    ):
        small_run(run)


COUNT = ["count", "--preset", "cola_7b", "--tp", "2", "--recompute", "latent", "--measure"]


def test_plan_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool("plan").main([*COUNT, "--placement", "btp", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert set(counted["measured"]["wire_elements"]) == {"predicted", "counted"}
    assert all(pair["predicted"] == pair["counted"] for pair in counted["measured"].values())
    assert counted["measured_shape"].startswith("hidden 64, ffn 172, 2 heads in 2 groups of dimension 32, ranks q 16, ")
    # Seven factors' worth forward and backward, all-reduced, and one column per norm.
    assert counted["measured"]["wire_elements"]["counted"] == 32 * (4 * 7 * 16 + 2 * 2) // 2


@pytest.mark.parametrize("as_json", [False, True])
def test_plan_says_what_differs(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned, "_PAUSES", planned._PAUSES[1:2])
    real: Callable[..., int] = planned.kept_elements
    monkeypatch.setattr(planned, "kept_elements", lambda *args, **kwargs: real(*args, **kwargs) + 1)
    assert load_tool("plan").main([*COUNT, *(["--json"] if as_json else [])]) == 1
    out, err = capsys.readouterr()
    assert err == "plan: error: counted differs from predicted: kept_elements\n"
    assert json.loads(out) if as_json else "DIFFERS" in out and out.count("DIFFERS") == 1


def test_plan_refuses_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_tool("plan").main(["count", "--preset", "cola_7b", "--tp", "16", "--measure"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("plan: error: parallel.tensor_parallel_size: found 16, allowed where ranks are run: 1 to 8")
