"""What every linear of the model becomes: a dense matrix or a low-rank pair, with which rank and activation.

A *method* is a row of `METHODS`. A pair computes `y = sigma(x A^T) B^T`, A [R, in], B [out, R]
(CoLA eq. 3; `svd` is the same with sigma = identity).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_lowrank.config.activations import check_activation
from megatron_lowrank.roles import BLOCKS, ROLE_TABLE, ROLES, Role


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the method table."""

    latent_activation: str
    """Non-linearity at the rank-R bottleneck, by its torch name."""
    mlp_activation: Literal["keep", "drop"]
    """Default of `LowRankConfig.mlp_activation`."""
    low_rank: bool = True
    """False: every role is one dense matrix."""


METHODS: dict[str, Method] = {
    "dense": Method(latent_activation="identity", mlp_activation="keep", low_rank=False),
    "svd": Method(latent_activation="identity", mlp_activation="keep"),
    "cola": Method(latent_activation="silu", mlp_activation="drop"),
}


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """Method, ranks and activations of the seven projections (roles q, k, v, o, gate, up, down) of every layer."""

    method: Literal["dense", "svd", "cola"] = "cola"
    """Row of the method table: `dense` (one matrix), `svd` (linear pair), `cola` (non-linear bottleneck)."""
    rank: int | float = 0.25
    """Rank of all roles: an integer is absolute, a number in (0, 1] is a ratio of the hidden size."""
    rank_overrides: Mapping[str, int | float] = field(default_factory=dict)
    """Ranks that differ, by `attn`, `mlp`, a role (`q`), a layer (`3`) or both (`3.q`); the most specific wins."""
    rank_multiple: int = 8
    """Ratios round to a multiple of this."""
    dense_layers: tuple[int, ...] = ()
    """Global indices (from 0) of layers whose roles all stay dense."""
    dense_roles: tuple[Role, ...] = ()
    """Roles that stay dense in every layer."""
    latent_activation: str | None = None
    """Non-linearity at the bottleneck: `identity` or an element-wise function of torch. Default: the method's."""
    mlp_activation: Literal["keep", "drop"] | None = None
    """`keep`: down(silu(gate(x)) * up(x)); `drop`: down(gate(x) * up(x)). Default: the method's."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"lowrank.method: found {self.method!r}, allowed: {', '.join(METHODS)}")
        if self.rank_multiple < 1:
            raise ValueError(f"lowrank.rank_multiple: found {self.rank_multiple}, allowed: a positive integer")
        _check_rank("lowrank.rank", self.rank)
        for key, rank in self.rank_overrides.items():
            _parse_override_key(key)
            _check_rank(f"lowrank.rank_overrides[{key}]", rank)
        for role in self.dense_roles:
            if role not in ROLES:
                raise ValueError(f"lowrank.dense_roles: found {role!r}, allowed: {', '.join(ROLES)}")
        if self.mlp_activation not in (None, "keep", "drop"):
            raise ValueError(f"lowrank.mlp_activation: found {self.mlp_activation!r}, allowed: keep, drop")
        check_activation("lowrank.latent_activation", self.sigma)

    @property
    def sigma(self) -> str:
        """Name of the activation at the bottleneck, the method's default resolved."""
        return self.latent_activation or METHODS[self.method].latent_activation

    @property
    def mlp(self) -> Literal["keep", "drop"]:
        """`mlp_activation` with the method's default resolved; a dense model keeps its SiLU."""
        return self.mlp_activation or METHODS[self.method].mlp_activation

    def is_dense(self, layer: int, role: Role) -> bool:
        """Whether this role of this layer (global index) is one dense matrix."""
        return not METHODS[self.method].low_rank or layer in self.dense_layers or role in self.dense_roles

    def is_dense_layer(self, layer: int) -> bool:
        """Whether all roles of this layer (global index) are dense matrices."""
        return all(self.is_dense(layer, role) for role in ROLES)

    def rank_of(self, layer: int, role: Role, hidden_size: int) -> int:
        """Rank of a role. layer+role wins over layer, role, group (`attn`/`mlp`), global."""
        for key in (f"{layer}.{role}", str(layer), role, ROLE_TABLE[role].block):
            if key in self.rank_overrides:
                return _resolve_rank(self.rank_overrides[key], hidden_size, self.rank_multiple)
        return _resolve_rank(self.rank, hidden_size, self.rank_multiple)

    def override_layers(self) -> tuple[int, ...]:
        """Layer indices named by `rank_overrides` and `dense_layers`, to be checked against the layer count."""
        named = [layer for layer, _ in map(_parse_override_key, self.rank_overrides) if layer is not None]
        return (*named, *self.dense_layers)


def _resolve_rank(rank: int | float, hidden_size: int, multiple: int) -> int:
    if isinstance(rank, int):
        return rank
    return multiple * max(1, math.floor(rank * hidden_size / multiple + 0.5))


def _check_rank(name: str, rank: int | float) -> None:
    if isinstance(rank, bool) or not isinstance(rank, (int, float)) or not math.isfinite(rank):
        raise ValueError(f"{name}: found {rank!r}, allowed: an integer >= 1 or a ratio in (0, 1]")
    if isinstance(rank, int) and rank < 1 or isinstance(rank, float) and not 0 < rank <= 1:
        raise ValueError(f"{name}: found {rank}, allowed: an integer >= 1 or a ratio in (0, 1]")


def _parse_override_key(key: str) -> tuple[int | None, str | None]:
    layer, dot, role = key.partition(".")
    if not dot and (key in BLOCKS or key in ROLES):
        return None, key
    if layer.isdigit() and (not dot or role in ROLES):
        return int(layer), role or None
    allowed = f"attn, mlp, {', '.join(ROLES)}, LAYER, LAYER.ROLE"
    raise ValueError(f"lowrank.rank_overrides: found key {key!r}, allowed: {allowed}")
