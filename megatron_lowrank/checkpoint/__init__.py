"""Training checkpoints: canonical names, exact resumption, re-sharding, and a folder that survives a kill.

Reading order: agree, files, read, optimizer, orphan, state, store

The public names are imported when they are asked for: `agree`, `files` and `read` need no megatron-core, and a program
uses `agree` before the CPU platform is in place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lowrank.checkpoint.files import latest
    from megatron_lowrank.checkpoint.read import checkpoint_tensors, read_run_config, verify_checksums
    from megatron_lowrank.checkpoint.store import load_checkpoint, save_checkpoint

_HOME = {
    "latest": "files", "checkpoint_tensors": "read", "read_run_config": "read", "verify_checksums": "read",
    "load_checkpoint": "store", "save_checkpoint": "store",
}  # fmt: skip

__all__ = [
    "checkpoint_tensors", "latest", "load_checkpoint", "read_run_config", "save_checkpoint", "verify_checksums",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
