"""Whatever is wrong with a checkpoint or a disk is one clear error on every rank, and no rank waits for another."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from training_steps import small_run, start

from megatron_lowrank import compat
from megatron_lowrank.checkpoint import (
    checkpoint_tensors,
    latest,
    load_checkpoint,
    read_run_config,
    save_checkpoint,
    verify_checksums,
)
from megatron_lowrank.checkpoint.agree import AgreedError, on_every_rank, on_rank_0
from megatron_lowrank.disk import file_entry, sha256
from megatron_lowrank.testing.ranks import run_ranks

STEP = "iter_0000001"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run = small_run(tp=2)

    def ranks() -> None:
        training = start(run)
        training.steps(1)
        save_checkpoint(folder, 1, run, training.chunks, training.optimizer, training.scheduler, {"step": 1})

    run_ranks(2, ranks)
    return folder


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest and its digest in COMPLETE."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "COMPLETE").write_text(sha256(path / "manifest.json"))


def truncate(path: Path) -> None:
    """Cuts the last bytes of a file of tensors."""
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def garble(path: Path) -> None:
    """Overwrites the tensors of one rank's file, whose size stays."""
    file = path / "__1_0.distcp"
    file.write_bytes(b"x" * file.stat().st_size)


def flip(name: str) -> Callable[[Path], None]:
    """Changes a byte in the middle of a file."""

    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(bytes(content))

    return change


def put(name: str, content: bytes) -> Callable[[Path], None]:
    """Replaces a file, with a manifest that fits."""

    def change(path: Path) -> None:
        (path / name).write_bytes(content)
        edit_manifest(path, lambda manifest: manifest["files"].update({name: file_entry(path / name)}))

    return change


def rename_key(path: Path) -> None:
    """Replaces a tensor's name by another of the same length."""
    content = (path / ".metadata").read_bytes()
    put(".metadata", content.replace(b"decoder.final_layernorm.weight", b"decoder.final_layernorm.weighs"))(path)


def newer(manifest: dict[str, Any]) -> None:
    """As of a release to come."""
    manifest["versions"]["megatron_core"] = "9.1.0"


def later_format(manifest: dict[str, Any]) -> None:
    """As of a later format of ours."""
    manifest["format_version"] = 99


def no_json(path: Path) -> None:
    """A manifest that is cut short, with a digest that fits."""
    (path / "manifest.json").write_text("{")
    (path / "COMPLETE").write_text(sha256(path / "manifest.json"))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, r"__1_0.distcp has \d+ bytes, the manifest says \d+ bytes"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "garbled": (garble, r"rank \d of 2: \S+__1_0.distcp: found sha256 \w{64}, manifest.json says \w{64}"),
    "flipped": (flip("__0_0.distcp"), r"\S+__0_0.distcp: found sha256"),
    "flipped pickle": (flip(".metadata"), r"\S+.metadata: found sha256"),
    "state": (put("train_state.json", b"[]"), r"train_state.json is damaged"),
    "config": (put("run_config.json", b"{}"), r"run_config.json is damaged: KeyError"),
    "architecture no object": (put("architecture.json", b"null"), r"architecture.json is damaged: TypeError"),
    "bytes": (put("architecture.json", b"\xff\xfe\x00"), r"architecture.json is no valid JSON"),
    "unsafe": (put(".metadata", b"cposix\nmkdir\n."), r"posix.mkdir in \S+.metadata, allowed"),
    "no pickle": (put(".metadata", b""), r".metadata is damaged"),
    "incomplete": (lambda path: (path / "COMPLETE").unlink(), "has no file COMPLETE: it is incomplete"),
    "newer": (lambda path: edit_manifest(path, newer), "was written by megatron-core 9.1.0, which this .* cannot read"),
    "format": (lambda path: edit_manifest(path, later_format), "format megatron_lowrank_training 99"),
    "manifest": (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json was changed"),
    "json": (no_json, "manifest.json is no valid JSON"),
    "key": (rename_key, "lacks keys decoder.final_layernorm.weight, optimizer.state.exp_avg.decoder.final"),
}
if compat.megatron_core_version().startswith("0.16"):  # later releases write no such file
    BROKEN["flipped common"] = (flip("common.pt"), r"\S+common.pt: found sha256")


def failures(attempts: dict[str, Callable[[], Any]]) -> list[dict[str, str]]:
    """The error of each attempt, in a rank; an attempt without one is a failure of the test."""
    found: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "nothing was raised"
        except AgreedError as error:
            found[name] = f"{error.code}: {error}"
    return [found]


def assert_same_on_all_ranks(outcomes: list[list[dict[str, str]]]) -> dict[str, str]:
    """What every rank has seen."""
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0][0]


def test_every_way_to_fail_to_load(saved: Path, tmp_path: Path) -> None:
    """Broken files, another architecture, another precision, nothing there."""
    for name, (break_, _) in BROKEN.items():
        shutil.copytree(saved, tmp_path / name)
        break_(tmp_path / name / STEP)
    run = small_run(tp=2)
    other = small_run(tp=2, lowrank={"rank": 8, "latent_activation": "gelu"})

    def ranks() -> list[dict[str, str]]:
        training = start(run)

        def load(path: Path, config: Any = run) -> None:
            load_checkpoint(path, config, training.chunks, training.optimizer, training.scheduler)

        attempts: dict[str, Callable[[], Any]] = {n: partial(load, tmp_path / n / STEP) for n in BROKEN}
        attempts["architecture"] = lambda: load(saved, other)
        attempts["nothing"] = lambda: load(saved / "no")
        attempts["empty"] = lambda: load(tmp_path)
        found = failures(attempts)
        load(saved)  # and the ranks are still in step
        return found

    found = assert_same_on_all_ranks(run_ranks(2, ranks, timeout=60))
    for name, (_, message) in BROKEN.items():
        assert re.search(message, found[name]), f"{name}: {found[name]}"
    assert "latent_activation: checkpoint silu, run gelu; rank.0.q: checkpoint 16, run 8;" in found["architecture"]
    assert found["nothing"].startswith("2: ") and found["nothing"].endswith("no is not a folder")
    assert "holds no complete checkpoint" in found["empty"]


def test_every_way_to_fail_to_save(saved: Path, tmp_path: Path) -> None:
    """A path under a file, a folder that takes no files, an object in the state, a disk full for one rank only."""
    (tmp_path / "file").write_text("")
    shutil.copytree(saved, tmp_path / "full")
    run = small_run(tp=2)

    def ranks() -> list[dict[str, str]]:
        training = start(run)

        def save(folder: Path, state: dict[str, Any] | None = None) -> None:
            save_checkpoint(folder, 2, run, training.chunks, training.optimizer, training.scheduler, state or {})

        def save_on_a_full_disk() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails as it does without space
            if dist.get_rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            try:
                save(tmp_path / "full")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        found = failures(
            {
                "under a file": lambda: save(tmp_path / "file" / "checkpoints"),
                "no file system": lambda: save(Path("/proc/checkpoints")),
                "object": lambda: save(tmp_path / "object", {"value": object()}),
                "full": save_on_a_full_disk,
            }
        )
        save(tmp_path / "good")
        return found

    found = assert_same_on_all_ranks(run_ranks(2, ranks, timeout=60))
    assert all(text.startswith("1: saving the checkpoint of step 2: ") for text in found.values()), found
    assert "Not a directory" in found["under a file"] and "/proc/checkpoints" in found["no file system"]
    assert "not made of JSON values" in found["object"]
    assert (latest(tmp_path / "good") or Path()).name == "iter_0000002"
    assert latest(tmp_path / "full") == tmp_path / "full" / STEP
    assert not (tmp_path / "full" / "iter_0000002.tmp").exists(), "the space of a failed save is given back"


def test_reading_without_a_process_group(saved: Path, tmp_path: Path) -> None:
    """The config, the weights, and the digests, of which a flipped byte shows in the last only."""
    run = read_run_config(saved)
    assert run == small_run(tp=2)
    assert dict(checkpoint_tensors(saved))["output_layer.weight"].shape == (257, 64)
    verify_checksums(saved)
    garbled = tmp_path / "garbled"
    shutil.copytree(saved, garbled)
    garble(garbled / STEP)
    with pytest.raises(ValueError, match=r"__1_0.distcp: found sha256"):
        verify_checksums(garbled)
    (garbled / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xc2\xb2")
    assert latest(garbled) == garbled / STEP


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The bytes that are free follow an error of a save, if they are few."""
    run = small_run()
    (tmp_path / "checkpoints").write_text("")

    def ranks() -> list[dict[str, str]]:
        training = start(run)
        shutil.disk_usage = lambda path: SimpleNamespace(free=17)  # type: ignore[assignment]
        return failures(
            {"full": lambda: save_checkpoint(tmp_path / "checkpoints", 1, run, training.chunks, None, None, {})}
        )

    (found,) = run_ranks(1, ranks)[0]
    assert found["full"].startswith("1: saving the checkpoint of step 1: ")
    assert found["full"].endswith(f"; 17 bytes free on {tmp_path / 'checkpoints'}")


def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    """With the rank named; values come back otherwise."""

    def step() -> int:
        if dist.get_rank() == 2:
            raise PermissionError("no")
        return dist.get_rank()

    def ranks() -> tuple[list[int], int, list[dict[str, str]]]:
        values = on_every_rank(dist.get_rank, what="counting")
        first = on_rank_0(lambda: 5 + dist.get_rank(), what="asking")
        return (
            values,
            first,
            failures(
                {
                    "one": lambda: on_every_rank(step, what="writing"),
                    "first": lambda: on_rank_0(lambda: 1 // 0, what="dividing"),
                    "chosen": lambda: on_every_rank(lambda: 1 // 0, what="dividing", code=7),
                }
            ),
        )

    message = {"one": "2: writing: rank 2 of 3: no",
               "first": "1: dividing: ZeroDivisionError: integer division or modulo by zero",
               "chosen": "7: dividing: ZeroDivisionError: integer division or modulo by zero"}  # fmt: skip
    assert run_ranks(3, ranks) == [([0, 1, 2], 5, [message])] * 3
