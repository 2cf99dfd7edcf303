"""The scripts as processes: mistakes end in one line and code 2, a lost rank ends the others, SIGTERM saves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, environment, token_files

SMALL = [
    "--preset", "cola_debug", "--train.sequence_length", "32", "--train.steps", "4", "--train.eval_rows", "0",
    "--log.progress", "plain", "--data.split", "100,0,0",
]  # fmt: skip
ENDLESS = ["--train.steps", "100000"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of token files over a small text."""
    texts = (f"line {number} of a small text, " * 20 for number in range(20))
    return token_files(tmp_path_factory.mktemp("text"), texts)


def start(ranks: list[list[str]], script: str = "examples/pretrain.py") -> list[subprocess.Popen[str]]:
    """Starts a rank per list of arguments, as srun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, script, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment() if len(ranks) == 1 else environment(
                RANK=str(rank), WORLD_SIZE=str(len(ranks)), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(len(ranks)),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            ),
        )
        for rank, arguments in enumerate(ranks)
    ]  # fmt: skip


def ends(processes: list[subprocess.Popen[str]], timeout: float = 90) -> tuple[list[int], str]:
    """Exit codes, and the error lines of all ranks; a traceback anywhere is a failure."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any("Traceback" in err for _, err in outputs), outputs
    lines = [line for _, err in outputs for line in err.splitlines() if ": error: " in line]
    return [process.returncode for process in processes], "\n".join(lines)


def wait_for(process: subprocess.Popen[str], part: str, timeout: float = 90) -> None:
    """Reads a process's output until a line holds `part`."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    for line in process.stdout:
        if part in line:
            return
        assert time.monotonic() < deadline, f"no line with {part!r}"
    raise AssertionError(f"the process ended without a line with {part!r}: {process.communicate()}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bogus", "1"], "unknown field --bogus"),
        (["--parallel.tensor_parallel_size", "2"], "world size: found 1 ranks, allowed: a multiple of"),
        (["--data.path", "/nowhere/text"], "/nowhere/text.bin: no such file"),
        (["--checkpoint.load", "/nowhere"], "/nowhere is not a folder"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
        (["--data.cache_path", "/etc/passwd/x"], "data.cache_path: "),
        (["--checkpoint.folder", "/etc/passwd/x"], "checkpoint.folder: cannot write into /etc/passwd/x"),
        (["--model.transformer_impl", "transformer_engine"], "model.transformer_impl: found 'transformer_engine', but"),
        (["--train.exit_trigger", "/etc"], "train.exit_trigger: /etc is a folder"),
        (["--train.device", "cuda"], "train.device: found 'cuda', but no GPU is visible"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistake_is_one_line(text: str, tmp_path: Path, arguments: list[str], line: str) -> None:
    codes, said = ends(start([[*SMALL, "--data.path", text, "--out", str(tmp_path / "run"), *arguments]]))
    assert codes == [2]
    assert said.startswith("pretrain: error: ") and line in said and said.count("\n") == 0


def test_mistake_of_all_ranks_is_one_line(text: str, tmp_path: Path) -> None:
    arguments = [*SMALL, "--data.path", text, "--out", str(tmp_path), "--parallel.tensor_parallel_size", "4"]
    codes, said = ends(start([arguments, arguments]))
    assert codes == [2, 2]
    assert said.startswith("pretrain: error: world size: found 2 ranks") and said.count("\n") == 0


def test_placement_auto_is_chosen_said_and_recorded(text: str, tmp_path: Path) -> None:
    """Two ranks: too little memory is one mistake of all; else one rank says why, and the run is that of the row."""
    out = tmp_path / "run"
    arguments = [*SMALL, "--data.path", text, "--out", str(out), "--parallel.tensor_parallel_size", "2",
                 "--parallel.placement", "auto", "--train.recompute", "latent"]  # fmt: skip
    codes, said = ends(start([[*arguments, "--parallel.device_memory_gib", "0.0001"]] * 2))
    assert codes == [2, 2] and said.count("error") == 1
    assert said.startswith("pretrain: error: parallel.placement: found 'auto', but no placement can run (")
    processes = start([arguments] * 2)
    (first, _), (second, _) = (process.communicate(timeout=90) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert "placement btp_sp: " in first and "of communication per step" in first and "placement" not in second
    recorded = json.loads((out / "run_config.json").read_text())["config"]
    assert recorded["parallel"]["placement"] == "btp_sp" and recorded["train"]["recompute"] == "latent"


@pytest.mark.parametrize("change", [["--bogus", "1"], ["--data.path", "/nowhere/text"]], ids=lambda value: value[0])
def test_mistake_of_one_rank_ends_all(text: str, tmp_path: Path, change: list[str]) -> None:
    arguments = [*SMALL, "--data.path", text, "--out", str(tmp_path / "run")]
    codes, said = ends(start([arguments, [*arguments, *change]]))
    assert codes == [2, 2]
    assert said.startswith("pretrain: error: rank 1 of 2: ") and said.count("\n") == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [("ValueError('bad')", 2, "bad"), ("KeyError('x')", 1, "KeyError: 'x'"), ("OSError('gone')", 2, "gone")],
)
def test_a_bug_of_one_rank_is_no_mistake_of_the_user(tmp_path: Path, error: str, code: int, line: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "from megatron_lowrank.config import RunConfig\n"
        "from megatron_lowrank.train.failure import run_program\n"
        "from megatron_lowrank.train.launch import launched\n"
        "def read():\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        raise {error}\n"
        "    return RunConfig()\n"
        "def main(arguments):\n"
        "    with launched(read):\n"
        "        pass\n"
        "run_program('program', main, [])\n"
    )
    codes, said = ends(start([[], []], str(script)))
    assert codes == [code, code] and said == f"program: error: rank 1 of 2: {line}"


def test_missing_environment_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "examples/pretrain.py"], cwd=ROOT, env=environment(WORLD_SIZE="4", RANK="7"),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == "pretrain: error: RANK: found 7, allowed: 0 to WORLD_SIZE - 1 = 3\n"


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(text: str, tmp_path: Path) -> None:
    victim, pipeline = 1, ["--parallel.pipeline_parallel_size", "2"]
    arguments = [*SMALL, *ENDLESS, "--data.path", text, "--out", str(tmp_path / "run"), *pipeline]
    processes = start([arguments, arguments])
    wait_for(processes[0], "iteration        2/")
    processes[victim].send_signal(signal.SIGKILL)
    started = time.monotonic()
    codes, said = ends(processes, 60)
    assert time.monotonic() - started < 60
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    assert f"pretrain: error: rank {1 - victim} lost another rank" in said and said.count("\n") == 0


@pytest.mark.slow
def test_a_killed_rank_ends_torchrun(text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*SMALL, *ENDLESS, "--data.path", text, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, "examples/pretrain.py", *arguments], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(process, "iteration        2/")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(child) for child in children if b"pretrain.py" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert err.count("pretrain: error: ") <= 1  # torchrun may end the other rank before it has noticed
    deadline = time.monotonic() + 30
    while any(runs(rank) for rank in ranks):
        assert time.monotonic() < deadline, "a rank still runs"
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie that only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_sigterm_saves_and_the_command_resumes_and_samples(text: str, tmp_path: Path) -> None:
    arguments: list[Any] = [*SMALL, "--data.path", text, "--out", str(tmp_path / "run")]
    (process,) = start([[*arguments, *ENDLESS]])
    wait_for(process, "iteration        2/")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "saved " in out and ": signal SIGTERM" in out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[-1])["step"]
    (process,) = start([[*arguments, "--train.steps", str(step + 1)]])
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert f"at step {step}, {4 * step} rows consumed" in out and f"iteration {step + 1:8d}/" in out
    checkpoints = str(tmp_path / "run" / "checkpoints")
    (process,) = start([[checkpoints, "--prompt", "line ", "--tokens", "5"]], "tools/generate.py")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0 and out.startswith("line "), err


def descendants(process: subprocess.Popen[str]) -> list[int]:
    """A process and the helpers that it has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [process.pid, *map(int, children)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGHUP, 0)], ids=str
)
def test_no_process_outlives_a_run_that_has_saved(text: str, tmp_path: Path, number: signal.Signals, code: int) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    arguments = [*SMALL, *ENDLESS, "--data.path", text, "--out", str(tmp_path / "run")]
    (process,) = start([[*arguments, "--checkpoint.save_interval", "2"]])
    signal.signal(signal.SIGINT, previous)
    wait_for(process, "saved ")
    helpers = descendants(process)
    assert len(helpers) > 1
    (second,) = start([arguments])
    assert "out: another run is at work in" in ends([second])[1] and second.returncode == 2
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert number == signal.SIGKILL or f"signal {number.name}" in out
    deadline = time.monotonic() + 30
    while any(runs(helper) for helper in helpers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(runs(helper) for helper in helpers)
