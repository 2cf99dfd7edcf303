"""Table: placement x linear group -> what is sharded and which collective runs where. Pure data.

A linear group is `x -> c0 -> A -> c1 -> sigma -> c2 -> B -> c3`. Shard dims refer to stored matrices (`A [R, in]`: 0 is
R, 1 is in; `B [out, R]`: 0 is out, 1 is R; `W [out, in]`); None is replicated. `layers/linear.py` runs the ops; whoever
asks how a parameter is cut asks `shard_axis`. Dense matrices are stock linears of megatron-core, which carry their own
collectives (column: all-gather of the sequence before, row: reduce-scatter after).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.roles import ROLE_TABLE, GroupKind, Role

Move = Literal["gather_sequence", "scatter_sequence", "gather_hidden", "scatter_hidden"]
"""One collective: `gather_*` is an all-gather, `scatter_*` a reduce-scatter; along dim 0 or the last dim."""
Op = Literal["id", "ag_seq", "rs_seq", "ag_hid", "rs_hid"]

OPS: dict[Op, tuple[Move | None, Move | None]] = {
    "id": (None, None),
    "ag_seq": ("gather_sequence", "scatter_sequence"),
    "rs_seq": ("scatter_sequence", "gather_sequence"),
    "ag_hid": ("gather_hidden", "scatter_hidden"),
    "rs_hid": ("scatter_hidden", "gather_hidden"),
}
"""op -> (what the forward pass moves, what the backward pass moves). A group of one rank moves nothing."""

PartKind = Literal["a", "b", "dense", "bias", "norm", "embedding", "output"]
"""What a canonical parameter is: a factor, a dense matrix, an output bias, a norm's gain, a table of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """One cell of the table for a low-rank pair."""

    c0: Op
    a_dim: int | None
    c1: Op
    c2: Op
    b_dim: int | None
    c3: Op
    bias_dim: int | None
    """How the output bias `[out]` is sharded; it is added after c3, once."""


@dataclass(frozen=True, kw_only=True)
class DensePlan:
    """How a dense matrix is cut."""

    w_dim: int
    bias_dim: int | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One row of the table."""

    norm_dim: int | None
    """How the gain of a layer's norm is sharded."""
    rank_divides: bool
    """Whether every rank R has to be a multiple of the tensor-parallel size."""
    pairs: dict[GroupKind, PairPlan] | None
    """Cells for low-rank pairs; None: the row holds dense matrices only."""


DENSE_PLANS: dict[GroupKind, DensePlan] = {
    "column": DensePlan(w_dim=0, bias_dim=0),
    "row": DensePlan(w_dim=1, bias_dim=None),
}

PLACEMENTS: dict[str, Placement] = {
    "dense": Placement(norm_dim=None, rank_divides=False, pairs=None),
    "vanilla": Placement(
        norm_dim=None,
        rank_divides=True,
        pairs={
            "column": PairPlan(c0="ag_seq", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_hid", bias_dim=0),
            "row": PairPlan(c0="ag_hid", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_seq", bias_dim=None),
        },
    ),
}


def pair_plan(placement: str, role: Role) -> PairPlan:
    """Cells of a pair of this role. The placement has to hold pairs, as `RunConfig` checks."""
    pairs = PLACEMENTS[placement].pairs
    assert pairs is not None, f"placement {placement} holds dense matrices only"
    return pairs[ROLE_TABLE[role].kind]


def shard_axis(placement: str, kind: PartKind, role: Role | None = None, *, dense: bool = False) -> int | None:
    """Axis along which a canonical parameter is cut over the tensor-parallel ranks; None: replicated.

    Args:
        placement: Row of the table.
        kind: What the parameter is; the final norm, which belongs to no layer, is not asked for here.
        role: Of a factor, dense matrix or bias.
        dense: Whether a bias belongs to a dense matrix.
    """
    if kind in ("embedding", "output"):
        return 0
    if kind == "norm" or role is None:
        return PLACEMENTS[placement].norm_dim
    if kind == "dense" or dense:
        cells = DENSE_PLANS[ROLE_TABLE[role].kind]
        return cells.w_dim if kind == "dense" else cells.bias_dim
    pair = pair_plan(placement, role)
    return {"a": pair.a_dim, "b": pair.b_dim, "bias": pair.bias_dim}[kind]
