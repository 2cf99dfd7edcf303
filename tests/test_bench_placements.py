"""The benchmark of the placements runs, says where its numbers come from, and refuses what it cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripts import load_tool


def _main(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_placements.py", *arguments])
    load_tool("bench_placements").main()


def test_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "128", "--layers", "1", "--sequence", "8", "--micro-batches", "1", "--rounds", "1"]
    _main([*small, "--json", str(tmp_path / "a.json")], monkeypatch)
    result = json.loads((tmp_path / "a.json").read_text())
    assert {"date", "command", "python", "torch", "megatron_core", "megatron_lowrank"} < set(result)
    rows = {row["candidate"]: row for row in result["rows"]}
    out = capsys.readouterr().out
    assert len(rows) == 7 and all(f"\n{name} " in out for name in rows)
    sent = {name: row["wire_bytes_per_layer_and_micro_batch"] for name, row in rows.items()}
    summed = {name: row["gradient_sum_bytes_per_layer_and_step"] for name, row in rows.items()}
    n, h, r, f, byte = 8, 128, 32, 344, 4
    assert sent["dense"] == 10 * h * n * byte // 2
    assert sent["vanilla"] == sent["vanilla_replicated"] == (16 * h + 6 * f) * n * byte // 2
    assert sent["btp"] == sent["btp, grouping off"] == (28 * r + 2 * 2) * n * byte // 2
    assert sent["btp_sp"] == sent["btp_sp, recompute latent"] == 14 * r * n * byte // 2
    assert summed["btp"] == summed["vanilla_replicated"] == 0 and summed["vanilla"] == 2 * h * byte
    assert summed["btp_sp"] == (7 * h * r + 2 * h) * byte
    assert (
        rows["btp_sp"]["over_btp_sp"] == 1 and rows["btp, grouping off"]["collectives_per_layer_and_micro_batch"] == 14
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "3"], "--ranks 3: parallel.tensor_parallel_size: found 3, which does not divide "),
        (["--micro-batches", "0"], "--micro-batches: found 0, allowed: a positive integer"),
        (["--preset", "dense_60m"], "--preset: found dense_60m, which is dense already, "),
        (["--json", "."], "--json: cannot write '.' (Is a directory)"),
        (["--thread", "3"], "unrecognized arguments: --thread 3"),
    ],
)
def test_refuses_before_it_measures(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _main(arguments, monkeypatch)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.startswith(f"bench_placements: error: {text}")
    assert err.count("\n") == 1
