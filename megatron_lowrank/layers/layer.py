"""The decoder layer: megatron-core's own, which knows its canonical parts."""

from __future__ import annotations

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowrank.layers.canonical import Part
from megatron_lowrank.placement import shard_axis
from megatron_lowrank.roles import BLOCK_NORM


class LowRankTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer with our groups in its slots; nothing of the forward pass is changed."""

    @property
    def layer_index(self) -> int:
        """Global index from 0; megatron-core counts from 1."""
        return int(self.layer_number) - 1

    def canonical_parts(self) -> list[Part]:
        """Parts of the norms and of all groups, under the layer's global prefix."""
        attention, mlp = self.self_attention, self.mlp
        parts: list[Part] = []
        for block, groups in {
            "attn": (attention.linear_qkv, attention.linear_proj),
            "mlp": (mlp.linear_fc1, mlp.linear_fc2),
        }.items():
            name = BLOCK_NORM[block]  # type: ignore[index]
            weight = getattr(getattr(self, name), "weight", None)
            if weight is not None:  # else the norm belongs to the group
                axis = shard_axis(groups[0].plan.placement, "norm")
                parts.append(Part(key=f"{name}.weight", parameter=weight, axis=axis))
            for group in groups:
                parts += group.canonical_parts()
        return [part.prefixed(f"decoder.layers.{self.layer_index}.") for part in parts]
