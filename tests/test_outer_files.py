"""What lies around the package: shell scripts, the Slurm script with stubs in place of Slurm, the Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lowrank.checkpoint.files import MARKER
from megatron_lowrank.config import preset
from megatron_lowrank.train.folder import checkpoint_folder, record_run

ROOT = Path(__file__).resolve().parent.parent
SBATCH = ROOT / "slurm/pretrain.sbatch"
FOLDERS = ("examples", "tests", "tools", "slurm", "benchmarks", "docs", ".ci")


def is_shell(path: Path) -> bool:
    return path.is_file() and (
        path.suffix in (".sh", ".sbatch") or path.read_bytes()[:32].partition(b"\n")[0].endswith(b"bash")
    )


SHELL = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if is_shell(path))


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_parse(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def header() -> dict[str, str]:
    """Options of the #SBATCH lines; Slurm stops reading them at the first command."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    found = [line.removeprefix("#SBATCH ") for line in lines[:first_command] if line.startswith("#SBATCH")]
    matches = [re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", option) for option in found]
    assert all(matches), found
    return {match[1]: match[2] or "" for match in matches if match}


def test_header_of_the_slurm_script() -> None:
    options = header()
    assert options["ntasks-per-node"] == options["gpus-per-node"], "one task per GPU"
    assert "gpus-per-task" not in options, "it would hide the other GPUs, and LOCAL_RANK picks one"
    assert re.fullmatch(r"USR1@\d+", options["signal"]), "with B: the tasks would not get it"
    assert "requeue" in options and options["open-mode"] == "append"
    assert re.fullmatch(r"(\d+-)?\d\d:\d\d:\d\d", options["time"])


STUBS = {
    # As Slurm does it: one process per task, and the first failing exit code. Its options end at the first word.
    "srun": """
while [[ $1 == --* ]]; do echo "$1" >>"$RECORD/srun"; shift; done
status=0
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@" || status=$?
done
exit $status
""",
    "scontrol": """
case $1 in
    show) printf 'node07\\nnode08\\n' ;;
    requeue) echo "$2" >>"$RECORD/requeued" ;;
esac
""",
    "fake_python": """
env >"$RECORD/environment.$RANK"
printf '%s\\n' "$@" >"$RECORD/arguments.$RANK"
[ -z "${SAVES:-}" ] || echo "$SAVES" >"$CHECKPOINTS/latest_checkpointed_iteration.txt"
exit "${EXITS:-0}"
""",
}
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Runs the script as a job of 4 tasks on 2 nodes, in the run's folder `tmp_path / "run"` of 20 steps."""
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/usr/bin/env bash\n{body}")
        stub.chmod(0o755)
    (tmp_path / "record").mkdir()
    run = replace(preset("debug"), out=str(tmp_path / "run"))

    def run_script(
        *arguments: str, saved: int | None = None, checkpoints: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        elsewhere = None if checkpoints is None else str(checkpoints)
        mine = replace(run, checkpoint=replace(run.checkpoint, folder=elsewhere))
        # The names of both files come from the package, so a change of either is seen here.
        record_run(mine, {"world_size": 4})
        folder = checkpoint_folder(mine)
        folder.mkdir(exist_ok=True)
        if saved is not None:
            (folder / MARKER).write_text(str(saved))
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path),
            "RECORD": str(tmp_path / "record"), "CHECKPOINTS": str(folder), "SLURM_JOB_ID": "1234567",
            "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "6", "SLURM_JOB_NODELIST": "node[07-08]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "OUT": str(tmp_path / "run"), "PYTHON": "fake_python", **variables,
        }  # fmt: skip
        # Slurm runs a copy of the script, elsewhere.
        copy = tmp_path / "slurm_script"
        copy.write_text(SBATCH.read_text())
        command = ["bash", str(copy), *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run_script


def recorded(tmp_path: Path, name: str) -> list[str]:
    path = tmp_path / "record" / name
    return path.read_text().splitlines() if path.exists() else []


def test_environment_and_arguments_of_every_task(submit: Submit, tmp_path: Path) -> None:
    done = submit("--preset", "cola_debug", "--data.path", "0.5", "a b", "0.5", "c", SAVES="20", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        found = dict(line.split("=", 1) for line in recorded(tmp_path, f"environment.{rank}") if "=" in line)
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank % 2), "4")
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node07", str(10000 + 1234567 % 20000))
        assert 1024 < int(found["MASTER_PORT"]) < 32768, "below the ports that the kernel hands out"
        assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
        assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert found["OMP_NUM_THREADS"] == "3", "the user's value wins"
        assert found["PYTHONPATH"].split(":")[0] == found["PWD"] == str(ROOT)
        assert recorded(tmp_path, f"arguments.{rank}") == [
            "-u", "examples/pretrain.py", "--out", str(tmp_path / "run"),
            "--preset", "cola_debug", "--data.path", "0.5", "a b", "0.5", "c",
        ]  # fmt: skip
    options = recorded(tmp_path, "srun")
    assert f"--output={tmp_path / 'run'}/logs/%j-rank%t.out" in options and "--cpus-per-task=6" in options
    assert not [option for option in options if option.startswith("--container")]


def test_container_options(submit: Submit, tmp_path: Path) -> None:
    assert submit(SAVES="20", CONTAINER="image.sqsh", MOUNTS="/data:/data").returncode == 0
    options = recorded(tmp_path, "srun")
    assert options[-3:] == [
        "--container-image=image.sqsh", "--container-mounts=/data:/data", f"--container-workdir={ROOT}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "saved,variables,code,says,requeued",
    [
        (None, {"SAVES": "7"}, 0, "stopped at step 7 of 20; requeued", True),
        (7, {"SAVES": "12"}, 0, "stopped at step 12 of 20; requeued", True),
        (12, {"SAVES": "20"}, 0, "finished: step 20 of 20", False),
        (20, {}, 0, "finished: step 20 of 20", False),
        (None, {}, 0, "no checkpoint since step 0", False),
        (7, {}, 0, "no checkpoint since step 7", False),
        (7, {"SAVES": "12", "EXITS": "3"}, 3, "exit code 3 at step 12 of 20", False),
        (None, {"EXITS": "2"}, 2, "exit code 2 at step 0 of 20", False),
        (7, {"SAVES": "12", "REQUEUE": "0"}, 0, "not requeued (REQUEUE=0)", False),
        (7, {"SAVES": "damaged"}, 0, "no checkpoint since step 7", False),
    ],
)
def test_requeue_decision(
    submit: Submit, tmp_path: Path, saved: int | None, variables: dict[str, str], code: int, says: str, requeued: bool
) -> None:
    done = submit(saved=saved, **variables)
    assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr
    assert recorded(tmp_path, "requeued") == (["1234567"] if requeued else [])


def test_requeue_looks_into_the_folder_of_checkpoints_that_the_run_names(submit: Submit, tmp_path: Path) -> None:
    done = submit(saved=3, checkpoints=tmp_path / "elsewhere", SAVES="5")
    assert "stopped at step 5 of 20; requeued" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments,variables,message",
    [
        (("--out", "x"), {}, "found --out, allowed: the variable OUT"),
        (("--out=x",), {}, "found --out=x, allowed: the variable OUT"),
        ((), {"SLURM_JOB_ID": ""}, "found no SLURM_JOB_ID"),
        ((), {"PROJECT": "/"}, "PROJECT: found no examples/pretrain.py"),
    ],
)
def test_mistakes_end_before_anything_starts(
    submit: Submit, tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = submit(*arguments, **variables)
    assert done.returncode == 2 and message in done.stderr and not recorded(tmp_path, "srun")


INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR"}


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) pairs, continued lines joined as Docker joins them."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines)).splitlines()
    pairs = [line.strip().partition(" ") for line in joined if line.strip()]
    return [(instruction, rest.strip()) for instruction, _, rest in pairs]


def commands() -> list[str]:
    return [rest for instruction, rest in dockerfile() if instruction == "RUN"]


def python_snippets(command: str) -> list[str]:
    return re.findall(r'python -c "([^"]*)"', command)


def test_dockerfile_has_known_instructions_and_shell_that_parses() -> None:
    found = dockerfile()
    assert {instruction for instruction, _ in found} <= INSTRUCTIONS
    from_line = next(i for i, (instruction, _) in enumerate(found) if instruction == "FROM")
    assert {instruction for instruction, _ in found[:from_line]} <= {"ARG"}, "only ARG may precede FROM"
    assert found[from_line][1] == "nvcr.io/nvidia/pytorch:${NGC_TAG}"
    assert all(rest for _, rest in found)
    for command in commands():
        assert subprocess.run(["sh", "-n", "-c", command], capture_output=True).returncode == 0, command
        for code in python_snippets(command):
            compile(code, "<Dockerfile>", "exec")


def test_dockerfile_copies_what_exists() -> None:
    for instruction, rest in dockerfile():
        if instruction == "COPY":
            *sources, _ = rest.split()
            assert sources and all((ROOT / source).exists() for source in sources), rest


def test_dockerfile_never_installs_torch_or_the_other_apex() -> None:
    shell = [re.sub(r'python -c "[^"]*"', "python", command) for command in commands()]
    installs = [part for command in shell for part in re.split(r"&&|\|\||;", command) if "pip install" in part]
    assert len(installs) == 4
    for install in installs:
        names = [re.split(r"[=<>\[]", word.strip("\"'()"))[0].lower() for word in install.split()]
        assert not {"torch", "apex", "torchvision", "triton", "--upgrade", "-u"} & set(names), install
        # Either nothing is pulled along, or the list of the image's packages holds: PIP_CONSTRAINT is lifted only then.
        assert "--no-deps" in names or "PIP_CONSTRAINT=" not in install, install
    assert any('"torch==$(python' in command and "image_packages.txt" in command for command in commands())


def test_dockerfile_lists_the_requirements_that_are_missing(tmp_path: Path) -> None:
    """The snippet that compares our requirements with an image, run on made-up packages."""
    code = next(code for command in commands() for code in python_snippets(command) if "ours" in code)
    installed = {
        "megatron_lowrank": "0.1", "torch": "2.9.0a0+50eac811a6.nv25.09", "PyYAML": "6.0", "some_tool": "0.9"
    }  # fmt: skip
    required = ["torch>=2.6,<2.15", "pyyaml>=6", "some-tool>=1", "absent>=3", "unlisted>=1", 'te; extra == "te"',
                'old; python_version < "3.0"']  # fmt: skip
    for name, version in installed.items():
        metadata = tmp_path / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        lines = [f"Requires-Dist: {text}" for text in required] if name == "megatron_lowrank" else []
        metadata.write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]))
    # Importable, but known to pip under another name or none.
    (tmp_path / "unlisted.py").write_text("")
    only = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    done = subprocess.run([sys.executable, "-c", only + code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == ["some-tool>=1", "absent>=3"], done.stdout + done.stderr


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1)])
def test_ci_fails_if_either_lane_does(first: int, second: int, tmp_path: Path) -> None:
    """Lanes are stand-ins; each is set up before any is tested, and the text of both is shown."""
    versions = ("3.11", "3.12")
    for name in (".ci", "tests", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "tests" / "run.sh").write_text(
        'name=$(basename "$PYTHON")\n'
        '[ "${1:-}" = --setup ] && { echo "setup $name"; exit 0; }\n'
        f'echo "tested $name"; case $name in python3.11) exit {first} ;; *) exit {second} ;; esac\n'
    )
    for version in versions:
        python = tmp_path / "bin" / f"python{version}"
        python.write_text("#!/bin/sh\nexit 0\n")
        python.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == int(first + second > 0), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("ci: lane 3.1") or "FAILED" in line or "passed" in line] == [
        "setup python3.11", "setup python3.12",
        "tested python3.11", f"ci: lane 3.11 {'FAILED' if first else 'passed'}",
        "tested python3.12", f"ci: lane 3.12 {'FAILED' if second else 'passed'}",
    ]  # fmt: skip
