"""The run's folder: its resolved config and versions, and whether this run may go on in it.

out/
    run_config.json       config, digest, versions, data, tokenizer of the newest start
    metrics.jsonl         losses and rates
    loss.png              their picture
    tensorboard/          events
    checkpoints/          unless checkpoint.folder says otherwise
    cache/                row indices, unless data.cache_path says otherwise
    .lock                 held by the run that is at work here, as is the one in its folder of checkpoints
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any, TextIO

from megatron_lowrank import disk
from megatron_lowrank.compat import versions
from megatron_lowrank.config import RunConfig
from megatron_lowrank.messages import differences, some

RUN_CONFIG, LOCK = "run_config.json", ".lock"


def checkpoint_folder(run: RunConfig) -> Path:
    """Where the run's checkpoints go."""
    return Path(run.checkpoint.folder or Path(run.out) / "checkpoints")


def lock_folders(run: RunConfig) -> list[TextIO]:
    """Makes the run's folder and its folder of checkpoints, tries to write there, and takes both; for rank 0.

    Returns:
        The locks, which last until these files are closed or the process ends.

    Raises:
        ValueError: a folder cannot be written, or another run is at work in it.
    """
    folders = {"out": Path(run.out)}
    if run.checkpoint.save:
        folders["checkpoint.folder"] = checkpoint_folder(run).resolve()
    locks: list[TextIO] = []
    for field, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".probe_", dir=folder) as probe:
                probe.write(b"0")
        except OSError as error:
            raise ValueError(f"{field}: cannot write into {folder}: {error}") from error
        if not any(Path(lock.name).parent.resolve() == folder.resolve() for lock in locks):
            locks += _lock(field, folder)
    return locks


def _lock(field: str, folder: Path) -> list[TextIO]:
    path = folder / LOCK
    try:
        file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed with the run)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            file.seek(0)
            holder = " ".join(file.read(200).split())
            raise ValueError(
                f"{field}: another run is at work in {folder} ({holder}); wait for its end, or choose another folder"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        warnings.warn(f"{field}: {path} cannot be locked ({error}); two runs must not use it at once", stacklevel=1)
        return []
    return [file]


def record_run(run: RunConfig, facts: dict[str, Any]) -> None:
    """Writes run_config.json, with what `compare_folder` compares; for rank 0.

    Raises:
        OSError: the folder cannot be written.
    """
    Path(run.out).mkdir(parents=True, exist_ok=True)
    disk.write_json(Path(run.out) / RUN_CONFIG, _record(run, facts))


def compare_folder(run: RunConfig, facts: dict[str, Any]) -> list[str]:
    """Looks at the config of the run that used the folder last; writes nothing.

    Args:
        run: The resolved run.
        facts: What else to record: world size, data, tokenizer.

    Returns:
        What differs from the run that used the folder last, one line each.

    Raises:
        ValueError: that run had another architecture, or the folder's config is damaged.
    """
    folder = Path(run.out)
    path, record = folder / RUN_CONFIG, _record(run, facts)
    changes: list[str] = []
    if path.exists():
        try:
            old = disk.read_json(path)
            config, architecture, before = dict(old["config"]), dict(old["architecture"]), dict(old.get("versions", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"out: {path} is damaged ({error!r}); remove it or choose another --out") from error
        if differ := differences(architecture, record["architecture"]):
            raise ValueError(
                f"out: {folder} holds a run of another architecture ({some(differ, 5, '; ')}); choose another --out"
            )
        changes = differences(_flat(config), _flat(record["config"]))
        changes += differences(before, record["versions"], "version of {name}: {old} before, {new} now")
    return changes


def _record(run: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": run.to_dict(), "digest": run.digest(), "architecture": run.architecture(), "versions": versions(),
        **facts,
    }  # fmt: skip


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
