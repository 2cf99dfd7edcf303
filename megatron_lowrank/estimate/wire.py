"""What the tensor-parallel ranks exchange in a layer: kind, order and width of every collective, and bytes on the wire.

The placement table is interpreted: a group runs c0, A, c1, sigma, c2, B, c3 (backward the other way round), an op moves
what `OPS` says, and what it moves is as wide as the tensor at that place: the input of A at c0, the bottlenecks at c1
and c2, the output of B at c3. A dense matrix is a stock linear of megatron-core, which brings its own collectives.

*Width* is the number of entries per token of the full buffer: an all-gather's output, a reduce-scatter's input, the
tensor of an all-reduce, and the local buffer of an all-to-all. A rank of a ring of t sends (t - 1)/t of it once, for an
all-reduce twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.placement import OPS, PLACEMENTS, Move, Op, conversion, pair_plan, statistic_columns
from megatron_lowrank.roles import ROLE_TABLE, GroupKind, Role, roles_of_slot

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Direction = Literal["forward", "backward"]
Place = Literal["c0", "c1", "c2", "c3"]

MOVE_KIND: dict[Move, Kind] = {
    "gather_sequence": "all_gather",
    "scatter_sequence": "reduce_scatter",
    "gather_hidden": "all_gather",
    "scatter_hidden": "reduce_scatter",
    "reduce": "all_reduce",
    "sequence_to_hidden": "all_to_all",
    "hidden_to_sequence": "all_to_all",
}
PLACES: tuple[Place, ...] = ("c0", "c1", "c2", "c3")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""precision -> bytes of an activation, and of a live parameter."""

# (sequence parallel, side) -> what a stock linear moves forward and backward, always as wide as the hidden size. With
# sequence parallelism the column side gathers its input anew in backward, for the weight's gradient.
_STOCK_LINEAR: dict[tuple[bool, GroupKind], tuple[tuple[Move, ...], tuple[Move, ...]]] = {
    (True, "column"): (("gather_sequence",), ("gather_sequence", "scatter_sequence")),
    (True, "row"): (("scatter_sequence",), ("gather_sequence",)),
    (False, "column"): ((), ("reduce",)),
    (False, "row"): (("reduce",), ()),
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective."""

    kind: Kind
    """As `testing.collectives` records it."""
    width: int
    """Entries per token of the full buffer, the norm's statistic left out."""
    statistic: int = 0
    """Columns that carry the statistic of a norm in the same buffer."""
    full_precision: bool = False
    """Whether its entries are fp32 in a bf16 run too."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of a forward and of a backward pass, each in the order of issue."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()

    @property
    def both(self) -> tuple[Exchange, ...]:
        """Forward, then backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Group:
    """Roles of one layer that share an input."""

    kind: GroupKind
    pairs: tuple[Role, ...]
    """Those that are low-rank pairs."""
    dense: tuple[Role, ...]
    """Those that are one matrix; together they are one stock linear."""


def layer_groups(run: RunConfig, layer: int) -> tuple[Group, ...]:
    """The four groups of a layer, in the order of the forward pass: qkv, o, gate and up, down."""
    groups = []
    for slot in dict.fromkeys(info.slot for info in ROLE_TABLE.values()):
        roles = roles_of_slot(slot)
        dense = tuple(role for role in roles if run.lowrank.is_dense(layer, role))
        pairs = tuple(role for role in roles if role not in dense)
        groups.append(Group(kind=ROLE_TABLE[roles[0]].kind, pairs=pairs, dense=dense))
    return tuple(groups)


def move_of(run: RunConfig, op: Op, direction: Direction) -> Move | None:
    """What an op moves; a group of one rank moves nothing."""
    return None if run.parallel.tensor_parallel_size == 1 else OPS[op][direction == "backward"]


def op_exchanges(run: RunConfig, layer: int, group: Group, place: Place, direction: Direction) -> tuple[Exchange, ...]:
    """Collectives of one op for the pairs of a group: one with grouping, else one per role but for the shared input.

    Args:
        run: the run, its placement resolved.
        layer: global index.
        group: of this layer.
        place: which op.
        direction: of the pass. Without grouping c1 and c2 still are one node, which takes the roles in their order;
            of c3 each role has its own, and backward meets the last one first.
    """
    if not group.pairs:
        return ()
    op: Op = getattr(pair_plan(run.placement, group.pairs[0]), place)
    move = move_of(run, op, direction)
    if move is None:
        return ()
    widths = [_width_at(run, layer, role, place) for role in group.pairs]
    if place == "c0":
        widths = widths[:1]
    elif run.parallel.grouping:
        widths = [sum(widths)]
    statistic = 0
    if op == "g_norm":
        statistic = statistic_columns(run.parallel.tensor_parallel_size, limbs=run.train.precision == "bf16")
    found = [
        Exchange(kind=MOVE_KIND[move], width=width, statistic=0 if i else statistic) for i, width in enumerate(widths)
    ]
    return tuple(reversed(found) if direction == "backward" and place == "c3" else found)


def layer_collectives(run: RunConfig, layer: int) -> Traffic:
    """What one decoder layer exchanges without recomputation.

    Args:
        run: the run, its placement resolved.
        layer: global index.
    """
    forward: list[Exchange] = []
    backward: list[Exchange] = []
    groups = layer_groups(run, layer)
    for group in groups:
        for place in PLACES:
            forward += op_exchanges(run, layer, group, place, "forward")
            # A dense role reads the input beside the A's.
            forward += _stock_linear(run, group.kind).forward if group.dense and place == "c1" else ()
    for group in reversed(groups):
        for place in reversed(PLACES):
            backward += _stock_linear(run, group.kind).backward if group.dense and place == "c1" else ()
            backward += op_exchanges(run, layer, group, place, "backward")
    return Traffic(forward=tuple(forward), backward=tuple(backward))


def layout_changes(run: RunConfig) -> dict[int | None, Traffic]:
    """Exchanges where the layout of the residual changes: the layer in front of which it does, None for the final norm.

    Embedding, final norm and output layer know the sequence shard (or the whole) only, and so does a layer without any
    pair; the change costs an all-to-all of the local buffer in either direction.
    """
    order: list[int | None] = [*range(run.model.num_layers), None]
    before, changes = run.residual(None), {}
    for layer in order:
        now = run.residual(layer)
        traffic = _moved(run, conversion(before, now), run.model.hidden_size // run.parallel.tensor_parallel_size)
        if traffic.both:
            changes[layer] = traffic
        before = now
    return changes


def end_collectives(run: RunConfig) -> dict[str, Traffic]:
    """What embedding, output layer and loss exchange for one micro-batch; all are stock, whatever the placement."""
    scatter: Op = "rs_seq" if PLACEMENTS[run.placement].sequence_parallel else "g"
    alone = run.parallel.tensor_parallel_size == 1
    # Largest logit, logit of the target, sum of exponentials.
    scalars = () if alone else (Exchange(kind="all_reduce", width=1, full_precision=True),) * 3
    return {
        "embedding": _moved(run, scatter, run.model.hidden_size),
        "output layer": _stock_linear(run, "column"),
        "loss": Traffic(forward=scalars),
    }


def ring_bytes(run: RunConfig, exchanges: Iterable[Exchange], *, tokens: int, statistic: bool = False) -> int:
    """Bytes that one rank sends for some collectives.

    Args:
        run: the run; says group size and precision.
        exchanges: the collectives.
        tokens: of the micro-batch.
        statistic: count the columns of the norms' statistic, and them alone; they are left out otherwise.
    """
    t, element, total = run.parallel.tensor_parallel_size, ELEMENT_BYTES[run.train.precision], 0
    for exchange in exchanges:
        width = exchange.statistic if statistic else exchange.width
        rounds = 2 if exchange.kind == "all_reduce" else 1
        total += rounds * width * (4 if exchange.full_precision else element)
    return -(-total * tokens * (t - 1) // t)


def _width_at(run: RunConfig, layer: int, role: Role, place: Place) -> int:
    width_in, width_out = run.model.role_widths(role)
    rank = run.rank_of(layer, role)
    return {"c0": width_in, "c1": rank, "c2": rank, "c3": width_out}[place]


def _moved(run: RunConfig, op: Op, width: int) -> Traffic:
    forward, backward = (
        () if move is None else (Exchange(kind=MOVE_KIND[move], width=width),)
        for move in (move_of(run, op, "forward"), move_of(run, op, "backward"))
    )
    return Traffic(forward=forward, backward=backward)


def _stock_linear(run: RunConfig, kind: GroupKind) -> Traffic:
    if run.parallel.tensor_parallel_size == 1:
        return Traffic()
    forward, backward = (
        tuple(Exchange(kind=MOVE_KIND[move], width=run.model.hidden_size) for move in moves)
        for moves in _STOCK_LINEAR[PLACEMENTS[run.placement].sequence_parallel, kind]
    )
    return Traffic(forward=forward, backward=backward)
