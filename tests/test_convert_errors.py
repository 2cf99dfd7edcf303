"""Every bad input: its code, its exit status, one line, the destination untouched, no temporary folder left."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lowrank.convert.atomic import read_manifest, write_manifest
from megatron_lowrank.convert.cli import main
from megatron_lowrank.convert.shards import WrittenShards

FIXTURES = Path(__file__).parent / "fixtures"
SHARD = "model-00001-of-00001.safetensors"


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(name: str, size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size((folder / name).stat().st_size))


def set_entry(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.__setitem__(name, value))


def set_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return edit


def make_index(entry: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        weight_map = dict.fromkeys(load_file(folder / "shard.safetensors"), "shard.safetensors")
        weight_map["lm_head.weight"] = entry
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return edit


def duplicate(folder: Path) -> None:
    make_index("other.safetensors")(folder)
    shutil.copyfile(folder / "shard.safetensors", folder / "other.safetensors")


class CreatesFile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unsafe_pickle_was_executed",)


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(CreatesFile()))
    (folder / "modeling_cola.py").write_text("import os; os.mkdir('unsafe_pickle_was_executed')")


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **fields)


NORM = "model.layers.1.input_layernorm.weight"
Q_A = "model.layers.0.self_attn.q_proj.cola_a"
BAD_SOURCES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "missing key": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), "MISSING_KEY", NORM),
    "extra key": (set_entry("model.other.weight", torch.ones(2)), "EXTRA_KEY", "model.other.weight"),
    "bias without its switch": (set_entry("model.layers.0.mlp.up_proj.bias", torch.ones(176)), "EXTRA_KEY",
                                "up_proj.bias"),
    "switch without its bias": (config(mlp_bias=True), "MISSING_KEY", "9 missing: model.layers.0.mlp.down_proj.bias"),
    "wrong shape": (set_entry(NORM, torch.ones(63)), "SHAPE", r"found \[63\], expected \[64\]"),
    "wrong ffn width": (config(intermediate_size=172), "SHAPE", "gate_proj.cola_b"),
    "rank mismatch": (set_entry(Q_A, torch.ones(64, 12)), "RANK",
                      "factor A of q in layer 0 has rank 12, the config gives 16 and factor B has 16"),
    "rank of the config": (config(rank=8), "RANK", "has rank 16, the config gives 8"),
    "rank too large": (config(rank=65), "RANK", "found 65"),
    "integer weights": (set_entry(NORM, torch.ones(64, dtype=torch.int32)), "CORRUPT", "int32"),
    "cut in the length": (cut("model.safetensors", lambda size: 5), "CORRUPT", "holds 5 bytes"),
    "cut in the header": (cut("model.safetensors", lambda size: 200), "CORRUPT", "holds 200 bytes"),
    "cut in the data": (cut("model.safetensors", lambda size: size - 3), "CORRUPT", "its tensors need 309088"),
    "bytes behind the data": (cut("model.safetensors", lambda size: size + 4), "CORRUPT", "holds 309092 bytes"),
    "header no JSON": (set_header(lambda h: h.update({"x": float("nan")})), "CORRUPT", "tensor x"),
    "unknown dtype": (set_header(lambda h: h[NORM].update(dtype="Q7")), "CORRUPT", "unknown dtype 'Q7'"),
    "overlapping tensors": (set_header(lambda h: h[NORM].update(data_offsets=[0, 256])), "CORRUPT", "gap or overlap"),
    "negative size": (set_header(lambda h: h[NORM].update(shape=[-64])), "CORRUPT", NORM),
    "NaN": (lambda f: edit_tensors(f, lambda t: t[NORM].__setitem__(7, float("nan"))), "NONFINITE", r"1 NaN.*\(7,\)"),
    "infinity": (lambda f: edit_tensors(f, lambda t: t[Q_A].__setitem__((3, 2), float("inf"))), "NONFINITE",
                 r"\(2, 3\)"),
    "unknown model type": (config(model_type="bert"), "UNKNOWN_ARCH", "bert"),
    "dense model": (lambda f: save_file({"layers.0.q_proj.weight": torch.ones(2)}, f / "model.safetensors"),
                    "UNKNOWN_ARCH", "dense projections"),
    "no model": (lambda f: (f / "config.json").unlink(), "UNKNOWN_ARCH", "nor config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "MISSING_FILE", "model.safetensors"),
    "parent in the index": (make_index("../x.safetensors"), "UNSAFE_PATH", "../x"),
    "absolute index": (make_index("/etc/x.safetensors"), "UNSAFE_PATH", "/etc/x"),
    "folder in the index": (make_index("a/b.safetensors"), "UNSAFE_PATH", "a/b"),
    "other file in the index": (make_index("config.json"), "UNSAFE_PATH", "config.json"),
    "missing shard": (make_index("gone.safetensors"), "MISSING_FILE", "gone.safetensors"),
    "pickle in the index": (make_index("x.bin"), "UNSAFE_PICKLE", "x.bin"),
    "only a pickle": (only_a_pickle, "UNSAFE_PICKLE", "pytorch_model.bin"),
    "tensor in two shards": (duplicate, "DUPLICATE", "is in .*other.safetensors and .*shard.safetensors"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "CORRUPT", "config.json"),
    "too many layers": (config(num_hidden_layers=10_001), "CONFIG", "num_layers: found 10001"),
    "negative width": (config(hidden_size=-64), "CONFIG", "hidden_size"),
    "text for a number": (config(vocab_size="128"), "CONFIG", "vocab_size: found '128'"),
    "true for a number": (config(num_hidden_layers=True), "CONFIG", "num_hidden_layers"),
    "missing field": (lambda f: (f / "config.json").write_text('{"rank": 16}'), "CONFIG", "num_hidden_layers"),
    "GQA": (config(num_key_value_heads=2), "CONFIG", "num_key_value_heads"),
    "scaled rotary": (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "CONFIG", "llama3"),
    "unknown activation": (config(hidden_act="softmax"), "CONFIG", "hidden_act"),
    "other activation twice": (config(hidden_act="gelu", only_lr_act=False), "CONFIG", "only_lr_act"),
}  # fmt: skip


def run_and_check(arguments: list[str], code: str, text: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"convert: error[{code}]: ") and re.search(text, err), err


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_hugging_face_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / "cola_tiny" / file, src / file)
    dst.mkdir()
    for file in ("config.json", "kept.safetensors"):
        (dst / file).touch()
    damage, code, text = BAD_SOURCES[name]
    damage(src)
    run_and_check(["import-hf", str(src), str(dst), "--overwrite"], code, text, 2, capsys)
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
    assert sorted(os.listdir(dst)) == ["config.json", "kept.safetensors"]
    assert not list(tmp_path.rglob("unsafe_pickle_was_executed"))


def flip(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-20] ^= 1
        (folder / name).write_bytes(data)

    return edit


def rewrite_description(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the description and make the manifest agree, as a wrong writer would."""

    def edit(folder: Path) -> None:
        manifest = read_manifest(folder)
        values = json.loads((folder / "lowrank_config.json").read_text())
        change(values)
        (folder / "lowrank_config.json").write_text(json.dumps(values))
        small = ["lowrank_config.json", "model.safetensors.index.json"]
        files = {name: entry for name, entry in manifest["files"].items() if name not in small}
        write_manifest(folder, WrittenShards(files=files, tensors=manifest["tensors"]), small)

    return edit


def same_size(folder: Path) -> None:
    path = folder / "lowrank_config.json"
    path.write_text(path.read_text().replace('"seed": null', '"seed": 1234'))


BAD_CANONICAL: dict[str, tuple[Callable[[Path], Any], str, str, int]] = {
    "incomplete": (lambda f: (f / "COMPLETE").unlink(), "INCOMPLETE", "COMPLETE", 2),
    "other manifest": (flip("manifest.json"), "CHECKSUM", "manifest.json", 3),
    "other description": (same_size, "CHECKSUM", "lowrank_config", 3),
    "flipped bit": (flip(SHARD), "CHECKSUM", "output_layer.weight", 3),
    "cut": (cut(SHARD, lambda size: size - 1), "CORRUPT", SHARD, 2),
    "missing shard": (lambda f: (f / SHARD).unlink(), "MISSING_FILE", SHARD, 2),
    "other version": (rewrite_description(lambda v: v.update(format_version=9)), "UNKNOWN_ARCH", "version 9", 2),
    "other kind": (rewrite_description(lambda v: v.update(kind="training")), "UNKNOWN_ARCH", "kind 'training'", 2),
    "other ranks": (rewrite_description(lambda v: v["lowrank"].update(rank=8)), "RANK", "ranks", 2),
    "other width": (rewrite_description(lambda v: v["model"].update(ffn_hidden_size=172)), "SHAPE", "linear_fc1", 2),
    "more layers": (rewrite_description(lambda v: v["model"].update(num_layers=10**6)), "CONFIG", "num_layers", 2),
    "unknown field": (rewrite_description(lambda v: v["model"].update(experts=8)), "CONFIG", "model.experts", 2),
    "missing field": (rewrite_description(lambda v: v["model"].pop("norm_epsilon")), "CONFIG", "norm_epsilon", 2),
    "no number": (rewrite_description(lambda v: v["model"].update(num_layers=2.5)), "CONFIG", "num_layers", 2),
    "layer outside": (rewrite_description(lambda v: v["lowrank"].update(dense_layers=[3])), "CONFIG", "layer 3", 2),
    "unknown method": (rewrite_description(lambda v: v["lowrank"].update(method="x")), "CONFIG", "lowrank.method", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CANONICAL)
def test_bad_canonical_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = tmp_path / "src"
    assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(src)]) == 0
    capsys.readouterr()
    damage, code, text, status = BAD_CANONICAL[name]
    damage(src)
    run_and_check(["export-hf", str(src), str(tmp_path / "dst")], code, text, status, capsys)
    assert os.listdir(tmp_path) == ["src"]


def test_overflow_of_a_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FIXTURES / "cola_tiny", tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: tensors[NORM].__setitem__(0, 1e5))
    arguments = ["import-hf", str(tmp_path / "src"), str(tmp_path / "dst"), "--dtype", "fp16"]
    run_and_check(arguments, "OVERFLOW", "1e[+]05 overflows torch.float16", 2, capsys)
    assert os.listdir(tmp_path) == ["src"]


def test_nonfinite_weights_pass_when_asked(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "cola_tiny", tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: tensors[NORM].__setitem__(0, float("nan")))
    assert main(["import-hf", str(tmp_path / "src"), str(tmp_path / "dst"), "--allow-nonfinite"]) == 0


@pytest.mark.parametrize(
    "names", [("precious.txt",), ("config.json", "notes"), ("COMPLETE", "manifest.json", "__0_0.distcp")]
)
def test_overwrite_spares_what_is_no_model(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    for name in names:
        (dst / name).touch()
    for option in ([], ["--overwrite"], ["--overwrite", "--dry-run"]):
        arguments = ["import-hf", str(FIXTURES / "cola_tiny"), str(dst), *option]
        run_and_check(arguments, "EXISTS", f"no model folder, found {', '.join(sorted(names))}; ", 2, capsys)
    assert sorted(os.listdir(dst)) == sorted(names) and os.listdir(tmp_path) == ["dst"]


def test_overwrite_replaces_an_empty_folder_and_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(FIXTURES / "cola_tiny", tmp_path / "model")
    for name in ("empty", "model", "model"):
        assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / name), "--overwrite"]) == 0
        assert (tmp_path / name / "COMPLETE").is_file()


def test_bad_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "src"
    shutil.copytree(FIXTURES / "cola_tiny", source)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for dst, code in (("src/new", "DST_IN_SRC"), ("src", "DST_IN_SRC"), (".", "DST_IN_SRC"), ("link", "EXISTS"),
                      ("none/dst", "MISSING_FILE")):  # fmt: skip
        run_and_check(["import-hf", str(source), str(tmp_path / dst), "--overwrite"], code, "", 2, capsys)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    arguments = ["import-hf", str(source), str(tmp_path / "dst")]
    run_and_check(arguments, "NO_SPACE", "303872 bytes needed, 5 free", 4, capsys)
    assert sorted(os.listdir(tmp_path)) == ["link", "src"]


@pytest.mark.parametrize(
    ("number", "code"), [("ENOSPC", "NO_SPACE"), ("EDQUOT", "NO_SPACE"), ("EIO", "IO"), ("EROFS", "PERMISSION")]
)
def test_a_failing_disk(
    number: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: object, name: str, tensor: torch.Tensor) -> str:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), "file")

    monkeypatch.setattr("megatron_lowrank.convert.tensor_file.TensorFileWriter.write", fail)
    run_and_check(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / "dst")], code, "", 4, capsys)
    assert os.listdir(tmp_path) == []
