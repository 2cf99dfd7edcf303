"""Canonical name, shape and initial distribution of every parameter of a model, from its config alone.

Checkpoints, initialisation, conversion and counting all read this one list, so none of them can drift from the others.
Names follow megatron-core (`linear_*_down_proj` is factor A, `linear_*_up_proj` factor B); the layer index is global,
q/k/v and gate/up are always separate, and no name depends on placement, tensor or pipeline parallelism. Orientation is
torch.nn.Linear's: A [R, in], B [out, R], W [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.config.lowrank import ROLES, LowRankConfig
from megatron_lowrank.config.model import ModelConfig

Kind = Literal["a", "b", "dense", "bias", "norm", "embedding", "output"]

ROLE_MODULE: dict[str, tuple[str, str]] = {
    "q": ("self_attention.linear_qkv", ".q"), "k": ("self_attention.linear_qkv", ".k"),
    "v": ("self_attention.linear_qkv", ".v"), "o": ("self_attention.linear_proj", ""),
    "gate": ("mlp.linear_fc1", ".gate"), "up": ("mlp.linear_fc1", ".up"), "down": ("mlp.linear_fc2", ""),
}  # fmt: skip
"""role -> (module path below a layer, branch suffix)."""

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
    kind: Kind
    """a, b: factors; dense: one matrix; bias; norm; embedding; output."""
    layer: int | None = None
    """Global layer index, or None outside the layers."""
    role: str | None = None
    """One of the seven projections, or None."""
    std: float | None = None
    """Standard deviation of the normal initialisation; None: constant (norm 1)."""
    uniform: float | None = None
    """Half-width of a uniform initialisation (biases)."""


def role_key(role: str, part: Literal["a", "b", "dense", "bias", "dense_bias"]) -> str:
    """Name of a role's parameter below its layer, e.g. `mlp.linear_fc1_down_proj.gate.weight`."""
    module, branch = ROLE_MODULE[role]
    middle = {"a": "_down_proj", "b": "_up_proj", "bias": "_up_proj", "dense": "", "dense_bias": ""}[part]
    return f"{module}{middle}{branch}.{'bias' if part.endswith('bias') else 'weight'}"


def pair_std(in_features: int, out_features: int, rank: int) -> float:
    """Std of both factors: R^(-1/4) (in + out)^(-1/4), so that std((A B)_ij) = (in + out)^(-1/2) (CoLA release)."""
    return float(rank**-0.25 * (in_features + out_features) ** -0.25)


EMBEDDING_STD = 0.02
"""Std of embedding and output layer."""


def layer_parameters(model: ModelConfig, lowrank: LowRankConfig, layer: int) -> Iterator[CanonicalParameter]:
    """The parameters of one decoder layer, in the order of the forward pass."""
    prefix = f"decoder.layers.{layer}."
    for role in ROLES:
        if role in ("q", "gate"):
            norm = "input_layernorm" if role == "q" else "pre_mlp_layernorm"
            yield CanonicalParameter(
                name=f"{prefix}{norm}.weight", shape=(model.hidden_size,), kind="norm", layer=layer
            )
        width_in, width_out = model.role_widths(role)
        place = {"layer": layer, "role": role}
        dense = lowrank.is_dense(layer, role)
        if dense:
            # A dense matrix starts with the std that the product of a pair would have.
            yield CanonicalParameter(
                name=prefix + role_key(role, "dense"), shape=(width_out, width_in), kind="dense",
                std=(width_in + width_out) ** -0.5, **place,  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            rank = lowrank.rank_of(layer, role, model.hidden_size)
            std = pair_std(width_in, width_out, rank)
            yield CanonicalParameter(
                name=prefix + role_key(role, "a"), shape=(rank, width_in), kind="a", std=std, **place,  # type: ignore[arg-type]
            )  # fmt: skip
            yield CanonicalParameter(
                name=prefix + role_key(role, "b"), shape=(width_out, rank), kind="b", std=std, **place,  # type: ignore[arg-type]
            )  # fmt: skip
        if model.role_has_bias(role):
            yield CanonicalParameter(
                name=prefix + role_key(role, "dense_bias" if dense else "bias"), shape=(width_out,), kind="bias",
                uniform=width_out ** -0.5, **place,  # type: ignore[arg-type]
            )  # fmt: skip


def canonical_parameters(model: ModelConfig, lowrank: LowRankConfig) -> Iterator[CanonicalParameter]:
    """Every parameter of the model, in the order of the forward pass."""
    vocabulary = (model.vocab_size, model.hidden_size)
    yield CanonicalParameter(name=EMBEDDING, shape=vocabulary, kind="embedding", std=EMBEDDING_STD)
    for layer in range(model.num_layers):
        yield from layer_parameters(model, lowrank, layer)
    yield CanonicalParameter(name=FINAL_NORM, shape=(model.hidden_size,), kind="norm")
    if not model.tie_embeddings:
        yield CanonicalParameter(name=OUTPUT, shape=vocabulary, kind="output", std=EMBEDDING_STD)


def parameter_count(model: ModelConfig, lowrank: LowRankConfig) -> int:
    """Number of parameters; padding rows of the vocabulary do not count."""
    total = 0
    for parameter in canonical_parameters(model, lowrank):
        size = 1
        for side in parameter.shape:
            size *= side
        total += size
    return total
