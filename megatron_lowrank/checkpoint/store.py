"""Saving and loading a training checkpoint: all ranks, one outcome."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_lowrank import compat, disk
from megatron_lowrank.checkpoint import files, state
from megatron_lowrank.checkpoint.agree import FAILED, AgreedError, on_every_rank, on_rank_0
from megatron_lowrank.checkpoint.optimizer import adam_step
from megatron_lowrank.checkpoint.read import check_architecture, check_tensors, intact, scan_metadata, verify_checksums
from megatron_lowrank.config import RunConfig

logger = logging.getLogger(__name__)
_FULL = 2**20
"""Bytes; a disk with less free space is named in the error of a save."""


def save_checkpoint(
    folder: str | Path,
    step: int,
    run: RunConfig,
    chunks: Sequence[nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    train_state: dict[str, Any],
) -> Path:
    """Writes a checkpoint, atomically, then removes old ones beyond `run.checkpoint.keep`. Collective.

    Killed at any moment, it leaves the last checkpoint loadable. A checkpoint of the same step is replaced.

    Args:
        folder: Of all checkpoints, on a file system that every rank sees.
        step: Optimizer steps done.
        run: Config, stored with the checkpoint.
        chunks: The model's chunks on this rank, wrapped for DDP or not.
        optimizer: megatron-core's, with or without the distributed optimizer; None stores the weights alone.
        scheduler: megatron-core's OptimizerParamScheduler, or None.
        train_state: JSON values, the same on every rank; tuples come back as lists, keys as strings.

    Returns:
        The folder of this checkpoint.

    Raises:
        AgreedError: it cannot be written, or `train_state` is not made of JSON values. Its exit code is 1.
    """
    compat.silence_known_notices()
    folder = Path(folder)
    partial, what = files.partial_path(folder, step), f"saving the checkpoint of step {step}"

    def describe() -> dict[str, str]:
        progress = {
            "train_state": train_state,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "adam_step": 0 if optimizer is None else adam_step(optimizer),
        }
        contents = {
            files.RUN_CONFIG: run.to_dict(), files.ARCHITECTURE: run.architecture(), files.TRAIN_STATE: progress,
        }  # fmt: skip
        try:
            return {name: json.dumps(content, indent=1) for name, content in contents.items()}
        except TypeError as error:
            raise ValueError(f"the training state is not made of JSON values: {error}") from error

    texts = on_every_rank(describe, what=what, code=FAILED)[0]
    try:
        on_rank_0(lambda: files.prepare(folder, step), what=what, code=FAILED)
        on_every_rank(lambda: _check_writable(partial), what=what, code=FAILED)
        on_every_rank(lambda: state.save_state(partial, chunks, optimizer), what=what, code=FAILED)

        def describe_files() -> None:
            for name, text in texts.items():
                disk.write_text(partial / name, text)

        on_rank_0(describe_files, what=what, code=FAILED)
        sealed = on_every_rank(lambda: files.seal_files(partial, dist.get_rank()), what=what, code=FAILED)
        manifest = {
            "step": step,
            "versions": compat.versions(),
            "layout": _layout(run),
            "config_digest": run.digest(),
            "files": {name: entry for entries in sealed for name, entry in entries.items()},
        }  # fmt: skip
        path = on_rank_0(lambda: files.publish(folder, step, manifest), what=what, code=FAILED)
    except AgreedError as error:
        free = on_rank_0(lambda: _free_bytes(folder), what=what)  # before the failed save gives its space back
        if dist.get_rank() == 0:
            files.discard(folder, step)
        if free < _FULL:
            raise AgreedError(f"{error}; {free} bytes free on {folder}", error.code) from error
        raise
    on_rank_0(lambda: files.retain(folder, step, run.checkpoint.keep), what=what, code=FAILED)
    return path


def load_checkpoint(
    path: str | Path,
    run: RunConfig,
    chunks: Sequence[nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
    weights_only: bool = False,
) -> dict[str, Any]:
    """Reads a checkpoint into a model, its optimizer and scheduler, whatever the layout that wrote it. Collective.

    Tensor, pipeline and data parallelism, interleaving, placement and the distributed optimizer may differ from the
    writer's. The random state is restored if the layout is the same; otherwise the generators are seeded anew.

    Args:
        path: A checkpoint, or a folder of them (then its latest).
        run: Config of this run; its architecture has to be the checkpoint's.
        chunks: The model's chunks on this rank, wrapped for DDP or not.
        optimizer: megatron-core's; None reads no state for it.
        scheduler: megatron-core's, set to the position in the checkpoint; its shape stays the run's.
        weights_only: Take the weights alone; optimizer, scheduler and random state stay as at the start of a run.

    Returns:
        The `train_state` that was saved; empty with `weights_only`.

    Raises:
        AgreedError: there is no checkpoint, it cannot be read, or it is incomplete, damaged, of another architecture or
            of a newer megatron-core.
    """
    what = f"loading the checkpoint {path}"
    full = optimizer is not None and not weights_only
    found = on_rank_0(lambda: _find(path), what=what)
    on_every_rank(lambda: _check_files(found), what=what)
    manifest, progress = on_rank_0(lambda: _inspect(found, run, full), what=what)
    layout = _layout(run)
    same_layout = manifest["layout"] == layout

    def load() -> None:
        state.load_state(
            found, chunks, optimizer if full else None,
            adam_step=progress["adam_step"], restore_rng=same_layout and not weights_only,
        )  # fmt: skip
        if optimizer is not None and not full:
            state.reset_main_parameters(optimizer)
        if scheduler is not None and not weights_only and progress["scheduler"] is not None:
            _set_scheduler(scheduler, progress["scheduler"])

    on_every_rank(load, what=what)
    if weights_only:
        return {}
    if not same_layout:
        state.reseed(run.train.seed, manifest["step"])
        if dist.get_rank() == 0:
            logger.warning("%s was written on %s, this is %s: random generators start anew from the seed and the step",
                           found, manifest["layout"], layout)  # fmt: skip
    train_state: dict[str, Any] = progress["train_state"]
    return train_state


def _find(path: str | Path) -> Path:
    """The checkpoint, after a look at its manifest and at who wrote it."""
    found = files.resolve(path)
    manifest = files.read_manifest(found)
    with intact(found / disk.MANIFEST):
        written = str(manifest["versions"]["megatron_core"])
    ours = compat.megatron_core_version()
    if _generation(written) > _generation(ours):
        raise ValueError(f"{found} was written by megatron-core {written}, which this {ours} cannot read: upgrade it")
    return found


def _inspect(found: Path, run: RunConfig, full: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and progress, after everything that can be found wrong before a rank reads a tensor."""
    manifest = files.read_manifest(found)
    with intact(found / disk.MANIFEST):
        manifest = {"step": int(manifest["step"]), "layout": dict(manifest["layout"])}
    with intact(found / files.ARCHITECTURE):
        check_architecture(found, disk.read_json(found / files.ARCHITECTURE), run.architecture())
    with intact(found / files.RUN_CONFIG):
        precision = disk.read_json(found / files.RUN_CONFIG)["train"]["precision"]
    if full and precision == "bf16" and run.train.precision == "fp32":
        # Its weights are rounded, and only a shard of the fp32 ones is on each data-parallel rank.
        raise ValueError(f"{found} has train.precision bf16, run fp32: allowed with checkpoint.load_weights_only only")
    scan_metadata(found)
    check_tensors(found, run, with_optimizer=full)
    with intact(found / files.TRAIN_STATE):
        progress = disk.read_json(found / files.TRAIN_STATE)
        return manifest, {name: progress[name] for name in ("train_state", "scheduler", "adam_step")}


def _layout(run: RunConfig) -> dict[str, int | None]:
    return {
        "world": dist.get_world_size(),
        "tensor": run.parallel.tensor_parallel_size,
        "pipeline": run.parallel.pipeline_parallel_size,
        "virtual_pipeline": run.parallel.virtual_pipeline_size,
        "context": parallel_state.get_context_parallel_world_size(),
    }


def _generation(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _check_writable(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: rank 0 has made it, this rank does not see it; allowed: a shared file system")
    probe = path / f".probe_{dist.get_rank()}"
    probe.write_bytes(b"0")
    probe.unlink()


def _check_files(path: Path) -> None:
    """Whether this rank sees the checkpoint, and whether its share of the files is what was written."""
    if not disk.is_complete(path):
        raise FileNotFoundError(f"{path}: rank 0 has found it, this rank does not; allowed: a shared file system")
    verify_checksums(path, dist.get_rank(), dist.get_world_size())


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return _FULL  # it does not exist, so the disk was not what failed


def _set_scheduler(scheduler: Any, stored: dict[str, Any]) -> None:
    differing = {k: v for k, v in scheduler.state_dict().items() if k != "num_steps" and stored.get(k) != v}
    if differing and dist.get_rank() == 0:
        before = {name: stored.get(name) for name in differing}
        logger.warning("the schedule differs: checkpoint %s, run %s; the run's is used", before, differing)
    # The position alone: what is left of the schedule is the run's config's to say.
    scheduler.num_steps = 0
    scheduler.step(int(stored["num_steps"]))
