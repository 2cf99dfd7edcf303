"""DataConfig -> datasets for training and validation, every file checked before the first step."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_lowrank.config import DataConfig
from megatron_lowrank.data.files import TokenFiles, open_files, strip_suffix
from megatron_lowrank.data.rows import Blend, DocumentRows, PackedRows, Rows
from megatron_lowrank.data.tokenizers import Tokenizer, load_tokenizer

NO_DATA = "data.path: found nothing; make token files with tools/prepare_data.py and name their prefix"
PARTS = ("train", "valid")
"""Parts of `data.split` that a run reads, in its order; the third one, test, is held out from both."""


class RowDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows as tensors: tokens [S] int64, labels [S] int64, loss_mask [S] float32."""

    def __init__(
        self, rows: Blend, *, sequence_length: int, eod: int, pad: int, eod_mask_loss: bool, description: dict[str, Any]
    ) -> None:
        """Wraps a sequence of rows.

        Args:
            rows: the rows.
            sequence_length: S.
            eod: end-of-document id.
            pad: id that fills rows shorter than S; it never enters the loss.
            eod_mask_loss: leave out positions whose input is `eod`, as Megatron's option does.
            description: what decides the content and order of the rows, as JSON values.
        """
        self.sequence_length, self.description = sequence_length, description
        self._rows, self._eod, self._pad, self._eod_mask_loss = rows, eod, pad, eod_mask_loss

    def __len__(self) -> int:
        """Rows that were asked for; for validation at most what the files hold."""
        return self._rows.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """One row.

        Raises:
            IndexError: the row is beyond what was asked for.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a dataset that was built for {len(self)} rows")
        found = self._rows[row]
        length = len(found) - 1
        text = np.full(self.sequence_length + 1, self._pad, dtype=np.int64)
        text[: length + 1] = found
        tokens, labels = torch.from_numpy(text[:-1].copy()), torch.from_numpy(text[1:].copy())
        loss_mask = torch.zeros(self.sequence_length)
        loss_mask[:length] = 1.0
        if self._eod_mask_loss:
            loss_mask[tokens == self._eod] = 0.0
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The datasets of a run; None where no rows were asked for."""

    train: RowDataset | None
    """Training rows, as many as asked for."""
    valid: RowDataset | None
    """Validation rows, at most one pass over the files."""


def data_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; `auto` is the one that the sidecar of the first file names.

    Raises:
        ValueError: no data, `auto` without a sidecar, or a tokenizer other than the one a file was prepared with.
    """
    if not data.path:
        raise ValueError(NO_DATA)
    paths = [prefix for name in ("path", "valid_path") for _, prefix in data.blend(name)]
    sidecars = [(prefix, open_files(prefix).sidecar) for prefix in paths]
    kind, path, eod_token = data.tokenizer, data.tokenizer_path, data.eod_token
    if kind == "auto":
        if sidecars[0][1] is None:
            prefix = strip_suffix(paths[0])
            where = f"{prefix}.json does not tell"
            if os.path.exists(f"{prefix}.json"):
                where += f" of these files: its digest does not match {prefix}.idx and .bin (damaged or replaced?)"
            raise ValueError(f"data.tokenizer: found 'auto', but {where}, allowed: byte, hf, sentencepiece")
        record = sidecars[0][1]["tokenizer"]
        kind, eod_token = record["kind"], eod_token or record["eod_token"]
        if path is None and record["path"] is not None:
            path = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(paths[0])), record["path"]))
    tokenizer = load_tokenizer(kind, path, eod_token)
    for prefix, sidecar in sidecars:
        made = tokenizer.identity() if sidecar is None else {k: sidecar["tokenizer"][k] for k in ("kind", "sha256")}
        if made != tokenizer.identity():
            raise ValueError(
                f"data.tokenizer: found {tokenizer.kind} {tokenizer.path or ''} (sha256 "
                f"{tokenizer.identity()['sha256'][:12] or 'none'}), allowed for {prefix}: {made['kind']} (sha256 "
                f"{made['sha256'][:12] or 'none'}), with which it was prepared"
            )
    return tokenizer


def build_datasets(
    data: DataConfig, *, sequence_length: int, vocab_size: int, eod: int, train_rows: int, valid_rows: int = 0,
    pad: int | None = None, cache: str | None = None,
) -> Datasets:  # fmt: skip
    """Datasets of a run. Every rank may call it, with or without a process group; ranks share the cache.

    Args:
        data: files and form of the rows.
        sequence_length: S.
        vocab_size: `model.vocab_size`; no token id may reach it.
        eod: end-of-document id.
        train_rows: length of the training set, over all epochs of the run. Rows do not depend on it.
        valid_rows: validation rows wanted.
        pad: id that fills short rows. Default: `eod`.
        cache: folder of row indices, used if `data.cache_path` is not given; None as well: no cache.

    Raises:
        ValueError: files that are missing or damaged, ids out of range, a split without the rows that are needed.
    """
    folder = data.cache_path or cache
    if not data.path:
        raise ValueError(NO_DATA)
    opened = {prefix: open_files(prefix) for name in ("path", "valid_path") for _, prefix in data.blend(name)}
    for files in opened.values():
        _check_ids(files, vocab_size, folder)
    kind: type[Rows] = PackedRows if data.rows == "packed" else DocumentRows
    built: dict[str, RowDataset | None] = {}
    for part, (name, wanted) in enumerate(zip(PARTS, (train_rows, valid_rows), strict=True)):
        own = name == "valid" and bool(data.valid_path)
        blend = data.blend("valid_path" if own else "path")
        shares, index = ((1.0,), 0) if data.valid_path else (data.split_shares(), part)
        if wanted == 0:
            built[name] = None
            continue
        try:
            sources = [
                kind(
                    opened[prefix], shares, index, sequence_length=sequence_length, seed=data.shuffle_seed, cache=folder
                )
                for _, prefix in blend
            ]
        except ValueError as error:
            where = f"data.split {data.split!r}" if not data.valid_path else "data.valid_path" if own else "data.path"
            raise ValueError(f"{where}, {name}: {error}; {_remedy(data, name)}") from error
        rows = Blend(sources, [weight for weight, _ in blend], wanted, cache=folder, repeat=name == "train")
        if rows.rows < wanted:
            warnings.warn(
                f"{name}: {wanted} rows asked for, the files hold {rows.rows}, so {rows.rows} are used", stacklevel=2
            )
        built[name] = RowDataset(
            rows, sequence_length=sequence_length, eod=eod, pad=eod if pad is None else pad,
            eod_mask_loss=data.eod_mask_loss,
            description={
                "rows": data.rows, "sequence_length": sequence_length, "shuffle_seed": data.shuffle_seed,
                "split": [index, *shares], "eod": eod, "eod_mask_loss": data.eod_mask_loss,
                "files": [[weight, opened[prefix].digest] for weight, prefix in blend],
                "names": [os.path.basename(opened[prefix].prefix) for _, prefix in blend],
            },
        )  # fmt: skip
    return Datasets(**built)


def _remedy(data: DataConfig, part: str) -> str:
    """What to do about a part that has no row."""
    shorter = ", or lower --train.sequence_length" if data.rows == "packed" else ""
    if data.valid_path:
        return f"name files with more text{shorter}"
    if part == "train":
        return f"prepare more text{shorter}"
    share = data.split_shares()[1]
    more = "80,20,0" if share < 0.2 else "50,50,0"
    if share == 0:
        return f"give validation a share with --data.split {more}, or switch it off with --train.eval_rows 0"
    return (
        f"give validation more with --data.split {more}, name other files with --data.valid_path, or cut long texts "
        "with prepare_data --cut-text"
    )


def _check_ids(files: TokenFiles, vocab_size: int, cache: str | None) -> None:
    """Compares the largest id with the vocabulary; without a sidecar the file is read once and the answer cached."""
    largest = files.max_token(cache)
    if largest >= vocab_size:
        raise ValueError(
            f"{files.prefix}.bin: found token id {largest}, allowed: ids below model.vocab_size {vocab_size}; the file "
            f"was made with a larger vocabulary than the model has; set --model.vocab_size to at least {largest + 1}"
        )
