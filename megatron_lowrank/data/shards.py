"""One shard of documents -> one small pair of token files; this is what a worker of `prepare` does.

A shard is complete when its .json exists: that is written last. Everything carries the worker's process id until it is
renamed, so a worker that outlives a killed run cannot spoil the files of the next one.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowrank import disk
from megatron_lowrank.data.documents import BAD_LINES_KEPT, Piece, Report, read_piece
from megatron_lowrank.data.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Everything a worker needs, small enough to send to one."""

    stem: str
    """Path of the results without suffix."""
    pieces: tuple[Piece, ...]
    """What to read."""
    tokenizer: tuple[str, str | None, str | None]
    """Arguments of `load_tokenizer`."""
    json_key: str
    """Key of the text in a line of JSON."""
    cut_text: int | None
    """Bytes above which a .txt file becomes several documents."""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.end - piece.start for piece in self.pieces)


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """The type that megatron-core picks for a vocabulary: uint16 or int32."""
    from megatron.core.datasets.indexed_dataset import DType

    return DType.optimal_dtype(vocab_size)  # type: ignore[no-any-return]


def shard_record(shard: Shard) -> dict[str, Any] | None:
    """Record of a shard that is complete, or None."""
    try:
        return disk.read_json(Path(f"{shard.stem}.json"))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def write_shard(shard: Shard) -> dict[str, Any]:
    """Encodes a shard and writes `STEM.bin`, `.idx`, `.npy` (count of every token id) and `.json`.

    Returns:
        The record: documents, tokens and the report of every piece.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = _tokenizer(*shard.tokenizer)
    mine = f"{shard.stem}.{os.getpid()}"
    dtype = token_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{mine}.bin", dtype=dtype)
    reports: list[Report] = []
    documents = tokens = 0
    for piece in shard.pieces:
        reports.append(Report(path=piece.path))
        for text in read_piece(piece, shard.json_key, reports[-1], shard.cut_text):
            ids = np.array([*tokenizer.encode(text), tokenizer.eod], dtype=np.int64)
            builder.add_document(ids, [len(ids)])
            documents += 1
            tokens += len(ids)
    builder.finalize(f"{mine}.idx")
    np.save(f"{mine}.npy", np.bincount(np.fromfile(f"{mine}.bin", dtype=dtype)))
    for suffix in (".bin", ".idx", ".npy"):
        os.replace(mine + suffix, shard.stem + suffix)
    record = {"documents": documents, "tokens": tokens, "reports": [report.to_dict() for report in reports]}
    disk.write_json(Path(f"{shard.stem}.json"), record)
    return record


@functools.cache
def _tokenizer(kind: str, path: str | None, eod_token: str | None) -> Tokenizer:
    return load_tokenizer(kind, path, eod_token)


def start_worker(lock: int) -> None:
    """Prepares a worker process: it leaves the lock and the keyboard to its parent, and does not outlive it.

    Args:
        lock: file descriptor of the parent's lock; kept open here it would hold the lock after the parent was killed.
    """
    os.close(lock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Tally:
    """Sums the records of shards, in their order, and turns lines within a piece into lines of a file."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.documents = self.tokens = self.empty = self.text_bytes = 0
        self.bad: Counter[str] = Counter()
        self.examples: list[str] = []
        self.hashes: list[str] = []
        self._lines: Counter[str] = Counter()

    def add(self, record: dict[str, Any]) -> None:
        """Adds the record of the next shard."""
        self.documents += record["documents"]
        self.tokens += record["tokens"]
        for report in record["reports"]:
            self.empty += report["empty"]
            self.text_bytes += report["text_bytes"]
            self.bad.update(report["bad"])
            self.hashes.append(report["sha256"])
            for line, reason in report["where"]:
                if len(self.examples) < BAD_LINES_KEPT:
                    self.examples.append(f"{report['path']}:{self._lines[report['path']] + line}: {reason}")
            self._lines[report["path"]] += report["lines"]
