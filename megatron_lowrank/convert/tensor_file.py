"""One safetensors file: checked before anything is allocated, and written front to back, one tensor in memory.

Layout: 8-byte little-endian length of the header, a JSON header padded with spaces to 8 bytes, then the tensors.
A library call that takes a dict of tensors would hold a whole shard; here the header is made from `TensorSpec`s, which
are known before the first tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lowrank.convert.errors import ConvertError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_TAGS: dict[torch.dtype, str] = {dtype: tag for tag, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that is yet to be read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """An existing file. Opening reads and checks the header only.

    Raises:
        ConvertError: CORRUPT (truncated, or a header that contradicts itself or the size of the file), DUPLICATE.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if self._size < 8 or length > min(self._size - 8, LARGEST_HEADER):
                    raise self._corrupt(f"holds {self._size} bytes, its header needs {8 + length}")
                header = file.read(length)
        except OSError as error:
            raise ConvertError.from_os_error(error) from error
        self._data_start = 8 + length
        self.specs: dict[str, TensorSpec] = {}
        self._begin: dict[str, int] = {}
        self._read_header(header)

    def read(self, name: str) -> tuple[Tensor, str]:
        """A tensor and the sha256 of its bytes."""
        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        view = _bytes_of(tensor)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self._data_start + self._begin[name])
                done = 0
                # One system call returns at most 2 GiB.
                while done < spec.nbytes and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ConvertError.from_os_error(error) from error
        if done < spec.nbytes:
            raise self._corrupt(f"ends inside tensor {name}: {done} of {spec.nbytes} bytes")
        return tensor, hashlib.sha256(view).hexdigest()

    def _read_header(self, header: bytes) -> None:
        try:
            entries = json.loads(header.decode("utf-8"), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"has an unreadable header ({error})") from error
        if not isinstance(entries, dict):
            raise self._corrupt("has a header that is no JSON object")
        entries.pop("__metadata__", None)
        spans: list[tuple[int, int, str]] = []
        for name, entry in entries.items():
            spec, begin, end = self._entry(name, entry)
            self.specs[name] = spec
            self._begin[name] = begin
            spans.append((begin, end, name))
        expected = 0
        for begin, end, name in sorted(spans):
            if begin != expected:
                raise self._corrupt(f"has data offsets with a gap or overlap at tensor {name}: {begin}, not {expected}")
            expected = end
        if self._data_start + expected != self._size:
            raise self._corrupt(f"holds {self._size} bytes, its tensors need {self._data_start + expected}")

    def _entry(self, name: str, entry: Any) -> tuple[TensorSpec, int, int]:
        try:
            tag, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._corrupt(f"has an incomplete header entry for tensor {name}") from error
        if not isinstance(tag, str) or tag not in DTYPES:
            raise self._corrupt(f"has unknown dtype {tag!r} at tensor {name}")
        sizes = [*shape, begin, end] if isinstance(shape, list) else [None]
        # bool is an int to Python, and json reads `true`.
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise self._corrupt(f"has a bad shape or offset at tensor {name}: {shape!r}, {begin!r}, {end!r}")
        spec = TensorSpec(name=name, shape=tuple(shape), dtype=DTYPES[tag])
        if end - begin != spec.nbytes:
            raise self._corrupt(f"gives {end - begin} bytes to tensor {name}, whose shape {shape} needs {spec.nbytes}")
        return spec, begin, end

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ConvertError("DUPLICATE", f"tensor {repeated} is twice in {self.path}")
        return dict(pairs)

    def _corrupt(self, what: str) -> ConvertError:
        return ConvertError("CORRUPT", f"{self.path} {what}")


class TensorFileWriter:
    """A new file, written front to back: `write` takes the tensors in the order of the specs."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._pending = list(reversed(specs))
        self._hash = hashlib.sha256()
        self._file = open(path, "xb")  # noqa: SIM115 - closed by `close`
        self.bytes = 0
        header = _header(specs)
        self._put(memoryview(len(header).to_bytes(8, "little")))
        self._put(memoryview(header))

    def write(self, name: str, tensor: Tensor) -> str:
        """Append a tensor; returns the sha256 of its bytes."""
        spec = self._pending.pop()
        assert (spec.name, spec.shape, spec.dtype) == (name, tuple(tensor.shape), tensor.dtype), (spec, name)
        data = _bytes_of(tensor.detach().cpu().contiguous())
        self._put(data)
        return hashlib.sha256(data).hexdigest()

    def close(self) -> str:
        """Flush to the disk; returns the sha256 of the whole file."""
        assert not self._pending, self._pending[-1]
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abort(self) -> None:
        """Close without finishing."""
        self._file.close()

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, shared and writable."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": DTYPE_TAGS[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]
        }  # fmt: skip
        offset += spec.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)
