"""Text <-> token ids: raw bytes, any `tokenizer.json`, a sentencepiece model, and a BPE trained on the spot.

Contract: `encode` never emits the end-of-document token by itself, also when the text spells it out; whoever writes
documents appends `eod`. `identity` names the file by content, so that a run and its data can be matched.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from megatron_lowrank import disk

END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
"""End-of-document tokens looked for in a `tokenizer.json`, in this order."""
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Padding tokens looked for in a `tokenizer.json`, in this order."""
BPE_END = "<|endoftext|>"
"""The special token of a BPE trained by `train_bpe`; its id is 0."""
BPE_MINIMUM = 257
"""Smallest vocabulary of `train_bpe`: every byte and the end token."""
BPE_SAMPLE_BYTES = 1 << 30
"""`train_bpe` learns from the first gibibyte of text: merges settle long before, memory does not."""


class Tokenizer(Protocol):
    """What data and export need from a tokenizer."""

    kind: str
    """byte, hf or sentencepiece."""
    vocab_size: int
    """One more than the largest id."""
    eod: int
    """Id of the end-of-document token."""
    pad: int | None
    """Id of the padding token, or None."""
    path: str | None
    """File it was read from, or None."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""

    def identity(self) -> dict[str, str]:
        """Kind and sha256 of the file, for records of runs and data."""


class ByteTokenizer:
    """UTF-8 bytes 0 to 255 and the end of a document, 256."""

    kind = "byte"
    vocab_size = 257
    eod = 256
    pad: int | None = None
    path: str | None = None

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes; the end of a document is left out, broken UTF-8 replaced."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def identity(self) -> dict[str, str]:
        """Kind; there is no file."""
        return {"kind": self.kind, "sha256": ""}


class HFTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library."""

    kind = "hf"

    def __init__(self, path: str, eod_token: str | None = None) -> None:
        """Reads the file and finds its special tokens.

        Raises:
            ValueError: the file is missing or is no `tokenizer.json`, or it has no end-of-document token.
        """
        import tokenizers

        self.path: str | None = path
        self._sha256 = _file_sha256(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise ValueError(f"tokenizer: {path} is not a tokenizer.json ({error})") from error
        # A document that spells out a special token must not end in the middle.
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"data.tokenizer_path: {path} has an empty vocabulary, allowed: a trained tokenizer.json")
        self.vocab_size = max(vocabulary.values()) + 1
        candidates = END_TOKENS if eod_token is None else (eod_token,)
        found = [vocabulary[token] for token in candidates if token in vocabulary]
        if not found:
            what = f"no end-of-document token {eod_token!r}" if eod_token is not None else "no end-of-document token"
            raise ValueError(
                f"tokenizer: {path} has {what}, allowed: one of {' '.join(END_TOKENS)}, or a token of the vocabulary "
                "given by --eod-token or --data.eod_token"
            )
        self.eod = found[0]
        self.pad: int | None = next((vocabulary[token] for token in PAD_TOKENS if token in vocabulary), None)

    def encode(self, text: str) -> list[int]:
        """Ids of the text."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens spelled out."""
        return self._model.decode(ids, skip_special_tokens=False)

    def identity(self) -> dict[str, str]:
        """Kind and hash of the file."""
        return {"kind": self.kind, "sha256": self._sha256}


class SentencePieceTokenizer:
    """A sentencepiece `.model` file."""

    kind = "sentencepiece"

    def __init__(self, path: str) -> None:
        """Reads the model.

        Raises:
            ValueError: the file is missing or is no sentencepiece model, or it has no end-of-sentence token.
        """
        import sentencepiece

        self.path: str | None = path
        self._sha256 = _file_sha256(path)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.Load(path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"tokenizer: {path} is not a sentencepiece model ({error})") from error
        self.vocab_size = int(self._model.vocab_size())
        self.eod = int(self._model.eos_id())
        if self.eod < 0:
            raise ValueError(f"tokenizer: {path} has no end-of-sentence token, allowed: a model with eos_id >= 0")
        self.pad: int | None = int(self._model.pad_id()) if self._model.pad_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Ids of the text."""
        return list(self._model.EncodeAsIds(text))

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        return str(self._model.DecodeIds(ids))

    def identity(self) -> dict[str, str]:
        """Kind and hash of the file."""
        return {"kind": self.kind, "sha256": self._sha256}


def load_tokenizer(kind: str, path: str | None = None, eod_token: str | None = None) -> Tokenizer:
    """A tokenizer by kind.

    Args:
        kind: byte, hf or sentencepiece.
        path: `tokenizer.json` (hf) or `.model` (sentencepiece).
        eod_token: text of the end-of-document token (hf). Default: the first of `END_TOKENS` that it has.

    Raises:
        ValueError: unknown kind, no path where one is needed, or a defect of the file.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind not in ("hf", "sentencepiece"):
        raise ValueError(f"tokenizer: found {kind!r}, allowed: byte, hf, sentencepiece")
    if path is None:
        raise ValueError(f"tokenizer_path: found nothing, but tokenizer {kind!r} needs a file")
    return HFTokenizer(path, eod_token) if kind == "hf" else SentencePieceTokenizer(path)


def train_bpe(texts: Iterable[str], vocab_size: int, path: str, sample_bytes: int = BPE_SAMPLE_BYTES) -> HFTokenizer:
    """Trains a byte-level BPE and writes it as `tokenizer.json`. Equal texts give an equal file.

    Args:
        texts: documents.
        vocab_size: entries of the vocabulary, end token included.
        path: file to write.
        sample_bytes: learn from the first documents of together this many bytes.

    Raises:
        ValueError: a vocabulary too small for all bytes.
    """
    if vocab_size < BPE_MINIMUM:
        raise ValueError(
            f"--train-bpe: found vocabulary {vocab_size}, allowed: {BPE_MINIMUM} or more, all bytes and end"
        )
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BPE_END], show_progress=False,
        # The alphabet is a set: sorted, it gives equal ids in every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    read = [0]
    model.train_from_iterator(_head(texts, sample_bytes, read), trainer)
    temporary = f"{path}.tmp"
    model.save(temporary)
    os.replace(temporary, path)
    trained = HFTokenizer(path, BPE_END)
    # Without any text, that is what is wrong, and the caller's error.
    if read[0] and trained.vocab_size < vocab_size:
        warnings.warn(
            f"--train-bpe: the text gives {trained.vocab_size} entries only, fewer than {vocab_size}", stacklevel=2
        )
    return trained


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Compares a tokenizer with `model.vocab_size`; a smaller vocabulary is a warning.

    Raises:
        ValueError: the tokenizer has ids that the model has no embedding for.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size: found {vocab_size}, allowed: at least {tokenizer.vocab_size}, the vocabulary of the "
            f"{tokenizer.kind} tokenizer"
            + (f" {tokenizer.path}" if tokenizer.path else "")
            + f"; set --model.vocab_size {tokenizer.vocab_size}"
        )
    if tokenizer.vocab_size < vocab_size:
        warnings.warn(
            f"model.vocab_size {vocab_size} is larger than the vocabulary of the {tokenizer.kind} tokenizer, "
            f"{tokenizer.vocab_size}: {vocab_size - tokenizer.vocab_size} rows of the embedding are never used",
            stacklevel=2,
        )


def _file_sha256(path: str) -> str:
    try:
        return disk.sha256(Path(path))
    except OSError as error:
        raise ValueError(f"tokenizer: cannot read {path} ({error.strerror})") from error


def _head(texts: Iterable[str], limit: int, read: list[int]) -> Iterator[str]:
    """The first documents, until they hold `limit` bytes; `read[0]` counts the bytes."""

    def room(text: str) -> bool:
        before = read[0]
        read[0] += len(text.encode())
        return before < limit

    return takewhile(room, texts)
