"""Matrix-multiplication FLOPs of forward and backward.

Conventions. A multiply-add is 2 FLOPs. Norms, activations, softmax and rotary are left out. Backward is twice forward
(one product for the input's gradient, one for the weight's). Counting is *actual*, the low-rank pairs as configured;
for *dense_equivalent* numbers pass `dense_equivalent(lowrank)`. How the S x S attention products are counted is always
said by the caller, since the two habits differ by up to a third of the total at long sequences:

- `full`: every query meets every key, 4 S^2 H_q forward. What a FLOP counter sees in an unfused implementation.
- `causal`: half of that, what a causal kernel computes.

In full counting, one sequence of n tokens, MHA and one rank R, a layer costs 48 n H R + 18 n R (H + F) + 12 n^2 H
forward and backward; a dense one 24 n H^2 + 18 n H F + 12 n^2 H; the output layer 6 n H V, once per model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.roles import ROLES

AttentionCount = Literal["full", "causal"]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of a forward pass by part; backward and totals follow."""

    projections: int
    """The seven projections."""
    attention: int
    """Scores and context, the two S x S products."""
    head: int = 0
    """Output layer."""

    @property
    def forward(self) -> int:
        """All parts, forward."""
        return self.projections + self.attention + self.head

    @property
    def backward(self) -> int:
        """Without any recomputation."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            projections=self.projections + other.projections, attention=self.attention + other.attention,
            head=self.head + other.head,
        )  # fmt: skip

    def __mul__(self, count: int) -> Flops:
        return Flops(projections=self.projections * count, attention=self.attention * count, head=self.head * count)


def projection_flops(width_in: int, width_out: int, rank: int | None, tokens: int) -> int:
    """Forward FLOPs of one projection: 2 n R (in + out), or 2 n in out when it is dense (rank None)."""
    return 2 * tokens * (width_in * width_out if rank is None else rank * (width_in + width_out))


def attention_flops(model: ModelConfig, tokens: int, attention: AttentionCount) -> int:
    """Forward FLOPs of scores and context of one sequence; fewer key/value heads do not change them."""
    full = 4 * tokens * tokens * model.query_width
    return full if attention == "full" else full // 2


def head_flops(model: ModelConfig, tokens: int) -> int:
    """Forward FLOPs of the output layer, padding rows of the vocabulary left out."""
    return 2 * tokens * model.hidden_size * model.vocab_size


def layer_flops(
    model: ModelConfig, lowrank: LowRankConfig, layer: int, *, tokens: int, attention: AttentionCount
) -> Flops:
    """FLOPs of one decoder layer over one sequence.

    Args:
        model: shape of the model.
        lowrank: method and ranks; dense roles and layers are counted as such.
        layer: global index.
        tokens: length of the sequence.
        attention: how the S x S products are counted.
    """
    projections = 0
    for role in ROLES:
        rank = None if lowrank.is_dense(layer, role) else lowrank.rank_of(layer, role, model.hidden_size)
        projections += projection_flops(*model.role_widths(role), rank, tokens)
    return Flops(projections=projections, attention=attention_flops(model, tokens, attention))


def model_flops(
    model: ModelConfig, lowrank: LowRankConfig, *, sequence_length: int, attention: AttentionCount
) -> Flops:
    """FLOPs of the whole model with its output layer over one sequence."""
    total = Flops(projections=0, attention=0, head=head_flops(model, sequence_length))
    for layer in range(model.num_layers):
        total += layer_flops(model, lowrank, layer, tokens=sequence_length, attention=attention)
    return total


def flops_per_token(
    model: ModelConfig, lowrank: LowRankConfig, *, sequence_length: int, attention: AttentionCount
) -> float:
    """Forward and backward FLOPs per token of a full row; attention makes it depend on the row's length."""
    return model_flops(model, lowrank, sequence_length=sequence_length, attention=attention).total / sequence_length


def flops_per_step(
    model: ModelConfig, lowrank: LowRankConfig, *, sequence_length: int, rows: int, attention: AttentionCount
) -> int:
    """Forward and backward FLOPs of an optimizer step over all ranks.

    Args:
        model: shape of the model.
        lowrank: method and ranks.
        sequence_length: tokens per row, padding included.
        rows: rows of the global batch.
        attention: how the S x S products are counted.
    """
    return (model_flops(model, lowrank, sequence_length=sequence_length, attention=attention) * rows).total
