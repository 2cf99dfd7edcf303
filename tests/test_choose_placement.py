"""Placement `auto`: one case for each branch of the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lowrank.config import LowRankConfig, RunConfig, preset
from megatron_lowrank.estimate import Candidate, choose, choose_placement, resolve_placement

D, F, R, LAYERS = 4096, 11008, 1024, 32


def _run(t: int = 4, **fields: Any) -> RunConfig:
    """The 7B model with placement `auto`; fields of any section by their names."""
    run = preset("cola_7b")
    parallel = {"placement": "auto", "tensor_parallel_size": t}
    sections: dict[str, dict[str, Any]] = {"parallel": parallel, "train": {}, "lowrank": {}, "model": {}}
    for name, value in fields.items():
        section = next(section for section in sections if hasattr(getattr(run, section), name))
        sections[section][name] = value
    return replace(run, **{name: replace(getattr(run, name), **values) for name, values in sections.items()})


def _by_name(candidates: tuple[Candidate, ...]) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in candidates}


def test_one_rank_needs_no_comparison() -> None:
    choice = choose_placement(_run(1, device_memory_gib=0.001), data_parallel_size=1)
    assert choice.placement == "btp_sp" and not choice.candidates and "one tensor-parallel rank" in choice.reason[0]


# Without replicas it pays from T = d e_g / e_a on: 8192 tokens per step and group in bf16, 4096 in fp32.
@pytest.mark.parametrize(
    ("precision", "rows", "expected"),
    [("bf16", 31, "btp"), ("bf16", 32, "btp_sp"), ("bf16", 33, "btp_sp"),
     ("fp32", 15, "btp"), ("fp32", 16, "btp_sp"), ("fp32", 17, "btp_sp")],
)  # fmt: skip
def test_tokens_per_step_decide(precision: str, rows: int, expected: str) -> None:
    run = _run(global_batch_size=rows, micro_batch_size=1, precision=precision)
    choice = choose_placement(run, data_parallel_size=1)
    assert choice.placement == expected
    assert (choice.reason[0] == "placement btp_sp: no slower than the other") == (rows in (16, 32))


def test_predicted_numbers() -> None:
    """Ring bytes of a step over the bandwidths, and bytes per parameter and token, against the closed forms."""
    replicas, tokens = 8, 512 * 256 // 8
    run = _run(global_batch_size=512, micro_batch_size=16, precision="bf16", recompute="latent",
               tp_bandwidth=100.0, dp_bandwidth=10.0)  # fmt: skip
    found = _by_name(choose_placement(run, data_parallel_size=replicas).candidates)
    whole, cut = 7 * D * R, 4 * D * R + 3 * F * R
    expected = {
        "btp_sp": (14 * R * tokens * 2 + 14 * D * R * 4, whole + cut / 4),
        "btp": (28 * R * tokens * 2, (whole + cut) / 4),
    }
    for name, (wire, held) in expected.items():
        assert found[name].tensor_seconds == pytest.approx(LAYERS * wire * 3 / 4 / 100e9)
        assert found[name].data_seconds == pytest.approx(LAYERS * held * 7 / 8 * (4 + 2) / 10e9)
        assert found[name].seconds == found[name].tensor_seconds + found[name].data_seconds
        kept = {"btp_sp": (2 * D / 4 + 5 * R + 2 * R / 4) * 2, "btp": (2 * D / 4 + 7 * R) * 2 + 2 * 4}[name]
        assert found[name].kept_bytes == LAYERS * 16 * 256 * kept
        ends = 2 * 32256 * D / 4 + D  # rows padded to a multiple of 4 x 128
        gains = LAYERS * 2 * D / (4 if name == "btp" else 1)
        assert found[name].state_bytes == pytest.approx((LAYERS * held + ends + gains) * (6 + 12 / replicas), abs=8)


def test_replicas_and_their_overlap_decide() -> None:
    fields = {"global_batch_size": 512, "recompute": "latent", "tp_bandwidth": 100.0}
    assert choose_placement(_run(**fields, dp_bandwidth=10.0), data_parallel_size=8).placement == "btp"
    assert choose_placement(_run(**fields, dp_bandwidth=1000.0), data_parallel_size=8).placement == "btp_sp"
    # Between the bandwidth that pays as it is, and half of it, which pays with half of the traffic hidden.
    gain = (14 * R * 16384 * 2 - 14 * D * R * 4) * 3 / 4 / 100e9
    even = 7 * D * R * 3 / 4 * 7 / 8 * 6 / gain / 1e9
    near = {**fields, "dp_bandwidth": 0.75 * even}
    assert choose_placement(_run(**near), data_parallel_size=8).placement == "btp"
    hidden = choose_placement(_run(**near, overlap_grad_reduce=True), data_parallel_size=8)
    assert hidden.placement == "btp_sp"
    plain = _by_name(choose_placement(_run(**near), data_parallel_size=8).candidates)["btp_sp"]
    assert hidden.candidates[0].data_seconds == pytest.approx(plain.data_seconds / 2)
    # One all-reduce of fp32 gradients instead of fp32 gradients there and bf16 weights back.
    whole = choose_placement(_run(**near, use_distributed_optimizer=False), data_parallel_size=8)
    assert whole.candidates[0].data_seconds == pytest.approx(plain.data_seconds * 8 / 6)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"hidden_size": 4098, "kv_channels": 128, "rank": 1024}, "does not divide model.hidden_size 4098"),
     ({"dense_roles": ("k",)}, "found k dense in layer 0")],
)  # fmt: skip
def test_what_btp_cannot_hold_is_left_to_btp_sp(fields: dict[str, Any], text: str) -> None:
    choice = choose_placement(_run(global_batch_size=16, **fields), data_parallel_size=1)
    refused = _by_name(choice.candidates)["btp"].refused
    assert choice.placement == "btp_sp" and refused is not None and text in refused
    assert any(line.startswith("btp: ") and text in line for line in choice.reason)
    assert choice.reason[0].endswith("no other one can run or fits")


# A step long enough for btp_sp: in ms 736 against 1286 of btp, 960 with a sharded store, 1049 against 1913 with `full`.
# GiB of btp_sp, sharded, btp: 17.35, 13.60, 13.93 with `latent`, 1.02 more with attention kept, 33.18 and 33.01 with
# `none`, 10.85 and 5.93 with `full`.
@pytest.mark.parametrize(
    ("recompute", "store", "gib", "expected"),
    [
        ("latent", "gathered", 17.4, ("btp_sp", "gathered")),
        ("latent", "gathered", 17.3, ("btp_sp", "sharded")),
        ("latent", "gathered", 13.7, ("btp_sp", "sharded")),
        ("latent", "gathered", 13.5, None),
        ("latent", "sharded", 17.4, ("btp_sp", "sharded")),
        ("latent_keep_attention", "gathered", 18.4, ("btp_sp", "gathered")),
        ("latent_keep_attention", "gathered", 18.3, ("btp_sp", "sharded")),
        ("none", "gathered", 33.2, ("btp_sp", "gathered")),
        ("none", "gathered", 33.1, ("btp", "gathered")),
        ("none", "gathered", 33.0, None),
        ("full", "gathered", 10.9, ("btp_sp", "gathered")),
        ("full", "gathered", 10.8, ("btp", "gathered")),
        ("full", "gathered", 5.9, None),
    ],
)
def test_memory_decides(recompute: str, store: str, gib: float, expected: tuple[str, str] | None) -> None:
    run = _run(global_batch_size=4096, micro_batch_size=64, precision="bf16", recompute=recompute, latent_store=store,
               dp_bandwidth=100.0)  # fmt: skip
    if expected is None:
        with pytest.raises(ValueError, match="no placement can run") as caught:
            choose_placement(run, data_parallel_size=8, device_memory_gib=gib)
        lines = str(caught.value).splitlines()
        assert len(lines) == (4 if recompute == "latent" else 3)
        assert all(f"more than the {gib:g} GiB of a device" in line and " ms of " in line for line in lines[1:])
        return
    choice = choose_placement(run, data_parallel_size=8, device_memory_gib=gib)
    assert (choice.placement, choice.latent_store) == expected
    # What the run says goes before what the device has.
    said = replace(run, parallel=replace(run.parallel, device_memory_gib=gib))
    assert choose_placement(said, data_parallel_size=8, device_memory_gib=0.001) == choice


def test_the_heaviest_stage_and_every_micro_batch_in_flight_count() -> None:
    one, two = (
        _by_name(choose_placement(_run(pipeline_parallel_size=p), data_parallel_size=1).candidates)["btp_sp"]
        for p in (1, 2)
    )
    assert one.kept_bytes == two.kept_bytes and one.tensor_seconds == pytest.approx(2 * two.tensor_seconds)
    uneven = _run(pipeline_parallel_size=2, num_layers_in_first_pipeline_stage=24)
    heavy = _by_name(choose_placement(uneven, data_parallel_size=1).candidates)["btp_sp"]
    assert heavy.kept_bytes == one.kept_bytes * 2 * 24 // 32
    assert heavy.tensor_seconds == pytest.approx(one.tensor_seconds * 24 / 32)


@pytest.mark.parametrize(
    ("stages", "chunks", "batches", "held"),
    [(1, None, 8, 1), (4, None, 8, 4), (4, None, 2, 2), (8, None, 1, 1), (4, 2, 8, (6 + 4 + 1) / 2), (2, 2, 2, 2.0)],
)
def test_micro_batches_that_the_first_stage_holds(stages: int, chunks: int | None, batches: int, held: float) -> None:
    """1F1B holds one per stage still ahead; interleaving holds chunks, more of them, each a part of the layers."""
    fields = {"pipeline_parallel_size": stages, "virtual_pipeline_size": chunks}
    run = _run(**fields, global_batch_size=batches, micro_batch_size=1)
    assert choose._in_flight(run, 1, 0) == held
    assert choose._in_flight(run, 1, stages - 1) <= held


def test_all_ranks_plan_with_the_smallest_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that chose by their own memory would build different models."""
    from types import SimpleNamespace

    import torch

    from megatron_lowrank.train.launch import World, _with_placement

    run = _run(global_batch_size=4096, micro_batch_size=16, precision="bf16", recompute="latent")
    sizes = {0: 80.0, 1: 20.0, 2: 80.0, 3: 80.0}
    alone = [choose_placement(run, data_parallel_size=1, device_memory_gib=size).placement for size in sizes.values()]
    assert alone == ["btp_sp", "btp", "btp_sp", "btp_sp"]
    store = torch.distributed.HashStore()
    for rank, size in sizes.items():
        store.set(f"memory/{rank}", repr(size))
    chosen = []
    for rank, size in sizes.items():
        device = SimpleNamespace(total_memory=size * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, device=device: device)
        world = World(rank=rank, size=4, local_rank=rank)
        chosen.append(_with_placement(run, world, "cuda", store).placement)
    assert chosen == ["btp"] * 4 and capsys.readouterr().out.count("placement btp: ") == 1


def test_ranks_may_differ() -> None:
    lowrank = LowRankConfig(rank=512, rank_overrides={"q": 1000, "mlp": 768, "3": 256})
    run = replace(_run(global_batch_size=64), lowrank=lowrank)
    ranks = 31 * (1000 + 3 * 512 + 3 * 768) + 7 * 256
    found = choose_placement(run, data_parallel_size=1).candidates[0]
    tokens, element = 64 * 256, 2 if run.train.precision == "bf16" else 4
    assert found.tensor_seconds == pytest.approx((2 * ranks * tokens * element + 2 * D * ranks * 4) * 3 / 4 / 144e9)


def test_resolving_names_the_row() -> None:
    fields = {"global_batch_size": 4096, "micro_batch_size": 64, "recompute": "latent", "dp_bandwidth": 100.0}
    run = _run(**fields, precision="bf16")
    resolved, choice = resolve_placement(run, data_parallel_size=8, device_memory_gib=15.0)
    assert choice is not None and choice.reason[0].startswith("placement btp_sp with latent_store sharded: ")
    assert any("131072 tokens per step and tensor-parallel group of 4, 8 replicas" in line for line in choice.reason)
    assert (resolved.placement, resolved.train.latent_store) == ("btp_sp", "sharded")
    assert resolved == replace(
        run, parallel=replace(run.parallel, placement="btp_sp"), train=replace(run.train, latent_store="sharded")
    )
    assert resolve_placement(resolved, data_parallel_size=8, device_memory_gib=0.001) == (resolved, None)
    for name in ("vanilla", "vanilla_replicated", "btp"):
        named = replace(run, parallel=replace(run.parallel, placement=name))
        assert resolve_placement(named, data_parallel_size=8) == (named, None)
