"""Reader of training checkpoints: full weights of a complete checkpoint, whatever layout wrote it.

Neither megatron-core nor a process group is needed. Digests of the small files are compared at once, those of the files
with tensors when the first tensor is read. Torch keeps the table of tensors in a pickle, `.metadata`; it is looked
through before torch loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowrank import disk
from megatron_lowrank.checkpoint.files import read_manifest, resolve
from megatron_lowrank.checkpoint.read import (
    CachedReader,
    UnsafePickleError,
    check_tensors,
    checkpoint_tensors,
    read_run_config,
    scan_metadata,
)
from megatron_lowrank.convert.description import Source
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import TensorSource, from_tensors

_TENSORS = ".distcp"


def open_training(path: Path) -> TensorSource:
    """Reader of a checkpoint, or of the latest one of a folder of checkpoints.

    Raises:
        ConvertError: INCOMPLETE, CHECKSUM, CORRUPT, MISSING_FILE, UNSAFE_PATH, UNSAFE_PICKLE, or an I/O error; for the
            files with tensors only when the first one is read.
    """
    with _convert_errors(path):
        folder = resolve(path)
        manifest = read_manifest(folder)
        for name in manifest["files"]:
            if not name.endswith(_TENSORS):
                disk.check_file(folder, name, manifest)
        scan_metadata(folder)
        run = read_run_config(folder)
        check_tensors(folder, run, with_optimizer=False)
        stored = CachedReader(folder).read_metadata().state_dict_metadata
    dtypes = {name: e.properties.dtype for name, e in stored.items() if isinstance(e, TensorStorageMetadata)}
    origin = Source(kind="training", metadata={name: manifest[name] for name in ("step", "config_digest")})
    source = from_tensors(run.model, run.lowrank, _tensors(folder, manifest), origin, dtypes)
    return replace(source, seed=run.train.seed)


def _tensors(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    with _convert_errors(folder):
        for name in manifest["files"]:
            if name.endswith(_TENSORS):
                disk.check_file(folder, name, manifest)
        yield from checkpoint_tensors(folder)


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnsafePickleError as error:
        raise ConvertError("UNSAFE_PICKLE", str(error)) from error
    except disk.DamagedError as error:
        raise ConvertError.from_damage(error) from error
    except FileNotFoundError as error:
        raise ConvertError("MISSING_FILE", str(error)) from error
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    except (ValueError, KeyError, CheckpointException) as error:  # torch derives the last one from BaseException
        raise ConvertError("CORRUPT", f"{error} ({path})") from error
