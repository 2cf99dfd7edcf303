"""The canonical folder: full tensors under canonical names, no optimizer. Reader and writer of the hub's own format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lowrank import compat, disk
from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.convert.atomic import atomic_folder, check_destination, read_manifest, write_manifest
from megatron_lowrank.convert.description import DESCRIPTION, Description, Source, read_description
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import (
    Progress,
    TensorSource,
    check_keys,
    check_shapes,
    expected_parameters,
    finite,
    from_tensors,
)
from megatron_lowrank.convert.shards import INDEX, ShardedReader, write_shards

SHARD_BYTES = 5_000_000_000


def open_canonical(folder: str | Path) -> TensorSource:
    """Reader: check everything but the tensors' data, which is verified as it is read.

    Raises:
        ConvertError: any code of a bad folder.
    """
    folder = Path(folder)
    description = read_description(folder)
    manifest = read_manifest(folder)
    if DESCRIPTION not in manifest["files"]:
        raise ConvertError("CORRUPT", f"the manifest does not cover {DESCRIPTION} ({folder})")
    reader = ShardedReader(folder)
    parameters = expected_parameters(description.model, description.lowrank)
    check_keys(parameters, reader.specs, DESCRIPTION, str(folder))
    check_keys(parameters, manifest["tensors"], DESCRIPTION, str(folder / disk.MANIFEST))
    check_shapes(parameters, reader.specs, {name: name for name in parameters}, str(folder))
    reader.expect_checksums({name: str(entry.get("sha256")) for name, entry in manifest["tensors"].items()})
    return TensorSource(
        model=description.model, lowrank=description.lowrank, specs=tuple(reader.specs[name] for name in parameters),
        read=reader.read, source=description.source, seed=description.seed,
    )  # fmt: skip


def save_canonical(
    source: TensorSource,
    dst: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda name, size: None,
) -> None:
    """Writer: stream a source into a new canonical folder.

    Raises:
        ConvertError: from the destination, the disk, or the source while it streams; `dst` is then as before.
    """
    description = Description(
        model=source.model, lowrank=source.lowrank, dtype=source.dtype, source=source.source, seed=source.seed,
        versions=compat.versions(),
    )  # fmt: skip
    check_destination(dst, None, overwrite=overwrite, needed_bytes=source.nbytes)
    with atomic_folder(dst, overwrite=overwrite) as folder:
        disk.write_text(folder / DESCRIPTION, description.to_json())
        shards = write_shards(
            folder, source.specs, source.stream(), limit=shard_bytes, single_name=None, progress=progress
        )
        write_manifest(folder, shards, [DESCRIPTION, INDEX])


def read_canonical(folder: str | Path) -> tuple[ModelConfig, LowRankConfig, Iterator[tuple[str, Tensor]]]:
    """The configs of a canonical folder, and its tensors one by one in canonical order (full, CPU, stored dtype).

    Raises:
        ConvertError: the folder is bad; for a tensor's data (checksum, NaN) only when that tensor is reached.
    """
    source = finite(open_canonical(folder))
    return source.model, source.lowrank, source.stream()


def load_canonical(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a canonical folder at once, by canonical name."""
    return dict(read_canonical(folder)[2])


def write_canonical(
    folder: str | Path,
    model: ModelConfig,
    lowrank: LowRankConfig,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    source: Source | None = None,
    *,
    dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    seed: int | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Write full tensors as a canonical folder, atomically.

    Args:
        folder: the new folder; its parent exists.
        model: shape of the model.
        lowrank: method, ranks and activations.
        tensors: name -> tensor, or an iterable of pairs in the order of `canonical_parameters`, taken one at a time.
        source: where the weights come from. Default: `python`.
        dtypes: with an iterable, the dtype of every tensor (or one per name), since sizes are written first.
        overwrite: replace an existing folder, after the new one is complete.
        shard_bytes: size at which a new shard begins.
        seed: seed of the initial weights, for the record.
        allow_nonfinite: write NaN and infinities too.
    """
    stream = replace(from_tensors(model, lowrank, tensors, source or Source(kind="python"), dtypes), seed=seed)
    save_canonical(
        stream if allow_nonfinite else finite(stream), Path(folder), overwrite=overwrite, shard_bytes=shard_bytes
    )
