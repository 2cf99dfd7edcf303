"""Conversion between Hugging Face folders and ours: reader -> stream of (canonical name, tensor) -> writer.

Reading order: errors, tensor_file, shards, atomic, description, hub, canonical, training, cola_layout, cola, formats,
report, cli
"""

from megatron_lowrank.convert.canonical import load_canonical, open_canonical, read_canonical, write_canonical
from megatron_lowrank.convert.cola import open_cola
from megatron_lowrank.convert.description import Description, Source, read_description
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import TensorSource

__all__ = [
    "ConvertError", "Description", "Source", "TensorSource", "load_canonical", "open_canonical", "open_cola",
    "read_canonical", "read_description", "write_canonical",
]  # fmt: skip
