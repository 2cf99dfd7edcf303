"""Which format a folder is in, and the tables of readers and writers. A new format is one row here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_lowrank.checkpoint.read import METADATA
from megatron_lowrank.convert.canonical import open_canonical
from megatron_lowrank.convert.cola import CONFIG, check_reference_cola, open_cola, save_reference_cola
from megatron_lowrank.convert.cola_layout import detect_layout
from megatron_lowrank.convert.description import DESCRIPTION
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import TensorSource
from megatron_lowrank.convert.shards import ShardedReader, read_json
from megatron_lowrank.convert.training import open_training
from megatron_lowrank.disk import MARKER

Format = Literal["canonical", "training", "cola", "cola_m"]

READERS: dict[Format, Callable[[Path], TensorSource]] = {
    "canonical": open_canonical,
    "training": open_training,
    "cola": lambda folder: open_cola(folder, "cola"),
    "cola_m": lambda folder: open_cola(folder, "cola_m"),
}
"""Every format has a reader."""

HF_FORMATS: tuple[Format, ...] = ("cola", "cola_m")
"""What `import-hf` takes."""

WRITERS = {"reference-cola": (check_reference_cola, save_reference_cola)}
"""Layouts of `export-hf`: layout -> (check that refuses a model, writer)."""


def detect_format(path: Path) -> Format:
    """The format of a folder.

    Raises:
        ConvertError: MISSING_FILE, UNKNOWN_ARCH, or what is wrong with its index or headers.
    """
    if not path.is_dir():
        raise ConvertError("MISSING_FILE", f"{path} is no folder" if path.exists() else f"{path} does not exist")
    if (path / DESCRIPTION).is_file():
        return "canonical"
    if (path / METADATA).exists() or (path / MARKER).exists() or any(path.glob("iter_*")):
        return "training"
    if not (path / CONFIG).is_file():
        raise ConvertError("UNKNOWN_ARCH", f"found neither {DESCRIPTION} nor {CONFIG} ({path})")
    layout = detect_layout(keys := ShardedReader(path).specs)
    if layout is None:
        config = read_json(path / CONFIG)
        dense = any(key.endswith("_proj.weight") for key in keys)
        what = f"architectures {config.get('architectures')}, model_type {config.get('model_type')!r}"
        what += ", dense projections" if dense else ""
        raise ConvertError("UNKNOWN_ARCH", f"found {what}; supported: {', '.join(READERS)} ({path})")
    return layout


def open_source(path: Path, allowed: tuple[Format, ...], command: str) -> TensorSource:
    """Open a folder with the reader of its format.

    Args:
        path: the folder.
        allowed: formats that the command takes.
        command: its name, for the message.

    Raises:
        ConvertError: UNKNOWN_ARCH when the format is another one; any code of a bad folder.
    """
    found = detect_format(path)
    if found not in allowed:
        known = {"training": "a training checkpoint", "canonical": "a canonical folder"}.get(found, f"a {found} folder")
        raise ConvertError("UNKNOWN_ARCH", f"found {known}, {command} takes: {', '.join(allowed)} ({path})")
    return READERS[found](path)
