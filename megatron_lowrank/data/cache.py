"""Arrays that are built once and memory-mapped by every process: row indices, and how often each token occurs.

megatron-core writes its index cache file by file from rank 0 and lets the others wait at a barrier: a rank killed in
between leaves files that every later run fails to load, and a rank that reads data without the others deadlocks. Here
an entry is a folder that is renamed into place when complete, guarded by a file lock that the kernel releases with its
holder; so it needs no process group, and one index serves all ranks of a node through the page cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def cached_arrays(folder: str | None, key: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that belong to a key.

    Args:
        folder: cache folder, shared by runs and ranks; None: build in memory.
        key: everything that the arrays depend on, as JSON values.
        build: makes the arrays, none of them empty.

    Returns:
        Name -> array, memory-mapped read-only if there is a folder.
    """
    if folder is None:
        return build()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    entry = Path(folder) / name
    arrays = _load(entry)
    if arrays is not None:
        return arrays
    os.makedirs(folder, exist_ok=True)
    with _locked(entry.with_suffix(".lock")):
        arrays = _load(entry)
        if arrays is None:
            # Left by a machine that went down before its disk was written.
            shutil.rmtree(entry, ignore_errors=True)
            _store(entry, key, build())
            arrays = _load(entry)
    assert arrays is not None
    return arrays


def _load(entry: Path) -> Arrays | None:
    """Arrays of an entry, or None if it is absent or damaged."""
    try:
        names = json.loads((entry / "names.json").read_text())["arrays"]
        return {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _store(entry: Path, key: dict[str, Any], arrays: Arrays) -> None:
    """Writes an entry under a temporary name and renames it."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
        (temporary / "names.json").write_text(json.dumps({"arrays": sorted(arrays), "key": key}, indent=1))
        temporary.chmod(0o755)
        os.rename(temporary, entry)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        # On file systems without locks another process may have been first; its arrays are the same.
        if _load(entry) is None:
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock where the file system has locks; elsewhere several may build, and the first rename wins."""
    with open(path, "w") as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
