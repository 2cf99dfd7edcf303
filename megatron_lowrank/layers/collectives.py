"""The collectives of the placement table as autograd functions: explicit group, any device, fresh outputs.

megatron-core's own mappings allocate on the current CUDA device and reduce in place; a gradient that two consumers
share would be corrupted. These never write into their input. Activations are [S, B, H]; `dim 0` is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
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


_MOVES: dict[Move, Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]] = {
    "gather_sequence": _gather_first,
    "scatter_sequence": _scatter_first,
    "gather_hidden": _gather_last,
    "scatter_hidden": _scatter_last,
}


def _move(move: Move | None, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x if move is None else _MOVES[move](x, group)


class _Collective(torch.autograd.Function):
    """Forward and backward moves of one row of the op table."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op, group: dist.ProcessGroup) -> torch.Tensor:
        forward, ctx.move = OPS[op]
        ctx.group = group
        return _move(forward, x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Gradients of batched or transposed products are strided; a collective on them must see one dense buffer.
        return _move(ctx.move, grads[0].contiguous(), ctx.group), None, None


def apply_op(op: Op, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Run one op of the placement table, forward and (under autograd) backward.

    Args:
        op: Name of the op.
        x: [S or S/t, B, width].
        group: Tensor-parallel group; a group of one makes every op the identity.

    Raises:
        ValueError: the op is not in the table.
    """
    if op not in OPS:
        raise ValueError(f"placement op: found {op!r}, allowed: {', '.join(OPS)}")
    if OPS[op] == (None, None) or dist.get_world_size(group) == 1:
        return x
    return _Collective.apply(x, op, group)  # type: ignore[no-any-return,no-untyped-call]
