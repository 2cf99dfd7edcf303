"""Training checkpoints as a source: what ranks have trained comes out of them bit for bit, and damage is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from training_steps import small_run, start

from megatron_lowrank import disk
from megatron_lowrank.checkpoint import save_checkpoint
from megatron_lowrank.convert import load_canonical, open_canonical
from megatron_lowrank.convert.cli import main
from megatron_lowrank.model import all_parts
from megatron_lowrank.names import canonical_parameters
from megatron_lowrank.testing.ranks import run_ranks

TOOL = Path(__file__).parent.parent / "tools" / "convert.py"
Saved = tuple[Path, dict[str, torch.Tensor]]


def train_and_save(folder: Path, precision: Literal["fp32", "bf16"], **changes: Any) -> dict[str, torch.Tensor]:
    """Two checkpoints of two tensor-parallel ranks; the full tensors of the second, put together from live parts."""
    run = small_run(tp=2, precision=precision, **changes)

    def ranks() -> dict[str, tuple[int | None, torch.Tensor]]:
        training = start(run)
        for step in (1, 2):
            training.steps(1)
            save_checkpoint(folder, step, run, training.chunks, training.optimizer, None, {"step": step})
        return {
            part.key: (part.axis, part.gradient_block(part.parameter).detach().clone())
            for part in all_parts([chunk.module for chunk in training.chunks])
        }

    blocks = run_ranks(2, ranks)
    full: dict[str, torch.Tensor] = {}
    for parameter in canonical_parameters(run.model, run.lowrank):
        axis = blocks[0][parameter.name][0]
        pieces = [rank[parameter.name][1] for rank in blocks]
        full[parameter.name] = pieces[0] if axis is None else torch.cat(pieces, axis)[: parameter.shape[0]]
    return full


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param) / "checkpoints"
    return folder, train_and_save(folder, request.param)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_trained_model_comes_out_bit_for_bit(saved: Saved, tmp_path: Path) -> None:
    """By way of the canonical folder, and of the public layout and back."""
    checkpoints, live = saved
    assert main(["reshard", str(checkpoints), str(tmp_path / "canonical"), "--to", "canonical"]) == 0
    assert_same(load_canonical(tmp_path / "canonical"), live)
    source = open_canonical(tmp_path / "canonical")
    assert (source.source.kind, source.source.metadata["step"], source.seed) == ("training", 2, 42)
    assert main(["export-hf", str(checkpoints), str(tmp_path / "hf"), "--layout", "reference-cola"]) == 0
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert_same(load_canonical(tmp_path / "back"), live)
    # The folder that came by way of the canonical one is the same.
    assert main(["export-hf", str(tmp_path / "canonical"), str(tmp_path / "hf2")]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "hf2"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_mixed_models_too(tmp_path: Path) -> None:
    """Dense roles and layers, biases and a tied embedding."""
    live = train_and_save(
        tmp_path / "checkpoints", "fp32", model={"attention_bias": True, "tie_embeddings": True},
        lowrank={"dense_layers": (1,), "dense_roles": ("q", "k"), "rank_overrides": {"0.v": 8}},
    )  # fmt: skip
    assert main(["reshard", str(tmp_path / "checkpoints"), str(tmp_path / "a"), "--to", "canonical"]) == 0
    assert_same(load_canonical(tmp_path / "a"), live)


def test_one_checkpoint_or_the_latest(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, _ = saved
    for path, step in ((checkpoints, 2), (checkpoints / "iter_0000001", 1)):
        assert main(["inspect", str(path), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["format"], summary["complete"], summary["source_metadata"]["step"]) == ("training", True, step)
        assert (summary["method"], summary["parameters"]) == ("cola", 72_640)
    assert main(["inspect", str(checkpoints)]) == 0
    assert "training, step 2" in capsys.readouterr().out
    first = checkpoints / "iter_0000001"
    assert main(["reshard", str(first), str(tmp_path / "a"), "--to", "canonical", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"would write {tmp_path / 'a'}: 35 tensors") and not os.listdir(tmp_path)


def test_the_marker_alone_tells_what_the_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / disk.MARKER).write_text("5")
    assert main(["inspect", str(tmp_path / "src")]) == 2
    assert "error[MISSING_FILE]" in (text := capsys.readouterr().err) and "holds no complete checkpoint" in text


class CreatesFile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unsafe_pickle_was_executed",)


def reseal(folder: Path, name: str) -> None:
    """Makes the manifest agree with a changed file, as whoever wrote it would."""
    manifest = disk.read_json(folder / disk.MANIFEST)
    manifest["files"][name] = disk.file_entry(folder / name)
    disk.seal(folder, manifest)


def put(name: str, data: bytes | None = None, sealed: bool = True) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        old = (folder / name).read_bytes()
        (folder / name).write_bytes(old[:-100] + b"x" * 100 if data is None else data)
        if sealed:
            reseal(folder, name)

    return damage


def evil_entry(folder: Path) -> None:
    manifest = disk.read_json(folder / disk.MANIFEST)
    manifest["files"]["../x"] = {"bytes": 0}
    disk.seal(folder, manifest)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str, int]] = {
    "incomplete": (lambda f: (f / "COMPLETE").unlink(), "INCOMPLETE", "has no file COMPLETE", 2),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "INCOMPLETE", "manifest.json", 2),
    "manifest": (put("manifest.json", b"{}", sealed=False), "CHECKSUM", "manifest.json was changed", 3),
    "missing file": (lambda f: (f / "__1_0.distcp").unlink(), "MISSING_FILE", "__1_0.distcp is missing", 2),
    "name with a path": (evil_entry, "UNSAFE_PATH", "names '../x'", 2),
    "config": (put("run_config.json", sealed=False), "CHECKSUM", "run_config.json", 3),
    "no config": (put("run_config.json", b"[1]"), "CORRUPT", "run_config.json", 2),
    "tensors": (put("__1_0.distcp", sealed=False), "CHECKSUM", "__1_0.distcp", 3),
    "tensors of nothing": (put("__1_0.distcp", b"x" * 500), "CORRUPT", "", 2),
    "unsafe pickle": (put(".metadata", pickle.dumps(CreatesFile())), "UNSAFE_PICKLE", "posix.mkdir in", 2),
    "no pickle": (put(".metadata", b"what"), "UNSAFE_PICKLE", ".metadata", 2),
    "end of a pickle": (put(".metadata", b""), "CORRUPT", ".metadata", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage(
    name: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved[0] / "iter_0000002", tmp_path / "iter_0000002")
    damage, code, text, status = DAMAGES[name]
    damage(tmp_path / "iter_0000002")
    assert main(["reshard", "iter_0000002", "dst", "--to", "canonical"]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"convert: error[{code}]: ") and text in error and error.count("\n") == 1, error
    assert os.listdir(tmp_path) == ["iter_0000002"]


def test_the_reader_needs_no_megatron_core(saved: Saved, tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_lowrank.convert.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 'megatron' in sys.modules)"
    )
    arguments = ["reshard", str(saved[0]), str(tmp_path / "a"), "--to", "canonical"]
    environment = os.environ | {"PYTHONPATH": str(TOOL.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
