"""Shape of the decoder: a pre-norm LLaMA with RMSNorm, rotary embedding and a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.roles import ROLE_TABLE, Role


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model, in megatron-core's words. Every width is global, never per rank."""

    num_layers: int = 2
    """Decoder layers L."""
    hidden_size: int = 64
    """Width H of the residual stream."""
    ffn_hidden_size: int = 176
    """Width F of the MLP."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads (GQA, MQA). Default: as many as query heads (MHA)."""
    kv_channels: int | None = None
    """Head dimension D. Default: hidden_size / num_attention_heads."""
    vocab_size: int = 256
    """True vocabulary size V, without padding."""
    vocab_multiple: int = 128
    """The embedding's rows are padded to a multiple of this times the tensor-parallel size (Megatron-LM:
    make_vocab_size_divisible_by)."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model may be given."""
    norm_epsilon: float = 1e-6
    """Epsilon of every RMSNorm."""
    rotary_base: float = 10000.0
    """Base theta of the rotary embedding (half-rotation layout)."""
    tie_embeddings: bool = False
    """Share the embedding with the output layer (megatron-core: share_embeddings_and_output_weights)."""
    attention_bias: bool = False
    """Bias on q, k, v and o (after B)."""
    mlp_bias: bool = False
    """Bias on gate, up and down (after B)."""
    pad_token_id: int | None = 0
    """Its embedding row starts at zero. None: no such row."""
    bos_token_id: int | None = 0
    """Written into exported checkpoints."""
    eos_token_id: int | None = 1
    """Written into exported checkpoints."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose linears, norms and attention fill the slots: torch's and ours, or Transformer Engine's (GPU only)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "query_groups",
                     "head_dim", "vocab_size", "vocab_multiple", "max_position_embeddings"):  # fmt: skip
            limit = 10_000 if name == "num_layers" else 2**31
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"model.{name}: found {getattr(self, name)}, allowed: 1 to {limit}")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.num_attention_heads: found {self.num_attention_heads}, which does not divide "
                f"model.hidden_size {self.hidden_size}; choose a divisor or set model.kv_channels"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.kv_channels: found head dimension {self.head_dim}, allowed: even (rotary pairs)")
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"model.num_query_groups: found {self.query_groups}, allowed: a divisor of "
                f"model.num_attention_heads {self.num_attention_heads}"
            )
        if not self.norm_epsilon > 0 or not self.rotary_base > 0:
            raise ValueError(
                f"model.norm_epsilon and model.rotary_base: found {self.norm_epsilon} and {self.rotary_base}, "
                "allowed: positive numbers"
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"model.{name}: found {token}, allowed: 0 to {self.vocab_size - 1}")

    @property
    def query_groups(self) -> int:
        """Key/value heads, the default resolved."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_dim(self) -> int:
        """Head dimension D, the default resolved."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def query_width(self) -> int:
        """H_q, the output width of q and the input width of o."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """H_kv, the output width of k and of v."""
        return self.query_groups * self.head_dim

    def role_widths(self, role: Role) -> tuple[int, int]:
        """(in, out) of the dense matrix that a role's pair replaces."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        return {
            "q": (hidden, self.query_width),
            "k": (hidden, self.key_value_width),
            "v": (hidden, self.key_value_width),
            "o": (self.query_width, hidden),
            "gate": (hidden, ffn),
            "up": (hidden, ffn),
            "down": (ffn, hidden),
        }[role]

    def role_has_bias(self, role: Role) -> bool:
        """Whether a role carries an output bias."""
        return self.attention_bias if ROLE_TABLE[role].block == "attn" else self.mlp_bias

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Rows of the live embedding: V rounded up to a multiple of vocab_multiple * tensor_parallel_size."""
        step = self.vocab_multiple * tensor_parallel_size
        return -(-self.vocab_size // step) * step
