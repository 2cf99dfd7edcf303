"""The benchmark of the placements runs, and says where its numbers come from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripts import load_tool


def test_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "128", "--layers", "1", "--sequence", "8", "--micro-batches", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_placements.py", *small, "--json", str(tmp_path / "a.json")])
    load_tool("bench_placements").main()
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
