"""Reader and writer of the public CoLA folder; the reader also takes CoLA-M."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lowrank import disk
from megatron_lowrank.convert.atomic import atomic_folder, check_destination
from megatron_lowrank.convert.cola_layout import (
    DROPPED_BUFFERS,
    Layout,
    detect_layout,
    read_cola_config,
    reference_key,
    why_not_reference,
    write_cola_config,
)
from megatron_lowrank.convert.description import Source
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import Progress, TensorSource, check_keys, check_shapes, expected_parameters
from megatron_lowrank.convert.shards import SINGLE, ShardedReader, read_json, write_shards
from megatron_lowrank.names import EMBEDDING

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TRAINING_STATE = "training_state.json"
HEAD = "lm_head.weight"


def open_cola(folder: Path, layout: Layout | None = None) -> TensorSource:
    """Reader of a CoLA or CoLA-M folder.

    Args:
        folder: holds `config.json` and safetensors.
        layout: which names to expect; None: told by the keys.

    Raises:
        ConvertError: any code of a bad folder.
    """
    config = read_json(folder / CONFIG)
    reader = ShardedReader(folder)
    present = detect_layout(reader.specs)
    if present is None:
        raise ConvertError("UNKNOWN_ARCH", f"no cola_a and cola_b tensors, supported: cola, cola_m ({folder})")
    if layout not in (None, present):
        raise ConvertError("UNKNOWN_ARCH", f"found the names of {present}, asked for {layout} ({folder})")
    model, lowrank, notes = read_cola_config(config, folder / CONFIG)
    parameters = expected_parameters(model, lowrank)
    keys = {name: reference_key(parameter, present, model.num_layers) for name, parameter in parameters.items()}
    found, dropped = _without_extras(reader, model.tie_embeddings, folder)
    notes += dropped
    check_keys([key for key, _ in keys.values()], found, f"{CONFIG} as {present}", str(folder))
    specs = {}
    for name, (key, transposed) in keys.items():
        spec = reader.specs[key]
        specs[name] = replace(spec, name=name, shape=spec.shape[::-1] if transposed else spec.shape)
    check_shapes(parameters, specs, {name: key for name, (key, _) in keys.items()}, str(folder))

    def read(name: str) -> Tensor:
        key, transposed = keys[name]
        return reader.read(key).T.contiguous() if transposed else reader.read(key)

    return TensorSource(
        model=model, lowrank=lowrank, specs=tuple(specs.values()), read=read, notes=tuple(notes),
        source=Source(kind=present, metadata=_training_state(folder)),
    )  # fmt: skip


def save_reference_cola(
    source: TensorSource,
    dst: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int,
    progress: Progress = lambda name, size: None,
) -> None:
    """Writer of a folder that the public CoLA code loads.

    Raises:
        ConvertError: NOT_EXPRESSIBLE with the reason; errors of the destination, the disk or the source.
    """
    check_reference_cola(source)
    layers = source.model.num_layers
    parameters = expected_parameters(source.model, source.lowrank)
    keys = {name: reference_key(parameter, "cola", layers) for name, parameter in parameters.items()}
    specs = []
    for spec in source.specs:
        key, transposed = keys[spec.name]
        specs.append(replace(spec, name=key, shape=spec.shape[::-1] if transposed else spec.shape))

    def read(name: str) -> tuple[str, Tensor]:
        key, transposed = keys[name]
        return key, source.read(name).T.contiguous() if transposed else source.read(name)

    dtype = source.specs[0].dtype if source.dtype == "mixed" else getattr(torch, source.dtype)
    config = write_cola_config(source.model, source.lowrank, str(dtype).removeprefix("torch."))
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    check_destination(dst, None, overwrite=overwrite, needed_bytes=source.nbytes)
    with atomic_folder(dst, overwrite=overwrite) as folder:
        disk.write_json(folder / CONFIG, dict(sorted(config.items())))
        disk.write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **special})
        stream = (read(spec.name) for spec in source.specs)
        write_shards(folder, specs, stream, limit=shard_bytes, single_name=SINGLE, progress=progress)


def check_reference_cola(source: TensorSource) -> None:
    """Refuse a model that the public code cannot express.

    Raises:
        ConvertError: NOT_EXPRESSIBLE.
    """
    if (reason := why_not_reference(source.model, source.lowrank)) is not None:
        raise ConvertError("NOT_EXPRESSIBLE", f"reference-cola: {reason}")


def _without_extras(reader: ShardedReader, tied: bool, folder: Path) -> tuple[list[str], list[str]]:
    """Keys without harmless ones, and notes about those."""
    buffers = [key for key in reader.specs if key.endswith(DROPPED_BUFFERS)]
    found = [key for key in reader.specs if key not in buffers]
    notes = [f"dropped {len(buffers)} buffers such as {buffers[0]}"] if buffers else []
    if tied and HEAD in found:
        # Some libraries save the shared matrix twice. Bits are compared: a NaN equals itself.
        embedding = "model.embed_tokens.weight"
        same = embedding in found and reader.specs[HEAD].shape == reader.specs[embedding].shape
        if not same or not torch.equal(reader.read(HEAD).view(torch.uint8), reader.read(embedding).view(torch.uint8)):
            what = f"tie_word_embeddings is true, but {HEAD} differs from {embedding} (here {EMBEDDING})"
            raise ConvertError("CONFIG", f"{what} ({folder})")
        found.remove(HEAD)
        notes.append(f"dropped {HEAD}, a copy of the tied embedding")
    return found, notes


def _training_state(folder: Path) -> dict[str, Any]:
    """Plain numbers of `training_state.json`, if there is one."""
    if not (folder / TRAINING_STATE).is_file():
        return {}
    values = read_json(folder / TRAINING_STATE)
    return {name: value for name, value in values.items() if type(value) in (int, float)}
