"""Reader of training checkpoints: full weights of a complete checkpoint, whatever layout wrote it.

Neither megatron-core nor a process group is needed. Digests of the small files are compared at once, those of the files
with tensors when the first tensor is read. Torch keeps the table of tensors in a pickle, `.metadata`; it is looked
through before torch loads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowrank import disk
from megatron_lowrank.checkpoint.files import read_manifest, resolve
from megatron_lowrank.checkpoint.read import CachedReader, check_tensors, checkpoint_tensors, read_run_config
from megatron_lowrank.convert.description import Source
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import TensorSource, from_tensors

METADATA = ".metadata"
_TENSORS = ".distcp"
_CHECKPOINT = "torch.distributed.checkpoint."
_ALLOWED = {
    "torch": {"Size"}, "torch.serialization": {"_get_layout"}, f"{_CHECKPOINT}filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}  # fmt: skip
"""Module -> names that `.metadata` may refer to, beside torch's dtypes."""


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
        scan_pickle(folder / METADATA)
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
    except disk.DamagedError as error:
        raise ConvertError.from_damage(error) from error
    except FileNotFoundError as error:
        raise ConvertError("MISSING_FILE", str(error)) from error
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    except (ValueError, KeyError, CheckpointException) as error:  # torch derives the last one from BaseException
        raise ConvertError("CORRUPT", f"{error} ({path})") from error


class _Scanner(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def scan_pickle(path: Path) -> None:
    """Refuse a pickle that refers to anything but the records of torch's distributed checkpoints.

    Raises:
        ConvertError: UNSAFE_PICKLE with the forbidden name, CORRUPT.
    """
    try:
        with path.open("rb") as file:
            _Scanner(file).load()
    except pickle.UnpicklingError as error:
        raise ConvertError("UNSAFE_PICKLE", f"{error} in {path}, allowed: records of torch's checkpoints") from error
    except (EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise ConvertError("CORRUPT", f"{path} is no readable pickle: {error}") from error
