"""Rows of a run: megatron-core's order, splits, blends, caches, and every damaged file."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_lowrank.config import DataConfig
from megatron_lowrank.data.datasets import RowDataset, build_datasets, data_tokenizer
from megatron_lowrank.data.files import open_files
from megatron_lowrank.data.prepare import PrepareOptions, prepare
from megatron_lowrank.data.rows import split_range
from megatron_lowrank.testing.ranks import run_ranks

EOD = 256
S = 16


def write(prefix: Path, documents: list[list[int]], sentences: int = 1) -> str:
    """Writes documents as Megatron-LM's preprocess_data.py does, each in this many sequences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        parts = np.array_split(np.array(document), sentences)
        builder.add_document(torch.tensor(document), [len(part) for part in parts])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(count: int, base: int = 0, seed: int = 0) -> list[list[int]]:
    """Documents of different lengths; document i consists of the token base + i and ends with EOD."""
    lengths = np.random.RandomState(seed).randint(3, 40, count)
    return [[base + i] * int(length) + [EOD] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("data")
    first = write(folder / "a_text_document", numbered(150))
    return first, write(folder / "b_text_document", numbered(60, base=300, seed=1))


def build(data: DataConfig, **changes: Any) -> tuple[RowDataset | None, RowDataset | None]:
    values: dict[str, Any] = {"sequence_length": S, "vocab_size": 400, "eod": EOD, "train_rows": 50} | changes
    built = build_datasets(data, **values)
    return built.train, built.valid


def train(data: DataConfig, **changes: Any) -> RowDataset:
    found = build(data, **changes)[0]
    assert found is not None
    return found


def full(row: dict[str, torch.Tensor]) -> list[int]:
    assert row["tokens"][1:].tolist() == row["labels"][:-1].tolist()
    return [*row["tokens"].tolist(), int(row["labels"][-1])]


class _MegatronTokenizer:
    vocab_size, eod, pad, eos = 400, EOD, -1, EOD
    unique_identifiers: dict[str, str] = {}


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("blend", [False, True])
def test_order_is_that_of_megatron_core(
    files: tuple[str, str], tmp_path: Path, blend: bool, eod_mask_loss: bool
) -> None:
    path = ("0.7", files[0], "0.3", files[1]) if blend else (files[0],)
    data = DataConfig(path=path, split="90,10,0", shuffle_seed=7, eod_mask_loss=eod_mask_loss)
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=S, blend=(list(path[1::2]), [0.7, 0.3]) if blend else (list(path), None),
        split="90,10,0", path_to_cache=str(tmp_path), tokenizer=_MegatronTokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=eod_mask_loss, create_attention_mask=False,
    )  # fmt: skip

    def theirs() -> list[Any]:
        # In a process group of one: 0.16's blended dataset asks for its rank without looking whether there is a group.
        built = BlendedMegatronDatasetBuilder(GPTDataset, [150, 8, 0], lambda: True, config).build()
        names = ("tokens", "labels", "loss_mask")
        return [
            [{name: built[part][i][name] for name in names} for i in range(rows)] for part, rows in enumerate((150, 8))
        ]

    ours = build(data, train_rows=150, valid_rows=8)
    for dataset, rows in zip(ours, run_ranks(1, theirs)[0], strict=True):
        assert dataset is not None
        for mine, other in zip((dataset[i] for i in range(len(dataset))), rows, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)
            assert mine["loss_mask"].dtype == torch.float32


def test_packed_rows_reassemble_the_documents(files: tuple[str, str]) -> None:
    dataset = train(DataConfig(path=(files[0],), split="1,0,0"), train_rows=1)
    per_epoch = dataset._rows.sources[0].rows_per_epoch
    dataset = train(DataConfig(path=(files[0],), split="1,0,0"), train_rows=2 * per_epoch)
    index = dataset._rows.sources[0]._index(0)
    stream = [token for document in index["order"] for token in numbered(150)[document]]
    rows = [full(dataset[i]) for i in range(per_epoch)]
    for position, row in zip(index["rows"], rows, strict=True):
        assert row == stream[position * S : (position + 1) * S + 1]
    assert per_epoch == (len(stream) - 1) // S
    # The next epoch holds the same documents in another order.
    again = [full(dataset[i]) for i in range(per_epoch, 2 * per_epoch)]
    assert rows != again
    lost = 2 * (S + 1)
    difference = Counter(t for row in rows for t in row[:-1]) - Counter(t for row in again for t in row[:-1])
    assert difference.total() < lost


@pytest.mark.parametrize("rows", ["packed", "document"])
def test_order_depends_on_the_seed_and_not_on_the_length_of_the_run(
    files: tuple[str, str], tmp_path: Path, rows: Any
) -> None:
    data = DataConfig(path=("2", files[0], "1", files[1]), rows=rows, cache_path=str(tmp_path))
    short, long = train(data, train_rows=500), train(data, train_rows=900)
    other = train(DataConfig(path=data.path, rows=rows, shuffle_seed=43), train_rows=500)
    first = [full(short[i]) for i in range(500)]
    assert first == [full(long[i]) for i in range(500)]
    assert first != [full(other[i]) for i in range(500)]
    with pytest.raises(IndexError, match="row 500"):
        short[500]


def test_document_rows(tmp_path: Path) -> None:
    documents = [[1, 2, EOD], [EOD], [3] * 40 + [EOD], list(range(S)) + [EOD], [], [4, EOD]]
    prefix = write(tmp_path / "d", documents)
    dataset = train(DataConfig(path=(prefix,), split="1,0,0", rows="document"), train_rows=12, pad=0)
    for epoch in range(3):
        texts = []
        for i in range(4 * epoch, 4 * epoch + 4):
            row = dataset[i]
            count = int(row["loss_mask"].sum())
            assert row["loss_mask"].tolist() == [1.0] * count + [0.0] * (S - count)
            assert set(row["tokens"][count + 1 :].tolist()) <= {0}
            texts.append([*row["tokens"][:count].tolist(), int(row["labels"][count - 1])])
        assert sorted(texts) == sorted(d[: S + 1] for d in documents if len(d) > 1)


def test_document_rows_join_sentences(tmp_path: Path) -> None:
    documents = [list(range(i, i + 30)) + [EOD] for i in range(20)]
    plain = train(DataConfig(path=(write(tmp_path / "p", documents),), rows="document"))
    split = train(DataConfig(path=(write(tmp_path / "s", documents, sentences=4),), rows="document"))
    assert [full(plain[i]) for i in range(50)] == [full(split[i]) for i in range(50)]


@pytest.mark.parametrize("rows", ["packed", "document"])
def test_splits_are_disjoint_by_document(files: tuple[str, str], rows: Any) -> None:
    """And the third share is in neither."""
    data = DataConfig(path=(files[0],), split="70,20,10", rows=rows)
    parts = [
        {token for i in range(len(part)) for token in full(part[i]) if token != EOD}
        for part in build(data, train_rows=400, valid_rows=20) if part is not None
    ]  # fmt: skip
    assert max(parts[0]) < 105 <= min(parts[1]) and max(parts[1]) < 135


@settings(max_examples=100)
@given(st.integers(0, 5000), st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any))
def test_split_ranges_cover_everything(count: int, shares: list[int]) -> None:
    normal = tuple(share / sum(shares) for share in shares)
    ranges = [split_range(count, normal, part) for part in range(3)]
    assert [ranges[0][0], ranges[2][1]] == [0, count]
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(ranges[:-1], ranges[1:], strict=True))
    if count >= sum(share > 0 for share in shares):
        assert [first < last for first, last in ranges] == [share > 0 for share in shares]
    expected = [round(edge * count) for edge in (0, normal[0], normal[0] + normal[1], 1)]
    if all(a < b or share == 0 for a, b, share in zip(expected[:-1], expected[1:], shares, strict=True)):
        assert ranges == list(zip(expected[:-1], expected[1:], strict=True)), "megatron-core's"


def test_blends_reach_the_weights_and_valid_path_is_its_own(files: tuple[str, str]) -> None:
    data = DataConfig(path=("3", files[0], "1", files[1]), valid_path=(files[1],))
    dataset, valid = build(data, train_rows=400, valid_rows=5)
    assert dataset is not None and valid is not None
    for rows in (40, 400):
        from_second = sum(max(t for t in full(dataset[i]) if t != EOD) >= 300 for i in range(rows))
        assert abs(from_second - rows / 4) <= 1
    assert all(token >= EOD for i in range(5) for token in full(valid[i]))


def test_validation_never_repeats_a_row(files: tuple[str, str]) -> None:
    for path in ((files[0],), ("1", files[0], "1", files[1])):
        with pytest.warns(UserWarning, match="valid: 1000 rows asked for, the files hold"):
            _, valid = build(DataConfig(path=path, split="50,50,0"), valid_rows=1000)
        assert valid is not None
        sources = valid._rows.sources
        assert 0 < len(valid) <= sum(source.rows_per_epoch for source in sources) < 1000
        assert len(valid) >= min(source.rows_per_epoch for source in sources)


def test_ranks_share_one_cache_and_damage_is_repaired(files: tuple[str, str], tmp_path: Path) -> None:
    data = DataConfig(path=("1", files[0], "1", files[1]), cache_path=str(tmp_path))

    def rank() -> Any:
        dataset = train(data, train_rows=300)
        rows = [full(dataset[i]) for i in range(300)]
        dist.barrier()
        return rows

    first, second = run_ranks(2, rank)
    assert first == second
    entries = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    stamps = [path.stat().st_mtime_ns for path in entries]
    assert len(entries) == 1 + 2 + 2 * 2  # the blend; of each file its largest id and two epochs
    dataset = train(data, train_rows=300)
    assert [full(dataset[i]) for i in range(300)] == first
    assert [path.stat().st_mtime_ns for path in entries] == stamps
    # A folder left by a killed rank, and one that a crash of the machine left cut short.
    (tmp_path / f"{entries[0].name}.killed").mkdir()
    for entry in entries[1:]:
        for array in entry.glob("*.npy"):
            array.write_bytes(array.read_bytes()[:-1])
    dataset = train(data, train_rows=300)
    assert [full(dataset[i]) for i in range(300)] == first


def test_eod_is_masked_where_it_is_the_input(files: tuple[str, str]) -> None:
    dataset = train(DataConfig(path=(files[0],), eod_mask_loss=True))
    for i in range(20):
        row = dataset[i]
        assert torch.equal(row["loss_mask"] == 0, row["tokens"] == EOD)


def _damage(prefix: str, kind: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    match kind:
        case "no bin":
            tokens.unlink()
        case "no idx":
            index.unlink()
        case "neither":
            index.unlink()
            tokens.unlink()
        case "swapped":
            one, other = index.read_bytes(), tokens.read_bytes()
            index.write_bytes(other)
            tokens.write_bytes(one)
        case "short bin":
            tokens.write_bytes(tokens.read_bytes()[:-2])
        case "long bin":
            tokens.write_bytes(tokens.read_bytes() + b"\0\0")
        case "short idx":
            index.write_bytes(index.read_bytes()[:-8])
        case "header only":
            index.write_bytes(index.read_bytes()[:20])
        case "empty idx":
            index.write_bytes(b"")
        case "bad version":
            index.write_bytes(index.read_bytes()[:9] + struct.pack("<Q", 2) + index.read_bytes()[17:])
        case "float tokens":
            index.write_bytes(index.read_bytes()[:17] + b"\x07" + index.read_bytes()[18:])
        case "no documents":
            write(Path(prefix), [])
        case "no tokens":
            write(Path(prefix), [[]])
        case "damaged marks":
            index.write_bytes(index.read_bytes()[:-8] + struct.pack("<q", 1))
        case "large ids":
            write(Path(prefix), [[1, 2, 999, EOD] * 50])
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no bin", r"x\.bin: no such file, found .*x\.idx only, allowed: the prefix of both files"),
        ("no idx", r"x\.idx: no such file, found .*x\.bin only"),
        ("neither", r"x\.bin: no such file, found neither .bin nor .idx"),
        ("swapped", r"x\.idx: found no index header.*the two files are swapped"),
        ("short bin", r"x\.bin: cut short, found \d+ bytes, allowed: \d+ for the \d+ tokens of uint16"),
        ("long bin", r"x\.bin: too long"),
        ("short idx", r"x\.idx: cut short, found \d+ bytes, allowed: \d+ for its 150 sequences and 150 documents"),
        ("header only", r"x\.idx: cut short, found 20 bytes, allowed: at least 34"),
        ("empty idx", r"x\.idx: found no index header"),
        ("bad version", r"x\.idx: found version 2"),
        ("float tokens", r"x\.idx: found version 1 and type code 7, allowed: version 1 and one of"),
        ("no documents", r"x\.idx: empty, found 0 sequences"),
        ("no tokens", r"x\.bin: empty, found no tokens|x\.idx: empty, found no tokens in 1 document,"),
        ("damaged marks", r"x\.idx: damaged, found documents from sequence 0 to 1, allowed: rising from 0 to 150"),
        ("large ids", r"x\.bin: found token id 999, allowed: ids below model.vocab_size 400"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_damaged_files(files: tuple[str, str], tmp_path: Path, kind: str, message: str, cached: bool) -> None:
    prefix = str(tmp_path / "x")
    for suffix in (".bin", ".idx"):
        shutil.copy(files[0] + suffix, prefix + suffix)
    _damage(prefix, kind)
    with pytest.raises(ValueError, match=message):
        train(DataConfig(path=(prefix,)), cache=str(tmp_path / "cache") if cached else None)


def test_prefix_mistakes(files: tuple[str, str], tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        assert open_files(files[0] + suffix).prefix == files[0]
    with pytest.raises(ValueError, match="did you mean .*a_text_document"):
        open_files(files[0].removesuffix("_text_document"))
    with pytest.raises(ValueError, match="data.path: found nothing"):
        train(DataConfig())


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        (
            {"split": "100,0,0"},
            {"valid_rows": 1},
            "data.split '100,0,0', valid: .*holds 0 of 150 documents .*"
            "; give validation a share with --data.split 80,20,0, or switch it off with --train.eval_rows 0",
        ),
        (
            {"split": "9990,10,0"},
            {"valid_rows": 1, "sequence_length": 64},
            "valid: .*holds 1 of 150 documents with .*allowed: at least 65 tokens, one row; give validation more with "
            "--data.split 80,20,0, name other files with --data.valid_path, or cut long texts with prepare_data "
            "--cut-text",
        ),
        ({"split": "98,0,2", "rows": "document"}, {"valid_rows": 1}, "valid: .*none of two or more tokens"),
        ({}, {"sequence_length": 100000}, "train: .*allowed: at least 100001 tokens.*lower --train.sequence_length"),
    ],
)
def test_a_part_without_rows(files: tuple[str, str], data: dict[str, Any], rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DataConfig(path=(files[0],), **data), **rows)


def test_tokenizer_of_the_data(files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(tmp_path / "deep" / "t")
    os.mkdir(tmp_path / "deep")
    prepare(PrepareOptions(out=prefix, train_bpe=270))
    monkeypatch.chdir(tmp_path)
    found = data_tokenizer(DataConfig(path=("deep/t.idx",)))
    assert (found.kind, found.vocab_size, found.path) == ("hf", 270, f"{prefix}.tokenizer.json")
    with pytest.raises(ValueError, match=r"found byte .*allowed for .*: hf \(sha256 [0-9a-f]{12}\)"):
        data_tokenizer(DataConfig(path=(prefix,), tokenizer="byte"))
    with pytest.raises(ValueError, match="found 'auto', but .*a_text_document.json does not tell, allowed: byte"):
        data_tokenizer(DataConfig(path=(files[0],)))
    assert data_tokenizer(DataConfig(path=(files[0],), tokenizer="byte")).kind == "byte"
    with pytest.raises(ValueError, match="data.path: found nothing; make token files with tools/prepare_data.py and"):
        data_tokenizer(DataConfig())


def test_a_sidecar_of_other_files_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text to encode")
    prepare(PrepareOptions(input=(str(tmp_path / "x.txt"),), out=str(tmp_path / "o")))
    record = json.loads((tmp_path / "o.json").read_text())
    write(tmp_path / "o", [[5, 390, EOD] * 30])
    assert open_files(str(tmp_path / "o")).sidecar is None
    assert record["max_token"] == EOD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(train(DataConfig(path=(str(tmp_path / "o"),), split="1,0,0"))) == 50
    with pytest.raises(ValueError, match="found token id 390"):
        train(DataConfig(path=(str(tmp_path / "o"),), split="1,0,0"), vocab_size=390)
