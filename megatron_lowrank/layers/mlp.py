"""The gated MLP: down(act(gate(x)) * up(x)) over two linear groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowrank.layers.linear import LayerPlan, gated


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
        return self.linear_fc2(gated(gate, up, self.keep))  # type: ignore[no-any-return]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Sharded state of both groups."""
        return {
            **self.linear_fc1.sharded_state_dict(f"{prefix}linear_fc1.", sharded_offsets, metadata),
            **self.linear_fc2.sharded_state_dict(f"{prefix}linear_fc2.", sharded_offsets, metadata),
        }

    def backward_dw(self) -> None:
        """Nothing is delayed."""

    def extra_repr(self) -> str:
        """What becomes of the SiLU."""
        return f"mlp_activation={'keep' if self.keep else 'drop'}"
