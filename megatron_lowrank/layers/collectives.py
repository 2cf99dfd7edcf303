"""The collectives of the placement table as autograd functions: explicit group, any device, fresh outputs.

megatron-core's own mappings allocate on the current CUDA device and reduce in place; a gradient that two consumers
share would be corrupted. These never write into their input. Activations are [S, B, H]; `dim 0` is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowrank.placement import OPS, Move, Op


def _gather_first(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S/t, ...] -> [S, ...], rank order."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter_first(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, ...] partial sums -> [S/t, ...] complete."""
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _gather_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, B, H/t] -> [S, B, H], rank order along the last dimension."""
    size = dist.get_world_size(group)
    blocks = _gather_first(x.unsqueeze(0), group)
    return blocks.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])


def _scatter_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, B, H] partial sums -> [S, B, H/t] complete."""
    size = dist.get_world_size(group)
    blocks = x.view(*x.shape[:-1], size, x.shape[-1] // size).movedim(-2, 0)
    return _scatter_first(blocks, group).squeeze(0)


def _reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Partial sums -> complete sums, same shape."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _sequence_to_hidden(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S/t, B, H] -> [S, B, H/t]."""
    size = dist.get_world_size(group)
    length, batch, hidden = x.shape
    blocks = x.view(length, batch, size, hidden // size).movedim(2, 0).contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out.view(size * length, batch, hidden // size)


def _hidden_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, B, H/t] -> [S/t, B, H]."""
    size = dist.get_world_size(group)
    length, batch, width = x.shape
    blocks = x.contiguous().view(size, length // size, batch, width)
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out.movedim(0, 2).reshape(length // size, batch, size * width)


_MOVES: dict[Move, Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]] = {
    "gather_sequence": _gather_first,
    "scatter_sequence": _scatter_first,
    "gather_hidden": _gather_last,
    "scatter_hidden": _scatter_last,
    "reduce": _reduce,
    "sequence_to_hidden": _sequence_to_hidden,
    "hidden_to_sequence": _hidden_to_sequence,
}


def run_move(move: Move | None, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One collective outside of autograd; a group of one moves nothing."""
    return x if move is None or dist.get_world_size(group) == 1 else _MOVES[move](x, group)


def start_move(
    move: Move | None, owned: torch.Tensor, group: dist.ProcessGroup, *, overlap: bool
) -> tuple[torch.Tensor, Any]:
    """Begin a reduction of a tensor that nobody else reads, so that other work can run under it.

    Args:
        move: `reduce`, `scatter_sequence` or None.
        owned: Dense partial sums; a `reduce` writes its result into them.
        group: Tensor-parallel group.
        overlap: Whether to return before the result is there.

    Returns:
        (result, work): `work.wait()` before the result is read; None when it is there already.
    """
    if move is None or dist.get_world_size(group) == 1:
        return owned, None
    if move == "reduce":
        return owned, dist.all_reduce(owned, group=group, async_op=overlap)
    assert move == "scatter_sequence", f"{move} is no reduction"
    out = owned.new_empty((owned.shape[0] // dist.get_world_size(group), *owned.shape[1:]))
    return out, dist.reduce_scatter_tensor(out, owned, group=group, async_op=overlap)


def _move_together(
    move: Move | None, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Several tensors that differ in their last dimension, in one collective."""
    if move is None or len(tensors) == 1:
        return tuple(run_move(move, x, group) for x in tensors)
    size = dist.get_world_size(group)
    if move in ("gather_hidden", "scatter_hidden"):  # the widths of one rank have to lie side by side
        scatter = move == "scatter_hidden"
        blocks = [x.view(*x.shape[:-1], size, -1).movedim(-2, 0) if scatter else x.unsqueeze(0) for x in tensors]
        widths = [x.shape[-1] for x in blocks]
        packed = torch.cat(blocks, dim=-1)
        moved = (_scatter_first if scatter else _gather_first)(packed, group)
        parts = torch.split(moved, widths, dim=-1)
        return tuple(part.movedim(0, -2).reshape(*part.shape[1:-1], -1) for part in parts)
    widths = [x.shape[-1] for x in tensors]
    return torch.split(_MOVES[move](torch.cat(list(tensors), dim=-1), group), widths, dim=-1)


class _Collective(torch.autograd.Function):
    """Forward and backward moves of one row of the op table, for tensors that travel together."""

    @staticmethod
    def forward(ctx: Any, op: Op, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forward, ctx.move = OPS[op]
        ctx.group = group
        moved = _move_together(forward, tensors, group)
        return tuple(x.view_as(x) if forward is None else x for x in moved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # Gradients of batched or transposed products are strided; a collective on them must see one dense buffer.
        return None, None, *_move_together(ctx.move, [grad.contiguous() for grad in grads], ctx.group)


def apply_together(op: Op, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Run one op of the placement table on tensors that share a collective, forward and (under autograd) backward.

    Args:
        op: Name of the op.
        tensors: [S or S/t, B, width] each.
        group: Tensor-parallel group; a group of one makes every op the identity.

    Raises:
        ValueError: the op is not in the table.
    """
    if op not in OPS:
        raise ValueError(f"placement op: found {op!r}, allowed: {', '.join(OPS)}")
    if OPS[op] == (None, None) or dist.get_world_size(group) == 1:
        return tuple(tensors)
    return _Collective.apply(op, group, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def apply_op(op: Op, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`apply_together` of one tensor."""
    return apply_together(op, (x,), group)[0]


class _Known(torch.autograd.Function):
    """An op whose forward result is there already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op, known: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        _, ctx.move = OPS[op]
        ctx.group = group
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return run_move(ctx.move, grads[0].contiguous(), ctx.group), None, None, None


def known_result(op: Op, x: torch.Tensor, known: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`apply_op(op, x, group)` where its value is `known`: nothing moves forward, backward is the op's."""
    return _Known.apply(x, op, known, group)  # type: ignore[no-any-return,no-untyped-call]


class _KeptWhole(torch.autograd.Function):
    """All-gather whose gradient is this rank's own rows: for a consumer that hands back complete gradients of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rows, ctx.group = x.shape[0], group
        return _gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return own_rows(grads[0], ctx.group), None


def gather_to_keep(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S/t, B, R] -> [S, B, R] of which only `own_rows` may carry a gradient; the wire sees one all-gather."""
    return _KeptWhole.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def own_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's [S/t, ...] of [S, ...], a view."""
    rows = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, rows * dist.get_rank(group), rows)
