"""Text to token files: equal to a naive loop, however it is cut, compressed, parallelised or killed."""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from scripts import load_tool

from megatron_lowrank.data.cut import cut_text
from megatron_lowrank.data.documents import Piece, Report, cut_shards, list_inputs, read_piece
from megatron_lowrank.data.files import open_files, unigram_entropy
from megatron_lowrank.data.prepare import BadLineError, PrepareOptions, prepare
from megatron_lowrank.data.shards import Shard, write_shard
from megatron_lowrank.data.tokenizers import HFTokenizer


def _texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abc dé漢\n", k=draw.randint(1, 200))) + "." for _ in range(count)]


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()


def _documents(prefix: Path | str) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    return [data[i].tolist() for i in range(len(data))]


def _expected(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def _result(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder with every kind of file, and its documents in sorted order of the files."""
    texts = _texts(120)
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(_jsonl(texts[:60]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(_jsonl(texts[60:80])))
    (folder / "c.json.zst").write_bytes(
        b"".join(zstandard.compress(_jsonl(part)) for part in (texts[80:90], texts[90:100]))
    )
    for i, text in enumerate(texts[100:]):
        (folder / "deep" / f"{i:03d}.txt").write_text(text, newline="")
    (folder / "ignored.md").write_text("no")
    return folder, texts


def test_equals_a_naive_loop_for_any_cut_and_any_workers(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, texts = corpus
    one = prepare(PrepareOptions(input=(str(folder),), out=str(tmp_path / "one"), shard_bytes=1000))
    two = prepare(PrepareOptions(input=(str(folder),), out=str(tmp_path / "two"), shard_bytes=1000, workers=2))
    assert _documents(tmp_path / "one") == _expected(texts)
    assert _result(tmp_path / "one") == _result(tmp_path / "two")
    prepare(PrepareOptions(input=(str(folder),), out=str(tmp_path / "whole")))
    assert _result(tmp_path / "one")[:2] == _result(tmp_path / "whole")[:2]
    assert one == two
    assert (one["documents"], one["tokens"]) == (120, sum(map(len, _expected(texts))))
    assert one["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert one["dtype"] == "uint16"
    assert not list(tmp_path.glob("*.parts"))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["", "x", "line " * 9, "é"]), min_size=1, max_size=12), st.integers(1, 60), st.booleans()
)
def test_byte_ranges_cover_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard: int, last: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.jsonl"
    content = _jsonl(texts)
    path.write_bytes(content if last else content.removesuffix(b"\n"))
    found: list[str] = []
    lines = empty = 0
    for piece in [piece for shard_ in cut_shards(list_inputs((str(path),)), shard) for piece in shard_]:
        report = Report(path=piece.path)
        found += read_piece(piece, "text", report)
        lines += report.lines
        empty += report.empty
    assert found == [text for text in texts if text]
    assert (lines, empty) == (len(texts), texts.count(""))


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(_jsonl(_texts(600)))
    whole = PrepareOptions(input=(str(source),), out=str(tmp_path / "whole"), shard_bytes=2000, train_bpe=270)
    prepare(whole)
    options = PrepareOptions(
        input=(str(source),), out=str(tmp_path / "killed"), shard_bytes=2000, train_bpe=270, workers=workers
    )
    process = multiprocessing.get_context("fork").Process(target=prepare, args=(options,))
    process.start()
    assert process.pid is not None
    parts = tmp_path / "killed.parts"
    while process.is_alive() and len(list(parts.glob("0*.json"))) < 8:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.json")}
    assert not (tmp_path / "killed.idx").exists()
    assert len(done) >= 8
    assert prepare(options)["documents"] == 600
    left, right = _result(tmp_path / "killed"), _result(tmp_path / "whole")
    assert left[:2] == right[:2]
    assert left[2] == right[2].replace(b"whole.tokenizer", b"killed.tokenizer")
    assert not parts.exists()


def _interrupted(options: PrepareOptions, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Runs `prepare` until it has written this many shards."""
    left = iter(range(shards))

    def write(shard: Shard) -> dict[str, Any]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return write_shard(shard)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("megatron_lowrank.data.prepare.write_shard", write)
        prepare(options)


def test_resuming_keeps_finished_shards_and_refuses_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(_jsonl(_texts(50)) + b"{bad\n")
    options = PrepareOptions(input=(str(source),), out=str(tmp_path / "o"), shard_bytes=500)
    _interrupted(options, monkeypatch, shards=3)
    first = tmp_path / "o.parts" / "00000.json"
    before = first.stat().st_mtime_ns
    for change, flag in (({"json_key": "content"}, "--json-key"), ({"cut_text": 9}, "--cut-text")):
        with pytest.raises(ValueError, match=rf"--out: .*of another command \(different: {flag}\)"):
            prepare(replace(options, **change))  # type: ignore[arg-type]
    # The mark of a finished shard is believed: its file is read and not written again.
    record = json.loads(first.read_text())
    record["reports"][0]["empty"] = 7
    first.write_text(json.dumps(record))
    os.utime(first, ns=(before, before))
    assert prepare(options)["empty_documents"] == 7


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"strict": True}, BadLineError, r"x\.jsonl:3: invalid JSON"),
        ({"json_key": "body"}, ValueError, r"3 bad lines, the first .*x\.jsonl:1: missing key .*; --json-key names"),
        ({"train_bpe": 10}, ValueError, "--train-bpe: found vocabulary 10"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_leave_nothing_behind(tmp_path: Path, change: dict[str, Any], kind: Any, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(_jsonl(["one", "two"]) + b"{bad\n")
    with pytest.raises(kind, match=message):
        prepare(PrepareOptions(input=(str(tmp_path / "x.jsonl"),), out=str(tmp_path / "o"), shard_bytes=10, **change))
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab \n\ré漢😀", max_size=200), st.integers(1, 50))
def test_cut_pieces_join_to_the_text(text: str, limit: int) -> None:
    pieces = cut_text(text, limit)
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= limit or len(piece) == 1 for piece in pieces)
    for piece, rest in zip(pieces[:-1], pieces[1:], strict=True):
        # Behind a line break; only where none is within reach behind a blank, and only without these elsewhere.
        reach = (piece + rest).encode()[:limit] if len(piece.encode()) + len(rest.encode()) > limit else b""
        assert piece[-1] == "\n" or (b"\n" not in reach and (piece[-1] == " " or b" " not in reach))


def test_a_book_is_cut_into_equal_documents() -> None:
    book = "".join(f"{i} a line of a book\n" for i in range(1000))
    sizes = [len(piece.encode()) for piece in cut_text(book, 5000)]
    assert len(sizes) == -(-len(book) // 5000) and max(sizes) - min(sizes) < 50
    assert cut_text(book, len(book)) == [book]


def test_cut_text_applies_to_plain_text_only(tmp_path: Path) -> None:
    long = "a line of text\n" * 100
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.jsonl").write_bytes(_jsonl([long]))
    options = PrepareOptions(input=(str(tmp_path),), out=str(tmp_path / "o"), cut_text=400)
    record = prepare(options)
    assert record["documents"] == 5 and record["text_bytes"] == 2 * len(long)
    assert _documents(tmp_path / "o") == _expected([*cut_text(long, 400), long])
    with pytest.raises(ValueError, match="made from another input or command"):
        prepare(replace(options, cut_text=None))
    record = prepare(PrepareOptions(out=str(tmp_path / "topics"), cut_text=20000, train_bpe=300))
    assert 79 < record["documents"] < 120 and record["text_bytes"] > 400_000


def test_bad_lines_are_counted_and_located(tmp_path: Path) -> None:
    good = _jsonl(["one"]).strip()
    lines = [
        good, b"{not json", b'{"other": "x"}', b'{"text": 3}', b'{"text": "\xff"}', b'["text"]', b'{"text": "\\ud800"}',
        b"", b'{"text": " \\n"}', b'\xef\xbb\xbf{"text": "two"}', b"[" * 100000, good.replace(b"one", b"three") + b"\r",
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    cut = gzip.compress(_jsonl(_texts(2000)))
    (tmp_path / "b.jsonl.gz").write_bytes(cut[: len(cut) * 2 // 3])
    stream = zstandard.compress(_jsonl(_texts(2000)))
    (tmp_path / "c.jsonl.zst").write_bytes(stream[: len(stream) * 2 // 3])
    (tmp_path / "d.jsonl.gz").write_bytes(b"this is no gzip file")
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    record = prepare(PrepareOptions(input=(str(tmp_path),), out=str(tmp_path / "o"), shard_bytes=5000))
    assert record["bad_lines"] == {
        "invalid JSON": 2, "missing key": 2, "text is not a string": 1, "invalid UTF-8": 2, "text is not Unicode": 1,
        "broken compression": 3,
    }  # fmt: skip
    assert record["empty_documents"] == 1
    documents = _documents(tmp_path / "o")
    assert documents[:3] == _expected(["one", "two", "three"])
    (kept,) = (
        int(found[1]) - 1 for line in record["bad_examples"] if (found := re.search(r"b.jsonl.gz:(\d+): ", line))
    )
    # All lines before the cut arrive.
    assert documents[3 : 3 + kept] == _expected(_texts(2000))[:kept]
    assert kept > 500
    for place in ("a.jsonl:2: invalid JSON", "a.jsonl:3: missing key (text)", "a.jsonl:5: invalid UTF-8", "e.txt:1: "):
        assert any(place in line for line in record["bad_examples"]), place


def test_sidecar_and_unigram_entropy(tmp_path: Path) -> None:
    record = prepare(PrepareOptions(out=str(tmp_path / "topics"), train_bpe=300))
    prefix = str(tmp_path / "topics")
    tokens = [token for document in _documents(prefix) for token in document]
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    assert record["unigram_entropy"] == pytest.approx(-sum(share * math.log(share) for share in shares))
    assert unigram_entropy(prefix) == record["unigram_entropy"]
    tokenizer = HFTokenizer(str(tmp_path / record["tokenizer"]["path"]))
    assert tokenizer.identity().items() <= record["tokenizer"].items()
    assert (record["max_token"], record["eod"]) == (max(tokens), 0)
    assert open_files(prefix).sidecar == record
    # Without the sidecar the file itself is read.
    os.remove(f"{prefix}.json")
    assert unigram_entropy(f"{prefix}.bin") == pytest.approx(record["unigram_entropy"])
    assert open_files(prefix).max_token() == max(tokens)


def test_results_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("first")
    options = PrepareOptions(input=(str(tmp_path / "x.txt"),), out=str(tmp_path / "o"))
    record = prepare(options)
    stamp = (tmp_path / "o.bin").stat().st_mtime_ns
    assert prepare(options) == record
    assert (tmp_path / "o.bin").stat().st_mtime_ns == stamp
    (tmp_path / "x.txt").write_text("second one")
    with pytest.raises(ValueError, match="--out: .* from another input or command; choose another --out, or --over"):
        prepare(options)
    prepare(PrepareOptions(input=options.input, out=options.out, overwrite=True))
    assert _documents(tmp_path / "o") == _expected(["second one"])


def test_large_vocabularies_take_int32() -> None:
    assert (DType.optimal_dtype(65499), DType.optimal_dtype(65500)) == (np.uint16, np.int32)


def test_reading_a_piece_needs_no_folder() -> None:
    (built_in,) = list_inputs(())
    report = Report(path=built_in.path)
    assert len(list(read_piece(built_in, "text", report))) == report.lines > 50
    assert report.text_bytes == built_in.size > 400_000
    assert isinstance(built_in, Piece)


@pytest.fixture(scope="module")
def command() -> Any:
    return load_tool("prepare_data")


def test_command_line(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"body": "abc"}\n{"body": 1}\n')
    common = ["--input", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "o"), "--json-key", "body"]
    assert command.main([*common, "--strict"]) == 2
    assert "x.jsonl:2: text is not a string (int)" in capsys.readouterr().err
    assert command.main(common) == 0
    output = capsys.readouterr()
    assert "1 document, 4 tokens of byte" in output.out
    assert "x.jsonl:2" in output.err
    with pytest.raises(SystemExit) as error:
        command.main(["--out", "x", "--tokenizer", "words"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere"], "found no file or folder nowhere"),
        (["--input", __file__], "allowed: files ending in .txt .jsonl"),
        (["--input", "{tmp}/empty"], "holds no text"),
        (["--input", "{tmp}/a.txt", "{tmp}/a.txt"], "given more than once"),
        (["--input", "{tmp}/blank.txt"], "--input: found no document, 1 empty one"),
        (["--input", "{tmp}/blank.txt", "--train-bpe", "300"], "--input: found no document, 1 empty one"),
        (["--workers", "0"], "--workers: found 0"),
        (["--cut-text", "0"], "--cut-text: found 0 bytes"),
        (["--shard-mib", "nan"], "--shard-mib: found nan"),
        (["--tokenizer", "hf"], "needs a file"),
        (["--train-bpe", "10"], "found vocabulary 10"),
        (["--train-bpe", "300", "--tokenizer", "sentencepiece"], "found a --tokenizer as well"),
    ],
)
def test_bad_arguments(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "blank.txt").write_text(" \n")
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert command.main([*filled, "--out", str(tmp_path / "o")]) == 2
    lines = capsys.readouterr().err.splitlines()
    error = [line for line in lines if "error" in line]
    assert len(error) == 1 and message in error[0]
    assert not any("warning" in line for line in lines)
    assert not (tmp_path / "o.parts").exists()


def test_warnings_are_clean_lines(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("too short for so many entries")
    arguments = ["--input", str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), "--train-bpe", "900"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # pytest's own filter for megatron-core takes ours for one of its modules
        assert command.main(arguments) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "entries only" in line]
    assert len(said) == 1 and said[0].startswith("prepare_data: warning: --train-bpe: the text gives ")


def test_help_has_no_noise(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    output = capsys.readouterr().out
    assert "None" not in output and "[])" not in output and output.count("python tools/prepare_data.py") == 3
