"""tools/generate.py before torch is imported: what it samples from, and mistakes in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load_tool

from megatron_lowrank import disk
from megatron_lowrank.checkpoint.files import prepare, publish
from megatron_lowrank.convert.description import DESCRIPTION

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def command() -> Any:
    return load_tool("generate")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with an empty checkpoint, which is all that the search looks at."""
    prepare(tmp_path / "run" / "checkpoints", 7)
    publish(tmp_path / "run" / "checkpoints", 7, {"files": {}})
    return tmp_path / "run"


def test_a_run_its_checkpoints_and_one_of_them(command: Any, run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_0000007"
    for path in (run, run / "checkpoints", checkpoint):
        assert command.find_checkpoint(path) == checkpoint


def test_other_folders_say_what_is_expected(command: Any, tmp_path: Path) -> None:
    disk.seal(tmp_path, {"format": "other", "files": {}})
    (tmp_path / "canonical").mkdir()
    (tmp_path / "canonical" / DESCRIPTION).write_text("{}")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for path, message in (
        (tmp_path, "is a folder of the format other"), (tmp_path / "canonical", "is a canonical folder"),
        (tmp_path / "empty", "no complete checkpoint"),
        (tmp_path / "none", "is not there"), (tmp_path / disk.MANIFEST, "is not a folder"),
    ):  # fmt: skip
        with pytest.raises((OSError, ValueError), match=f"{message}.*; expected a training checkpoint"):
            command.find_checkpoint(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "-3"], "--tokens: found '-3', allowed: a whole number, 0 or more"),
        (["--top-k", "0"], "--top-k: found '0', allowed: a whole number, 1 or more"),
        (["--temperature", "nan"], "--temperature: found 'nan', allowed: a number, 0 or more"),
        (["--seed", "x"], "--seed: found 'x'"),
    ],
)
def test_bad_numbers(
    command: Any, run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.parse([str(run), *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("generate: error: ") and message in line


def test_a_missing_path_is_refused_before_torch_is_imported() -> None:
    # With -X importtime each import is a line on stderr.
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "tools/generate.py", "nowhere"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("generate: error: nowhere is not there; expected a training")
    assert "| torch\n" not in done.stderr
