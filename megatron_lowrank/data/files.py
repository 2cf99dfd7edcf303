"""Megatron's token files: checked before use, with the sidecar that `prepare` writes beside them.

`PREFIX.bin` holds token ids end to end; `PREFIX.idx` holds, after a header of 34 bytes, the length (int32) and byte
offset (int64) of every sequence and the first sequence (int64) of every document, plus one end mark. They are written
by megatron-core's `IndexedDatasetBuilder`, here or by Megatron-LM's `preprocess_data.py`, and read by its
`IndexedDataset`, which trusts them; so everything is checked here first. `PREFIX.json` is ours and optional.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version 1, code of the dtype, number of sequences, number of documents plus one."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Code in the header -> integer type."""
_EDGE = 1 << 20
_SCAN = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """One checked pair of files."""

    prefix: str
    """Path without .bin and .idx."""
    dtype: np.dtype[Any]
    """Type of a token on disk."""
    sequences: int
    """Number of sequences; without sentence splitting a document is one."""
    documents: int
    """Number of documents."""

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sequence, memory-mapped."""
        return np.memmap(f"{self.prefix}.idx", dtype="<i4", mode="r", offset=HEADER.size, shape=(self.sequences,))

    @cached_property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """First sequence of every document, and the number of sequences, memory-mapped."""
        offset = HEADER.size + 12 * self.sequences
        return np.memmap(f"{self.prefix}.idx", dtype="<i8", mode="r", offset=offset, shape=(self.documents + 1,))

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens end to end, memory-mapped."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r")

    @cached_property
    def indexed(self) -> Any:
        """megatron-core's `IndexedDataset` over the files."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(self.prefix)

    @cached_property
    def digest(self) -> str:
        """Identity of the contents: sizes and both ends of both files, 16 hexadecimal digits; paths do not enter."""
        digest = hashlib.sha256()
        for suffix in (".bin", ".idx"):
            size = os.path.getsize(self.prefix + suffix)
            digest.update(struct.pack("<Q", size))
            with open(self.prefix + suffix, "rb") as stream:
                digest.update(stream.read(_EDGE))
                stream.seek(max(0, size - _EDGE))
                digest.update(stream.read())
        return digest.hexdigest()[:16]

    @cached_property
    def sidecar(self) -> dict[str, Any] | None:
        """What `prepare` recorded, or None without a sidecar or with one that tells of other files."""
        try:
            with open(f"{self.prefix}.json", encoding="utf-8") as stream:
                record = json.load(stream)
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("files_digest") == self.digest else None

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each token id occurs, [largest id + 1]. Reads the whole .bin file.

        Raises:
            ValueError: a negative id.
        """
        total = np.zeros(0, dtype=np.int64)
        for start in range(0, len(self.tokens), _SCAN):
            part = self.tokens[start : start + _SCAN]
            if part.min() < 0:
                raise ValueError(f"{self.prefix}.bin: found token id {part.min()}, allowed: 0 and more")
            total = add_counts(total, np.bincount(part))
        return total

    def max_token(self) -> int:
        """Largest token id; from the sidecar if there is one, else by reading the whole .bin file."""
        return int(self.sidecar["max_token"]) if self.sidecar else len(self.counts()) - 1


def strip_suffix(prefix: str) -> str:
    """The prefix of a path that may name one of the two files."""
    return prefix.removesuffix(".bin").removesuffix(".idx")


def open_files(path: str) -> TokenFiles:
    """Checks a pair of token files.

    Args:
        path: prefix; one of the two file names is taken for it too.

    Raises:
        ValueError: a file is missing, empty, cut short, or not what its suffix says.
    """
    prefix = strip_suffix(path)
    for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
        if not os.path.isfile(prefix + suffix):
            found = f"{prefix}{other} only" if os.path.isfile(prefix + other) else "neither .bin nor .idx"
            hint = f"; did you mean {prefix}_text_document?" if os.path.isfile(f"{prefix}_text_document.idx") else ""
            raise ValueError(f"{prefix}{suffix}: no such file, found {found}, allowed: the prefix of both files{hint}")
    size = os.path.getsize(f"{prefix}.idx")
    with open(f"{prefix}.idx", "rb") as stream:
        head = stream.read(HEADER.size)
    with open(f"{prefix}.bin", "rb") as stream:
        swapped = stream.read(len(MAGIC)) == MAGIC
    if head[: len(MAGIC)] != MAGIC:
        what = f"; {prefix}.bin has one, so the two files are swapped" if swapped else ""
        raise ValueError(f"{prefix}.idx: found no index header, allowed: a file that begins with MMIDIDX{what}")
    if size < HEADER.size:
        raise ValueError(f"{prefix}.idx: cut short, found {size} bytes, allowed: at least {HEADER.size}")
    _, version, code, sequences, marks = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise ValueError(
            f"{prefix}.idx: found version {version} and type code {code}, allowed: version 1 and one of {DTYPES}"
        )
    expected = HEADER.size + 12 * sequences + 8 * marks
    # Multimodal files carry one more byte per sequence; the tokens are the same.
    if size not in (expected, expected + sequences):
        state = "cut short" if size < expected else "too long"
        raise ValueError(
            f"{prefix}.idx: {state}, found {size} bytes, allowed: {expected} for its {sequences} sequences and "
            f"{marks - 1} documents"
        )
    if sequences == 0 or marks < 2:
        raise ValueError(f"{prefix}.idx: empty, found {sequences} sequences, allowed: at least one document")
    files = TokenFiles(
        prefix=prefix, dtype=np.dtype(DTYPES[code]).newbyteorder("<"), sequences=sequences, documents=marks - 1
    )
    _check_contents(files)
    return files


def _check_contents(files: TokenFiles) -> None:
    prefix = files.prefix
    starts = files.document_starts
    if starts[0] != 0 or starts[-1] != files.sequences or (starts[1:] < starts[:-1]).any():
        raise ValueError(
            f"{prefix}.idx: damaged, found documents from sequence {starts[0]} to {starts[-1]}, allowed: rising from 0 "
            f"to {files.sequences}"
        )
    if files.lengths.min() < 0:
        raise ValueError(f"{prefix}.idx: damaged, found a sequence of {files.lengths.min()} tokens, allowed: 0 or more")
    tokens = int(files.lengths.sum(dtype=np.int64))
    if tokens == 0:
        raise ValueError(f"{prefix}.idx: empty, found no tokens in {files.documents} documents, allowed: at least one")
    size, expected = os.path.getsize(f"{prefix}.bin"), tokens * files.dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{prefix}.bin: {'cut short' if size < expected else 'too long'}, found {size} bytes, allowed: {expected} "
            f"for the {tokens} tokens of {files.dtype.name} that {prefix}.idx lists"
        )


def add_counts(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sum of two count vectors of different length."""
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    total = long.astype(np.int64)
    total[: len(short)] += short
    return total


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that the counts describe."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_entropy(prefix: str) -> float:
    """Entropy in nats per token of the token distribution: the loss of a model that knows frequencies and no context.

    Args:
        prefix: prefix of any .bin/.idx pair.

    Raises:
        ValueError: see `open_files`.
    """
    files = open_files(prefix)
    return float(files.sidecar["unigram_entropy"]) if files.sidecar else entropy(files.counts())


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Writes a JSON file that is either complete or absent."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
