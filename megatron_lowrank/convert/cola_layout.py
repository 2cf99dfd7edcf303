"""The public CoLA release on disk: tensor names of its two layouts, and its `config.json` <-> our configs.

Both layouts store raw factors `cola_a` [in, R] and `cola_b` [R, out], the transposes of ours. CoLA-M cuts a layer
into segments between latents, and a segment crosses the layer's border: the B of `down` of layer i is stored in layer
i + 1, except that of the last layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.convert.description import check_sizes, check_type
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.names import EMBEDDING, FINAL_NORM, OUTPUT, CanonicalParameter
from megatron_lowrank.roles import ROLES

Layout = Literal["cola", "cola_m"]

GLOBAL_KEYS = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}
NORM_KEYS = {"input_layernorm": "input_layernorm.weight", "pre_mlp_layernorm": "post_attention_layernorm.weight"}

COLA_MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""role -> module that holds both factors and the bias."""

COLA_M_MODULES = {
    "q": ("pre_attn.pre_q_proj", "self_attn.post_q_proj"), "k": ("pre_attn.pre_k_proj", "self_attn.post_k_proj"),
    "v": ("pre_attn.pre_v_proj", "self_attn.post_v_proj"), "o": ("self_attn.pre_o_proj", "post_attn.post_o_proj"),
    "gate": ("pre_mlp.pre_gate_proj", "self_mlp.post_gate_proj"),
    "up": ("pre_mlp.pre_up_proj", "self_mlp.post_up_proj"),
    "down": ("self_mlp.pre_down_proj", "post_mlp.post_down_proj"),
}  # fmt: skip
"""role -> (module of A, module of B and bias)."""
SHIFTED_DOWN = "last_layer_post_mlp.post_down_proj"
"""Module that holds the B of `down` of the layer before."""

DROPPED_BUFFERS = ("rotary_emb.inv_freq",)
"""Endings of keys that older libraries saved and that carry no weight."""


def detect_layout(keys: Iterable[str]) -> Layout | None:
    """Which layout the keys belong to; the folder's config cannot tell, both write `model_type: cola`."""
    factors = [key for key in keys if key.endswith((".cola_a", ".cola_b"))]
    if any(".pre_" in key or ".post_" in key for key in factors):
        return "cola_m"
    return "cola" if factors else None


def reference_key(parameter: CanonicalParameter, layout: Layout, num_layers: int) -> tuple[str, bool]:
    """(key in the reference layout, whether the tensor is transposed there).

    Raises:
        ConvertError: NOT_EXPRESSIBLE for a parameter that CoLA has no place for (a dense role).
    """
    if parameter.layer is None:
        return GLOBAL_KEYS[parameter.name], False
    layer, prefix = parameter.layer, f"model.layers.{parameter.layer}."
    if parameter.kind == "norm":
        return prefix + NORM_KEYS[parameter.name.split(".")[-2]], False
    if parameter.kind == "dense" or parameter.role is None:
        what = f"{parameter.role} of layer {layer} is dense; in CoLA every role is a pair"
        raise ConvertError("NOT_EXPRESSIBLE", what)
    leaf = {"a": "cola_a", "b": "cola_b", "bias": "bias"}[parameter.kind]
    if layout == "cola":
        return f"{prefix}{COLA_MODULES[parameter.role]}.{leaf}", parameter.kind != "bias"
    module = COLA_M_MODULES[parameter.role][0 if parameter.kind == "a" else 1]
    if parameter.role == "down" and parameter.kind != "a" and layer < num_layers - 1:
        prefix, module = f"model.layers.{layer + 1}.", SHIFTED_DOWN
    return f"{prefix}{module}.{leaf}", parameter.kind != "bias"


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "relu6": "relu6", "leaky_relu": "leaky_relu", "mish": "mish",
}  # fmt: skip
"""`hidden_act` -> our name."""
REVERSED_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()} | {"silu": "silu"}

SIZES = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
"""Fields that must be there -> ours."""
MODEL_TYPES = (None, "cola", "cola_m")


def read_cola_config(config: dict[str, Any], path: Path) -> tuple[ModelConfig, LowRankConfig, list[str]]:
    """Our configs, and warnings.

    Args:
        config: content of `config.json`.
        path: that file, for messages.

    Raises:
        ConvertError: UNKNOWN_ARCH, CONFIG, RANK.
    """

    def bad(what: str) -> ConvertError:
        return ConvertError("CONFIG", f"{what} ({path})")

    if config.get("model_type") not in MODEL_TYPES:
        what = f"found model_type {config['model_type']!r}, supported: cola, cola_m"
        raise ConvertError("UNKNOWN_ARCH", f"{what} ({path})")
    notes: list[str] = []
    for name in SIZES:
        if name not in config:
            raise bad(f"field {name} is missing")
        check_type(name, config[name], 0, path)
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise bad(f"num_key_value_heads: found {config['num_key_value_heads']}, CoLA has as many as heads, {heads}")
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise bad(f"hidden_act: found {activation!r}, supported: {', '.join(ACTIVATIONS)}")
    if config.get("lr_act_type") not in (None, activation):
        ignored = config["lr_act_type"]
        notes.append(f"lr_act_type {ignored!r} has no effect in CoLA; the latents use hidden_act {activation!r}")
    check_type("only_lr_act", config.get("only_lr_act", True), True, path)
    keep = not config.get("only_lr_act", True)
    if keep and ACTIVATIONS[activation] != "silu":
        raise bad(f"hidden_act: found {activation!r} with only_lr_act false; our MLP's own activation is silu")
    rank = config.get("rank")
    rank = config["hidden_size"] // 4 if rank is None else rank
    check_type("rank", rank, 0, path)
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    optional = {"rms_norm_eps": ("norm_epsilon", 1e-6), "tie_word_embeddings": ("tie_embeddings", False),
                "attention_bias": ("attention_bias", False), "mlp_bias": ("mlp_bias", False)}  # fmt: skip
    fields = {ours: config[name] for name, ours in SIZES.items()}
    fields |= {ours: config.get(name, value) for name, (ours, value) in optional.items()}
    fields |= {"rotary_base": rotary_base(config, path), "kv_channels": config.get("head_dim")}
    for name, value in fields.items():
        check_type(name, value, 0 if name == "kv_channels" and value is not None else defaults[name], path)
    fields |= _special_ids(config, notes, path)
    try:
        model = ModelConfig(**fields)
        lowrank = LowRankConfig(
            method="cola", rank=rank, latent_activation=ACTIVATIONS[activation],
            mlp_activation="keep" if keep else "drop",
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise bad(str(error)) from error
    check_sizes(model, lowrank, path)
    return model, lowrank, notes


def rotary_base(config: dict[str, Any], path: Path) -> float:
    """Base of the rotary embedding from any of the places where Hugging Face configs keep it.

    Raises:
        ConvertError: CONFIG for a scaled rotary embedding, which we do not compute.
    """
    base: Any = None
    for name in ("rope_scaling", "rope_parameters"):
        parameters = config.get(name)
        if not isinstance(parameters, dict):
            continue
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind not in (None, "default"):
            raise ConvertError("CONFIG", f"{name}: found type {kind!r}, supported: none, default ({path})")
        base = parameters.get("rope_theta", base)
    base = config.get("rope_theta", 10000.0 if base is None else base)
    check_type("rope_theta", base, 1.0, path)
    return float(base)


def why_not_reference(model: ModelConfig, lowrank: LowRankConfig) -> str | None:
    """Why the public CoLA code cannot load this model, or None if it can."""
    if lowrank.method != "cola":
        return f"method {lowrank.method}: the reference layout holds cola only"
    if model.query_groups != model.num_attention_heads:
        return f"{model.query_groups} key/value heads for {model.num_attention_heads} heads: CoLA has no GQA"
    if lowrank.sigma not in REVERSED_ACTIVATIONS:
        return f"latent_activation {lowrank.sigma}: CoLA has no name for it"
    if lowrank.mlp == "keep" and lowrank.sigma != "silu":
        return f"mlp_activation keep with latent_activation {lowrank.sigma}: CoLA has one activation for both"
    places = [(layer, role) for layer in range(model.num_layers) for role in ROLES]
    if dense := [f"{role} of layer {layer}" for layer, role in places if lowrank.is_dense(layer, role)]:
        return f"{dense[0]} is dense: in CoLA every role is a pair"
    ranks = sorted({lowrank.rank_of(layer, role, model.hidden_size) for layer, role in places})
    return f"ranks {ranks} differ between roles or layers: CoLA has one" if len(ranks) > 1 else None


def write_cola_config(model: ModelConfig, lowrank: LowRankConfig, dtype: str) -> dict[str, Any]:
    """`config.json` for the public code; `why_not_reference` has said None."""
    activation = REVERSED_ACTIVATIONS[lowrank.sigma]
    return {
        "architectures": ["ColaForCausalLM"], "attention_bias": model.attention_bias, "attention_dropout": 0,
        "bos_token_id": model.bos_token_id, "eos_token_id": model.eos_token_id, "head_dim": model.head_dim,
        "hidden_act": activation, "hidden_size": model.hidden_size, "initializer_range": 0.02,
        "intermediate_size": model.ffn_hidden_size, "lr_act_type": activation,
        "max_position_embeddings": model.max_position_embeddings, "mlp_bias": model.mlp_bias, "model_type": "cola",
        "num_attention_heads": model.num_attention_heads, "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_attention_heads, "only_lr_act": lowrank.mlp == "drop",
        "pad_token_id": model.pad_token_id, "pretraining_tp": 1, "rank": lowrank.rank_of(0, "q", model.hidden_size),
        "rms_norm_eps": model.norm_epsilon, "rope_scaling": None, "rope_theta": model.rotary_base,
        "tie_word_embeddings": model.tie_embeddings, "torch_dtype": dtype, "use_cache": True,
        "vocab_size": model.vocab_size,
    }  # fmt: skip


def _special_ids(config: dict[str, Any], notes: list[str], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        if isinstance(value, list) and value:
            notes.append(f"{name} {value}: only the first is kept")
            value = value[0]
        if value is None or value == -1:
            if name == "pad_token_id":
                found[name] = None
            else:
                notes.append(f"{name} is not set; ours is the default")
            continue
        check_type(name, value, 0, path)
        found[name] = value
    return found
