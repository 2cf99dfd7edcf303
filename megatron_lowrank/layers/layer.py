"""The decoder layer: megatron-core's own, which knows its canonical parts and the layout of its residual."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowrank.layers.canonical import Part
from megatron_lowrank.layers.collectives import apply_op
from megatron_lowrank.layers.factors import LayerPlan
from megatron_lowrank.placement import Op


class LowRankTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer with our groups in its slots.

    Where the layout of the residual changes, at the first and behind the last layer of a hidden-sharded model, it
    converts. Between layers the residual always has the shape that megatron-core expects, [S/t, B, H]: a hidden-sharded
    one is the storage of [S, B, H/t] under that shape, so that schedules, messages and residual adds stay stock.
    """

    @property
    def layer_index(self) -> int:
        """Global index from 0; megatron-core counts from 1."""
        return int(self.layer_number) - 1

    @property
    def plan(self) -> LayerPlan:
        """What the layer's groups were built from."""
        return self.self_attention.linear_qkv.plan  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """megatron-core's forward; [S/t, B, H] -> ([S/t, B, H], context)."""
        if args:
            args = (self._convert(self.plan.entry, args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = self._convert(self.plan.entry, kwargs["hidden_states"])
        hidden_states, context = super().forward(*args, **kwargs)
        return self._convert(self.plan.exit, hidden_states), context

    def _convert(self, op: Op, x: torch.Tensor) -> torch.Tensor:
        if op == "id" or self.plan.size == 1:
            return x
        shape, size = x.shape, self.plan.size
        if op == "hid_to_seq":
            return apply_op(op, x.view(size * shape[0], shape[1], -1), self.plan.tp_group)
        return apply_op(op, x, self.plan.tp_group).view(shape)

    def canonical_parts(self) -> list[Part]:
        """Parts of all groups, under the layer's global prefix."""
        groups = (
            self.self_attention.linear_qkv, self.self_attention.linear_proj, self.mlp.linear_fc1, self.mlp.linear_fc2
        )  # fmt: skip
        prefix = f"decoder.layers.{self.layer_index}."
        return [part.prefixed(prefix) for group in groups for part in group.canonical_parts()]
