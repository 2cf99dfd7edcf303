"""The README's commands: every one is understood, and those that fit a test are run in the README's order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT, environment

from megatron_lowrank.config.cli import parse_run

README = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """Words of every command in the README's shell blocks, comments left out."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_run_parses() -> None:
    runs = [words for words in commands() if "examples/pretrain.py" in words]
    assert len(runs) == 4
    for words in runs:
        arguments = [word for word in words[words.index("examples/pretrain.py") + 1 :] if word != "..."]
        parse_run(arguments)


def test_every_named_file_is_there() -> None:
    named = {word for words in commands() for word in words if re.fullmatch(r"(examples|tools|tests|slurm)/\S+", word)}
    assert {"examples/quickstart.sh", "tools/convert.py", "tools/plan.py"} <= named
    named |= set(re.findall(r"\]\((docs/\w+\.md)\)", README)) | {"slurm/pretrain.sbatch", "tests/run.sh", "Dockerfile"}
    assert not [path for path in named if not (ROOT / path).exists()]


SMALLER = {"--workers 8": "--workers 2", "--train-bpe 32000": "--train-bpe 400", "runs/mine": "runs/tiny"}
"""What a test changes of the README's commands: sizes, and the run that is sampled and converted."""
TOO_LARGE = ("cola_60m", "cola_1b_tp", "bench_step", "bench_placements", "quickstart")
"""A test of its own runs the quickstart; the benchmark's command stands in its files."""


@pytest.mark.timeout(900)
def test_the_commands_run_in_the_order_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "my_texts").mkdir()
    text = "".join(f"Sentence {number} says a little more than sentence {number - 1} did.\n" for number in range(600))
    for path in ("my_texts/a.txt", "my_text.txt"):
        (tmp_path / path).write_text(text)
    (tmp_path / "more.jsonl.zst").write_bytes(_compressed(b'{"text": "one more line"}\n' * 50))
    ran = []
    for words in commands():
        line = shlex.join(words)
        if words[0] != "python" or any(name in line for name in TOO_LARGE):
            continue
        for old, new in SMALLER.items():
            line = line.replace(old, new)
        arguments = [
            str(ROOT / word) if word.startswith(("tools/", "examples/")) else word for word in shlex.split(line)
        ]
        if (
            "..." in arguments
        ):  # the run that starts from imported weights: same model and data, its own folder, two steps
            arguments.remove("...")
            arguments += ["--data.path", "data/tiny", "--data.split", "90,10,0", "--out", "runs/again"]
            arguments += ["--train.steps", "2"]
        done = subprocess.run([sys.executable, *arguments[1:]], cwd=tmp_path, env=environment(), capture_output=True,
                              text=True, timeout=200, check=False)  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        ran.append(Path(arguments[1]).name)
        if "load_weights_only" in line:
            assert "starting from the weights of canonical" in done.stdout
    assert ran == [
        "prepare_data.py", "prepare_data.py", "prepare_data.py", "pretrain.py", "generate.py", "convert.py",
        "convert.py", "pretrain.py", "convert.py", "plan.py", "plan.py", "summarize.py",
    ]  # fmt: skip


def _compressed(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(content)
