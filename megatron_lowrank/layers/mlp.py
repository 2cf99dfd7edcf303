"""The gated MLP: down(act(gate(x)) * up(x)) over two linear groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_lowrank.layers.factors import LayerPlan
from megatron_lowrank.layers.recompute import Segment


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020, eq. 6); keeps gate and up, and not silu(gate) beside them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, functional.silu(gate).mul_(grads[0])


class LowRankMLP(MegatronModule):
    """Slot `mlp`: owns `linear_fc1` (norm, gate, up) and `linear_fc2` (down).

    A composite of its own and no subclass of megatron-core's MLP: what that class is given differs between versions.
    """

    def __init__(self, config: TransformerConfig, submodules: Any = None, *, lr_plan: LayerPlan, **kwargs: Any) -> None:
        super().__init__(config)
        self.linear_fc1 = build_module(submodules.linear_fc1, config=config)
        self.linear_fc2 = build_module(submodules.linear_fc2, config=config)
        self.keep, self.replays = lr_plan.lowrank.mlp == "keep", lr_plan.replays

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual [S/t, B, H] -> ([S/t, B, H], bias not added yet or None)."""

        def gated(*latents: torch.Tensor) -> tuple[torch.Tensor]:
            gate, up = self.linear_fc1.split(latents)
            product = _SwiGLU.apply(gate, up) if self.keep else gate * up  # type: ignore[no-untyped-call]
            return (self.linear_fc2.enter(product),)

        segment = Segment(self.replays)
        (entered,) = segment.run(gated, *self.linear_fc1.latents(x))
        with segment.not_kept():
            kept = self.linear_fc2.latents(entered)
        return self.linear_fc2.finish(kept)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """What becomes of the SiLU."""
        return f"mlp_activation={'keep' if self.keep else 'drop'}"
