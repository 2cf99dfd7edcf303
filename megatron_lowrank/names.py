"""Canonical name, shape and initial distribution of every parameter of a model, from its config alone.

Checkpoints, initialisation, conversion and counting all read this one list, so none of them can drift from the others.
Names follow megatron-core (`linear_*_down_proj` is factor A, `linear_*_up_proj` factor B); the layer index is global,
q/k/v and gate/up are always separate, and no name depends on placement, tensor or pipeline parallelism. Orientation is
torch.nn.Linear's: A [R, in], B [out, R], W [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.placement import PartKind
from megatron_lowrank.roles import BLOCK_NORM, ROLE_TABLE, Role, roles_of_slot

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class CanonicalParameter:
    """One full, unsharded parameter."""

    name: str
    """Canonical name, global layer index included."""
    shape: tuple[int, ...]
    """Full shape; vocabulary-sized ones without padding rows."""
    kind: PartKind
    """a, b: factors; dense: one matrix; bias; norm; embedding; output."""
    layer: int | None = None
    """Global layer index, or None outside the layers."""
    role: Role | None = None
    """One of the seven projections, or None."""
    std: float | None = None
    """Standard deviation of the normal initialisation; None: constant (norm 1)."""
    uniform: float | None = None
    """Half-width of a uniform initialisation (biases)."""


def role_key(role: Role, part: Literal["a", "b", "dense", "bias", "dense_bias"]) -> str:
    """Name of a role's parameter below its layer, e.g. `mlp.linear_fc1_down_proj.gate.weight`."""
    row = ROLE_TABLE[role]
    middle = {"a": "_down_proj", "b": "_up_proj", "bias": "_up_proj", "dense": "", "dense_bias": ""}[part]
    return f"{row.slot}{middle}{row.branch}.{'bias' if part.endswith('bias') else 'weight'}"


def pair_std(in_features: int, out_features: int, rank: int) -> float:
    """Std of both factors: R^(-1/4) (in + out)^(-1/4), so that std((A B)_ij) = (in + out)^(-1/2) (CoLA release)."""
    return float(rank**-0.25 * (in_features + out_features) ** -0.25)


EMBEDDING_STD = 0.02
"""Std of embedding and output layer."""


def layer_parameters(model: ModelConfig, lowrank: LowRankConfig, layer: int) -> Iterator[CanonicalParameter]:
    """The parameters of one decoder layer, in the order of the forward pass."""
    prefix = f"decoder.layers.{layer}."
    for role, row in ROLE_TABLE.items():
        if row.kind == "column" and role == roles_of_slot(row.slot)[0]:
            name = f"{prefix}{BLOCK_NORM[row.block]}.weight"
            yield CanonicalParameter(name=name, shape=(model.hidden_size,), kind="norm", layer=layer)
        yield from _role_parameters(model, lowrank, layer, role)


def _role_parameters(
    model: ModelConfig, lowrank: LowRankConfig, layer: int, role: Role
) -> Iterator[CanonicalParameter]:
    width_in, width_out = model.role_widths(role)
    dense = lowrank.is_dense(layer, role)

    def parameter(part: Literal["a", "b", "dense", "bias", "dense_bias"], shape: tuple[int, ...], **draw: float) -> Any:
        kind: PartKind = "bias" if part == "dense_bias" else part
        name = f"decoder.layers.{layer}.{role_key(role, part)}"
        return CanonicalParameter(name=name, shape=shape, kind=kind, layer=layer, role=role, **draw)

    if dense:
        # A dense matrix starts with the std that the product of a pair would have.
        yield parameter("dense", (width_out, width_in), std=(width_in + width_out) ** -0.5)
    else:
        rank = lowrank.rank_of(layer, role, model.hidden_size)
        std = pair_std(width_in, width_out, rank)
        yield parameter("a", (rank, width_in), std=std)
        yield parameter("b", (width_out, rank), std=std)
    if model.role_has_bias(role):
        yield parameter("dense_bias" if dense else "bias", (width_out,), uniform=width_out**-0.5)


def canonical_parameters(model: ModelConfig, lowrank: LowRankConfig) -> Iterator[CanonicalParameter]:
    """Every parameter of the model, in the order of the forward pass."""
    vocabulary = (model.vocab_size, model.hidden_size)
    yield CanonicalParameter(name=EMBEDDING, shape=vocabulary, kind="embedding", std=EMBEDDING_STD)
    for layer in range(model.num_layers):
        yield from layer_parameters(model, lowrank, layer)
    yield CanonicalParameter(name=FINAL_NORM, shape=(model.hidden_size,), kind="norm")
    if not model.tie_embeddings:
        yield CanonicalParameter(name=OUTPUT, shape=vocabulary, kind="output", std=EMBEDDING_STD)
