"""The gated MLP: down(act(gate(x)) * up(x)) over two linear groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_lowrank.layers.linear import LayerPlan


class LowRankMLP(MegatronModule):
    """Slot `mlp`: owns `linear_fc1` (gate, up) and `linear_fc2` (down).

    A composite of its own and no subclass of megatron-core's MLP: what that class is given differs between versions.
    """

    def __init__(self, config: TransformerConfig, submodules: Any = None, *, lr_plan: LayerPlan, **kwargs: Any) -> None:
        super().__init__(config)
        self.linear_fc1 = build_module(submodules.linear_fc1, config=config)
        self.linear_fc2 = build_module(submodules.linear_fc2, config=config)
        self.keep = lr_plan.lowrank.mlp == "keep"

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S/t, B, H] -> ([S/t, B, H], bias not added yet or None)."""
        gate, up = self.linear_fc1(x)
        gate = functional.silu(gate) if self.keep else gate
        return self.linear_fc2(gate * up)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """What becomes of the SiLU."""
        return f"mlp_activation={'keep' if self.keep else 'drop'}"
