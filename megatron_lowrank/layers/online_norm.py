"""RMSNorm of a residual that is cut along the hidden dimension, without a collective of its own (exact).

With local slices x_i, gain_i [H/t] and local columns A_i [R, H/t] of the down-projections:

    S_i = sum_j x_ij^2        H_i = (x_i * gain_i) A_i^T
    [H, S] = sum over ranks   rho = sqrt(S/H_size + eps)        z = H / rho

The statistic travels with the bottleneck, and the scale, one number per token, is applied after the sum; that is the
same function as normalising first. Backward needs no collective either: dz is complete on every rank, and the sum over
ranks that RMSNorm's gradient contains equals rho * <dz, z>. With c = <dz, z> over all branches:

    u_i = (dz/rho) A_i     dx_i = u_i * gain_i - x_i * c / (H_size rho^2)
    dA_i = (dz/rho)^T (x_i * gain_i)             dgain_i = sum over tokens of x_i * u_i

The published form scales each slice by its own RMS before the sum, which cannot be undone afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_lowrank.placement import STATISTIC_LIMBS, statistic_columns


def write_statistic(columns: torch.Tensor, statistic: torch.Tensor, rank: int) -> None:
    """Put this rank's sum of squares into the buffer.

    Args:
        columns: [..., `statistic_columns`], a view of the buffer.
        statistic: [...], fp32 or fp64.
        rank: This process in its tensor-parallel group.
    """
    if columns.shape[-1] == 1:
        columns[..., 0] = statistic
        return
    # The sum over ranks adds zeros to every limb, so it is exact in any order and in any precision.
    columns.zero_()
    rest = statistic
    for limb in range(STATISTIC_LIMBS):
        part = rest.to(columns.dtype)
        columns[..., STATISTIC_LIMBS * rank + limb] = part
        rest = rest - part.to(rest.dtype)


def read_statistic(columns: torch.Tensor, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum over ranks, [...] in `dtype`, added in the same order everywhere."""
    if columns.shape[-1] == 1:
        return columns[..., 0].to(dtype)
    limbs = columns[..., : STATISTIC_LIMBS * ranks].to(dtype).view(*columns.shape[:-1], ranks, STATISTIC_LIMBS)
    # Small limbs first: each rank's own sum comes back to the last bit.
    own: torch.Tensor = limbs[..., 2] + limbs[..., 1] + limbs[..., 0]
    total: torch.Tensor = own[..., 0]
    for rank in range(1, ranks):
        total = total + own[..., rank]
    return total


@dataclass(frozen=True, kw_only=True)
class OnlineNorm:
    """What the norm has to know besides its tensors."""

    hidden_size: int
    """H, over all ranks."""
    epsilon: float
    group: dist.ProcessGroup
    """Tensor-parallel group."""


class _OnlineNormDown(torch.autograd.Function):
    """z_i = (x gain) A_i^T / rho of every branch; keeps x, rho and z."""

    @staticmethod
    def forward(
        ctx: Any, norm: OnlineNorm, x: torch.Tensor, gain: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ranks, rank = dist.get_world_size(norm.group), dist.get_rank(norm.group)
        wide = torch.promote_types(x.dtype, torch.float32)
        scaled = x * gain
        statistic = torch.linalg.vector_norm(x.to(wide), dim=-1).square()
        sums: list[torch.Tensor] = []
        for number, weight in enumerate(weights):
            # The first branch carries the statistic.
            extra = statistic_columns(ranks, limbs=x.dtype != wide) if number == 0 and ranks > 1 else 0
            width = weight.shape[0]
            buffer = x.new_empty((*x.shape[:-1], width + extra))
            torch.mm(scaled.flatten(0, -2), weight.T, out=buffer.flatten(0, -2)[:, :width])
            if extra:
                write_statistic(buffer[..., width:], statistic, rank)
            if ranks > 1:
                dist.all_reduce(buffer, group=norm.group)
            if extra:
                statistic = read_statistic(buffer[..., width:], ranks, wide)
            sums.append(buffer[..., :width])
        rho = (statistic / norm.hidden_size + norm.epsilon).sqrt().unsqueeze(-1)
        latents = tuple((total.to(wide) / rho).to(x.dtype) for total in sums)
        ctx.norm = norm
        ctx.save_for_backward(x, gain, rho, *weights, *latents)
        return latents

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, gain, rho, *rest = ctx.saved_tensors
        weights, latents = rest[: len(grads)], rest[len(grads) :]
        wide = rho.dtype
        inner = torch.zeros_like(rho)
        for grad, latent in zip(grads, latents, strict=True):
            inner += (grad.to(wide) * latent.to(wide)).sum(-1, keepdim=True)
        scaled = (x * gain).flatten(0, -2)
        grad_sums = [(grad.to(wide) / rho).to(x.dtype).flatten(0, -2) for grad in grads]
        u = grad_sums[0] @ weights[0]
        for grad, weight in zip(grad_sums[1:], weights[1:], strict=True):
            u.addmm_(grad, weight)
        wide_u, wide_x = u.view_as(x).to(wide), x.to(wide)
        grad_gain = (wide_u * wide_x).flatten(0, -2).sum(0).to(gain.dtype)
        grad_x = (wide_u * gain.to(wide)).addcmul_(wide_x, inner / rho.square(), value=-1 / ctx.norm.hidden_size)
        return None, grad_x.to(x.dtype), grad_gain, *(grad.T @ scaled for grad in grad_sums)


def online_norm_down(
    norm: OnlineNorm, x: torch.Tensor, gain: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """RMSNorm and the down-projections behind it, over a hidden-sharded residual.

    Args:
        norm: H, epsilon, group.
        x: [S, B, H/t], this rank's slice.
        gain: [H/t].
        weights: Stacked A's [R, H/t]; each is one all-reduce, the first with the statistic.

    Returns:
        z [S, B, R] per stack, complete and the same on every rank.
    """
    return _OnlineNormDown.apply(norm, x, gain, *weights)  # type: ignore[no-any-return,no-untyped-call]
