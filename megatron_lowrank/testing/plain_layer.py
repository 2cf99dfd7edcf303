"""A straightforward torch re-statement of the published decoder layer, for comparing speed; no megatron-core.

Per projection one matrix product, the activation, one matrix product (CoLA eq. 3), or one product where the role is
dense. Weights come from the same canonical tensors as the real model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lowrank.config import ROLES, LowRankConfig, ModelConfig, activation_by_name
from megatron_lowrank.layers.init import draw
from megatron_lowrank.layers.reference import rms_norm, rotary_tables, rotate
from megatron_lowrank.names import layer_parameters


class PlainLinear(nn.Module):
    """sigma(x A^T) B^T, or x W^T."""

    def __init__(self, weights: list[Tensor], activation: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.activation = activation_by_name(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if len(self.weights) == 1:
            return functional.linear(x, self.weights[0])
        return functional.linear(self.activation(functional.linear(x, self.weights[0])), self.weights[1])


class PlainLayer(nn.Module):
    """Pre-norm LLaMA decoder layer, biases left out."""

    def __init__(self, model: ModelConfig, lowrank: LowRankConfig, layer: int, seed: int = 0) -> None:
        super().__init__()
        self.model, self.keep = model, lowrank.mlp == "keep"
        full = {parameter: draw(parameter, seed) for parameter in layer_parameters(model, lowrank, layer)}
        norms = [tensor for parameter, tensor in full.items() if parameter.kind == "norm"]
        self.norms = nn.ParameterList(norms)
        self.roles = nn.ModuleDict(
            {role: PlainLinear([t for p, t in full.items() if p.role == role], lowrank.sigma) for role in ROLES}
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        normed = rms_norm(x, self.norms[0], self.model.norm_epsilon)
        q, k, v = (
            self.roles[role](normed).unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2)
            for role in ("q", "k", "v")
        )
        attended = functional.scaled_dot_product_attention(
            rotate(q, *tables), rotate(k, *tables), v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        x = x + self.roles["o"](attended.transpose(1, 2).flatten(2))
        normed = rms_norm(x, self.norms[1], self.model.norm_epsilon)
        gate = self.roles["gate"](normed)
        gate = functional.silu(gate) if self.keep else gate
        down: Tensor = self.roles["down"](gate * self.roles["up"](normed))
        return x + down


class PlainStack(nn.Module):
    """Decoder layers alone: no embedding, no head."""

    def __init__(self, model: ModelConfig, lowrank: LowRankConfig) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(PlainLayer(model, lowrank, layer) for layer in range(model.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        with torch.no_grad():
            tables = rotary_tables(x.shape[1], self.model.head_dim, self.model.rotary_base, x)
        for layer in self.layers:
            x = layer(x, tables)
        return x
