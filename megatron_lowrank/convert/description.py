"""`lowrank_config.json`: the only place from which a reader of our formats learns the model.

The configs are written as they are, and beside them what they resolve to. A reader rebuilds the configs and refuses
the file when they resolve to something else, so a changed default can never re-interpret old weights silently.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.shards import read_json
from megatron_lowrank.messages import differences
from megatron_lowrank.roles import ROLES

DESCRIPTION = "lowrank_config.json"
FORMAT = "megatron_lowrank"
FORMAT_VERSION = 1
KIND = "canonical"
MOST_LAYERS = 10_000
LARGEST_WIDTH = 1 << 31

Config = TypeVar("Config", ModelConfig, LowRankConfig)
REQUIRED = {
    "model": ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "norm_epsilon",
              "rotary_base", "tie_embeddings"),
    "lowrank": ("method", "rank"),
}  # fmt: skip
"""Fields that may not be left to a default."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from."""

    kind: str
    """Format that was read, e.g. `cola`, `canonical`, `training`, `python`."""
    exact: bool = True
    """False: the weights only approximate those of the source."""
    init_from: str | None = None
    """How inexact weights were made, e.g. `dense_svd_warm_start`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values worth keeping, such as the step of the training run."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Content of `lowrank_config.json`."""

    model: ModelConfig
    lowrank: LowRankConfig
    dtype: str
    """Common dtype of the tensors, e.g. `float32`, or `mixed`."""
    source: Source
    seed: int | None = None
    """Seed of the initial weights, if known."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What was installed at writing (`compat.versions`)."""

    def to_json(self) -> str:
        """The text of the file."""
        lowrank = {**_plain(self.lowrank), "rank_overrides": dict(self.lowrank.rank_overrides)}
        values = {
            "format": FORMAT, "format_version": FORMAT_VERSION, "kind": KIND, "model": _plain(self.model),
            "lowrank": lowrank, "resolved": resolved(self.model, self.lowrank), "dtype": self.dtype,
            "seed": self.seed, "source": _plain(self.source), "versions": dict(self.versions),
        }  # fmt: skip
        return json.dumps(values, indent=2, default=dict) + "\n"


def read_description(folder: Path) -> Description:
    """Read and check `lowrank_config.json`.

    Raises:
        ConvertError: UNKNOWN_ARCH (format or version), CONFIG (a field), RANK, MISSING_FILE, CORRUPT.
    """
    path = folder / DESCRIPTION
    values = read_json(path)
    found = (values.get("format"), values.get("format_version"), values.get("kind"))
    if found != (FORMAT, FORMAT_VERSION, KIND):
        what = f"format {found[0]!r} version {found[1]!r} kind {found[2]!r}"
        raise ConvertError(
            "UNKNOWN_ARCH", f"found {what}, supported: {FORMAT} version {FORMAT_VERSION} kind {KIND!r} ({path})"
        )
    model = _config(ModelConfig, "model", values, path)
    lowrank = _config(LowRankConfig, "lowrank", values, path)
    check_sizes(model, lowrank, path)
    if (rebuilt := resolved(model, lowrank)) != values.get("resolved"):
        stored = values.get("resolved")
        stored = stored if isinstance(stored, dict) else {}
        differing = differences(stored, rebuilt, "{name}: {old!r} in the file, {new!r} from its fields")
        code: Literal["RANK", "CONFIG"] = "RANK" if rebuilt["ranks"] != stored.get("ranks") else "CONFIG"
        raise ConvertError(code, f"{'; '.join(differing)[:400]} ({path})")
    try:
        source = Source(**values["source"])
        return Description(
            model=model, lowrank=lowrank, dtype=str(values["dtype"]), source=source,
            seed=values.get("seed"), versions=dict(values.get("versions", {})),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ConvertError("CONFIG", f"field source, dtype or versions: {error} ({path})") from error


def check_sizes(model: ModelConfig, lowrank: LowRankConfig, path: Path) -> None:
    """Refuse values that no model has, before anything is sized by them.

    Raises:
        ConvertError: CONFIG, RANK.
    """
    if model.num_layers > MOST_LAYERS:
        raise ConvertError("CONFIG", f"num_layers: found {model.num_layers}, allowed: at most {MOST_LAYERS} ({path})")
    for name in ("hidden_size", "ffn_hidden_size", "query_width", "vocab_size", "max_position_embeddings"):
        if getattr(model, name) > LARGEST_WIDTH:
            raise ConvertError("CONFIG", f"{name}: found {getattr(model, name)}, allowed: < {LARGEST_WIDTH} ({path})")
    if not math.isfinite(model.norm_epsilon) or not math.isfinite(model.rotary_base):
        raise ConvertError("CONFIG", f"norm_epsilon or rotary_base is not finite ({path})")
    if outside := [layer for layer in lowrank.override_layers() if layer >= model.num_layers]:
        raise ConvertError("CONFIG", f"found layer {outside[0]}, allowed: below {model.num_layers} ({path})")
    for layer in range(model.num_layers):
        for role in ROLES:
            rank, smaller = lowrank.rank_of(layer, role, model.hidden_size), min(model.role_widths(role))
            if rank > smaller and not lowrank.is_dense(layer, role):
                what = f"found {rank} for {role} of layer {layer}, allowed: at most {smaller}"
                raise ConvertError("RANK", f"{what} ({path})")


def check_type(name: str, value: object, default: object, path: Path) -> None:
    """Refuse a JSON value of another kind than the field's default; fields without a plain default are not judged.

    Raises:
        ConvertError: CONFIG.
    """
    # bool is an int to Python, but `true` is no number of layers.
    allowed = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(default))
    if allowed is not None and type(value) not in allowed:
        names = " or ".join(kind.__name__ for kind in allowed)
        raise ConvertError("CONFIG", f"{name}: found {value!r}, allowed: {names} ({path})")


def resolved(model: ModelConfig, lowrank: LowRankConfig) -> dict[str, Any]:
    """What the two configs mean with every default filled in, as plain JSON values."""
    return {
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "latent_activation": lowrank.sigma,
        "mlp_activation": lowrank.mlp,
        "ranks": [
            {role: None if lowrank.is_dense(layer, role) else lowrank.rank_of(layer, role, model.hidden_size)
             for role in ROLES}
            for layer in range(model.num_layers)
        ],
    }  # fmt: skip


def _plain(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _config(kind: type[Config], section: str, values: dict[str, Any], path: Path) -> Config:
    stored = values.get(section)
    if not isinstance(stored, dict):
        raise ConvertError("CONFIG", f"field {section} is missing ({path})")
    known = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := [name for name in stored if name not in known]:
        raise ConvertError("CONFIG", f"unknown field {section}.{unknown[0]}: written by a newer version? ({path})")
    if absent := [name for name in REQUIRED[section] if name not in stored]:
        raise ConvertError("CONFIG", f"field {section}.{absent[0]} is missing ({path})")
    for name, value in stored.items():
        optional = "None" in str(known[name].type)
        if value is not None or not optional:
            check_type(f"{section}.{name}", value, known[name].default, path)
    try:
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in stored.items()}
        return kind(**fields)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConvertError("CONFIG", f"{error} ({path})") from error
