"""RMSNorm that megatron-core's sequence parallelism accepts, as one autograd node."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowrank.layers.canonical import current_device, mark_parameter


class _RMSNorm(torch.autograd.Function):
    """y = cast(x / rms(x)) * weight, rms(x) = sqrt(mean(x^2) + eps), statistic in at least fp32.

    One node, so that autograd adds the residual's gradient in one fixed order whether or not it is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        inverse_rms = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse_rms)
        normed: torch.Tensor = (wide * inverse_rms).to(x.dtype)
        return normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With xhat = x / rms: dweight = sum_tokens g xhat,  dx = (g weight - xhat <g weight, xhat> / H) / rms.
        x, weight, inverse_rms = ctx.saved_tensors
        grad, wide_weight = grads[0].to(inverse_rms.dtype), weight.to(inverse_rms.dtype)
        normed = x.to(inverse_rms.dtype) * inverse_rms
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        # One product serves both sums, the second as a matrix-vector product: elementwise passes are what this costs.
        inner = (product @ wide_weight).unsqueeze(-1)
        grad_x = (grad * wide_weight).addcmul_(normed, inner, value=-1 / x.shape[-1]).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(MegatronModule):
    """RMSNorm of a column group and the final norm (built with config, hidden_size, eps).

    The weight [H] is replicated over tensor parallelism. Each rank sees its own tokens under sequence parallelism, so
    the weight carries `sequence_parallel` and megatron-core sums its gradient over the group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(config)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=current_device()))
        mark_parameter(self.weight, None, config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, H] -> [S, B, H]."""
        return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
