"""What a layer keeps for its backward pass on one rank, tensor by tensor. Parameters are not in it.

A tensor is counted once however many nodes keep it. How much of it a rank holds follows from the placement table: the
layout of a group's input is carried through c0, A, c1, c2, B and c3 (`pair_layouts`).

| recompute               | kept                                                                                   |
|-------------------------|----------------------------------------------------------------------------------------|
| `none`                  | residual, norms, bottlenecks before and after sigma, attention, MLP                    |
| `latent`                | residual and bottlenecks before sigma; an online norm's statistic, since rebuilding it |
|                         | takes a collective; norm and output of dense matrices that read the residual           |
| `latent_keep_attention` | that, output and log-sum-exp of the attention                                          |
| `full`                  | the layer's input                                                                      |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.estimate.wire import ELEMENT_BYTES, Group, layer_groups, move_of
from megatron_lowrank.placement import Move, PairPlan, Residual, pair_plan
from megatron_lowrank.roles import BLOCK_NORM

Layout = Residual
"""What a rank holds of any tensor: its tokens, its columns, or everything."""
_LAYOUT_AFTER: dict[Move, Layout] = {
    "gather_sequence": "replicated",
    "gather_hidden": "replicated",
    "scatter_sequence": "sequence",
    "scatter_hidden": "hidden",
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One tensor that a layer keeps."""

    name: str
    elements: int
    """On one rank."""
    full_precision: bool = False
    """Whether it is fp32 in a bf16 run too."""


@dataclass(frozen=True, kw_only=True)
class PairLayouts:
    """Layouts along one pair."""

    a_input: Layout
    """After c0."""
    latent: Layout
    """After c1: the complete bottleneck."""
    b_input: Layout
    """After c2."""
    output: Layout
    """After c3."""


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    width: int
    layout: Layout
    full_precision: bool = False


def pair_layouts(run: RunConfig, plan: PairPlan, layout: Layout) -> PairLayouts:
    """Layouts along a pair whose group reads a tensor of the given layout."""

    def op(name: str, before: Layout) -> Layout:
        move = move_of(run, getattr(plan, name), "forward")
        return before if move is None else _LAYOUT_AFTER.get(move, before)

    def product(dim: int | None, before: Layout) -> Layout:
        # A cut of the output's dim leaves columns; one of the input's dim leaves a summand as large as the whole.
        return before if dim is None else "hidden" if dim == 0 else "replicated"

    a_input = op("c0", layout)
    latent = op("c1", product(plan.a_dim, a_input))
    b_input = op("c2", latent)
    output = op("c3", product(plan.b_dim, b_input))
    return PairLayouts(a_input=a_input, latent=latent, b_input=b_input, output=output)


def online_norm(run: RunConfig, group: Group) -> bool:
    """Whether the norm in front of a group is part of its first op, one node that keeps input, statistic and z."""
    return bool(group.pairs) and pair_plan(run.placement, group.pairs[0]).c1 == "g_norm"


def kept_activations(run: RunConfig, layer: int, *, tokens: int) -> tuple[Kept, ...]:
    """What a layer keeps of one micro-batch, under `train.recompute` and `train.latent_store`.

    Args:
        run: the run, its placement resolved.
        layer: global index; one without any pair has no bottleneck to keep, so `latent` keeps what `none` does.
        tokens: of the micro-batch, all ranks together; a multiple of the tensor-parallel size where that cuts them.
    """
    t = run.parallel.tensor_parallel_size
    return tuple(
        Kept(
            name=tensor.name,
            elements=tensor.width * tokens // (1 if tensor.layout == "replicated" else t),
            full_precision=tensor.full_precision,
        )
        for tensor in _tensors(run, layer)
    )


def kept_elements(run: RunConfig, layer: int, *, tokens: int) -> int:
    """Entries that a layer keeps of one micro-batch on a rank; arguments as for `kept_activations`."""
    return sum(kept.elements for kept in kept_activations(run, layer, tokens=tokens))


def kept_bytes(run: RunConfig, layer: int, *, tokens: int) -> int:
    """Bytes that a layer keeps of one micro-batch on a rank; arguments as for `kept_activations`."""
    element = ELEMENT_BYTES[run.train.precision]
    return sum(
        kept.elements * (4 if kept.full_precision else element) for kept in kept_activations(run, layer, tokens=tokens)
    )


def _tensors(run: RunConfig, layer: int) -> Iterator[_Tensor]:
    dense = run.lowrank.is_dense_layer(layer)
    residual = run.residual(layer)
    policy = run.train.recompute
    yield _Tensor(name="x", width=run.model.hidden_size, layout=residual)
    if policy == "full":
        return
    replayed = policy != "none" and not dense
    qkv, o, gate_up, down = layer_groups(run, layer)
    yield from _norm(run, qkv, BLOCK_NORM["attn"], residual, replayed)
    yield from _latents(run, layer, qkv, residual, replayed)
    wide = _wide(run, qkv, residual)
    yield from _column_outputs(run, qkv, wide, replayed)
    if not replayed or policy == "latent_keep_attention":
        yield _Tensor(name="attention output", width=run.model.query_width, layout=wide)
        yield _Tensor(
            name="attention log-sum-exp", width=run.model.num_attention_heads, layout=wide, full_precision=True
        )
    if not replayed and _gathers(run, o):
        yield _Tensor(name="o input, gathered", width=run.model.query_width, layout=_row_input(run, o, wide))
    yield from _latents(run, layer, o, wide, replayed)
    yield _Tensor(name="x_mid", width=run.model.hidden_size, layout=residual)
    yield from _norm(run, gate_up, BLOCK_NORM["mlp"], residual, replayed)
    yield from _latents(run, layer, gate_up, residual, replayed)
    wide = _wide(run, gate_up, residual)
    yield from _column_outputs(run, gate_up, wide, replayed)
    if not replayed:
        # Nothing but down reads the product, so a gathered one is the only one that stays.
        name = "down input, gathered" if _gathers(run, down) else "down input"
        yield _Tensor(name=name, width=run.model.ffn_hidden_size, layout=_row_input(run, down, wide))
    yield from _latents(run, layer, down, wide, replayed)


def _norm(run: RunConfig, group: Group, name: str, residual: Layout, replayed: bool) -> Iterator[_Tensor]:
    if online_norm(run, group):
        yield _Tensor(name=f"{name} statistic", width=1, layout="replicated", full_precision=True)
        return
    if replayed and not group.dense:
        return
    yield _Tensor(name=f"{name} statistic", width=1, layout=residual, full_precision=True)
    width, gathers = run.model.hidden_size, _gathers(run, group)
    if group.dense or not gathers:
        yield _Tensor(name=f"{name} output", width=width, layout=residual)
    if gathers:
        plan = pair_plan(run.placement, group.pairs[0])
        layout = pair_layouts(run, plan, residual).a_input
        yield _Tensor(name=f"{name} output, gathered", width=width, layout=layout)


def _latents(run: RunConfig, layer: int, group: Group, layout: Layout, replayed: bool) -> Iterator[_Tensor]:
    for role in group.pairs:
        plan, rank = pair_plan(run.placement, role), run.rank_of(layer, role)
        along = pair_layouts(run, plan, layout)
        if replayed:
            where = along.b_input if run.train.latent_store == "gathered" else along.latent
            yield _Tensor(name=f"{role} bottleneck", width=rank, layout=where)
            continue
        # The identity makes no tensor of its own, and what c2 gathered replaces what it was gathered from.
        identity, moved = run.lowrank.sigma == "identity", move_of(run, plan.c2, "forward") is not None
        if not identity or not moved:
            yield _Tensor(name=f"{role} bottleneck", width=rank, layout=along.latent)
        if not identity or moved:
            after = "gathered" if identity else "after sigma"
            yield _Tensor(name=f"{role} bottleneck, {after}", width=rank, layout=along.b_input)


def _column_outputs(run: RunConfig, group: Group, wide: Layout, replayed: bool) -> Iterator[_Tensor]:
    for role in (*group.pairs, *group.dense):
        # A replay starts from bottlenecks, and from what a dense matrix made.
        if not replayed or role in group.dense:
            yield _Tensor(name=f"{role} output", width=run.model.role_widths(role)[1], layout=wide)


def _gathers(run: RunConfig, group: Group) -> bool:
    """Whether the pairs of a group read another tensor than the rank's own input."""
    return bool(group.pairs) and move_of(run, pair_plan(run.placement, group.pairs[0]).c0, "forward") is not None


def _wide(run: RunConfig, group: Group, residual: Layout) -> Layout:
    """Layout of heads or FFN channels: dense matrices that read the residual are cut by columns in every placement."""
    return pair_layouts(run, pair_plan(run.placement, group.pairs[0]), residual).output if group.pairs else "hidden"


def _row_input(run: RunConfig, group: Group, wide: Layout) -> Layout:
    return pair_layouts(run, pair_plan(run.placement, group.pairs[0]), wide).a_input if group.pairs else wide
