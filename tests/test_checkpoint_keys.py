"""Names in checkpoints are a promise: the golden lists below change only together with a format version."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from training_steps import small_run, start

from megatron_lowrank.checkpoint.state import model_state
from megatron_lowrank.config import RunConfig
from megatron_lowrank.names import canonical_parameters
from megatron_lowrank.testing.ranks import run_ranks

NORMS = {"input_layernorm.weight": (64,), "pre_mlp_layernorm.weight": (64,)}
PAIRS = {
    **NORMS,
    "self_attention.linear_qkv_down_proj.q.weight": (16, 64), "self_attention.linear_qkv_up_proj.q.weight": (64, 16),
    "self_attention.linear_qkv_down_proj.k.weight": (16, 64), "self_attention.linear_qkv_up_proj.k.weight": (64, 16),
    "self_attention.linear_qkv_down_proj.v.weight": (16, 64), "self_attention.linear_qkv_up_proj.v.weight": (64, 16),
    "self_attention.linear_proj_down_proj.weight": (16, 64), "self_attention.linear_proj_up_proj.weight": (64, 16),
    "mlp.linear_fc1_down_proj.gate.weight": (16, 64), "mlp.linear_fc1_up_proj.gate.weight": (176, 16),
    "mlp.linear_fc1_down_proj.up.weight": (16, 64), "mlp.linear_fc1_up_proj.up.weight": (176, 16),
    "mlp.linear_fc2_down_proj.weight": (16, 176), "mlp.linear_fc2_up_proj.weight": (64, 16),
}  # fmt: skip
DENSE = {
    **NORMS,
    "self_attention.linear_qkv.q.weight": (64, 64), "self_attention.linear_qkv.k.weight": (64, 64),
    "self_attention.linear_qkv.v.weight": (64, 64), "self_attention.linear_proj.weight": (64, 64),
    "mlp.linear_fc1.gate.weight": (176, 64), "mlp.linear_fc1.up.weight": (176, 64),
    "mlp.linear_fc2.weight": (64, 176),
}  # fmt: skip
MIXED_0 = {
    **NORMS,
    "self_attention.linear_qkv.q.weight": (64, 64), "self_attention.linear_qkv.q.bias": (64,),
    "self_attention.linear_qkv.k.weight": (64, 64), "self_attention.linear_qkv.k.bias": (64,),
    "self_attention.linear_qkv_down_proj.v.weight": (8, 64), "self_attention.linear_qkv_up_proj.v.weight": (64, 8),
    "self_attention.linear_qkv_up_proj.v.bias": (64,),
    "self_attention.linear_proj_down_proj.weight": (16, 64), "self_attention.linear_proj_up_proj.weight": (64, 16),
    "self_attention.linear_proj_up_proj.bias": (64,),
    "mlp.linear_fc1_down_proj.gate.weight": (32, 64), "mlp.linear_fc1_up_proj.gate.weight": (176, 32),
    "mlp.linear_fc1_down_proj.up.weight": (32, 64), "mlp.linear_fc1_up_proj.up.weight": (176, 32),
    "mlp.linear_fc2_down_proj.weight": (32, 176), "mlp.linear_fc2_up_proj.weight": (64, 32),
}  # fmt: skip
BIASES = {
    "self_attention.linear_qkv.q.bias": (64,), "self_attention.linear_qkv.k.bias": (64,),
    "self_attention.linear_qkv.v.bias": (64,), "self_attention.linear_proj.bias": (64,),
}  # fmt: skip
MIXED: dict[str, Any] = {
    "model": {"attention_bias": True, "tie_embeddings": True},
    "lowrank": {"dense_layers": (1,), "dense_roles": ("q", "k"), "rank_overrides": {"0.v": 8, "mlp": 32}},
}
GOLDEN: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "cola": ({"name": "cola_debug"}, [PAIRS, PAIRS]),
    "svd": ({"name": "svd_debug"}, [PAIRS, PAIRS]),
    "dense": ({"name": "dense_debug"}, [DENSE, DENSE]),
    "mixed": (MIXED, [MIXED_0, {**DENSE, **BIASES}]),
}


def golden(layers: list[dict[str, Any]], tied: bool) -> dict[str, tuple[int, ...]]:
    """Every key of a model with these layers, and its shape with one tensor-parallel rank (384 vocabulary rows)."""
    keys = {f"decoder.layers.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    keys |= {"embedding.word_embeddings.weight": (384, 64), "decoder.final_layernorm.weight": (64,)}
    return keys if tied else {**keys, "output_layer.weight": (384, 64)}


def saved_keys(run: RunConfig) -> dict[str, tuple[int, ...]]:
    """Keys and global shapes in the sharded state of a live model."""
    found: dict[str, tuple[int, ...]] = {}
    for value in (value for chunk in model_state(start(run).chunks) for value in chunk.values()):
        for tensor in value.build() if isinstance(value, ShardedTensorFactory) else [value]:
            assert isinstance(tensor, ShardedTensor)
            found[tensor.key] = tuple(tensor.global_shape)
    return found


def test_saved_keys_are_the_golden_ones() -> None:
    """Of each method, and of a model with dense roles, a dense layer and ranks that differ."""
    found = run_ranks(1, lambda: {name: saved_keys(small_run(**kwargs)) for name, (kwargs, _) in GOLDEN.items()})[0]
    for name, (kwargs, layers) in GOLDEN.items():
        assert found[name] == golden(layers, small_run(**kwargs).model.tie_embeddings), name


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_keys_are_the_canonical_ones(name: str) -> None:
    """So that a converter, which reads `canonical_parameters`, finds what a model writes."""
    kwargs, layers = GOLDEN[name]
    run = small_run(**kwargs)
    expected = {p.name: p.shape for p in canonical_parameters(run.model, run.lowrank)}
    keys = golden(layers, run.model.tie_embeddings)
    assert {key: (257, 64) if shape == (384, 64) else shape for key, shape in keys.items()} == expected
