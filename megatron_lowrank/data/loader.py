"""Rows -> the micro-batches of one data-parallel rank, resumable from the number of rows consumed alone.

The rows form one global stream. A step of global batch G that begins at row c takes rows c to c + G - 1; micro-batch m
of data-parallel rank r holds rows c + (m * D + r) * b to the b-th after it (D ranks, b rows each). So row i is the same
whatever D and b are, and a run may change them, or G, whenever it resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from megatron_lowrank.data.datasets import RowDataset
from megatron_lowrank.messages import differences

Batch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [b, S] int64 and loss_mask [b, S] float32, on the CPU."""


class Loader:
    """Micro-batches of one data-parallel rank."""

    def __init__(
        self, dataset: RowDataset, *, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int,
        consumed_rows: int = 0, prefetch: bool = False,
    ) -> None:  # fmt: skip
        """Starts at a row.

        Args:
            dataset: the rows.
            micro_batch_size: b.
            data_parallel_rank: r.
            data_parallel_size: D.
            consumed_rows: rows of the global stream that are behind.
            prefetch: read the next micro-batch in a thread while the current one is in use.

        Raises:
            ValueError: a number out of range.
        """
        if micro_batch_size < 1 or data_parallel_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"loader: found micro-batch size {micro_batch_size}, data-parallel rank {data_parallel_rank} of "
                f"{data_parallel_size}, allowed: sizes from 1, ranks from 0 below the size"
            )
        if consumed_rows < 0:
            raise ValueError(f"loader: found consumed_rows {consumed_rows}, allowed: 0 or more")
        self.dataset, self.consumed_rows = dataset, consumed_rows
        self._micro_batch_size, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader") if prefetch else None
        self._ahead: tuple[int, Future[Batch]] | None = None

    @property
    def row_step(self) -> int:
        """Rows that all ranks take per micro-batch: b * D."""
        return self._micro_batch_size * self._ranks

    def step(self, global_batch_size: int, copies: int = 1) -> list[Iterator[Batch]]:
        """Iterators over this rank's micro-batches of the next optimizer step.

        The step counts as consumed at once: pipeline stages that read no data must agree with those that do.

        Args:
            global_batch_size: G; it may differ from step to step.
            copies: independent iterators over the same micro-batches, one per model chunk of a pipeline stage.

        Raises:
            ValueError: G is not a multiple of b * D, or the dataset ends before.
        """
        if global_batch_size < 1 or global_batch_size % self.row_step:
            raise ValueError(
                f"global batch size: found {global_batch_size}, allowed: a multiple of micro-batch size "
                f"{self._micro_batch_size} x data-parallel size {self._ranks} = {self.row_step}"
            )
        start, stop = self.consumed_rows, self.consumed_rows + global_batch_size
        if stop > len(self.dataset):
            raise ValueError(f"loader: rows {start} to {stop - 1} wanted, the dataset has {len(self.dataset)}")
        self.consumed_rows = stop
        return [self._micro_batches(start, stop) for _ in range(copies)]

    def evaluate(self, rows: int) -> Iterator[Batch]:
        """This rank's micro-batches of the first rows of the dataset; every rank gets equally many.

        Each of the rows is in exactly one micro-batch of one rank; where they do not fill the last micro-batches,
        rows with loss_mask zero do.

        Args:
            rows: how many; more than the dataset has are cut to what it has.
        """
        rows = min(rows, len(self.dataset))
        for position in range(0, rows, self.row_step):
            yield self._read(position, rows)

    def evaluation_micro_batches(self, rows: int) -> int:
        """Number of micro-batches that `evaluate` yields."""
        return -(-min(rows, len(self.dataset)) // self.row_step)

    def state_dict(self) -> dict[str, Any]:
        """Rows consumed and what the rows are, as JSON values."""
        return {"consumed_rows": self.consumed_rows, "data": self.dataset.description}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues behind the rows of a saved state, whatever data-parallel and micro-batch sizes it was saved with.

        Raises:
            ValueError: the state belongs to other rows; the message lists what differs.
        """
        old, new = state["data"], self.dataset.description
        # Files may be renamed.
        stored, ours = ({key: value for key, value in rows.items() if key != "names"} for rows in (old, new))
        if differ := differences(stored, ours, "{name} {new!r} now, {old!r} in the checkpoint"):
            raise ValueError(
                f"data: the checkpoint was trained on other rows ({'; '.join(differ)}; files {new.get('names')} now, "
                f"{old.get('names')} in the checkpoint), allowed: the same data settings, or load the weights only"
            )
        self.consumed_rows = int(state["consumed_rows"])

    def _micro_batches(self, start: int, stop: int) -> Iterator[Batch]:
        for position in range(start, stop, self.row_step):
            yield self._fetch(position) if self._pool is not None else self._read(position, stop)

    def _fetch(self, position: int) -> Batch:
        """The micro-batch at a position, and the one behind it in the background."""
        assert self._pool is not None
        if self._ahead is not None and self._ahead[0] == position:
            batch = self._ahead[1].result()
        else:
            batch = self._read(position, len(self.dataset))
        behind = position + self.row_step
        # Also across steps: where a micro-batch lies does not depend on the global batch size.
        if behind + self.row_step <= len(self.dataset):
            self._ahead = behind, self._pool.submit(self._read, behind, len(self.dataset))
        return batch

    def _read(self, position: int, stop: int) -> Batch:
        """This rank's rows of the micro-batch at a position; rows from `stop` on are padding."""
        first = position + self._rank * self._micro_batch_size
        rows = []
        for row in range(first, first + self._micro_batch_size):
            item = self.dataset[min(row, stop - 1)]
            if row >= stop:
                item["loss_mask"] = torch.zeros_like(item["loss_mask"])
            rows.append(item)
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask")}
        batch["position_ids"] = torch.arange(self.dataset.sequence_length).repeat(self._micro_batch_size, 1)
        return batch
