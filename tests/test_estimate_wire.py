"""Closed forms of wire, kept activations and replay against the figures that the placement table has to give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, preset
from megatron_lowrank.estimate import (
    Exchange,
    end_collectives,
    kept_activations,
    kept_bytes,
    kept_elements,
    layer_collectives,
    layer_flops,
    layout_changes,
    pipeline_payload,
    replay_collectives,
    replay_flops,
    ring_bytes,
    step_wire,
    summed_parameters,
)
from megatron_lowrank.placement import statistic_columns

ROWS = ("dense", "vanilla", "vanilla_replicated", "btp", "btp_sp")
D, F, R, HEADS = 4096, 11008, 1024, 32
SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}


def _run(placement: str, t: int = 4, base: RunConfig | None = None, grouping: bool = True, **train: Any) -> RunConfig:
    run = base or preset("cola_7b")
    return replace(
        run,
        lowrank=replace(run.lowrank, method="dense") if placement == "dense" else run.lowrank,
        parallel=replace(run.parallel, placement=placement, tensor_parallel_size=t, grouping=grouping),
        train=replace(run.train, **train),
    )


def _words(exchanges: tuple[Exchange, ...]) -> list[str]:
    return [f"{SHORT[e.kind]} {e.width}" + (f"+{e.statistic}" if e.statistic else "") for e in exchanges]


# Widths that differ wherever they can: grouped queries, a head dimension of its own, a rank per role.
UNEVEN = RunConfig(
    model=ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_query_groups=2,
                      kv_channels=20),
    lowrank=LowRankConfig(
        method="cola", rank=8,
        rank_overrides={"q": 10, "k": 12, "v": 14, "o": 16, "gate": 18, "up": 20, "down": 22},
    ),
    parallel=ParallelConfig(tensor_parallel_size=2),
)  # fmt: skip
"""d_q 80, d_kv 40, fp32, two ranks."""

SEQUENCES = {
    "dense": ("AG 64, RS 64, AG 64, RS 64", "AG 64, AG 64, RS 64, AG 64, AG 64, RS 64"),
    "vanilla": (
        "AG 64, RS 160, AG 80, RS 64, AG 64, RS 352, AG 176, RS 64",
        "AG 64, RS 176, AG 352, RS 64, AG 64, RS 80, AG 160, RS 64",
    ),
    "vanilla_replicated": ("AR 160, AR 64, AR 352, AR 64", "AR 176, AR 64, AR 80, AR 64"),
    "btp": ("AR 36+1, AR 16, AR 38+1, AR 22", "AR 22, AR 38, AR 16, AR 36"),
    "btp_sp": ("AG 36, RS 16, AG 38, RS 22", "AG 22, RS 38, AG 16, RS 36"),
}
APART = {
    "dense": SEQUENCES["dense"],
    "vanilla": (
        "AG 64, RS 80, RS 40, RS 40, AG 80, RS 64, AG 64, RS 176, RS 176, AG 176, RS 64",
        "AG 64, RS 176, AG 176, AG 176, RS 64, AG 64, RS 80, AG 40, AG 40, AG 80, RS 64",
    ),
    "vanilla_replicated": (
        "AR 80, AR 40, AR 40, AR 64, AR 176, AR 176, AR 64",
        "AR 176, AR 64, AR 80, AR 64",
    ),
    "btp": (
        "AR 10+1, AR 12, AR 14, AR 16, AR 18+1, AR 20, AR 22",
        "AR 22, AR 18, AR 20, AR 16, AR 10, AR 12, AR 14",
    ),
    "btp_sp": (
        "AG 10, AG 12, AG 14, RS 16, AG 18, AG 20, RS 22",
        "AG 22, RS 18, RS 20, AG 16, RS 10, RS 12, RS 14",
    ),
}


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("placement", ROWS)
def test_collectives_of_a_layer(placement: str, grouping: bool) -> None:
    traffic = layer_collectives(_run(placement, 2, UNEVEN, grouping), 0)
    forward, backward = (SEQUENCES if grouping else APART)[placement]
    assert (_words(traffic.forward), _words(traffic.backward)) == (forward.split(", "), backward.split(", "))


@pytest.mark.parametrize("placement", ROWS)
def test_one_rank_exchanges_nothing(placement: str) -> None:
    run = _run(placement, 1, UNEVEN, recompute="full")
    assert not layer_collectives(run, 0).both and not replay_collectives(run, 0) and not layout_changes(run)
    assert not any(traffic.both for traffic in end_collectives(run).values())
    assert step_wire(run, tokens=512).total == 0


@pytest.mark.parametrize(
    ("placement", "units", "megabytes"),
    [("dense", 10 * D, (671.1, 1006.6, 1174.4)), ("vanilla", 16 * D + 6 * F, (2155.9, 3233.8, 3772.8)),
     ("vanilla_replicated", 16 * D + 6 * F, (2155.9, 3233.8, 3772.8)), ("btp", 28 * R, (469.8, 704.6, 822.1)),
     ("btp_sp", 14 * R, (234.9, 352.3, 411.0))],
)  # fmt: skip
def test_wire_of_the_7b_layer(placement: str, units: int, megabytes: tuple[float, float, float]) -> None:
    for t, expected in zip((2, 4, 8), megabytes, strict=True):
        run = _run(placement, t)
        sent = ring_bytes(run, layer_collectives(run, 0).both, tokens=16384)
        assert sent == units * 16384 * 2 * (t - 1) // t
        assert round(sent / 1e6, 1) == expected
        statistic = ring_bytes(run, layer_collectives(run, 0).both, tokens=16384, statistic=True)
        # Two norms, all-reduced once each, 16 columns of bf16 up to five ranks and 32 up to ten.
        columns = 16 if t < 6 else 32
        assert statistic == (2 * 2 * columns * 16384 * 2 * (t - 1) // t if placement == "btp" else 0)


def test_columns_of_the_statistic() -> None:
    assert [statistic_columns(t, limbs=True) for t in (2, 4, 5, 6, 8, 16)] == [16, 16, 16, 32, 32, 48]
    assert statistic_columns(8, limbs=False) == 1


@pytest.mark.parametrize("placement", ["vanilla", "btp_sp"])
def test_pairs_and_dense_matrices_side_by_side(placement: str) -> None:
    base = replace(UNEVEN, lowrank=replace(UNEVEN.lowrank, dense_roles=("k", "down")))
    traffic = layer_collectives(_run(placement, 2, base), 1)
    expected = {
        "vanilla": (
            "AG 64, AG 64, RS 120, AG 80, RS 64, AG 64, RS 352, RS 64",
            "AG 64, AG 352, RS 64, AG 64, RS 80, AG 120, AG 64, RS 64, RS 64",
        ),
        "btp_sp": ("AG 64, AG 24, RS 16, AG 38, RS 64", "AG 64, RS 38, AG 16, RS 24, AG 64, RS 64"),
    }[placement]
    assert (", ".join(_words(traffic.forward)), ", ".join(_words(traffic.backward))) == expected


def test_dense_layers_take_the_stock_linears() -> None:
    base = replace(UNEVEN, lowrank=replace(UNEVEN.lowrank, dense_layers=(1,)))
    for placement in ("vanilla", "btp", "btp_sp"):
        traffic = layer_collectives(_run(placement, 2, base), 1)
        assert (", ".join(_words(traffic.forward)), ", ".join(_words(traffic.backward))) == SEQUENCES["dense"]
    traffic = layer_collectives(_run("vanilla_replicated", 2, base), 1)
    assert _words(traffic.forward) == ["AR 64"] * 2 == _words(traffic.backward)


def test_only_btp_changes_the_layout() -> None:
    base = replace(UNEVEN, model=replace(UNEVEN.model, num_layers=4), lowrank=LowRankConfig(rank=8, dense_layers=(1,)))
    changes = layout_changes(_run("btp", 2, base))
    assert list(changes) == [0, 1, 2, None]
    assert all(_words(traffic.forward) == ["A2A 32"] == _words(traffic.backward) for traffic in changes.values())
    assert list(layout_changes(_run("btp", 2, UNEVEN))) == [0, None]
    assert not any(layout_changes(_run(row, 2, base)) for row in ROWS if row not in ("btp", "dense"))


@pytest.mark.parametrize("placement", ROWS)
def test_ends(placement: str) -> None:
    ends = {
        name: (_words(t.forward), _words(t.backward)) for name, t in end_collectives(_run(placement, 2, UNEVEN)).items()
    }
    whole = placement == "vanilla_replicated"
    assert ends["embedding"] == ((["AR 64"], []) if whole else (["RS 64"], ["AG 64"]))
    assert ends["output layer"] == (([], ["AR 64"]) if whole else (["AG 64"], ["AG 64", "RS 64"]))
    assert ends["loss"] == (["AR 1"] * 3, [])


@pytest.mark.parametrize("placement", ROWS)
def test_a_step_adds_up_over_the_stages(placement: str) -> None:
    run = _run(placement, precision="bf16")
    halved = replace(run, parallel=replace(run.parallel, pipeline_parallel_size=2))
    n, t = 16384, 4
    whole, (first, last) = step_wire(run, tokens=n), (step_wire(halved, tokens=n, stage=s) for s in (0, 1))
    for cause in ("layers", "statistic", "layout_changes", "ends", "gradient_sum"):
        assert getattr(whole, cause) == getattr(first, cause) + getattr(last, cause)
    assert whole.pipeline == whole.replay == 0
    payload = n * D if placement == "vanilla_replicated" else n * D // t
    assert first.pipeline == last.pipeline == 2 * payload == 2 * pipeline_payload(run, tokens=n)
    assert whole.layers == 32 * ring_bytes(run, layer_collectives(run, 0).both, tokens=n)
    assert whole.layout_changes == (4 * (D // t) * n * 2 * 3 // 4 if placement == "btp" else 0)
    seven = 5 * D if placement != "vanilla_replicated" else 4 * D
    assert whole.ends == (seven * 2 + 6 * 4) * n * 3 // 4
    assert whole.total == whole.layers + whole.statistic + whole.layout_changes + whole.ends + whole.gradient_sum
    gains = 65 * D
    summed = {"vanilla_replicated": 0, "btp": D, "btp_sp": gains + 32 * 7 * D * R}.get(placement, gains)
    assert summed_parameters(run, 0) == summed
    assert whole.gradient_sum == 2 * 4 * summed * 3 // 4
    full = replace(run, train=replace(run.train, recompute="full"))
    once = sum(ring_bytes(run, layer_collectives(run, layer).forward, tokens=n) for layer in range(32))
    assert step_wire(full, tokens=n).replay == once + whole.layout_changes // 2
    interleaved = replace(halved, parallel=replace(halved.parallel, virtual_pipeline_size=2))
    assert step_wire(interleaved, tokens=n, stage=0).pipeline == 3 * 2 * payload


# Entries per token, scalars of the norms and log-sum-exp apart.
KEPT = {
    ("dense", "none", "gathered"): 8 * D / 4 + 3 * F / 4,
    ("vanilla", "none", "gathered"): 3 * D + F + 6 * D / 4 + 2 * F / 4 + 14 * R / 4,
    ("vanilla_replicated", "none", "gathered"): 8 * D + 3 * F + 14 * R / 4,
    ("btp", "none", "gathered"): 6 * D / 4 + 3 * F / 4 + 14 * R,
    ("btp_sp", "none", "gathered"): 8 * D / 4 + 3 * F / 4 + 9 * R / 4 + 5 * R,
    ("vanilla", "latent", "gathered"): 2 * D / 4 + 7 * R / 4,
    ("vanilla_replicated", "latent", "gathered"): 2 * D + 7 * R / 4,
    ("btp", "latent", "gathered"): 9216,
    ("btp", "latent", "sharded"): 9216,
    ("btp_sp", "latent", "gathered"): 7680,
    ("btp_sp", "latent", "sharded"): 3840,
    ("btp", "latent_keep_attention", "gathered"): 9216 + D / 4,
    ("btp_sp", "latent_keep_attention", "sharded"): 3840 + D / 4,
    ("vanilla_replicated", "latent_keep_attention", "gathered"): 3 * D + 7 * R / 4,
    ("vanilla_replicated", "full", "gathered"): D,
    ("btp", "full", "gathered"): D / 4,
    ("dense", "full", "gathered"): D / 4,
}


@pytest.mark.parametrize(("placement", "recompute", "store"), KEPT)
def test_kept_for_backward_at_7b(placement: str, recompute: str, store: str) -> None:
    run = _run(placement, recompute=recompute, latent_store=store, precision="bf16")
    scalars = 0.0
    if recompute == "none":
        scalars = {"btp": 2.0, "vanilla_replicated": 2.0}.get(placement, 2 / 4)
    elif placement == "btp" and recompute != "full":
        scalars = 2.0
    if recompute in ("none", "latent_keep_attention"):
        scalars += HEADS if placement == "vanilla_replicated" else HEADS / 4
    expected = KEPT[placement, recompute, store]
    assert kept_elements(run, 0, tokens=4096) == 4096 * (expected + scalars)
    assert kept_bytes(run, 0, tokens=4096) == 4096 * (2 * expected + 4 * scalars)
    kept = kept_activations(run, 0, tokens=4096)
    assert len({tensor.name for tensor in kept}) == len(kept)


def test_kept_on_one_rank() -> None:
    run = _run("btp_sp", 1, recompute="latent")
    assert kept_elements(run, 0, tokens=100) == 100 * (2 * D + 7 * R)
    nothing = replace(run, train=replace(run.train, recompute="none"))
    assert kept_elements(nothing, 0, tokens=100) == 100 * (8 * D + 3 * F + 14 * R + 2 + HEADS)
    assert kept_elements(_run("vanilla", 1), 0, tokens=100) == kept_elements(nothing, 0, tokens=100)


@pytest.mark.parametrize(
    ("placement", "latents"),
    # q k v 36 and gate up 38 at the column side, o 16 and down 22 at the row side.
    [("vanilla", 112 / 2), ("vanilla_replicated", 112 / 2), ("btp", 112), ("btp_sp", 74 + 38 / 2)],
)
def test_the_identity_keeps_a_bottleneck_once(placement: str, latents: float) -> None:
    def entries(sigma: str) -> float:
        base = replace(UNEVEN, lowrank=replace(UNEVEN.lowrank, latent_activation=sigma))
        return sum(
            tensor.elements for tensor in kept_activations(_run(placement, 2, base), 0, tokens=32)
            if "bottleneck" in tensor.name
        )  # fmt: skip

    assert entries("identity") == 32 * latents
    assert entries("silu") == 32 * (latents + {"btp_sp": 112 / 2}.get(placement, latents))


def test_grouped_queries_shrink_what_attention_keeps() -> None:
    kept = {tensor.name: tensor.elements for tensor in kept_activations(_run("btp_sp", 2, UNEVEN), 0, tokens=32)}
    assert (kept["q output"], kept["k output"], kept["v output"]) == (16 * 80, 16 * 40, 16 * 40)
    assert (kept["attention output"], kept["attention log-sum-exp"]) == (16 * 80, 16 * 4)
    gathered = {tensor.name: tensor.elements for tensor in kept_activations(_run("vanilla", 2, UNEVEN), 0, tokens=32)}
    assert gathered["o input, gathered"] == 32 * 80 and gathered["attention output"] == 16 * 80
    assert gathered["down input, gathered"] == 32 * 176 and "down input" not in gathered


@pytest.mark.parametrize(("placement", "gathered"), [("vanilla", 64), ("btp_sp", 0)])
def test_kept_with_dense_matrices_beside_pairs(placement: str, gathered: int) -> None:
    base = replace(UNEVEN, lowrank=replace(UNEVEN.lowrank, dense_roles=("k", "down")))
    latent = kept_elements(_run(placement, 2, base, recompute="latent"), 0, tokens=32)
    latents = {"vanilla": (24 + 16 + 38) / 2, "btp_sp": 24 + 38 + 16 / 2}[placement]
    # Both residuals; statistic and output of the first norm, and the output of k; the bottlenecks.
    assert latent == 32 * (64 + (1 + 64) / 2 + gathered + 40 / 2 + latents)
    nothing = {t.name: t.elements for t in kept_activations(_run(placement, 2, base), 0, tokens=32)}
    assert nothing["input_layernorm output"] == 16 * 64
    assert ("input_layernorm output, gathered" in nothing) == (placement == "vanilla")
    assert nothing["down input"] == 16 * 176 and "down bottleneck" not in nothing
    run = _run(placement, 2, base, recompute="latent", latent_store="sharded")
    expected = {"vanilla": "RS 352, AG 64, RS 120, AG 80", "btp_sp": "AG 38, AG 24"}[placement]
    assert ", ".join(_words(replay_collectives(run, 0))) == expected


@pytest.mark.parametrize("placement", ["vanilla", "vanilla_replicated", "btp", "btp_sp"])
def test_a_dense_layer_keeps_and_replays_as_without_recomputation(placement: str) -> None:
    base = replace(UNEVEN, lowrank=replace(UNEVEN.lowrank, dense_layers=(1,)))
    latent = _run(placement, 2, base, recompute="latent")
    kept = kept_elements(latent, 1, tokens=32)
    assert kept == kept_elements(_run(placement, 2, base), 1, tokens=32)
    residual = 64 if placement == "vanilla_replicated" else 64 / 2
    statistic = 1 if placement == "vanilla_replicated" else 1 / 2
    assert kept == 32 * (4 * residual + 2 * statistic + (160 + 80 + 4 + 3 * 176) / 2)
    assert not replay_collectives(latent, 1)
    assert replay_flops(latent, 1, tokens=32, attention="full").forward == 0
    full = _run(placement, 2, base, recompute="full")
    assert kept_elements(full, 1, tokens=32) == 32 * residual
    assert replay_collectives(full, 1) == layer_collectives(full, 1).forward


@pytest.mark.parametrize(
    ("placement", "store", "expected"),
    [("btp", "gathered", ""), ("btp", "sharded", ""), ("btp_sp", "gathered", ""), ("btp_sp", "sharded", "AG 38, AG 36"),
     ("vanilla", "gathered", "RS 352, AG 176, AG 64, RS 160, AG 80, AG 64"),
     ("vanilla_replicated", "gathered", "AR 352, AR 160")],
)  # fmt: skip
def test_replayed_collectives(placement: str, store: str, expected: str) -> None:
    run = _run(placement, 2, UNEVEN, recompute="latent", latent_store=store)
    assert ", ".join(_words(replay_collectives(run, 0))) == expected
    # The input of o is rebuilt from the attention's output, before q, k and v are.
    run = _run(placement, 2, UNEVEN, recompute="latent_keep_attention", latent_store=store)
    assert ", ".join(_words(replay_collectives(run, 0))) == expected.replace("RS 160, AG 80", "AG 80, RS 160")
    assert not replay_collectives(_run(placement, 2, UNEVEN, latent_store=store), 0)
    full = _run(placement, 2, UNEVEN, recompute="full", latent_store=store)
    assert ", ".join(_words(replay_collectives(full, 0))) == SEQUENCES[placement][0]


def test_replayed_flops() -> None:
    n = 256
    attention: Literal["full", "causal"]
    for attention, factor in (("full", 4), ("causal", 2)):

        def replayed(run: RunConfig) -> int:
            return replay_flops(run, 0, tokens=n, attention=attention).forward  # noqa: B023

        assert replayed(_run("btp")) == 0
        assert replayed(_run("btp", recompute="latent")) == 6 * n * D * R + 4 * n * F * R + factor * n * n * D
        assert replayed(_run("btp_sp", recompute="latent_keep_attention")) == 6 * n * D * R + 4 * n * F * R
        full = _run("vanilla", recompute="full")
        assert replayed(full) == 16 * n * D * R + 6 * n * R * (D + F) + factor * n * n * D
        assert replayed(full) == layer_flops(full.model, full.lowrank, 0, tokens=n, attention=attention).forward
        ups = 10 * 80 + (12 + 14) * 40 + (18 + 20) * 176
        uneven = _run("btp_sp", 2, UNEVEN, recompute="latent")
        assert replayed(uneven) == 2 * n * ups + factor * n * n * 80
        some = replace(uneven, lowrank=replace(uneven.lowrank, dense_roles=("k", "down")))
        assert replayed(some) == 2 * n * (ups - 12 * 40) + factor * n * n * 80
