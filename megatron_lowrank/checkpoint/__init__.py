"""Training checkpoints: canonical names, exact resumption, re-sharding, and a folder that survives a kill.

Reading order: agree, files, read, optimizer, state, store
"""

from megatron_lowrank.checkpoint.files import latest
from megatron_lowrank.checkpoint.read import checkpoint_tensors, read_run_config, verify_checksums
from megatron_lowrank.checkpoint.store import load_checkpoint, save_checkpoint

__all__ = [
    "checkpoint_tensors", "latest", "load_checkpoint", "read_run_config", "save_checkpoint", "verify_checksums",
]  # fmt: skip
