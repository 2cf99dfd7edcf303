"""The folder of checkpoints on disk: names, manifest, completeness, the marker and retention. No process group.

    checkpoints/
        iter_0001000/                       complete: it was renamed to this name when everything in it was on disk
            __0_0.distcp ... .metadata      megatron-core's
            run_config.json, architecture.json, train_state.json
            manifest.json                   sizes and digests of the files above; versions, layout, step
            COMPLETE                        digest of the manifest, written last
        iter_0001500.tmp/                   being written, or left by a kill; the next save removes it
        iter_0001000.old/                   being replaced; as good as the original until the replacement is in place
        latest_checkpointed_iteration.txt   Megatron's marker: the number

At every moment of a save the marker, or the newest complete folder, is one that can be loaded.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_lowrank import disk
from megatron_lowrank.disk import COMPLETE, MANIFEST, MARKER, PARTIAL, is_complete

RUN_CONFIG, ARCHITECTURE, TRAIN_STATE = "run_config.json", "architecture.json", "train_state.json"
FORMAT, FORMAT_VERSION = "megatron_lowrank_training", 1
_OLD = ".old"
_NAME = re.compile(r"iter_(\d{7,})")
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")
logger = logging.getLogger(__name__)


def folder_name(step: int) -> str:
    """`iter_0001000`, as Megatron names it."""
    return f"iter_{step:07d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is complete."""
    return folder / (folder_name(step) + PARTIAL)


def complete_steps(folder: Path) -> dict[int, Path]:
    """Every complete checkpoint by step, oldest first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name.removesuffix(_OLD))
        # Sorted, so that `iter_0001000` is seen before `iter_0001000.old`, which counts only in its absence.
        if name and is_complete(path):
            found.setdefault(int(name[1]), path)
    return dict(sorted(found.items()))


def latest(folder: str | Path) -> Path | None:
    """The checkpoint to go on from: the one that the marker names, else the newest complete one; None without any.

    An incomplete folder is passed over with a warning.
    """
    folder = Path(folder)
    complete = complete_steps(folder)
    marker = folder / MARKER
    if marker.is_file():
        text = marker.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9]{1,18}", text) and int(text) in complete:
            return complete[int(text)]
        logger.warning("%s says %r, which is no complete checkpoint in that folder", marker, text[:40])
    for path in sorted(folder.glob("iter_*")) if folder.is_dir() else []:
        if _NAME.fullmatch(path.name) and not is_complete(path):
            logger.warning("%s has no file %s: it is incomplete and not used", path, COMPLETE)
    return complete[max(complete)] if complete else None


def resolve(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of a folder of checkpoints.

    Raises:
        OSError: there is none.
        ValueError: it is named explicitly and incomplete.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder")
    if is_complete(path):
        return path
    if _NAME.match(path.name) or (path / MANIFEST).exists() or (path / ".metadata").exists():
        what = f"{path} has no file {COMPLETE}: it is incomplete, or was not written by this package"
        raise disk.DamagedError("INCOMPLETE", what)
    found = latest(path)
    if found is None:
        raise FileNotFoundError(f"{path} holds no complete checkpoint")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, after checks of its digest, its format and the sizes of all files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is missing, truncated or changed, or the format is newer than this package.
    """
    manifest = disk.read_sealed(path)
    found = manifest.get("format"), manifest.get("format_version")
    if found[0] != FORMAT or not isinstance(found[1], int) or found[1] > FORMAT_VERSION:
        raise ValueError(f"{path}: found format {found[0]} {found[1]}, allowed: {FORMAT} up to {FORMAT_VERSION}")
    return manifest


def seal_files(path: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Forces the files of a rank onto the disk; name -> size and digest. Rank 0 also takes those of no rank."""
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(path.iterdir()):
        owner = _RANK_FILE.fullmatch(file.name)
        if (int(owner[1]) if owner else 0) == rank:
            disk.sync(file)
            entries[file.name] = disk.file_entry(file)
    return entries


def prepare(folder: Path, step: int) -> None:
    """Makes the partial folder of a step, empty, and removes what a killed save has left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        original = path.with_name(path.name.removesuffix(_OLD))
        if path.name.endswith(_OLD) and _NAME.fullmatch(original.name):
            if not original.exists() and is_complete(path):
                path.rename(original)  # killed between the two renames of `publish`
            else:
                shutil.rmtree(path)
        elif path.name.endswith(PARTIAL) and _NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            shutil.rmtree(path)
    partial_path(folder, step).mkdir()


def publish(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Completes the partial folder of a step, gives it its name and moves the marker to it."""
    partial, final = partial_path(folder, step), folder / folder_name(step)
    disk.seal(partial, {"format": FORMAT, "format_version": FORMAT_VERSION, **manifest})
    replaced = final.with_name(final.name + _OLD)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    disk.sync(folder)
    disk.write_text(folder / MARKER, str(step))
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def retain(folder: Path, step: int, keep: int) -> None:
    """Removes complete checkpoints older than `step`, so that `keep` remain with it; 0 keeps all.

    Newer ones, of a run that was taken back, stay. What cannot be removed is warned about: the save itself is done.
    """
    older = [path for other, path in complete_steps(folder).items() if other < step]
    for path in older[: max(0, len(older) - (keep - 1))] if keep else []:
        try:
            doomed = path.with_name(path.name.removesuffix(_OLD) + PARTIAL)
            path.rename(doomed)  # a kill must not leave half a folder under a complete one's name
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def discard(folder: Path, step: int) -> None:
    """Removes the partial folder of a save that failed: on a full disk, its space is what the next one needs."""
    shutil.rmtree(partial_path(folder, step), ignore_errors=True)
