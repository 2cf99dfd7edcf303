"""What a run says about itself: peaks of devices, the slots of every stage, warnings of every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lowrank.config import preset
from megatron_lowrank.testing.ranks import run_ranks
from megatron_lowrank.train import throughput
from megatron_lowrank.train.notices import report_warnings


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA H100 of a kind to come", None),
        ("NVIDIA H100", None), ("NVIDIA GeForce RTX 4090 D", None), ("", None),
    ],
)  # fmt: skip
def test_a_peak_is_known_by_the_whole_name_and_in_bf16(device: str, bf16: float | None) -> None:
    assert throughput.known_peak(device, "bf16") == bf16
    assert throughput.known_peak(device, "fp32") is None


def test_mfu_in_fp32_needs_a_peak_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    run = preset("cola_debug")
    assert run.train.precision == "fp32" and throughput.Throughput(run, 1).rates(8, 1.0).mfu is None
    told = throughput.Throughput(replace(run, log=replace(run.log, peak_tflops=50.0)), 1).rates(8, 1.0)
    assert told.mfu == pytest.approx(told.tflops_actual / 50)
    bf16 = throughput.Throughput(replace(run, train=replace(run.train, precision="bf16")), 1).rates(8, 1.0)
    assert bf16.mfu == pytest.approx(bf16.tflops_actual / 989.4)


def test_the_slots_of_every_stage_and_chunk_are_described() -> None:
    """A dense layer on the second stage, in the second chunk, is shown; equal layers share their lines."""

    def described() -> str:
        from megatron_lowrank.model import build_model
        from megatron_lowrank.train.launch import start_model_parallel
        from megatron_lowrank.train.summary import _all_slots

        run = preset("cola_debug")
        run = replace(
            run,
            model=replace(run.model, num_layers=4),
            lowrank=replace(run.lowrank, dense_layers=(3,)),
            parallel=replace(run.parallel, pipeline_parallel_size=2, virtual_pipeline_size=2),
        )
        start_model_parallel(run)
        return _all_slots(build_model(run))

    first, second = run_ranks(2, described)
    assert first == second
    lines = [line for line in first.splitlines() if line.startswith("layers ")]
    assert lines == ["layers 0, 1, 2:", "layers 3:"]
    low_rank, dense = first.split("layers 3:")
    assert "ranks q 16, k 16, v 16" in low_rank and "ranks" not in dense and "q,k,v: dense" in dense


class Store:
    """The part of the rendezvous store that settles who speaks."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


@pytest.fixture
def restored() -> Iterator[None]:
    """Leaves Python's way to show warnings as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_every_warning_is_shown_once_over_all_ranks(restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    here = Path(__file__).name
    for rank in (0, 1, 2):
        report_warnings(rank, store)
        warnings.warn("the same on every rank", stacklevel=1)
        warnings.warn("whatever its category", RuntimeWarning, stacklevel=1)
        if rank:
            warnings.warn("of other ranks\nonly", FutureWarning, stacklevel=1)
            warnings.warn(f"of {rank}", stacklevel=1)
    said = [line.rpartition(f" ({here}:")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "warning: the same on every rank",
        "warning: RuntimeWarning: whatever its category",
        "warning (rank 1): FutureWarning: of other ranks only",
        "warning (rank 1): of 1",
        "warning (rank 2): of 2",
    ]


def test_a_warning_is_shown_when_no_rank_can_be_asked(restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    report_warnings(3, None)
    warnings.warn("lost", stacklevel=1)
    assert capsys.readouterr().err.startswith("warning (rank 3): lost (")
