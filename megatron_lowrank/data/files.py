"""Megatron's token files: checked before use, with the sidecar that `prepare` writes beside them.

`PREFIX.bin` holds token ids end to end; `PREFIX.idx` holds, after a header of 34 bytes, the length (int32) and byte
offset (int64) of every sequence and the first sequence (int64) of every document, plus one end mark. They are written
by megatron-core's `IndexedDatasetBuilder`, here or by Megatron-LM's `preprocess_data.py`, and read by its
`IndexedDataset`, which trusts them; so everything is checked here first. `PREFIX.json` is ours and optional.

Each process checks a pair once, until one of the files changes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lowrank import disk
from megatron_lowrank.data.cache import cached_arrays
from megatron_lowrank.messages import counted

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version 1, code of the dtype, number of sequences, number of documents plus one."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Code in the header -> integer type."""
_BLOCK, _BLOCKS = 1 << 16, 64
"""Bytes and number of the blocks of .bin that enter the digest."""
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
        """Identity of the contents, 16 hexadecimal digits; paths do not enter.

        It covers the whole .idx file, and of the .bin file its size and 64 blocks of 64 KiB from the first byte to the
        last: all of a small file. Other tokens in documents of the same lengths, between the blocks, are not seen.
        """
        digest = hashlib.sha256()
        with open(f"{self.prefix}.idx", "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
        size = os.path.getsize(f"{self.prefix}.bin")
        digest.update(struct.pack("<Q", size))
        with open(f"{self.prefix}.bin", "rb") as stream:
            for start in np.unique(np.linspace(0, max(0, size - _BLOCK), _BLOCKS).astype(np.int64)):
                stream.seek(int(start))
                digest.update(stream.read(_BLOCK))
        return digest.hexdigest()[:16]

    @cached_property
    def sidecar(self) -> dict[str, Any] | None:
        """What `prepare` recorded, or None without a sidecar or with one that tells of other files (by `digest`)."""
        try:
            record = disk.read_json(Path(f"{self.prefix}.json"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("files_digest") == self.digest else None

    def counts(self, cache: str | None = None) -> npt.NDArray[np.int64]:
        """How often each token id occurs, [largest id + 1].

        Args:
            cache: folder that keeps the counts; without them the whole .bin file is read.

        Raises:
            ValueError: a negative id.
        """
        key = {"class": "token_counts", "files": self.digest}
        return cached_arrays(cache, key, lambda: {"counts": self._count()})["counts"]

    def max_token(self, cache: str | None = None) -> int:
        """Largest token id; from the sidecar if there is one, else from `counts`."""
        return int(self.sidecar["max_token"]) if self.sidecar else len(self.counts(cache)) - 1

    def _count(self) -> npt.NDArray[np.int64]:
        total = np.zeros(0, dtype=np.int64)
        for start in range(0, len(self.tokens), _SCAN):
            part = self.tokens[start : start + _SCAN]
            if part.min() < 0:
                raise ValueError(f"{self.prefix}.bin: found token id {part.min()}, allowed: 0 and more")
            total = add_counts(total, np.bincount(part))
        return total


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
    return _open(prefix, tuple(_stamp(prefix + suffix) for suffix in (".bin", ".idx", ".json")))


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes when a file does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=256)
def _open(prefix: str, stamps: tuple[object, ...]) -> TokenFiles:
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
        held = f"{counted(sequences, 'sequence')} and {counted(marks - 1, 'document')}"
        raise ValueError(f"{prefix}.idx: {state}, found {size} bytes, allowed: {expected} for its {held}")
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
        held = counted(files.documents, "document")
        raise ValueError(f"{prefix}.idx: empty, found no tokens in {held}, allowed: at least one")
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


def unigram_entropy(prefix: str, cache: str | None = None) -> float:
    """Entropy in nats per token of the token distribution: the loss of a model that knows frequencies and no context.

    Args:
        prefix: prefix of any .bin/.idx pair.
        cache: as for `TokenFiles.counts`, which are needed only without a sidecar.

    Raises:
        ValueError: see `open_files`.
    """
    files = open_files(prefix)
    return float(files.sidecar["unigram_entropy"]) if files.sidecar else entropy(files.counts(cache))
