"""A destination folder appears complete or not at all, also when the process is killed.

Everything is written into `DST.tmp-<random>` beside DST and flushed; a canonical folder is sealed (see `disk.py`); then
one rename shows the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lowrank import disk
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.shards import WrittenShards
from megatron_lowrank.messages import some


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
    _check_existing(dst, overwrite=overwrite)
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
            disk.sync(path)
        disk.sync(temporary)
        _show(temporary, dst, overwrite=overwrite)
        disk.sync(dst.absolute().parent)
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    finally:
        # Gone after a success, or the old folder after an exchange.
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(folder: Path, shards: WrittenShards, small_files: list[str]) -> None:
    """Seal a folder of the shards and the named small files."""
    files = {**shards.files, **{name: disk.file_entry(folder / name) for name in small_files}}
    disk.seal(folder, {"files": files, "tensors": shards.tensors})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder: its own digest, the size of each file, the digest of the small ones.

    Tensor data is verified when it is read, from the digest of each tensor.

    Raises:
        ConvertError: INCOMPLETE, CHECKSUM, UNSAFE_PATH, MISSING_FILE, CORRUPT.
    """
    try:
        manifest = disk.read_sealed(folder)
        for name in manifest["files"]:
            if not name.endswith(".safetensors"):
                disk.check_file(folder, name, manifest)
    except disk.DamagedError as error:
        raise ConvertError.from_damage(error) from error
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        raise ConvertError("CORRUPT", f"{folder / disk.MANIFEST} lists no tensors")
    return manifest


def _check_existing(dst: Path, *, overwrite: bool) -> None:
    """Refuse what is at `dst`, unless it may be replaced: an empty folder or one of a model, never a user's files."""
    if not os.path.lexists(dst):
        return
    if dst.is_symlink() or not dst.is_dir():
        raise ConvertError("EXISTS", f"{dst} is no folder, --overwrite replaces folders only")
    names = sorted(os.listdir(dst))
    described = {disk.COMPLETE, disk.MANIFEST} <= set(names) or "config.json" in names
    # Training checkpoints are sealed too, but hold no .safetensors.
    if names and not (described and any(name.endswith(".safetensors") for name in names)):
        raise ConvertError(
            "EXISTS",
            f"{dst} is no model folder, found {some(names, 3)}; --overwrite replaces an empty folder, or one with "
            f"*.safetensors beside config.json or {disk.MANIFEST} and {disk.COMPLETE}",
        )
    if not overwrite:
        raise ConvertError("EXISTS", f"{dst} exists; --overwrite replaces it")


def _show(temporary: Path, dst: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(dst):
        os.rename(temporary, dst)
        return
    _check_existing(dst, overwrite=overwrite)  # it may have appeared, or filled, while we were writing
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
