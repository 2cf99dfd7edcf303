"""Self-attention over separate q, k, v, and a core attention for backends without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


class LowRankSelfAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention whose `linear_qkv` (a QKVGroup) hands over q, k and v separately.

    Rows are head-major, not interleaved by query group, so a cut over ranks is a cut by heads.
    """

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
