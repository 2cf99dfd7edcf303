"""Self-attention over separate q, k, v, and a core attention for backends without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


class _Rotate(torch.autograd.Function):
    """Rotary embedding, half-rotation layout (RoFormer eq. 34): four passes over halves, and none to join them.

    megatron-core's unfused form slices, negates, joins and joins again, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out


class LowRankSelfAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention whose `linear_qkv` (a QKVGroup) hands over q, k and v separately.

    Rows are head-major, not interleaved by query group, so a cut over ranks is a cut by heads. In plain training it
    turns q and k itself; packed rows and inference stay with megatron-core's rotary code.
    """

    _angles: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """megatron-core's forward; [S/t, B, H] -> ([S/t, B, H], bias or None)."""
        angles = kwargs.get("rotary_pos_emb")
        special = ("packed_seq_params", "inference_context", "inference_params", "rotary_pos_cos")
        ours = isinstance(angles, torch.Tensor) and angles.shape[-1] == self.hidden_size_per_attention_head
        if ours and not args[1:] and all(kwargs.get(name) is None for name in special):
            kwargs["rotary_pos_emb"], self._angles = None, angles
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[S/t, B, H] -> q [S, B, heads/t, D], k and v [S, B, kv heads/t, D].

        Raises:
            ValueError: an output gate or an unsplit qkv is asked for, which this attention does not have.
        """
        if output_gate or not split_qkv:
            raise ValueError(f"attention: found output_gate={output_gate}, split_qkv={split_qkv}; not supported")
        head = self.hidden_size_per_attention_head
        query, key, value = (x.view(*x.shape[:2], -1, head) for x in self.linear_qkv(hidden_states))
        if self._angles is not None:
            half = self._angles[..., : head // 2]
            cos, sin = half.cos().to(query.dtype), half.sin().to(query.dtype)
            query, key = (_Rotate.apply(x, cos, sin) for x in (query, key))  # type: ignore[no-untyped-call]
        return query, key, value


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
