"""The public CoLA folders: there and back without a changed bit, both layouts, every config field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lowrank.config import LowRankConfig, ModelConfig
from megatron_lowrank.convert import ConvertError, load_canonical, open_canonical, open_cola, write_canonical
from megatron_lowrank.convert.canonical import save_canonical
from megatron_lowrank.convert.cli import main
from megatron_lowrank.convert.cola_layout import rotary_base
from megatron_lowrank.names import canonical_parameters

FIXTURES = Path(__file__).parent / "fixtures"


def copy_of(name: str, folder: Path, **fields: Any) -> Path:
    """A writable copy of a fixture with changed config fields; None removes a field."""
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name / file, folder / file)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(("name", "mlp"), [("cola_tiny", "drop"), ("cola_tiny_both_sigma", "keep")])
def test_there_and_back(name: str, mlp: str, tmp_path: Path) -> None:
    assert main(["import-hf", str(FIXTURES / name), str(tmp_path / "ours")]) == 0
    source = open_canonical(tmp_path / "ours")
    assert (source.lowrank.method, source.lowrank.sigma, source.lowrank.mlp) == ("cola", "silu", mlp)
    assert (source.model.norm_epsilon, source.source.kind, source.source.exact) == (1e-6, "cola", True)
    assert main(["export-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--layout", "reference-cola"]) == 0
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", FIXTURES / name))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)
    for file in ("config.json", "generation_config.json"):
        values, stored = (json.loads((folder / file).read_text()) for folder in (tmp_path / "back", FIXTURES / name))
        del stored["transformers_version"]  # we did not use it
        assert values == stored, file


def test_cola_m_gives_the_tensors_of_cola(tmp_path: Path) -> None:
    for name in ("cola_tiny", "colam_tiny"):
        assert main(["import-hf", str(FIXTURES / name), str(tmp_path / name)]) == 0
    first, second = load_canonical(tmp_path / "cola_tiny"), load_canonical(tmp_path / "colam_tiny")
    assert list(first) == list(second)
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_the_map_is_the_transposed_factor_and_not_another_one() -> None:
    """Pinned by hand, independently of the map's tables."""
    ours, theirs = dict(open_cola(FIXTURES / "cola_tiny").stream()), load_file(FIXTURES / "cola_tiny/model.safetensors")
    pairs = {
        "decoder.layers.1.mlp.linear_fc1_down_proj.gate.weight": "model.layers.1.mlp.gate_proj.cola_a",
        "decoder.layers.1.mlp.linear_fc1_up_proj.up.weight": "model.layers.1.mlp.up_proj.cola_b",
        "decoder.layers.2.mlp.linear_fc2_up_proj.weight": "model.layers.2.mlp.down_proj.cola_b",
        "decoder.layers.0.self_attention.linear_qkv_up_proj.k.weight": "model.layers.0.self_attn.k_proj.cola_b",
        "decoder.layers.0.self_attention.linear_proj_down_proj.weight": "model.layers.0.self_attn.o_proj.cola_a",
    }  # fmt: skip
    for name, key in pairs.items():
        assert ours[name].is_contiguous() and torch.equal(ours[name], theirs[key].T), name
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"
    assert torch.equal(ours[norm], theirs["model.layers.1.post_attention_layernorm.weight"])


def test_sharded_source_and_sharded_export(tmp_path: Path) -> None:
    assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / "a")]) == 0
    arguments = ["--max-shard-size", "60kB", "--layout", "reference-cola"]
    assert main(["export-hf", str(tmp_path / "a"), str(tmp_path / "b"), *arguments]) == 0
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) == 6
    assert main(["import-hf", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    first, second = load_canonical(tmp_path / "a"), load_canonical(tmp_path / "c")
    assert all(torch.equal(first[name], second[name]) for name in first) and list(first) == list(second)


def test_biases_and_other_activations(tmp_path: Path) -> None:
    model = ModelConfig(hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, kv_channels=6, vocab_size=19,
                        attention_bias=True, mlp_bias=True, tie_embeddings=True)  # fmt: skip
    lowrank = LowRankConfig(rank=4, latent_activation="gelu_tanh", mlp_activation="drop")
    tensors = {p.name: torch.randn(p.shape) for p in canonical_parameters(model, lowrank)}
    write_canonical(tmp_path / "a", model, lowrank, tensors)
    assert main(["export-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    keys = load_file(tmp_path / "b" / "model.safetensors").keys()
    assert "model.layers.1.mlp.down_proj.bias" in keys and "lm_head.weight" not in keys
    source = open_cola(tmp_path / "b")
    assert source.model == replace(model, num_query_groups=None) and source.lowrank == lowrank
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in source.stream())
    shutil.copyfile(tmp_path / "b" / "config.json", tmp_path / "config.json")
    # A saved copy of the tied matrix is dropped if it is one.
    doubled = load_file(tmp_path / "b" / "model.safetensors")
    doubled["lm_head.weight"] = doubled["model.embed_tokens.weight"].clone()
    save_file(doubled, tmp_path / "model.safetensors")
    assert "dropped lm_head.weight" in open_cola(tmp_path).notes[0]
    doubled["lm_head.weight"][3, 3] += 1
    save_file(doubled, tmp_path / "model.safetensors")
    with pytest.raises(ConvertError, match=r"CONFIG.*tie_word_embeddings"):
        open_cola(tmp_path)


def test_defaults_and_warnings_of_the_config(tmp_path: Path) -> None:
    fields = {"rank": None, "rms_norm_eps": None, "only_lr_act": None, "rope_theta": None, "head_dim": None,
              "lr_act_type": "relu", "eos_token_id": [1, 5], "pad_token_id": -1, "num_key_value_heads": None,
              "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}  # fmt: skip
    source = open_cola(copy_of("cola_tiny", tmp_path / "a", **fields))
    assert source.lowrank.rank == 16 and source.lowrank.mlp == "drop"
    assert (source.model.norm_epsilon, source.model.rotary_base) == (1e-6, 500000.0)
    assert source.model.pad_token_id is None and source.model.eos_token_id == 1
    assert len(source.notes) == 2 and "lr_act_type" in source.notes[0] and "eos_token_id" in source.notes[1]
    (tmp_path / "a" / "training_state.json").write_text('{"global_step": 3, "name": "x", "tokens_seen": 1e6}')
    assert open_cola(tmp_path / "a").source.metadata == {"global_step": 3, "tokens_seen": 1e6}
    assert rotary_base({}, tmp_path) == 10000.0


def test_the_dtype_is_kept_or_cast_once(tmp_path: Path) -> None:
    for dtype in ("bf16", "fp16"):
        assert main(["import-hf", str(FIXTURES / "cola_tiny"), str(tmp_path / dtype), "--dtype", dtype]) == 0
    expected = dict(open_cola(FIXTURES / "cola_tiny").stream())
    for name, tensor in load_canonical(tmp_path / "bf16").items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    assert main(["export-hf", str(tmp_path / "bf16"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert open_canonical(tmp_path / "fp16").dtype == "float16"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, r: (m, replace(r, method="svd")), "method svd"),
        (lambda m, r: (replace(m, num_query_groups=2), r), "CoLA has no GQA"),
        (lambda m, r: (m, replace(r, rank_overrides={"mlp": 8})), "ranks [8, 16] differ"),
        (lambda m, r: (m, replace(r, dense_roles=("o",))), "o of layer 0 is dense"),
        (lambda m, r: (m, replace(r, latent_activation="softplus")), "softplus: CoLA has no name"),
        (lambda m, r: (m, replace(r, latent_activation="gelu", mlp_activation="keep")), "one activation for both"),
    ],
)
def test_what_the_public_code_cannot_load_is_refused(
    change: Callable[[ModelConfig, LowRankConfig], tuple[ModelConfig, LowRankConfig]], reason: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, lowrank = change(ModelConfig(), LowRankConfig(rank=16))
    tensors = {p.name: torch.zeros(p.shape) for p in canonical_parameters(model, lowrank)}
    write_canonical(tmp_path / "a", model, lowrank, tensors)
    assert main(["export-hf", str(tmp_path / "a"), str(tmp_path / "b"), "--layout", "reference-cola"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("convert: error[NOT_EXPRESSIBLE]: reference-cola: ") and message.count("\n") == 1
    assert reason in message
    assert not (tmp_path / "b").exists()


def test_exchanged_tensors_do_not_go_unnoticed(tmp_path: Path) -> None:
    """The round trip alone would forgive a map that is wrong both ways; CoLA-M's shift and gate/up are pinned here."""
    folder = FIXTURES / "colam_tiny"
    ours, theirs = dict(open_cola(folder).stream()), load_file(folder / "model.safetensors")
    for layer, key in ((0, "1.last_layer_post_mlp"), (1, "2.last_layer_post_mlp"), (2, "2.post_mlp")):
        stored = theirs[f"model.layers.{key}.post_down_proj.cola_b"]
        assert torch.equal(ours[f"decoder.layers.{layer}.mlp.linear_fc2_up_proj.weight"], stored.T)
    both = dict(open_cola(FIXTURES / "cola_tiny_both_sigma").stream())
    gate, up = (both[f"decoder.layers.0.mlp.linear_fc1_down_proj.{branch}.weight"] for branch in ("gate", "up"))
    assert not torch.equal(gate, up)
    save_canonical(open_cola(folder), tmp_path / "a")
    assert open_canonical(tmp_path / "a").source.kind == "cola_m"
