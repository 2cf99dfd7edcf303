"""What the user is shown: what `inspect` says about a folder, and progress on stderr."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

from megatron_lowrank.convert.description import read_description
from megatron_lowrank.convert.formats import HF_FORMATS, READERS, detect_format
from megatron_lowrank.convert.hub import TensorSource
from megatron_lowrank.disk import is_complete
from megatron_lowrank.estimate import count_parameters
from megatron_lowrank.roles import ROLES

PLAIN_INTERVAL = 5.0
BAR_INTERVAL = 0.1


def summarize(path: Path) -> dict[str, Any]:
    """Plain JSON values that describe a folder, from configs and headers, never from tensor data.

    A canonical folder whose writing did not finish is described as far as `lowrank_config.json` goes.

    Raises:
        ConvertError: the folder is unknown or bad.
    """
    found = detect_format(path)
    complete = None if found in HF_FORMATS else found == "training" or is_complete(path)
    source: TensorSource | None = None
    if complete is False:
        description = read_description(path)
        model, lowrank, origin = description.model, description.lowrank, description.source
    else:
        source = READERS[found](path)
        model, lowrank, origin = source.model, source.lowrank, source.source
    count = count_parameters(model, lowrank)
    ranks: dict[str, list[int | str]] = {}
    for role in ROLES:
        of_layers = ["dense" if lowrank.is_dense(i, role) else lowrank.rank_of(i, role, model.hidden_size)
                     for i in range(model.num_layers)]  # fmt: skip
        ranks[role] = list(dict.fromkeys(of_layers))
    return {
        "path": str(path), "format": found, "complete": complete, "method": lowrank.method,
        "latent_activation": lowrank.sigma, "mlp_activation": lowrank.mlp, "ranks": ranks,
        "model": {
            "num_layers": model.num_layers, "hidden_size": model.hidden_size,
            "ffn_hidden_size": model.ffn_hidden_size, "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.query_groups, "kv_channels": model.head_dim, "vocab_size": model.vocab_size,
            "norm_epsilon": model.norm_epsilon, "rotary_base": model.rotary_base,
            "tie_embeddings": model.tie_embeddings, "attention_bias": model.attention_bias,
            "mlp_bias": model.mlp_bias,
        },
        "parameters": count.total, "parameters_by_kind": asdict(count),
        "dtype": source.dtype if source else None, "bytes": source.nbytes if source else None,
        "exact": origin.exact, "init_from": origin.init_from, "source": origin.kind,
        "source_metadata": dict(origin.metadata),
        "notes": list(source.notes) if source else [],
    }  # fmt: skip


def as_text(summary: dict[str, Any]) -> str:
    """The summary as aligned lines."""
    rows = {name: summary[name] for name in ("path", "format", "complete", "method")}
    rows["activations"] = f"latent {summary['latent_activation']}, mlp {summary['mlp_activation']}"
    for role, ranks in summary["ranks"].items():
        rows[f"rank {role}"] = ", ".join(str(rank) for rank in ranks)
    rows["model"] = ", ".join(f"{name} {value}" for name, value in summary["model"].items())
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in summary["parameters_by_kind"].items())
    rows["parameters"] = f"{summary['parameters']:,} ({kinds})"
    rows["dtype"] = summary["dtype"]
    rows["bytes"] = "unknown" if summary["bytes"] is None else f"{summary['bytes']:,}"
    inexact = "no: the weights only approximate the source's"
    rows["exact"] = "yes" if summary["exact"] else f"{inexact} ({summary['init_from']})"
    rows["source"] = ", ".join([summary["source"], *(f"{k} {v}" for k, v in summary["source_metadata"].items())])
    marker = {True: "yes", False: "NO: writing did not finish", None: "no marker in this format"}
    rows["complete"] = marker[summary["complete"]]
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


class ProgressReport:
    """A bar on a terminal, else one plain line every few seconds.

    Call it with the name and size of each tensor that is done.
    """

    def __init__(self, mode: Literal["auto", "plain", "none"], tensors: int, nbytes: int, out: TextIO | None = None):
        self._out = sys.stderr if out is None else out
        self._bar = mode == "auto" and self._out.isatty()
        self._silent = mode == "none"
        self._tensors, self._bytes = tensors, nbytes
        self._done_tensors = self._done_bytes = 0
        self._start = time.monotonic()
        # The first plain line comes after the interval, so that short runs stay quiet.
        self._next = self._start + (0.0 if self._bar else PLAIN_INTERVAL)

    def __call__(self, name: str, nbytes: int) -> None:
        """One more tensor is written."""
        self._done_tensors += 1
        self._done_bytes += nbytes
        now = time.monotonic()
        if self._silent or now < self._next:
            return
        self._next = now + (BAR_INTERVAL if self._bar else PLAIN_INTERVAL)
        line = self._line(name, max(now - self._start, 1e-6))
        self._out.write(f"\r\x1b[K{line}" if self._bar else f"{line}\n")
        self._out.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar and not self._silent:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _line(self, name: str, seconds: float) -> str:
        rate = self._done_bytes / seconds
        left = (self._bytes - self._done_bytes) / rate if rate else 0.0
        share = 100.0 * self._done_bytes / max(self._bytes, 1)
        return (
            f"{share:3.0f}% {self._done_tensors}/{self._tensors} tensors, "
            f"{self._done_bytes / 1e6:,.1f}/{self._bytes / 1e6:,.1f} MB, {rate / 1e6:,.0f} MB/s, "
            f"{left:,.0f} s left, {name}"
        )
