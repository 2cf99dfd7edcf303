"""Tokenizers: round trips, the end of a document, and every mistake a user can make with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowrank.data.tokenizers import (
    BPE_END,
    ByteTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    _head,
    check_vocabulary,
    load_tokenizer,
    train_bpe,
)  # fmt: skip

TEXTS = ["the cat sat on the mat\n", "a cat and a hat, Straße, 漢字", "def f(x):\n\treturn  x\n"] * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return train_bpe(TEXTS, 290, str(tmp_path_factory.mktemp("bpe") / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sp") / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXTS for line in text.splitlines()), model_prefix=str(prefix),
        vocab_size=60, pad_id=3, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text
    assert all(0 <= i < 256 for i in ids)


@settings(max_examples=50)
@given(st.text())
def test_bpe_round_trips_any_text(bpe: HFTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


def test_bpe_is_small_and_ends_documents_with_id_zero(bpe: HFTokenizer) -> None:
    assert bpe.vocab_size == 290
    assert (bpe.eod, bpe.pad) == (0, None)
    assert len(bpe.encode("the cat sat on the mat")) < 12


def test_a_text_that_spells_out_the_end_token_does_not_end(bpe: HFTokenizer) -> None:
    ids = bpe.encode(f"a{BPE_END}b")
    assert bpe.eod not in ids
    assert bpe.decode(ids) == f"a{BPE_END}b"


def test_bpe_is_the_same_file_in_another_process(bpe: HFTokenizer, tmp_path: Path) -> None:
    other = tmp_path / "t.json"
    code = f"from megatron_lowrank.data.tokenizers import train_bpe; train_bpe({TEXTS!r}, 290, {str(other)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert HFTokenizer(str(other)).identity() == bpe.identity()
    assert len(bpe.identity()["sha256"]) == 64


def test_bpe_learns_from_the_head_of_the_text_only(tmp_path: Path) -> None:
    texts = ["abababab" * 10, "xyxyxyxy" * 10]
    with pytest.warns(UserWarning, match="fewer than 400"):
        trained = train_bpe(texts, 400, str(tmp_path / "t.json"), sample_bytes=50)
    assert len(trained.encode("abab")) < len(trained.encode("xyxy")) == 4


def test_the_head_of_the_text_is_measured_in_bytes() -> None:
    assert list(_head(["ä" * 30, "b", "c"], 60, [0])) == ["ä" * 30]
    assert list(_head(["ä" * 30, "b", "c"], 61, [0])) == ["ä" * 30, "b"]


def test_sentencepiece(sentencepiece_model: str) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert (tokenizer.eod, tokenizer.pad) == (2, 3)
    assert tokenizer.identity()["kind"] == "sentencepiece"
    assert tokenizer.eod not in tokenizer.encode("a </s> b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("words",), "found 'words', allowed: byte, hf, sentencepiece"),
        (("hf",), "needs a file"),
        (("hf", "nowhere.json"), "cannot read nowhere.json"),
        (("sentencepiece", "nowhere.model"), "cannot read nowhere.model"),
        (("hf", __file__), "is not a tokenizer.json"),
        (("sentencepiece", __file__), "is not a sentencepiece model"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(*arguments)


def test_missing_end_token_lists_what_is_allowed(bpe: HFTokenizer, tmp_path: Path) -> None:
    assert bpe.path is not None
    path = tmp_path / "no_end.json"
    path.write_text(Path(bpe.path).read_text().replace(BPE_END, "<other>"))
    with pytest.raises(ValueError, match=r"no end-of-document token, allowed: one of </s> <\|endoftext\|>"):
        HFTokenizer(str(path))
    assert HFTokenizer(str(path), "<other>").eod == 0
    with pytest.raises(ValueError, match="no end-of-document token '<end>'"):
        HFTokenizer(str(path), "<end>")


def test_vocabulary_check() -> None:
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(ValueError, match="found 256, allowed: at least 257.*; set --model.vocab_size 257"):
        check_vocabulary(ByteTokenizer(), 256)
    with pytest.warns(UserWarning, match="43 rows of the embedding are never used"):
        check_vocabulary(ByteTokenizer(), 300)


def test_too_small_a_bpe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found vocabulary 100, allowed: 257"):
        train_bpe(TEXTS, 100, str(tmp_path / "t.json"))
