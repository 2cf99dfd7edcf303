"""The first command of the README, shortened to ten steps, in the Python that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def quickstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with this interpreter as the active Python, which has torch already."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["bash", str(ROOT / "examples" / "quickstart.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.timeout(1500)
def test_both_methods_from_text_to_sample(tmp_path: Path) -> None:
    out = tmp_path / "my results"
    for flag, method in (((), "cola"), (("--dense",), "dense")):
        done = quickstart("--out", str(out), "--steps", "10", *flag)
        assert done.returncode == 0, done.stdout + done.stderr
        run = out / method
        for name in ("loss.png", "metrics.jsonl", "tensorboard", "run_config.json", "sample.txt"):
            assert (run / name).exists(), name
        assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
        assert "resuming from" in done.stdout and "at step 9" in done.stdout
        assert "unigram entropy of the whole text" in done.stdout
        assert "Warning" not in done.stderr and "Warning" not in done.stdout, done.stderr
    assert "cola" in done.stdout and "dense" in done.stdout, "the table compares both runs"
    again = quickstart("--out", str(out), "--steps", "10")
    assert again.returncode == 0 and "is trained already" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--txt", "x"), "unknown argument --txt; allowed: --dense"),
        (("--text", "/nonexistent"), "--text /nonexistent does not exist"),
        (("--out",), "--out needs a value"),
        (("--out", "/proc/nope"), "--out /proc/nope cannot be created"),
        (("--steps", "1"), "--steps: found '1'"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = quickstart(*arguments)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
