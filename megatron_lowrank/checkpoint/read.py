"""Reading a training checkpoint without a model, a process group or megatron-core."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_lowrank.checkpoint.files import RUN_CONFIG, TRAIN_STATE, read_manifest, resolve
from megatron_lowrank.config import RunConfig
from megatron_lowrank.disk import DamagedError, check_file, read_json
from megatron_lowrank.messages import differences, some
from megatron_lowrank.names import CanonicalParameter, canonical_parameters

OPTIMIZER_PREFIX = "optimizer.state."
OPTIMIZER_STATES = ("param", "exp_avg", "exp_avg_sq")
"""fp32 main parameter and Adam's moments, each under `optimizer.state.<state>.<canonical name>`."""
RNG_KEY = "rng_state"
METADATA = ".metadata"
"""torch's table of tensors, a pickle."""
_TORCH = "torch.distributed.checkpoint."
_ALLOWED = {
    "torch": {"Size"}, "torch.serialization": {"_get_layout"}, f"{_TORCH}filesystem": {"_StorageInfo"},
    f"{_TORCH}metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_TORCH}planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}  # fmt: skip
"""Module -> names that `.metadata` may refer to, beside torch's dtypes."""
_WRONG_FORM = (
    KeyError, TypeError, AttributeError, IndexError, EOFError, ImportError, pickle.UnpicklingError, UnicodeDecodeError,
)  # fmt: skip
"""What damaged content raises when it is looked into."""


class UnsafePickleError(ValueError):
    """A pickle that names something else than records of torch's checkpoints."""


@contextmanager
def intact(file: Path) -> Iterator[None]:
    """Says that a file is damaged where looking into its content raises an error.

    Raises:
        DamagedError: it is.
    """
    try:
        yield
    except _WRONG_FORM as error:
        raise DamagedError("CORRUPT", f"{file} is damaged: {type(error).__name__}: {error}") from error


class _Scanner(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def scan_metadata(folder: Path) -> None:
    """Refuses a `.metadata` that refers to anything but the records of torch's distributed checkpoints.

    Raises:
        UnsafePickleError: it does; it holds the forbidden name.
        DamagedError: it is no readable pickle.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            _Scanner(file).load()
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(f"{error} in {path}, allowed: records of torch's checkpoints") from error
    except (EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedError("CORRUPT", f"{path} is damaged, it is no readable pickle: {error}") from error


class CachedReader(FileSystemReader):
    """Reads the metadata once, however many tensors are loaded one at a time."""

    _cached: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The metadata of the checkpoint."""
        if self._cached is None:
            self._cached = super().read_metadata()
        return self._cached


def read_run_config(path: str | Path) -> RunConfig:
    """The config of the run that wrote a checkpoint.

    Args:
        path: A checkpoint, or a folder of them (then its latest).

    Raises:
        OSError: there is no checkpoint, or it cannot be read.
        ValueError: it is incomplete, or its config is not valid.
    """
    file = resolve(path) / RUN_CONFIG
    with intact(file):
        return RunConfig.from_dict(read_json(file))


def checkpoint_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical name and full tensor of every weight, in the order of the forward pass, without vocabulary padding.

    One tensor is read at a time, on the CPU, in the dtype in which it was stored.

    Args:
        path: A checkpoint, or a folder of them (then its latest).

    Raises:
        OSError: there is no checkpoint, or it cannot be read.
        ValueError: it is incomplete or damaged, or its tensors are not those of its config.
    """
    path = resolve(path)
    read_manifest(path)
    run = read_run_config(path)
    scan_metadata(path)
    check_tensors(path, run, with_optimizer=False)
    reader = CachedReader(path)
    stored = reader.read_metadata().state_dict_metadata
    for parameter in canonical_parameters(run.model, run.lowrank):
        entry = stored[parameter.name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
            load({parameter.name: tensor}, storage_reader=reader, no_dist=True)
        yield parameter.name, tensor[: parameter.shape[0]]


def read_train_state(path: str | Path) -> dict[str, Any]:
    """The `train_state` that `save_checkpoint` was given.

    Args:
        path: A checkpoint, or a folder of them (then its latest).

    Raises:
        OSError: there is no checkpoint, or it cannot be read.
        ValueError: it is incomplete, or damaged.
    """
    file = resolve(path) / TRAIN_STATE
    with intact(file):
        return dict(read_json(file)["train_state"])


def check_architecture(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compares two values of `RunConfig.architecture()`.

    Args:
        path: Where the first one is from, for the message.
        stored: Of a checkpoint.
        wanted: Of the run.

    Raises:
        ValueError: they differ; it lists how.
    """
    if lines := differences(stored, wanted, "{name}: checkpoint {old}, run {new}"):
        raise ValueError(f"{path} has another architecture: {some(lines, separator='; ')}")


def check_tensors(path: Path, run: RunConfig, *, with_optimizer: bool) -> None:
    """Compares the names and global shapes of a checkpoint with what the config of a run implies.

    Args:
        path: A complete checkpoint.
        run: The run that wants to read it; the architectures have been found equal.
        with_optimizer: Whether the optimizer's state is wanted too.

    Raises:
        ValueError: a key is missing or unknown, or a shape differs.
    """
    with intact(path / METADATA):
        stored = CachedReader(path).read_metadata().state_dict_metadata
    expected = {parameter.name: parameter for parameter in canonical_parameters(run.model, run.lowrank)}
    weights = dict(expected)
    states = {f"{OPTIMIZER_PREFIX}{s}.{name}": p for s in OPTIMIZER_STATES for name, p in weights.items()}
    if with_optimizer:
        expected |= states
    known = {*weights, *states}
    missing = sorted(set(expected) - set(stored))
    unknown = sorted(
        name for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata) and name not in known
    )
    for word, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            raise ValueError(f"{path} {word} keys {some(names)}")
    for name, parameter in expected.items():
        entry = stored[name]
        found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if not _fits(found, parameter):
            raise ValueError(f"{path}: {name} has the shape {found}, the run's config makes it {parameter.shape}")


def _fits(found: tuple[int, ...] | None, parameter: CanonicalParameter) -> bool:
    if found is None or parameter.kind not in ("embedding", "output"):
        return found == parameter.shape
    return found[0] >= parameter.shape[0] and found[1:] == parameter.shape[1:]  # rows are padded, depending on TP


def verify_checksums(path: str | Path, share: int = 0, shares: int = 1) -> None:
    """Recomputes the digest of every file of a checkpoint, or of a share of the files.

    Args:
        path: A checkpoint, or a folder of them (then its latest).
        share: Which share, from 0.
        shares: Their number.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is missing, or its size or digest is not the manifest's.
    """
    path = resolve(path)
    manifest = read_manifest(path)
    for name in sorted(manifest["files"])[share::shares]:
        check_file(path, name, manifest)
