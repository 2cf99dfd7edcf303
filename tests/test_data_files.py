"""Token files: what the digest covers, and that one process checks and counts a pair once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_lowrank.config import DataConfig
from megatron_lowrank.data.datasets import Datasets, build_datasets, data_tokenizer
from megatron_lowrank.data.files import open_files, unigram_entropy

EOD = 256


def write(path: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{path}.idx")
    return str(path)


def numbered(count: int) -> list[list[int]]:
    return [[i] * (i + 20) + [EOD] for i in range(count)]


def build(data: DataConfig, cache: str | None = None) -> Datasets:
    return build_datasets(data, sequence_length=16, vocab_size=400, eod=EOD, train_rows=50, cache=cache)


def test_the_digest_covers_index_and_tokens(tmp_path: Path) -> None:
    """All of a small .bin file; of a large one blocks from both ends and between; of the .idx file every byte."""
    prefix = write(tmp_path / "a", [np.random.RandomState(0).randint(0, 300, 40_000).tolist()] * 120)
    digest = open_files(prefix).digest

    def digest_with_a_change(suffix: str, at: int) -> str:
        with open(prefix + suffix, "r+b") as stream:
            stream.seek(at)
            old = stream.read(1)
            stream.seek(at)
            stream.write(bytes([old[0] ^ 1]))
        os.utime(prefix + suffix, ns=(1, at))
        value = open_files(prefix).digest
        with open(prefix + suffix, "r+b") as stream:
            stream.seek(at)
            stream.write(old)
        return value

    size = os.path.getsize(f"{prefix}.bin")
    assert size > 64 * (1 << 16)
    for at in (0, (size - (1 << 16)) // 63 * 31 + 1000, size - 1):
        assert digest_with_a_change(".bin", at) != digest
    assert open_files(prefix).digest == digest
    # Also where no edge of the file is: one document one token longer, the next one shorter.
    lengths = np.memmap(f"{prefix}.idx", dtype="<i4", mode="r+", offset=34, shape=(120,))
    lengths[60] += 1
    lengths[61] -= 1
    lengths.flush()
    os.utime(f"{prefix}.idx", ns=(1, 1))
    assert open_files(prefix).digest != digest


def test_a_pair_is_checked_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "a", numbered(10))
    first = open_files(prefix)
    assert open_files(f"{prefix}.idx") is first and first.sidecar is None
    data = DataConfig(path=(prefix,), tokenizer="byte")
    monkeypatch.setattr("megatron_lowrank.data.files._check_contents", lambda files: pytest.fail("checked again"))
    assert data_tokenizer(data).kind == "byte" and build(data).train is not None
    monkeypatch.undo()
    # A sidecar that appears is seen, and so are other tokens.
    (tmp_path / "a.json").write_text(json.dumps({"files_digest": first.digest, "max_token": 7}))
    assert open_files(prefix).max_token() == 7
    write(tmp_path / "a", numbered(11))
    assert (open_files(prefix).documents, open_files(prefix).sidecar) == (11, None)
    os.remove(f"{prefix}.bin")
    with pytest.raises(ValueError, match="no such file"):
        open_files(prefix)


def test_counts_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sidecar the tokens are read once, for the largest id and for the entropy."""
    prefix = write(tmp_path / "a", numbered(10))
    cache = str(tmp_path / "cache")
    expected = unigram_entropy(prefix)
    assert build(DataConfig(path=(prefix,)), cache).train is not None
    monkeypatch.setattr("megatron_lowrank.data.files.TokenFiles._count", lambda files: pytest.fail("read again"))
    assert unigram_entropy(prefix, cache) == expected
    assert open_files(prefix).max_token(cache) == EOD
