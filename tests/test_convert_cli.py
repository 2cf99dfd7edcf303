"""The converter's command line: help, plans, reports, and a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from megatron_lowrank.convert import ConvertError
from megatron_lowrank.convert.cli import main
from megatron_lowrank.convert.report import ProgressReport

FIXTURES = Path(__file__).parent / "fixtures"
TOOL = Path(__file__).parent.parent / "tools" / "convert.py"


def test_the_tool_as_a_process(tmp_path: Path) -> None:
    """It also says which modules it loaded: neither megatron-core nor transformers."""
    program = (
        "import runpy, sys\ntry:\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "finally:\n    print([name for name in ('megatron', 'transformers') if name in sys.modules])\n"
    )
    arguments = ["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / "a")]
    # `argv` of the tool begins with its own path, as if it had been started directly.
    command = [sys.executable, "-c", program.replace("sys.argv[1]", repr(str(TOOL))), *arguments]
    environment = os.environ | {"PYTHONPATH": str(TOOL.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {tmp_path / 'a'}: 51 tensors, 303872 bytes, float32, 1 shard(s)\n[]\n"


def test_an_existing_destination_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"convert: error[EXISTS]: {tmp_path} exists; --overwrite replaces it\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["unknown"], ["import-hf", "a"], ["inspect"], ["import-hf", "a", "b", "--dtype", "int8"],
     ["reshard", "a", "b"], ["reshard", "a", "b", "--to", "training"],
     ["export-hf", "a", "b", "--max-shard-size", "5 apples"], ["export-hf", "a", "b", "--max-shard-size", "0"]],
)  # fmt: skip
def test_usage_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("convert: error[USAGE]: ") and err.count("\n") == 1


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["import-hf", str(FIXTURES / "colam_tiny"), str(tmp_path / "a"), "--dry-run", "--dtype", "bf16"]
    assert main([*arguments, "--max-shard-size", "60kB"]) == 0
    assert capsys.readouterr().out == f"would write {tmp_path / 'a'}: 51 tensors, 151936 bytes, bfloat16, 3 shard(s)\n"
    assert os.listdir(tmp_path) == []


def test_the_asked_architecture_must_be_the_found_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-hf", str(FIXTURES / "colam_tiny"), str(tmp_path / "a"), "--arch", "cola"]) == 2
    assert "found a cola_m folder, import-hf takes: cola " in capsys.readouterr().err
    assert main(["import-hf", str(FIXTURES / "colam_tiny"), str(tmp_path / "a"), "--arch", "cola_m"]) == 0
    assert main(["import-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "found a canonical folder, import-hf takes: cola, cola_m " in capsys.readouterr().err
    assert main(["export-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / "b")]) == 2
    assert "found a cola folder, export-hf takes: canonical, training " in capsys.readouterr().err
    (tmp_path / "run" / "iter_0000001").mkdir(parents=True)
    assert main(["import-hf", str(tmp_path / "run"), str(tmp_path / "b")]) == 2
    assert "found a training checkpoint, import-hf takes: cola, cola_m " in capsys.readouterr().err
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "canonical"]) == 2
    assert "found a canonical folder, reshard takes: training " in capsys.readouterr().err


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["format"] == "canonical" and summary["complete"] is True and summary["exact"] is True
    assert (summary["method"], summary["mlp_activation"], summary["dtype"]) == ("cola", "drop", "float32")
    assert summary["ranks"] == dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), [16])
    assert summary["parameters"] == 75_968 == sum(summary["parameters_by_kind"].values())
    assert main(["inspect", str(FIXTURES / "colam_tiny")]) == 0
    text = capsys.readouterr().out
    assert "cola_m" in text and "no marker in this format" in text and "75,968" in text
    (tmp_path / "a" / "COMPLETE").unlink()
    assert main(["inspect", str(tmp_path / "a"), "--json"]) == 0
    unfinished = json.loads(capsys.readouterr().out)
    assert unfinished["complete"] is False and unfinished["parameters"] == 75_968


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr("megatron_lowrank.convert.report.time.monotonic", lambda: float(next(now)))
    plain, bar, silent = io.StringIO(), Terminal(), Terminal()
    for out in (plain, bar, silent):
        mode: Literal["auto", "none"] = "none" if out is silent else "auto"
        report = ProgressReport(mode, 4, 4_000_000, out)
        for number in range(4):
            report(f"tensor{number}", 1_000_000)
        report.close()
    lines = plain.getvalue().splitlines()
    assert lines[0].startswith(" 50% 2/4 tensors, 2.0/4.0 MB, 0 MB/s, 6 s left, tensor1") and len(lines) == 2
    assert "\x1b" not in plain.getvalue() and "\r" not in plain.getvalue()
    assert bar.getvalue().count("\r") == 5 and bar.getvalue().endswith("\r\x1b[K")
    assert silent.getvalue() == ""


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="MISSING_FILE"):
        main(["inspect", str(tmp_path / "none"), "--debug"])
