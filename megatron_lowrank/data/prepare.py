"""Text -> token files: shards encoded in parallel, resumable, the same bytes however often it was stopped.

Work in progress lives in the folder `OUT.parts`: `plan.json` says what is being prepared, every finished shard stays,
and the three results are moved out of it at the end, the index last, so that `OUT.idx` exists only beside a complete
`OUT.bin`. After a kill, the same command continues, and another one is refused while the folder is there. An error in
the input or the options removes the folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron_lowrank import disk
from megatron_lowrank.data.documents import Piece, Report, cut_shards, list_inputs, read_piece
from megatron_lowrank.data.files import add_counts, entropy, open_files
from megatron_lowrank.data.out import check_out, out_prefix, work_folder
from megatron_lowrank.data.shards import Shard, Tally, shard_record, start_worker, token_dtype, write_shard
from megatron_lowrank.data.tokenizers import BPE_MINIMUM, Tokenizer, load_tokenizer, train_bpe
from megatron_lowrank.messages import counted

FORMAT = 1
"""Version of plan and sidecar."""


class BadLineError(ValueError):
    """A line is no document and `strict` was asked for."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to prepare."""

    out: str
    """Prefix of the results."""
    input: tuple[str, ...] = ()
    """Files and folders; none: the text that Python carries (`pydoc_data.topics`)."""
    tokenizer: str = "byte"
    """byte, hf or sentencepiece."""
    tokenizer_path: str | None = None
    """File of the tokenizer."""
    eod_token: str | None = None
    """Text of the end-of-document token (hf). Default: found."""
    train_bpe: int | None = None
    """Train a BPE of this many entries on the input first; it becomes `OUT.tokenizer.json`."""
    workers: int = 1
    """Processes that encode."""
    json_key: str = "text"
    """Key of the text in a line of JSON."""
    cut_text: int | None = None
    """Cut a .txt file (or built-in topic) of more bytes than this into documents of at most as many."""
    strict: bool = False
    """A bad line is an error and not only counted."""
    overwrite: bool = False
    """Replace results that exist."""
    shard_bytes: int = 64 << 20
    """Text per shard: what a killed run loses at most, times workers."""
    progress: bool = False
    """Show a progress bar."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers: found {self.workers}, allowed: 1 or more")
        if self.shard_bytes < 1:
            raise ValueError(f"--shard-mib: found {self.shard_bytes} bytes, allowed: 1 or more")
        if self.cut_text is not None and self.cut_text < 1:
            raise ValueError(f"--cut-text: found {self.cut_text} bytes, allowed: 1 or more")
        if self.train_bpe is not None and (self.tokenizer_path is not None or self.tokenizer == "sentencepiece"):
            raise ValueError("--train-bpe: found a --tokenizer as well, allowed: one of the two")
        if self.train_bpe is not None and self.train_bpe < BPE_MINIMUM:
            raise ValueError(
                f"--train-bpe: found vocabulary {self.train_bpe}, allowed: {BPE_MINIMUM} or more, all bytes and end"
            )
        if self.train_bpe is None and self.tokenizer in ("hf", "sentencepiece") and self.tokenizer_path is None:
            raise ValueError(f"--tokenizer-path: found nothing, but --tokenizer {self.tokenizer} needs a file")


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Writes `OUT.bin`, `OUT.idx` and the sidecar `OUT.json`; does nothing if they are there already.

    Returns:
        The sidecar's record.

    Raises:
        ValueError: bad input or options, results that exist, or unfinished work of another command.
        BadLineError: a bad line, with `strict`.
        RuntimeError: a worker died.
    """
    out = out_prefix(options.out)
    pieces = list_inputs(options.input)
    read = [piece.path for piece in pieces] + ([] if options.tokenizer_path is None else [options.tokenizer_path])
    check_out(out, read, overwrite=options.overwrite)
    parts = f"{out}.parts"
    if options.train_bpe is None:
        tokenizer: Tokenizer | None = load_tokenizer(options.tokenizer, options.tokenizer_path, options.eod_token)
    else:
        tokenizer = None
    plan = _plan(options, pieces, tokenizer)
    plan_digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    finished = _finished(out, plan_digest, options.overwrite)
    if finished is not None:
        shutil.rmtree(parts, ignore_errors=True)
        return finished
    with work_folder(parts, plan) as lock:
        try:
            return _work(out, parts, pieces, tokenizer, plan_digest, options, lock)
        except ValueError:
            # The input or an option is wrong: the same command would fail again, so there is nothing to continue.
            shutil.rmtree(parts, ignore_errors=True)
            raise
        except OSError as error:
            if error.filename is None:  # a full disk
                raise OSError(error.errno, error.strerror or str(error), parts) from error
            raise


def _work(
    out: str, parts: str, pieces: list[Piece], tokenizer: Tokenizer | None, plan_digest: str, options: PrepareOptions,
    lock: int,
) -> dict[str, Any]:  # fmt: skip
    """Trains the tokenizer if there is none yet, encodes every shard and joins them."""
    if tokenizer is None:
        tokenizer = _trained(options, pieces, f"{parts}/tokenizer.json")
    name = (tokenizer.kind, tokenizer.path, options.eod_token)
    shards = [
        Shard(
            stem=f"{parts}/{i:05d}", pieces=tuple(shard), tokenizer=name, json_key=options.json_key,
            cut_text=options.cut_text,
        )
        for i, shard in enumerate(cut_shards(pieces, options.shard_bytes))
    ]  # fmt: skip
    # Imports megatron-core, once before workers are forked, and before the bar begins to measure.
    token_dtype(tokenizer.vocab_size)
    records = [shard_record(shard) for shard in shards]
    done = sum(shard.size for shard, record in zip(shards, records, strict=True) if record is not None)
    tally, total = Tally(), sum(shard.size for shard in shards)
    with tqdm(
        total=total, initial=done, unit="B", unit_scale=True, desc="prepare",
        disable=None if options.progress and total else True,
    ) as bar:  # fmt: skip
        for shard, before, record in zip(shards, records, _encode(shards, records, options.workers, lock), strict=True):
            tally.add(record)
            bar.update(shard.size if before is None else 0)
            if options.strict and tally.bad:
                raise BadLineError(f"{tally.examples[0]} (strict)")
    if not tally.documents:
        seen = [counted(tally.empty, "empty one")] if tally.empty else []
        if tally.bad:
            seen.append(f"{counted(sum(tally.bad.values()), 'bad line')}, the first {tally.examples[0]}")
        hint = "; --json-key names the key of the text" if "missing key" in tally.bad else ""
        raise ValueError(f"--input: found no document{''.join(f', {what}' for what in seen)}{hint}")
    return _merge(out, parts, shards, tokenizer, tally, plan_digest, options)


def _plan(options: PrepareOptions, pieces: list[Piece], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Everything that decides a byte of the results."""
    identity: dict[str, Any] = {"train_bpe": options.train_bpe} if tokenizer is None else dict(tokenizer.identity())
    return {
        "format": FORMAT, "tokenizer": identity, "eod_token": options.eod_token, "json_key": options.json_key,
        "shard_bytes": options.shard_bytes, "input": [[p.path, p.size, p.modified] for p in pieces],
    } | ({} if options.cut_text is None else {"cut_text": options.cut_text})  # fmt: skip


def _finished(out: str, plan_digest: str, overwrite: bool) -> dict[str, Any] | None:
    """Record of results that this very plan has produced before; None when there is work to do."""
    if not os.path.exists(f"{out}.idx") or overwrite:
        return None
    try:
        record = open_files(out).sidecar
    except ValueError:
        record = None
    if record is not None and record.get("plan") == plan_digest:
        return record
    raise ValueError(
        f"--out: {out}.idx exists and was made from another input or command; choose another --out, or --overwrite"
    )


def _trained(options: PrepareOptions, pieces: list[Piece], path: str) -> Tokenizer:
    """The BPE of this plan, trained unless a run before has."""
    assert options.train_bpe is not None
    if os.path.exists(path):
        return load_tokenizer("hf", path)
    texts = (
        text
        for piece in pieces
        for text in read_piece(piece, options.json_key, Report(path=piece.path), options.cut_text)
    )
    return train_bpe(texts, options.train_bpe, path)


def _encode(
    shards: list[Shard], records: list[dict[str, Any] | None], workers: int, lock: int
) -> Iterator[dict[str, Any]]:
    """Records of all shards in order; those that are there already are not encoded again."""
    todo = sum(record is None for record in records)
    if min(workers, todo) <= 1:
        for shard, record in zip(shards, records, strict=True):
            yield record or write_shard(shard)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, todo), mp_context=context, initializer=start_worker, initargs=(lock,))
    try:
        futures: list[dict[str, Any] | Future[dict[str, Any]]] = [
            record or pool.submit(write_shard, shard) for shard, record in zip(shards, records, strict=True)
        ]
        for future in futures:
            yield future.result() if isinstance(future, Future) else future
    except BrokenProcessPool as error:
        raise RuntimeError("a worker died (out of memory?); the same command continues where it stopped") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _merge(
    out: str, parts: str, shards: list[Shard], tokenizer: Tokenizer, tally: Tally, plan: str, options: PrepareOptions
) -> dict[str, Any]:
    """Joins the shards, checks the result, and moves it to its place."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = token_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{parts}/merged.bin", dtype=dtype)
    counts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    # `add_index` collects garbage every time; without this it would walk through all objects of the process per shard.
    gc.freeze()
    for shard in shards:
        shard_counts: npt.NDArray[np.int64] = np.load(f"{shard.stem}.npy")
        if shard_counts.sum():
            builder.add_index(shard.stem)
            counts = add_counts(counts, shard_counts)
    gc.unfreeze()
    builder.finalize(f"{parts}/merged.idx")
    files = open_files(f"{parts}/merged")
    assert (files.documents, len(files.tokens), int(counts.sum())) == (tally.documents, tally.tokens, tally.tokens)
    path = tokenizer.path
    if options.train_bpe is not None:
        path = f"{out}.tokenizer.json"
        os.replace(f"{parts}/tokenizer.json", path)
    beside = os.path.dirname(os.path.abspath(out))
    record = {
        "format": FORMAT, "plan": plan, "files_digest": files.digest,
        "tokenizer": tokenizer.identity() | {
            "path": os.path.relpath(path, beside) if path else None, "eod_token": options.eod_token,
        },
        "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod, "dtype": dtype.__name__,
        "documents": tally.documents, "tokens": tally.tokens, "max_token": len(counts) - 1,
        "unigram_entropy": entropy(counts), "text_bytes": tally.text_bytes, "empty_documents": tally.empty,
        "bad_lines": dict(tally.bad), "bad_examples": tally.examples,
        "source_digest": hashlib.sha256("".join(tally.hashes).encode()).hexdigest(),
        "input": list(options.input),
    }  # fmt: skip
    if os.path.exists(f"{out}.idx"):
        # Never an old index beside new tokens.
        os.remove(f"{out}.idx")
    os.replace(f"{parts}/merged.bin", f"{out}.bin")
    disk.write_json(Path(f"{out}.json"), record)
    os.replace(f"{parts}/merged.idx", f"{out}.idx")
    shutil.rmtree(parts)
    return record
