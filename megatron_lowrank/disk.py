"""Files that are on the disk whole or not at all, and folders sealed by a manifest.

A sealed folder holds `manifest.json`, whose `files` give size and sha256 of each file, and `COMPLETE`, the sha256 of
the manifest, written last. Training checkpoints and canonical folders are both sealed in this way.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
MARKER = "latest_checkpointed_iteration.txt"
"""Megatron's file in a folder of checkpoints: the number of the newest."""
PARTIAL = ".tmp"
"""End of the name of what is being written."""

Defect = Literal["INCOMPLETE", "CHECKSUM", "CORRUPT", "MISSING_FILE", "UNSAFE_PATH"]


class DamagedError(ValueError):
    """A file or a sealed folder that is not what was written."""

    def __init__(self, defect: Defect, message: str) -> None:
        super().__init__(message)
        self.defect = defect


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a small file through a temporary name, so that it is there whole or not at all, and waits for the disk."""
    temporary = path.with_name(path.name + PARTIAL)
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """`write_text` of a JSON object."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError("CORRUPT", f"{path} is no valid JSON: {error}") from error


def sha256(path: Path) -> str:
    """sha256 of a file, read in pieces, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says about a file: size and digest."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def is_bare_name(name: object) -> bool:
    """Whether a name found in a manifest or index names a file of its own folder and nothing else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def is_complete(folder: Path) -> bool:
    """Whether everything of a sealed folder was written."""
    return (folder / COMPLETE).is_file()


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest, then `COMPLETE`; the files themselves are on the disk before."""
    write_json(folder / MANIFEST, manifest)
    write_text(folder / COMPLETE, sha256(folder / MANIFEST) + "\n")


def read_sealed(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder, after checks of its digest and of name and size of each file.

    Raises:
        OSError: a file cannot be read.
        DamagedError: a file is missing, truncated or changed, or the folder was never sealed.
    """
    path = folder / MANIFEST
    if not is_complete(folder) or not path.is_file():
        raise DamagedError("INCOMPLETE", f"{folder} lacks {COMPLETE} or {MANIFEST}: its writing did not finish")
    expected = (folder / COMPLETE).read_text(encoding="utf-8", errors="replace").strip()
    if (found := sha256(path)) != expected:
        raise DamagedError("CHECKSUM", f"{path} was changed: found sha256 {found}, {COMPLETE} says {expected}")
    manifest = read_json(path)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise DamagedError("CORRUPT", f"{path} lists no files")
    for name, entry in files.items():
        if not is_bare_name(name):
            raise DamagedError("UNSAFE_PATH", f"{path} names {name!r}, allowed: bare file names")
        wanted = entry.get("bytes") if isinstance(entry, dict) else None
        if not (folder / name).is_file():
            raise DamagedError("MISSING_FILE", f"{folder / name} is missing, the manifest says {wanted} bytes")
        if (size := (folder / name).stat().st_size) != wanted:
            raise DamagedError("CORRUPT", f"{folder / name} has {size} bytes, the manifest says {wanted} bytes")
    return manifest  # type: ignore[no-any-return]


def check_file(folder: Path, name: str, manifest: dict[str, Any]) -> None:
    """Recomputes the digest of a file of a sealed folder.

    Raises:
        OSError: it cannot be read.
        DamagedError: the digest is not the manifest's.
    """
    expected, found = manifest["files"][name].get("sha256"), sha256(folder / name)
    if found != expected:
        raise DamagedError("CHECKSUM", f"{folder / name}: found sha256 {found}, {MANIFEST} says {expected}")
