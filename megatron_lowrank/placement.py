"""Table: placement x linear group -> what is sharded and which collective runs where. Pure data.

A linear group is `x -> c0 -> A -> c1 -> sigma -> c2 -> B -> c3`. Shard dims refer to stored matrices (`A [R, in]`: 0 is
R, 1 is in; `B [out, R]`: 0 is out, 1 is R; `W [out, in]`); None is replicated. `layers/linear.py` runs the ops,
`estimate/` counts them; whoever asks how a parameter is cut asks `shard_axis`. Dense matrices are stock linears of
megatron-core, which carry their own collectives (column: all-gather of the sequence before, row: reduce-scatter after).
A tensor-parallel group of one rank runs no op: all low-rank placements are one function there.

| placement            | residual        | what the ranks exchange in a block                                  |
|----------------------|-----------------|---------------------------------------------------------------------|
| `dense`              | sequence shard  | the hidden state: gathered and scattered around each block          |
| `vanilla`            | sequence shard  | that, and every wide output, since the rank R is what is cut        |
| `vanilla_replicated` | on every rank   | the same bytes as all-reduces; attention runs whole on every rank   |
| `btp`                | hidden shard    | bottlenecks: one all-reduce of R per group and direction (BOOST)    |
| `btp_sp`             | sequence shard  | bottlenecks: one all-gather or reduce-scatter of R, half the bytes  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.roles import ROLE_TABLE, GroupKind, Role

Move = Literal[
    "gather_sequence", "scatter_sequence", "gather_hidden", "scatter_hidden", "reduce",
    "sequence_to_hidden", "hidden_to_sequence",
]  # fmt: skip
"""One collective: `gather_*` is an all-gather, `scatter_*` a reduce-scatter, along dim 0 or the last dim; `reduce` an
all-reduce; `*_to_*` an all-to-all that trades a shard of one dim for a shard of the other."""
Op = Literal["id", "f", "g", "g_norm", "ag_seq", "rs_seq", "ag_hid", "rs_hid", "seq_to_hid", "hid_to_seq"]

OPS: dict[Op, tuple[Move | None, Move | None]] = {
    "id": (None, None),
    "f": (None, "reduce"),
    "g": ("reduce", None),
    # The statistic of the norm travels with the bottleneck, and the scale is applied after the sum.
    "g_norm": ("reduce", None),
    "ag_seq": ("gather_sequence", "scatter_sequence"),
    "rs_seq": ("scatter_sequence", "gather_sequence"),
    "ag_hid": ("gather_hidden", "scatter_hidden"),
    "rs_hid": ("scatter_hidden", "gather_hidden"),
    "seq_to_hid": ("sequence_to_hidden", "hidden_to_sequence"),
    "hid_to_seq": ("hidden_to_sequence", "sequence_to_hidden"),
}
"""op -> (what the forward pass moves, what the backward pass moves). A group of one rank moves nothing."""

Residual = Literal["sequence", "hidden", "replicated"]
"""What a rank holds of the residual stream: [S/t, B, H], [S, B, H/t] or [S, B, H]."""

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

    residual: Residual
    """Layout of the residual stream between the groups."""
    norm_dim: int | None
    """How the gain of a layer's norm is sharded."""
    rank_divides: bool
    """Whether every rank R has to be a multiple of the tensor-parallel size."""
    hidden_divides: bool
    """Whether the hidden size has to be."""
    dense_roles: bool
    """Whether a layer may hold pairs and dense matrices side by side."""
    pairs: dict[GroupKind, PairPlan] | None
    """Cells for low-rank pairs; None: the row holds dense matrices only."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether megatron-core's sequence parallelism is on with more than one rank."""
        return self.residual != "replicated"


DENSE_PLANS: dict[GroupKind, DensePlan] = {
    "column": DensePlan(w_dim=0, bias_dim=0),
    "row": DensePlan(w_dim=1, bias_dim=None),
}

PLACEMENTS: dict[str, Placement] = {
    "dense": Placement(
        residual="sequence", norm_dim=None, rank_divides=False, hidden_divides=False, dense_roles=True, pairs=None
    ),
    "vanilla": Placement(
        residual="sequence", norm_dim=None, rank_divides=True, hidden_divides=False, dense_roles=True,
        pairs={
            "column": PairPlan(c0="ag_seq", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_hid", bias_dim=0),
            "row": PairPlan(c0="ag_hid", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_seq", bias_dim=None),
        },
    ),
    "vanilla_replicated": Placement(
        residual="replicated", norm_dim=None, rank_divides=True, hidden_divides=False, dense_roles=False,
        pairs={
            "column": PairPlan(c0="f", a_dim=0, c1="id", c2="id", b_dim=1, c3="g", bias_dim=None),
            "row": PairPlan(c0="f", a_dim=0, c1="id", c2="id", b_dim=1, c3="g", bias_dim=None),
        },
    ),
    "btp": Placement(
        residual="hidden", norm_dim=0, rank_divides=False, hidden_divides=True, dense_roles=False,
        pairs={
            "column": PairPlan(c0="id", a_dim=1, c1="g_norm", c2="f", b_dim=0, c3="id", bias_dim=0),
            "row": PairPlan(c0="id", a_dim=1, c1="g", c2="f", b_dim=0, c3="id", bias_dim=0),
        },
    ),
    "btp_sp": Placement(
        residual="sequence", norm_dim=None, rank_divides=False, hidden_divides=False, dense_roles=True,
        pairs={
            "column": PairPlan(c0="id", a_dim=None, c1="id", c2="ag_seq", b_dim=0, c3="id", bias_dim=0),
            "row": PairPlan(c0="id", a_dim=1, c1="rs_seq", c2="id", b_dim=None, c3="id", bias_dim=None),
        },
    ),
}  # fmt: skip
"""A layer whose seven roles are all dense takes the row `dense` in a model of any placement."""


def pair_plan(placement: str, role: Role) -> PairPlan:
    """Cells of a pair of this role. The placement has to hold pairs, as `RunConfig` checks."""
    pairs = PLACEMENTS[placement].pairs
    assert pairs is not None, f"placement {placement} holds dense matrices only"
    return pairs[ROLE_TABLE[role].kind]


def residual_of(placement: str, *, dense_layer: bool) -> Residual:
    """Layout of the residual in a layer; one without any pair takes the row `dense`, where that keeps a sequence."""
    row = PLACEMENTS[placement]
    return "sequence" if dense_layer and row.sequence_parallel else row.residual


def conversion(before: Residual, after: Residual) -> Op:
    """The op that turns a residual of one layout into another."""
    ops: dict[tuple[Residual, Residual], Op] = {
        ("sequence", "hidden"): "seq_to_hid",
        ("hidden", "sequence"): "hid_to_seq",
    }
    return "id" if before == after else ops[before, after]


STATISTIC_LIMBS = 3
"""bf16 numbers that hold one fp32 exactly (8 + 8 + 8 bits of mantissa)."""


def statistic_columns(ranks: int, *, limbs: bool) -> int:
    """Columns in which a norm's sum of squares travels with the bottleneck (op `g_norm`).

    One, where the buffer is as precise as the sum. In a bf16 buffer every rank has columns of its own for the limbs of
    its fp32 sum, so that the reduction adds zeros to them alone; the whole is a multiple of 16, as low-precision
    kernels want it.
    """
    return 16 * -(-STATISTIC_LIMBS * ranks // 16) if limbs else 1


def shard_axis(
    placement: str, kind: PartKind, role: Role | None = None, *, dense: bool = False, dense_layer: bool = False
) -> int | None:
    """Axis along which a canonical parameter is cut over the tensor-parallel ranks; None: replicated.

    Args:
        placement: Row of the table.
        kind: What the parameter is; the final norm, which belongs to no layer, is not asked for here.
        role: Of a factor, dense matrix or bias.
        dense: Whether a bias belongs to a dense matrix.
        dense_layer: Whether a norm belongs to a layer without any pair.
    """
    if kind in ("embedding", "output"):
        return 0
    if kind == "norm" or role is None:
        return None if dense_layer else PLACEMENTS[placement].norm_dim
    if kind == "dense" or dense:
        cells = DENSE_PLANS[ROLE_TABLE[role].kind]
        return cells.w_dim if kind == "dense" else cells.bias_dim
    pair = pair_plan(placement, role)
    return {"a": pair.a_dim, "b": pair.b_dim, "bias": pair.bias_dim}[kind]
