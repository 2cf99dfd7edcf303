"""The matrix products of a group with its collectives, one autograd node each: all A's on one input, all B's.

A factor here is a bare weight. Weights whose products share an input or a shape are stacked along dim 0, so that a
group needs one product where it can, and its bottlenecks lie side by side in one buffer that one collective reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_lowrank.layers.collectives import run_move, start_move
from megatron_lowrank.placement import OPS, Op

Tensors = tuple[torch.Tensor, ...]


class _Down(torch.autograd.Function):
    """z_i = c1(x A_i^T); the gradient of x is accumulated by the products themselves.

    Left to autograd, every branch would write its own gradient of x and more passes would add them up.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op, group: dist.ProcessGroup, *weights: torch.Tensor) -> Tensors:
        forward, ctx.move = OPS[op]
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        products = (functional.linear(x, weight) for weight in weights)
        # A product is nobody else's yet, so an all-reduce may write into it.
        return tuple(
            start_move(forward, z, group, overlap=False)[0] if forward == "reduce" else run_move(forward, z, group)
            for z in products
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows = [run_move(ctx.move, grad.contiguous(), ctx.group).flatten(0, -2) for grad in grads]
        grad_x = rows[0] @ weights[0]
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        flat = x.flatten(0, -2)
        return grad_x.view_as(x), None, None, *(grad.T @ flat for grad in rows)


def down(x: torch.Tensor, weights: Sequence[torch.Tensor], op: Op, group: dist.ProcessGroup) -> Tensors:
    """z = c1(x A^T) of each (stacked) A [R, in]: complete sums, since sigma of a sum is not the sum of sigmas.

    Args:
        x: [S or S/t, B, in or in/t], shared by all.
        weights: Stacked A's.
        op: c1 of the placement table.
        group: Tensor-parallel group.
    """
    return _Down.apply(x, op, group, *weights)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Where the bottleneck of one role lies, and its rows in a stacked B."""

    latent: int
    """Index of the buffer."""
    columns: tuple[int, int]
    """Its columns [from, to) in the buffer."""
    weight: int
    """Index of the stacked B."""
    rows: tuple[int, int]
    """Its rows [from, to) there."""


@dataclass(frozen=True, kw_only=True)
class UpPlan:
    """How the B's of a group are stacked and what moves around them."""

    branches: tuple[Branch, ...]
    """One per role; those that share a stack follow each other in it and in their buffer."""
    op: Op
    """c2 of the placement table."""
    group: dist.ProcessGroup
    overlap: bool
    """Whether the gradient of a bottleneck is reduced while the weight gradient is computed."""

    def stacks(self) -> dict[int, list[Branch]]:
        """Branches by stacked weight."""
        stacks: dict[int, list[Branch]] = {}
        for branch in self.branches:
            stacks.setdefault(branch.weight, []).append(branch)
        return stacks


class _Up(torch.autograd.Function):
    """y_p = c2(h_p) B_p^T; in backward the collective of dh is under way while dB is computed."""

    @staticmethod
    def forward(ctx: Any, plan: UpPlan, whole: Tensors | None, count: int, *tensors: torch.Tensor) -> Tensors:
        latents, weights = tensors[:count], tensors[count:]
        forward, _ = OPS[plan.op]
        moved = [run_move(forward, h, plan.group) for h in latents] if whole is None else list(whole)
        ctx.plan = plan
        ctx.save_for_backward(*moved, *weights)
        outputs: list[torch.Tensor] = []
        for number, branches in plan.stacks().items():
            first, last = branches[0], branches[-1]
            h = moved[first.latent][..., first.columns[0] : last.columns[1]]
            if len(branches) == 1:
                outputs.append(functional.linear(h, weights[number]))
                continue
            rank = first.columns[1] - first.columns[0]
            flat = h.flatten(0, -2).view(-1, len(branches), rank).transpose(0, 1)
            stacked = weights[number].view(len(branches), -1, rank)
            outputs += [y.view(*h.shape[:-1], -1) for y in torch.bmm(flat, stacked.transpose(1, 2)).unbind()]
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        plan: UpPlan = ctx.plan
        count = 1 + max(branch.latent for branch in plan.branches)
        latents, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        rows = [grad.flatten(0, -2) for grad in grads]
        # One dense buffer per collective: the products write their columns, so nothing is joined or made contiguous.
        buffers = [torch.empty_like(h, memory_format=torch.contiguous_format) for h in latents]
        for branch, grad in zip(plan.branches, rows, strict=True):
            columns = buffers[branch.latent].flatten(0, -2)[:, slice(*branch.columns)]
            torch.mm(grad, weights[branch.weight][slice(*branch.rows)], out=columns)
        _, move = OPS[plan.op]
        moving = [start_move(move, buffer, plan.group, overlap=plan.overlap) for buffer in buffers]
        grad_weights = [torch.empty_like(weight) for weight in weights]
        for branch, grad in zip(plan.branches, rows, strict=True):
            h = latents[branch.latent].flatten(0, -2)[:, slice(*branch.columns)]
            torch.mm(grad.T, h, out=grad_weights[branch.weight][slice(*branch.rows)])
        for _, work in moving:
            if work is not None:
                work.wait()
        return None, None, None, *(result for result, _ in moving), *grad_weights


def up(plan: UpPlan, latents: Tensors, weights: Sequence[torch.Tensor], whole: Tensors | None = None) -> Tensors:
    """y = c2(h) B^T of each role, in the order of `plan.branches`.

    Args:
        plan: Where everything lies.
        latents: Activated bottlenecks [S or S/t, B, sum of R].
        weights: Stacked B's [sum of out, R].
        whole: c2(latents) where somebody has it already; the forward pass then moves nothing.

    Returns:
        [S, B, out or out/t] per role.
    """
    return _Up.apply(plan, whole, len(latents), *latents, *weights)  # type: ignore[no-any-return,no-untyped-call]
