"""Which text is read and how it becomes rows of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, tokenizer and the form of a training row."""

    path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files: one prefix, or `WEIGHT PREFIX WEIGHT PREFIX ...` for a blend."""
    split: str = "98,2,0"
    """Shares of train, validation and test documents, used when valid_path is not given."""
    valid_path: tuple[str, ...] = ()
    """Prefixes (or a blend) used for validation in place of a split of `path`."""
    tokenizer: Literal["auto", "byte", "hf", "sentencepiece"] = "auto"
    """Kind of tokenizer: the one that the data was prepared with (auto, told by PREFIX.json), raw bytes, a
    `tokenizer.json`, or a sentencepiece model."""
    tokenizer_path: str | None = None
    """`tokenizer.json` (hf) or `.model` file (sentencepiece)."""
    eod_token: str | None = None
    """Text of the end-of-document token (hf). Default: found in the tokenizer."""
    rows: Literal["packed", "document"] = "packed"
    """`packed`: documents end to end, cut every sequence_length tokens; `document`: one document per row, truncated
    or padded, padding masked from the loss (the published recipe)."""
    eod_mask_loss: bool = False
    """Leave positions whose input is the end-of-document token out of the loss."""
    shuffle_seed: int = 42
    """Seed of the deterministic shuffle over documents, rows and epochs."""
    cache_path: str | None = None
    """Folder for the row index. Default: `cache/` in the run's folder."""

    def __post_init__(self) -> None:
        if not 0 <= self.shuffle_seed < 2**32:
            raise ValueError(f"data.shuffle_seed: found {self.shuffle_seed}, allowed: 0 to {2**32 - 1}")
        self.split_shares()
        for name in ("path", "valid_path"):
            self.blend(name)
        if self.tokenizer not in ("auto", "byte", "hf", "sentencepiece"):
            raise ValueError(f"data.tokenizer: found {self.tokenizer!r}, allowed: auto, byte, hf, sentencepiece")
        if self.tokenizer in ("hf", "sentencepiece") and self.tokenizer_path is None:
            raise ValueError(f"data.tokenizer_path: found nothing, but data.tokenizer {self.tokenizer!r} needs a file")
        if self.rows not in ("packed", "document"):
            raise ValueError(f"data.rows: found {self.rows!r}, allowed: packed, document")

    def split_shares(self) -> tuple[float, float, float]:
        """Shares of train, validation and test; they sum to one."""
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(math.isfinite(s) and s >= 0 for s in shares) or not shares[0] > 0:
            raise ValueError(f"data.split: found {self.split!r}, allowed: three numbers 'train,valid,test', train > 0")
        train, valid, test = (share / sum(shares) for share in shares)
        return train, valid, test

    def blend(self, name: str = "path") -> list[tuple[float, str]]:
        """The (weight, prefix) pairs of `path` or `valid_path`."""
        parts: tuple[str, ...] = getattr(self, name)
        if len(parts) <= 1:
            return [(1.0, prefix) for prefix in parts]
        try:
            weights = [float(weight) for weight in parts[0::2]]
        except ValueError:
            weights = []
        if len(parts) % 2 or not weights or not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(
                f"data.{name}: found {list(parts)}, allowed: one prefix, or 'WEIGHT PREFIX WEIGHT PREFIX ...' with "
                "positive weights"
            )
        return list(zip(weights, parts[1::2], strict=True))
