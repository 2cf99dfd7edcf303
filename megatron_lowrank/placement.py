"""Table: placement x linear group -> what is sharded and which collective runs where. Pure data.

A linear group is `x -> c0 -> A -> c1 -> sigma -> c2 -> B -> c3`; a dense group is `x -> c0 -> W -> c3`. Shard dims
refer to stored matrices (`A [R, in]`: 0 = R, 1 = in; `B [out, R]`: 0 = out, 1 = R; `W [out, in]`); None = replicated.
`layers/linear.py` is the only interpreter, so a new placement is a new row.

| op       | forward                    | backward               |
|----------|----------------------------|------------------------|
| `id`     | -                          | -                      |
| `ag_seq` | all-gather dim 0           | reduce-scatter dim 0   |
| `rs_seq` | reduce-scatter dim 0       | all-gather dim 0       |
| `ag_hid` | all-gather last dim        | reduce-scatter last dim|
| `rs_hid` | reduce-scatter last dim    | all-gather last dim    |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Op = Literal["id", "ag_seq", "rs_seq", "ag_hid", "rs_hid"]
GroupKind = Literal["column", "row"]
"""`column`: q, k, v and gate, up, which read the residual; `row`: o and down, which write it."""

GROUP_KIND: dict[str, GroupKind] = {
    "q": "column", "k": "column", "v": "column", "gate": "column", "up": "column", "o": "row", "down": "row",
}  # fmt: skip


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
    """One cell of the table for a dense matrix. A stock linear of megatron-core carries these collectives itself."""

    c0: Op
    w_dim: int
    c3: Op
    bias_dim: int | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One row of the table."""

    residual: Literal["sequence", "hidden"]
    """How the residual is sharded between blocks."""
    pairs: dict[GroupKind, PairPlan] | None
    """Cells for low-rank pairs; None: the row holds dense matrices only."""
    rank_divides: bool
    """Whether every rank R has to be a multiple of the tensor-parallel size."""


DENSE_PLANS: dict[GroupKind, DensePlan] = {
    "column": DensePlan(c0="ag_seq", w_dim=0, c3="id", bias_dim=0),
    "row": DensePlan(c0="id", w_dim=1, c3="rs_seq", bias_dim=None),
}

PLACEMENTS: dict[str, Placement] = {
    "dense": Placement(residual="sequence", pairs=None, rank_divides=False),
    "vanilla": Placement(
        residual="sequence",
        rank_divides=True,
        pairs={
            "column": PairPlan(c0="ag_seq", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_hid", bias_dim=0),
            "row": PairPlan(c0="ag_hid", a_dim=0, c1="id", c2="id", b_dim=1, c3="rs_seq", bias_dim=None),
        },
    ),
}
