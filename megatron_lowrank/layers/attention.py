"""Self-attention over separate q, k, v, and a core attention for backends without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_lowrank.layers.factors import LayerPlan
from megatron_lowrank.layers.recompute import Segment

Tensors = tuple[torch.Tensor, ...]


class _Rotate(torch.autograd.Function):
    """Rotary embedding, half-rotation layout (RoFormer eq. 34): four passes over halves, and none to join them.

    megatron-core's unfused form slices, negates, joins and joins again, forward and backward. Kept are the angles
    [S, 1, 1, D/2], which all layers share.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(angles)
        return _rotated(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (angles,) = ctx.saved_tensors
        return _rotated(grads[0], angles.cos().to(grads[0].dtype), -angles.sin().to(grads[0].dtype)), None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out


class LowRankSelfAttention(MegatronModule):
    """Slot `self_attention`: owns `linear_qkv` (norm, q, k, v), `core_attention` and `linear_proj`.

    A composite of its own and no subclass of megatron-core's attention, so that what is kept for backward can be
    chosen between the groups. Rows of q, k, v are head-major, not interleaved by query group: a cut over ranks is a cut
    by heads.
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int, *, lr_plan: LayerPlan,
        attn_mask_type: AttnMaskType = AttnMaskType.causal, cp_comm_type: str | None = None, pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.attn_mask_type, self.head_dim = attn_mask_type, lr_plan.model.head_dim
        self.linear_qkv = build_module(submodules.linear_qkv, config=config)
        self.core_attention = build_module(
            submodules.core_attention, config=config, layer_number=layer_number, attn_mask_type=attn_mask_type,
            attention_type="self", cp_comm_type=cp_comm_type, softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )  # fmt: skip
        self.linear_proj = build_module(submodules.linear_proj, config=config)
        self.replays = lr_plan.replays
        self.keeps_attention = lr_plan.replays and lr_plan.recompute == "latent_keep_attention"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual [S/t, B, H] -> ([S/t, B, H], bias not added yet or None).

        Args:
            hidden_states: In megatron-core's shape.
            attention_mask: None; the attention is causal.
            rotary_pos_emb: Angles [S, 1, 1, D].
            **kwargs: megatron-core's other inputs, which have to be None.

        Raises:
            ValueError: packed rows or megatron-core's inference are asked for.
        """
        given = sorted(name for name, value in kwargs.items() if value is not None)
        if given or rotary_pos_emb is None or rotary_pos_emb.shape[-1] != self.head_dim:
            raise ValueError(f"attention: found {', '.join(given) or 'no rotary angles of a head'}; not supported")
        angles = rotary_pos_emb[..., : self.head_dim // 2]

        def project(*latents: torch.Tensor) -> Tensors:
            q, k, v = (x.view(*x.shape[:2], -1, self.head_dim) for x in self.linear_qkv.split(latents))
            q, k = (_Rotate.apply(x, angles) for x in (q, k))  # type: ignore[no-untyped-call]
            # Out of a batched product v would keep the buffer alive that it shares with the unturned q and k.
            if v.untyped_storage().nbytes() > v.nbytes:
                v = v.clone(memory_format=torch.contiguous_format)
            return q, k, v

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.core_attention(q, k, v, attention_mask, attn_mask_type=self.attn_mask_type)  # type: ignore[no-any-return]

        latents = self.linear_qkv.latents(hidden_states)
        segment = Segment(self.replays)
        if not self.keeps_attention:
            (entered,) = segment.run(lambda *z: (self.linear_proj.enter(attend(*project(*z))),), *latents)
            with segment.not_kept():
                kept = self.linear_proj.latents(entered)
            return self.linear_proj.finish(kept)  # type: ignore[no-any-return]
        qkv = segment.run(project, *latents)
        with segment.not_kept():
            context = attend(*qkv)
        entry = Segment(self.linear_proj.enters)
        (entered,) = entry.run(lambda x: (self.linear_proj.enter(x),), context)
        with entry.not_kept():
            kept = self.linear_proj.latents(entered)
        return self.linear_proj.finish(kept)  # type: ignore[no-any-return]


class CausalAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention, GQA included; slot `core_attention`.

    No mask tensor is built, so memory is linear in the sequence where torch has a fused kernel.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [S, B, heads/t, D], k and v [S, B, kv heads/t, D] -> [S, B, heads/t * D].

        Raises:
            ValueError: a mask, a bias or packed sequences are given; this attention is plainly causal.
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError(
                "core attention of the local backend: found a mask, bias or packed rows; it is plainly causal"
            )
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
