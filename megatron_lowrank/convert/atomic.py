"""A destination folder appears complete or not at all, also when the process is killed.

Everything is written into `DST.tmp-<random>` beside DST and flushed; `manifest.json` lists the files, `COMPLETE` holds
the manifest's digest and is written last; then one rename shows the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.shards import WrittenShards, check_file_name, read_json

MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"


def check_destination(dst: Path, src: Path | None, *, overwrite: bool, needed_bytes: int) -> None:
    """Refuse a destination before anything is read in full.

    Raises:
        ConvertError: EXISTS, DST_IN_SRC, NO_SPACE, MISSING_FILE (no parent folder).
    """
    if src is not None:
        source, target = src.resolve(), dst.resolve()
        # The source inside the destination is as bad: --overwrite would remove it.
        if source == target or source in target.parents or target in source.parents:
            raise ConvertError("DST_IN_SRC", f"source and destination overlap ({src}, {dst})")
    if os.path.lexists(dst) and not overwrite:
        raise ConvertError("EXISTS", f"{dst} exists; --overwrite replaces it")
    if os.path.lexists(dst) and (dst.is_symlink() or not dst.is_dir()):
        raise ConvertError("EXISTS", f"{dst} is no folder, --overwrite replaces folders only")
    if not dst.absolute().parent.is_dir():
        raise ConvertError("MISSING_FILE", f"the parent folder of {dst} does not exist")
    free = shutil.disk_usage(dst.absolute().parent).free
    if needed_bytes > free:
        raise ConvertError("NO_SPACE", f"{needed_bytes} bytes needed, {free} free ({dst})")


@contextlib.contextmanager
def atomic_folder(dst: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `dst` when the block ends well, and is removed when it does not."""
    temporary = dst.absolute().parent / f"{dst.name}.tmp-{secrets.token_hex(6)}"
    try:
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        _show(temporary, dst, overwrite=overwrite)
        _sync(dst.absolute().parent)
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    finally:
        # Gone after a success, or the old folder after an exchange.
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(folder: Path, shards: WrittenShards, small_files: list[str]) -> None:
    """Write `manifest.json` over the shards and the named small files, then `COMPLETE`."""
    files = dict(shards.files)
    for name in small_files:
        data = (folder / name).read_bytes()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = json.dumps({"files": files, "tensors": shards.tensors}, indent=1) + "\n"
    (folder / MANIFEST).write_text(manifest, encoding="utf-8")
    (folder / COMPLETE).write_text(hashlib.sha256(manifest.encode()).hexdigest() + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder: its own digest, the size of each file, the digest of the small ones.

    Tensor data is verified when it is read, from the digest of each tensor.

    Raises:
        ConvertError: INCOMPLETE, CHECKSUM, UNSAFE_PATH, MISSING_FILE, CORRUPT.
    """
    if not (folder / COMPLETE).is_file() or not (folder / MANIFEST).is_file():
        raise ConvertError("INCOMPLETE", f"{folder} has no {COMPLETE} and {MANIFEST}: its writing did not finish")
    try:
        expected = (folder / COMPLETE).read_text(encoding="utf-8", errors="replace").strip()
        found = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    if expected != found:
        raise ConvertError("CHECKSUM", f"expected sha256 {expected}, found {found} ({folder / MANIFEST})")
    manifest = read_json(folder / MANIFEST)
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not all(map(_is_dict, tensors.values())):
        raise ConvertError("CORRUPT", f"{folder / MANIFEST} has no files or no tensors")
    for name, entry in files.items():
        _check_file(folder / check_file_name(name, folder / MANIFEST), entry if isinstance(entry, dict) else {})
    return manifest


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise ConvertError("MISSING_FILE", f"{path.name} of {MANIFEST} is not in {path.parent}")
    if (size := path.stat().st_size) != entry.get("bytes"):
        raise ConvertError("CORRUPT", f"{path} holds {size} bytes, {MANIFEST} says {entry.get('bytes')}")
    if path.suffix != ".safetensors":
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != entry.get("sha256"):
            raise ConvertError("CHECKSUM", f"expected sha256 {entry.get('sha256')}, found {found} ({path})")


def _show(temporary: Path, dst: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(dst):
        os.rename(temporary, dst)
        return
    if not overwrite:  # it appeared while we were writing
        raise ConvertError("EXISTS", f"{dst} exists; --overwrite replaces it")
    if _exchange(temporary, dst):
        return  # the caller removes `temporary`, which is the old folder now
    old = dst.with_name(f"{dst.name}.old-{secrets.token_hex(6)}")
    os.rename(dst, old)
    try:
        os.rename(temporary, dst)
    except OSError:
        os.rename(old, dst)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux renameat2), so that a kill finds the old folder or the new one, never none."""
    exchange_flag, here = 2, -100
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first.absolute()), os.fsencode(second.absolute())
    return bool(renameat2(here, names[0], here, names[1], exchange_flag) == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
