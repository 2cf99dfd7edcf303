"""The loader: the same global stream for any data-parallel size, resumed at any row."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowrank.config import DataConfig
from megatron_lowrank.data.datasets import RowDataset, build_datasets
from megatron_lowrank.data.loader import Batch, Loader
from megatron_lowrank.data.prepare import PrepareOptions, prepare

ROWS = 96
S = 16


def _dataset(prefix: str, **changes: Any) -> RowDataset:
    built = build_datasets(
        DataConfig(path=(prefix,), split="1,0,0", **changes),
        sequence_length=S,
        vocab_size=257,
        eod=256,
        train_rows=ROWS,
    )
    assert built.train is not None
    return built.train


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("loader")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i} " * (1 + i % 4))
    prepare(PrepareOptions(input=(str(folder),), out=str(folder / "o")))
    return str(folder / "o")


@pytest.fixture(scope="module")
def dataset(prefix: str) -> RowDataset:
    return _dataset(prefix)


@pytest.fixture(scope="module")
def stream(dataset: RowDataset) -> torch.Tensor:
    return torch.stack([dataset[i]["tokens"] for i in range(ROWS)])


def _loaders(dataset: RowDataset, ranks: int, micro: int, **options: Any) -> list[Loader]:
    return [
        Loader(dataset, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks, **options)
        for rank in range(ranks)
    ]


def _global(loaders: list[Loader], batch: int) -> torch.Tensor:
    """One step of all ranks, put back into the order of the global stream."""
    steps = [loader.step(batch)[0] for loader in loaders]
    return torch.cat([item["tokens"] for micro in zip(*steps, strict=True) for item in micro])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stream_is_the_same_for_any_layout_and_any_interruption(
    dataset: RowDataset, stream: torch.Tensor, data: st.DataObject
) -> None:
    consumed, state = 0, None
    while consumed < ROWS // 2:
        # Another layout, another batch size, another process.
        ranks, micro = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        batch = ranks * micro * data.draw(st.integers(1, 3))
        loaders = _loaders(dataset, ranks, micro, prefetch=data.draw(st.booleans()))
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(data.draw(st.integers(1, 2))):
            if consumed + batch > ROWS:
                break
            assert torch.equal(_global(loaders, batch), stream[consumed : consumed + batch])
            consumed += batch
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        state = json.loads(states[0])
        if consumed + 36 > ROWS:
            break
    assert state is not None and state["consumed_rows"] == consumed


def test_batches(dataset: RowDataset) -> None:
    loader = Loader(dataset, micro_batch_size=3, data_parallel_rank=1, data_parallel_size=2, consumed_rows=4)
    left, right = (list(iterator) for iterator in loader.step(12, copies=2))
    assert len(left) == len(right) == 2
    for batch, again in zip(left, right, strict=True):
        assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
            "tokens": ((3, S), torch.int64), "labels": ((3, S), torch.int64), "loss_mask": ((3, S), torch.float32),
            "position_ids": ((3, S), torch.int64),
        }  # fmt: skip
        assert batch["position_ids"].tolist() == [list(range(S))] * 3
        assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert torch.equal(left[1]["tokens"][0], dataset[4 + 6 + 3]["tokens"])


def test_a_step_counts_before_it_is_read(dataset: RowDataset, stream: torch.Tensor) -> None:
    loader = Loader(dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1)
    first = loader.step(4)[0]
    assert loader.state_dict()["consumed_rows"] == 4
    second = loader.step(4)[0]
    assert torch.equal(torch.cat([b["tokens"] for b in second]), stream[4:8])
    assert torch.equal(torch.cat([b["tokens"] for b in first]), stream[:4])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, ROWS + 5), st.integers(1, 4), st.integers(1, 5))
def test_evaluation_counts_every_row_once(
    dataset: RowDataset, stream: torch.Tensor, rows: int, ranks: int, micro: int
) -> None:
    found: list[torch.Tensor] = []
    per_rank: list[list[Batch]] = [list(loader.evaluate(rows)) for loader in _loaders(dataset, ranks, micro)]
    assert {len(batches) for batches in per_rank} == {_loaders(dataset, ranks, micro)[0].evaluation_micro_batches(rows)}
    for batches in zip(*per_rank, strict=True):
        for batch in batches:
            assert batch["tokens"].shape == (micro, S)
            found += [t for t, mask in zip(batch["tokens"], batch["loss_mask"], strict=True) if mask.any()]
    assert torch.equal(torch.stack(found), stream[: min(rows, ROWS)])


def test_other_data_is_refused(prefix: str, dataset: RowDataset) -> None:
    def loader(other: RowDataset) -> Loader:
        return Loader(other, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)

    start = loader(dataset)
    start.step(5)
    state = start.state_dict()
    with pytest.raises(
        ValueError, match=r"other rows \(rows 'document' now, 'packed' in the checkpoint; shuffle_seed 5"
    ):
        loader(_dataset(prefix, shuffle_seed=5, rows="document")).load_state_dict(state)
    with pytest.raises(ValueError, match="files .* now, .* in the checkpoint"):
        loader(dataset).load_state_dict({**state, "data": {**state["data"], "files": [[1.0, "0123"]]}})
    # Where the files lie does not matter.
    again = loader(dataset)
    again.load_state_dict({**state, "data": {**state["data"], "names": ["moved"]}})
    assert again.consumed_rows == 5


def test_mistakes(dataset: RowDataset) -> None:
    loader = Loader(dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2)
    with pytest.raises(
        ValueError, match="found 6, allowed: a multiple of micro-batch size 2 x data-parallel size 2 = 4"
    ):
        loader.step(6)
    with pytest.raises(ValueError, match="rows 0 to 99 wanted, the dataset has 96"):
        loader.step(100)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="data-parallel rank"):
            Loader(dataset, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=size)
    with pytest.raises(ValueError, match="consumed_rows -1"):
        Loader(dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1, consumed_rows=-1)
