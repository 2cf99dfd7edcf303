"""Token files -> the endless, shuffled sequence of rows of one file or of a weighted blend.

A row is S + 1 tokens: inputs and, shifted by one, labels. Row i belongs to epoch i // rows_per_epoch. Within its first
epoch the order is that of megatron-core's `GPTDataset` (same random draws, same row boundaries; a test holds the two
together), and so is the order of a blend. Later epochs are shuffled one by one, where `GPTDataset` shuffles as many
epochs as the whole run needs in one go: there the order of rows already seen changes with the length of the run, and a
run that is extended could not resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lowrank.data.cache import Arrays, cached_arrays
from megatron_lowrank.data.files import TokenFiles
from megatron_lowrank.messages import counted

Tokens = npt.NDArray[np.int64]


def split_range(count: int, shares: tuple[float, ...], part: int) -> tuple[int, int]:
    """First and behind-last of the items that belong to one part of a split.

    The rounding is megatron-core's, except that no share above zero stays without an item if there are enough of them.
    """
    total, edges = 0.0, [0]
    enough = count >= sum(share > 0 for share in shares)
    for i, share in enumerate(shares):
        total += share
        edge = round(total * count)
        if enough:
            edge = min(max(edge, edges[-1] + (share > 0)), count - sum(later > 0 for later in shares[i + 1 :]))
        edges.append(edge)
    return edges[part], edges[part + 1]


class Rows(ABC):
    """Rows of a part of one pair of token files."""

    def __init__(
        self, files: TokenFiles, shares: tuple[float, ...], part: int, *, sequence_length: int, seed: int,
        cache: str | None,
    ) -> None:  # fmt: skip
        """Selects the part.

        Args:
            files: checked token files.
            shares: shares of the split.
            part: which of them.
            sequence_length: S.
            seed: seed of the shuffle.
            cache: folder for row indices, or None.

        Raises:
            ValueError: the part has no row.
        """
        self.files, self.sequence_length, self._seed, self._cache = files, sequence_length, seed, cache
        self.first, self.last = split_range(self._units(), shares, part)
        self.rows_per_epoch = self._count()
        # Two epochs: a micro-batch may straddle them.
        self._index = lru_cache(maxsize=2)(self._load_index)

    def __getitem__(self, row: int) -> Tokens:
        """Tokens of a row, [S + 1] or fewer."""
        epoch, position = divmod(row, self.rows_per_epoch)
        return self._read(self._index(epoch), position)

    def _load_index(self, epoch: int) -> Arrays:
        key = {
            "class": type(self).__name__, "files": self.files.digest, "first": self.first, "last": self.last,
            "sequence_length": self.sequence_length, "seed": self._seed, "epoch": epoch,
        }  # fmt: skip
        return cached_arrays(self._cache, key, lambda: self._build(self._random(epoch)))

    def _random(self, epoch: int) -> np.random.RandomState:
        """The first epoch draws as megatron-core does; the seeds of later ones collide with no other run's first."""
        return np.random.RandomState(self._seed if epoch == 0 else [self._seed, epoch])

    def _held(self) -> str:
        """Documents of this part, for an error."""
        documents = counted(self._units(), "document")
        return f"{self.files.prefix}: this part of the split holds {self.last - self.first} of {documents}"

    @abstractmethod
    def _units(self) -> int:
        """Number of items that the split divides."""

    @abstractmethod
    def _count(self) -> int:
        """Rows per epoch."""

    @abstractmethod
    def _build(self, random: np.random.RandomState) -> Arrays:
        """Index of one epoch."""

    @abstractmethod
    def _read(self, index: Arrays, position: int) -> Tokens:
        """Tokens of a row of the epoch that the index describes."""


class PackedRows(Rows):
    """Documents in shuffled order, end to end, cut every S tokens; the rows are shuffled once more."""

    def _units(self) -> int:
        return self.files.sequences

    def _count(self) -> int:
        tokens = int(self.files.lengths[self.first : self.last].sum(dtype=np.int64))
        rows = (tokens - 1) // self.sequence_length
        if rows < 1:
            held = f"{self._held()} with {counted(tokens, 'token')}"
            raise ValueError(f"{held}, allowed: at least {self.sequence_length + 1} tokens, one row")
        return rows

    def _build(self, random: np.random.RandomState) -> Arrays:
        from megatron.core.datasets import helpers

        order = np.arange(self.first, self.last, dtype=np.int32)
        random.shuffle(order)
        lengths = np.array(self.files.lengths)
        tokens = int(lengths[self.first : self.last].sum(dtype=np.int64))
        starts = helpers.build_sample_idx(lengths, order, self.sequence_length, 1, tokens, True, True)
        rows = np.arange(self.rows_per_epoch, dtype=np.uint32 if self.rows_per_epoch < 2**32 - 2 else np.int64)
        random.shuffle(rows)
        return {"order": order, "starts": starts, "rows": rows}

    def _read(self, index: Arrays, position: int) -> Tokens:
        row = int(index["rows"][position])
        (document, offset), (last, end) = (map(int, start) for start in index["starts"][row : row + 2])
        pieces = []
        for i in range(document, last + 1):
            begin = offset if i == document else 0
            # The first token of the next row is the last label of this one.
            length = end + 1 - begin if i == last else None
            pieces.append(self.files.indexed.get(int(index["order"][i]), offset=begin, length=length))
        return np.concatenate(pieces).astype(np.int64)


class DocumentRows(Rows):
    """One document per row, its first S + 1 tokens. Documents of fewer than two tokens predict nothing: no rows."""

    def _units(self) -> int:
        return self.files.documents

    def _usable(self) -> npt.NDArray[np.int64]:
        """Documents of the part that predict a token."""
        starts = self.files.document_starts
        if self.files.sequences == self.files.documents == starts[-2] + 1:
            lengths: npt.NDArray[np.integer[Any]] = self.files.lengths[self.first : self.last]
        else:
            ends = np.concatenate([[0], np.cumsum(self.files.lengths, dtype=np.int64)])[starts]
            lengths = np.diff(ends)[self.first : self.last]
        return self.first + np.flatnonzero(lengths > 1)

    def _count(self) -> int:
        rows = len(self._usable())
        if rows < 1:
            raise ValueError(f"{self._held()}, none of two or more tokens, allowed: at least one")
        return rows

    def _build(self, random: np.random.RandomState) -> Arrays:
        rows = self._usable()
        random.shuffle(rows)
        return {"rows": rows}

    def _read(self, index: Arrays, position: int) -> Tokens:
        document = int(index["rows"][position])
        first, last = (int(start) for start in self.files.document_starts[document : document + 2])
        pieces, room = [], self.sequence_length + 1
        for sequence in range(first, last):
            pieces.append(self.files.indexed.get(sequence, length=min(room, int(self.files.lengths[sequence]))))
            room -= len(pieces[-1])
            if room == 0:
                break
        return np.concatenate(pieces).astype(np.int64)


class Blend:
    """Rows of several sources, interleaved so that at every row the shares taken so far are nearest to the weights."""

    def __init__(
        self, sources: list[Rows], weights: list[float], rows: int, *, cache: str | None, repeat: bool
    ) -> None:
        """Draws the interleaving (megatron-core's greedy rule).

        Args:
            sources: one per file.
            weights: positive; only their ratios count.
            rows: length.
            cache: folder for the index, or None.
            repeat: go through a source again when it is used up; if not, the blend ends there.
        """
        self.sources = sources
        self._index: Arrays | None = None
        self.rows = rows
        if len(sources) > 1:
            shares = np.array(weights, dtype=np.float64)
            shares /= shares.sum()
            key: dict[str, Any] = {"class": "Blend", "weights": shares.tolist(), "rows": rows}
            self._index = cached_arrays(cache, key, lambda: _interleave(shares, rows))
        if not repeat:
            self.rows = self._first_repeat()

    def __getitem__(self, row: int) -> Tokens:
        """Tokens of a row, [S + 1] or fewer."""
        if self._index is None:
            return self.sources[0][row]
        return self.sources[int(self._index["source"][row])][int(self._index["row"][row])]

    def _first_repeat(self) -> int:
        """Number of rows before a source begins its second epoch."""
        if self._index is None:
            return min(self.rows, self.sources[0].rows_per_epoch)
        sizes = np.array([source.rows_per_epoch for source in self.sources])
        over = np.flatnonzero(self._index["row"] >= sizes[self._index["source"]])
        return int(over[0]) if len(over) else self.rows


def _interleave(shares: npt.NDArray[np.float64], rows: int) -> Arrays:
    from megatron.core.datasets import helpers

    source, row = np.zeros(rows, dtype=np.int16), np.zeros(rows, dtype=np.int64)
    helpers.build_blending_indices(source, row, shares, len(shares), rows, False)
    return {"source": source, "row": row}
