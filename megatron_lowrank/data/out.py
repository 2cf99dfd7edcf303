"""Where `prepare` writes, checked before any work: it overwrites neither what it reads nor files of others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_lowrank import disk
from megatron_lowrank.data.files import strip_suffix
from megatron_lowrank.messages import differences

RESULTS = (".json", ".bin", ".idx", ".tokenizer.json")
"""Suffixes of the results; the last one only with --train-bpe."""
_FLAGS = {
    "tokenizer": "--tokenizer", "eod_token": "--eod-token", "json_key": "--json-key", "shard_bytes": "--shard-mib",
    "input": "--input", "cut_text": "--cut-text",
}  # fmt: skip
"""Key of a plan -> the option behind it."""


def out_prefix(out: str) -> str:
    """The prefix that --out names.

    Raises:
        ValueError: there is no name in it, so that the results would be hidden files.
    """
    prefix = strip_suffix(out)
    if os.path.basename(prefix) in ("", ".", ".."):
        raise ValueError(f"--out: found {out!r}, allowed: a prefix that ends in a name, such as data/text")
    return prefix


def check_out(out: str, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Refuses results that would destroy something else.

    Args:
        out: prefix of the results.
        inputs: every file that is read.
        overwrite: files in the way may go, unless they are inputs.

    Raises:
        ValueError: an input or a file of somebody else is in the way.
    """
    written = {os.path.realpath(out + suffix): out + suffix for suffix in RESULTS}
    parts = os.path.realpath(f"{out}.parts")
    for path in inputs:
        real = os.path.realpath(path)
        if real in written or real.startswith(parts + os.sep):
            raise ValueError(
                f"--out: {out} would overwrite the input {path} with {written.get(real, f'{out}.parts')}; choose "
                "another --out"
            )
    if os.path.lexists(parts) and not _is_work_folder(parts):
        raise ValueError(
            f"--out: {out}.parts, the folder for unfinished work, exists and is something else; choose another --out"
        )
    if overwrite or os.path.exists(f"{out}.idx"):
        return  # `prepare` itself compares existing results with the command
    mine = _is_sidecar(f"{out}.json")
    # A run that was killed at its end leaves some results, and its plan.
    unfinished = os.path.exists(f"{parts}/plan.json")
    for suffix in RESULTS:
        if os.path.lexists(out + suffix) and not mine and not (unfinished and suffix != ".json"):
            raise ValueError(
                f"--out: {out}{suffix} exists and was not made by prepare_data; choose another --out, or --overwrite"
            )


@contextmanager
def work_folder(parts: str, plan: dict[str, Any]) -> Iterator[int]:
    """Locks the folder and checks that what lies in it belongs to this plan. Yields the lock's descriptor."""
    os.makedirs(parts, exist_ok=True)
    lock = os.open(f"{parts}/lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--out: another process is preparing into {parts}") from error
        path = Path(f"{parts}/plan.json")
        if path.exists():
            if names := differences(disk.read_json(path), plan, "{name}"):
                changed = ", ".join(_FLAGS.get(name, name) for name in names)
                raise ValueError(
                    f"--out: {parts} holds unfinished work of another command (different: {changed}); run that one "
                    "again, choose another --out, or remove the folder"
                )
        else:
            disk.write_json(path, plan)
        yield lock
    finally:
        os.close(lock)


def is_result(folder: str, name: str) -> bool:
    """Whether a file of a folder of texts is the sidecar or the tokenizer beside token files, and no text."""
    stem = os.path.join(folder, name.removesuffix(".json"))
    if not name.endswith(".json"):
        return False
    if os.path.exists(f"{stem.removesuffix('.tokenizer')}.idx") and stem.endswith(".tokenizer"):
        return True
    # A corpus may lie beside token files that another program made of it.
    small = 1 << 20
    return os.path.exists(f"{stem}.idx") and os.path.getsize(f"{stem}.json") < small and _is_sidecar(f"{stem}.json")


def is_work_folder(folder: str, name: str) -> bool:
    """Whether a folder in a folder of texts is unfinished work of `prepare`."""
    return name.endswith(".parts") and _is_work_folder(os.path.join(folder, name))


def _is_sidecar(path: str) -> bool:
    try:
        record = disk.read_json(Path(path))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"format", "plan", "files_digest"} <= set(record)


def _is_work_folder(path: str) -> bool:
    if not os.path.isdir(path):
        return False
    names = set(os.listdir(path))
    # Killed between the lock and the plan, it holds no shards yet.
    return {"lock", "plan.json"} <= names or names <= {"lock", "plan.json.tmp"}
