"""Files and folders that are whole or not at all, and lists in messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lowrank import disk
from megatron_lowrank.messages import differences, some


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_json(tmp_path / "a.json", {"b": 1, "ä": [None]})
    assert disk.read_json(tmp_path / "a.json") == {"b": 1, "ä": [None]}

    def full(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        disk.write_json(tmp_path / "a.json", {})
    assert disk.read_json(tmp_path / "a.json")["b"] == 1


def test_what_is_no_json(tmp_path: Path) -> None:
    for text in ("{", "", "\x00", "[" * 100_000):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(disk.DamagedError, match=r"a.json is no valid JSON") as caught:
            disk.read_json(tmp_path / "a.json")
        assert caught.value.defect == "CORRUPT"


def sealed(folder: Path) -> dict[str, Any]:
    (folder / "a").write_bytes(b"abc")
    manifest = {"files": {"a": disk.file_entry(folder / "a")}, "step": 1}
    disk.seal(folder, manifest)
    return manifest


def test_a_sealed_folder(tmp_path: Path) -> None:
    manifest = sealed(tmp_path)
    assert disk.is_complete(tmp_path) and disk.read_sealed(tmp_path) == manifest
    assert manifest["files"]["a"] == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    disk.check_file(tmp_path, "a", manifest)
    (tmp_path / "a").write_bytes(b"abd")
    assert disk.read_sealed(tmp_path) == manifest, "sizes only"
    with pytest.raises(disk.DamagedError, match="a: found sha256"):
        disk.check_file(tmp_path, "a", manifest)


@pytest.mark.parametrize(
    ("damage", "defect"),
    [
        (lambda folder: (folder / "COMPLETE").unlink(), "INCOMPLETE"),
        (lambda folder: (folder / "manifest.json").unlink(), "INCOMPLETE"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "CHECKSUM"),
        (lambda folder: disk.seal(folder, {"step": 1}), "CORRUPT"),
        (lambda folder: disk.seal(folder, {"files": {"../a": {"bytes": 3}}}), "UNSAFE_PATH"),
        (lambda folder: disk.seal(folder, {"files": {"b": {"bytes": 3}}}), "MISSING_FILE"),
        (lambda folder: disk.seal(folder, {"files": {"a": 3}}), "CORRUPT"),
        (lambda folder: (folder / "a").write_bytes(b"ab"), "CORRUPT"),
    ],
)
def test_a_damaged_folder(damage: Callable[[Path], None], defect: str, tmp_path: Path) -> None:
    sealed(tmp_path)
    damage(tmp_path)
    with pytest.raises(disk.DamagedError) as caught:
        disk.read_sealed(tmp_path)
    assert caught.value.defect == defect


def test_bare_names() -> None:
    assert disk.is_bare_name("a.b") and disk.is_bare_name("..a")
    for name in ("", ".", "..", "a/b", "/a", "a\\b", "a\0", None, 3):
        assert not disk.is_bare_name(name)


def test_lists_in_messages() -> None:
    assert some(["a", "b"], 2) == "a, b" and some(["a", "b", "c"], 2, "; ") == "a; b and 1 more"
    assert differences({"a": 1, "b": "{x}"}, {"a": 1, "c": None, "d": 2}) == [
        "b: {x} before, None now", "d: None before, 2 now"
    ]  # fmt: skip
    assert differences({"a": "x"}, {"a": 2}, "{name} {old!r}/{new}") == ["a 'x'/2"]
