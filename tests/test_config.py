"""Presets, ranks, and one clear error per mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowrank.config import (
    ROLES,
    DataConfig,
    LowRankConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    activation_by_name,
    preset,
    preset_names,
)
from megatron_lowrank.config.cli import UsageError, dump, parse_run
from megatron_lowrank.names import canonical_parameters, pair_std


def test_tensor_parallel_twin_of_1b() -> None:
    assert preset("cola_1b_tp").model.ffn_hidden_size == 5472
    with pytest.raises(ValueError, match="does not divide model.ffn_hidden_size 5461"):
        replace(preset("cola_1b"), parallel=ParallelConfig(tensor_parallel_size=2))


def test_published_recipe() -> None:
    run = preset("cola_60m")
    assert (run.optimizer.lr, run.schedule.warmup_steps, run.train.steps) == (6e-3, 2000, 10000)
    assert (run.train.global_batch_size, run.train.sequence_length, run.data.rows) == (512, 256, "document")
    assert (run.optimizer.beta2, run.optimizer.weight_decay, run.optimizer.clip_grad) == (0.999, 0.01, 0.5)
    assert run.optimizer.decay_norms_and_biases and run.optimizer.min_lr_ratio == 0.1
    assert run.lowrank.mlp == "keep" and preset("cola_350m").lowrank.mlp == "drop"
    assert preset("svd_350m").lowrank.mlp == "keep", "a linear pair without SiLU would be no LLaMA"


@pytest.mark.parametrize("name", preset_names())
def test_config_survives_json_and_the_command_line(name: str, tmp_path: Path) -> None:
    run = preset(name)
    assert RunConfig.from_dict(json.loads(dump(run))) == run
    path = tmp_path / "run.json"
    path.write_text(dump(run))
    assert parse_run(["--config", str(path)]) == run == parse_run(["--preset", name])
    path.write_text(json.dumps({"config": run.to_dict(), "digest": run.digest()}))
    assert parse_run(["--config", str(path)]) == run, "a run folder's run_config.json is a config file"


def test_ranks_most_specific_wins() -> None:
    lowrank = LowRankConfig(rank=0.25, rank_overrides={"mlp": 24, "q": 0.1, "1": 40, "1.q": 7})
    ranks = {(layer, role): lowrank.rank_of(layer, role, 128) for layer in range(2) for role in ROLES}
    assert ranks[0, "o"] == 32 and ranks[0, "up"] == 24
    assert ranks[0, "q"] == 16, "12.8 rounds to a multiple of 8"
    assert ranks[1, "down"] == 40 and ranks[1, "q"] == 7


def test_dense_layers_and_roles_change_the_names() -> None:
    model = ModelConfig()
    names = [p.name for p in canonical_parameters(model, LowRankConfig(rank=8, dense_layers=(0,), dense_roles=("o",)))]
    assert "decoder.layers.0.self_attention.linear_qkv.q.weight" in names
    assert "decoder.layers.1.self_attention.linear_qkv_down_proj.q.weight" in names
    assert "decoder.layers.1.self_attention.linear_proj.weight" in names


def test_pair_std() -> None:
    assert pair_std(512, 512, 128) == pytest.approx(0.05256, abs=5e-6)
    assert pair_std(4096, 11008, 1024) == pytest.approx(0.01595, abs=5e-6)


@pytest.mark.parametrize("name", ["identity", "silu", "gelu_tanh", "softplus", "mish", "tanh", "hardswish", "erf"])
def test_activations_of_torch(name: str) -> None:
    assert activation_by_name(name)(torch.zeros(3)).shape == (3,)


NO_ACTIVATIONS = (
    "softmax", "nope", "glu", "dropout", "linear", "sort", "relu_", "rand", "sum", "cumsum", "__doc__", "os.system",
    "normalize", "layer_norm", "isnan", "rand_like", "set_num_threads", "detach", "sign", "round", "floor", "angle",
    "t", "squeeze", "flatten", "ravel", "clone", "alpha_dropout", "nan_to_num", "Tensor", "dequantize", "log", "cummax",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_ACTIVATIONS)
def test_no_activation(name: str) -> None:
    with pytest.raises(ValueError, match="lowrank.latent_activation: found"):
        LowRankConfig(latent_activation=name)


BAD: dict[str, tuple[list[str], str]] = {
    "rank too large": (["--lowrank.rank", "65"], "lowrank.rank: found 65 for q of layer 0, allowed: at most 64"),
    "rank zero": (["--lowrank.rank", "0"], "lowrank.rank: found 0, allowed: an integer >= 1"),
    "rank negative": (["--lowrank.rank", "-3"], "lowrank.rank: found -3"),
    "ratio": (["--lowrank.rank", "1.5"], "lowrank.rank: found 1.5"),
    "nan": (["--lowrank.rank", ".nan"], "lowrank.rank: found nan"),
    "heads": (["--model.num_attention_heads", "3"], "which does not divide model.hidden_size 64"),
    "tp heads": (["--parallel.tensor_parallel_size", "8"], "which does not divide model.num_attention_heads 4"),
    "tp ffn": (["--parallel.tensor_parallel_size", "2", "--model.ffn_hidden_size", "175"], "model.ffn_hidden_size 175"),
    "tp rank": (["--parallel.tensor_parallel_size", "2", "--lowrank.rank", "7", "--parallel.placement", "vanilla"],
                "2, which does not divide the rank 7 of q in layer 0, as placement 'vanilla' demands; the nearest that "
                "does: 8; btp_sp and btp take any rank"),
    "tp hidden": (["--parallel.placement", "btp", "--parallel.tensor_parallel_size", "4", "--model.hidden_size", "66",
                   "--model.kv_channels", "16"],
                  "found 4, which does not divide model.hidden_size 66; the nearest model.hidden_size that it "
                  "divides is 68"),
    "replicated TE": (["--parallel.placement", "vanilla_replicated", "--model.transformer_impl", "transformer_engine"],
                      "found 'transformer_engine', allowed with placement 'vanilla_replicated', where a rank attends "
                      "over all heads: local"),
    "overlap TE": (["--parallel.overlap_latent_grad", "true", "--model.transformer_impl", "transformer_engine"],
                   "parallel.overlap_latent_grad: found True, allowed with model.transformer_impl"),
    "btp dense role": (["--parallel.placement", "btp", "--lowrank.dense_roles", "[q]"],
                       "lowrank.dense_roles: found q dense in layer 0; placement 'btp' allows a layer whose roles are "
                       "all dense"),
    "recompute": (["--train.recompute", "bottleneck"], "train.recompute: found bottleneck, allowed: none, latent"),
    "recompute dense": (["--lowrank.method", "dense", "--train.recompute", "latent_keep_attention"],
                        "found 'latent_keep_attention', allowed with lowrank.method dense, which has no bottleneck to "
                        "keep: none, full"),
    "latent store": (["--train.latent_store", "cut"], "train.latent_store: found cut, allowed: gathered, sharded"),
    "bandwidth": (["--parallel.tp_bandwidth", "0"], "parallel.tp_bandwidth: found 0.0, allowed: a positive number"),
    "dense auto": (["--lowrank.method", "dense", "--parallel.placement", "auto"], "found 'auto', allowed with lowrank"),
    "pp": (["--parallel.pipeline_parallel_size", "4"], "cannot share model.num_layers 2 evenly"),
    "vpp": (["--parallel.virtual_pipeline_size", "2"], "interleaving needs at least 2 stages"),
    "preset": (["--preset", "cola_61m"], "did you mean 'cola_60m'"),
    "field": (["--lowrank.methd", "svd"], "did you mean --lowrank.method"),
    "section": (["--lowrnk.rank", "4"], "unknown field --lowrnk.rank; did you mean --lowrank.rank"),
    "method": (["--lowrank.method", "lora"], "lowrank.method: found lora, allowed: dense, svd, cola"),
    "activation": (["--lowrank.latent_activation", "sillu"], "did you mean 'silu'"),
    "type": (["--model.num_layers", "two"], "model.num_layers: found two, allowed: an integer"),
    "placement": (["--parallel.placement", "ring"],
                  "parallel.placement: found 'ring', allowed: dense, vanilla, vanilla_replicated, btp, btp_sp, auto"),
    "dense placement": (["--lowrank.method", "dense", "--parallel.placement", "vanilla"], "with lowrank.method"),
    "length": (["--train.sequence_length", "4096"], "at most model.max_position_embeddings 2048"),
    "sp length": (["--train.sequence_length", "63", "--parallel.tensor_parallel_size", "2"],
                  "found 63, allowed with placement 'btp_sp': a multiple of parallel.tensor_parallel_size 2, such as "
                  "64"),
    "layer": (["--lowrank.dense_layers", "[5]"], "found layer 5, allowed: 0 to 1"),
    "override": (["--lowrank.rank_overrides", "{foo: 3}"], "found key 'foo', allowed: attn, mlp, q"),
    "split": (["--data.split", "0,1,0"], "data.split: found '0,1,0'"),
    "blend": (["--data.path", "x", "a", "1", "b"], "WEIGHT PREFIX"),
    "ramp": (["--train.batch_ramp", "[3,2,9]"], "train.batch_ramp: found [3, 2, 9]"),
    "tokenizer": (["--data.tokenizer", "hf"], "data.tokenizer_path: found nothing"),
    "positional": (["cola"], "cola"),
    "value missing": (["--train.steps"], "train.steps: found no value, allowed: an integer"),
    "seed": (["--train.seed", "99999999999999999999999"], "train.seed: found 99999999999999999999999, allowed: 0 to"),
    "shuffle seed": (["--data.shuffle_seed", "-1"], "data.shuffle_seed: found -1, allowed: 0 to"),
    "beta": (["--optimizer.beta1", "1"], "optimizer.beta1: found 1.0, allowed: at least 0 and less than 1"),
    "timeout": (["--parallel.distributed_timeout_seconds", "99999999999999"], "allowed: 5 to 604800"),
    "layers": (["--model.num_layers", "100000000"], "model.num_layers: found 100000000, allowed: 1 to 10000"),
    "batch": (["--train.global_batch_size", "1000000000000"], "below 1e12"),
    "out": (["--out", ""], "out: found an empty name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_command_lines_give_one_line(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(UsageError) as caught:
        parse_run(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content,message", [
    ("model: {layers: 3}", "unknown field --model.layers"),
    ("models: {num_layers: 3}", "unknown field --models"),
    ("- 1", "holds a list"),
    ("a: [", "neither YAML nor JSON"),
    ("model: 3", "model"),
    ("model.num_layers: x", "model.num_layers"),
    ("model: {num_layers: 3, num_layers: 4}", "the key 'num_layers' is there twice"),
    ("a: &a [1]\nb: *a", "aliases"),
    ("out: 2026-01-01", "out holds '2026-01-01', a date"),
    ("config: other.yaml", "cannot name another file"),
    ("train: {steps: " + "9" * 5001 + "}", "neither YAML nor JSON"),
])  # fmt: skip
def test_bad_files_name_the_field(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        parse_run(["--config", str(path)])


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (["my texts/a"], [(1.0, "my texts/a")]),
        (["0.3", "a", "0.7", "my b"], [(0.3, "a"), (0.7, "my b")]),
        (["3 a 7e-1 b"], [(3.0, "a"), (0.7, "b")]),
        (['["1", "x", "2", "y"]'], [(1.0, "x"), (2.0, "y")]),
    ],
)
def test_data_paths_and_blends(words: list[str], blend: list[tuple[float, str]]) -> None:
    run = parse_run(["--data.path", *words, "--train.steps", "5"])
    assert run.data.blend() == blend and run.train.steps == 5


def test_file_then_flags() -> None:
    with pytest.raises(UsageError, match="cannot read"):
        parse_run(["--config", "/nonexistent.yaml"])


@pytest.mark.parametrize("path", ["a", "[0.5, a, 0.5, b]"])
def test_data_path_in_a_file_is_as_free_as_the_flag(path: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{path: {path}}}")
    assert len(parse_run(["--config", str(file)]).data.blend()) in (1, 2)


def test_later_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lowrank: {rank: 32, method: svd}\nmodel.num_layers: 4\n")
    run = parse_run(["--preset", "debug", "--config", str(path), "--lowrank.rank", "8"])
    assert (run.lowrank.rank, run.lowrank.method, run.model.num_layers) == (8, "svd", 4)


def test_help_is_grouped_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pretrain [--preset NAME]") and "Shape of the model" in text
    for field in ("--lowrank.rank_overrides", "--train.batch_ramp", "--checkpoint.keep", "--log.peak_tflops"):
        assert field in text


@pytest.mark.parametrize(
    "world,message", [(3, "found 3 ranks, allowed: a multiple of"), (4, None), (16, "global_batch")]
)
def test_world_size(world: int, message: str | None) -> None:
    run = replace(preset("debug"), parallel=ParallelConfig(tensor_parallel_size=2),
                  train=TrainConfig(global_batch_size=4, micro_batch_size=2, sequence_length=64))  # fmt: skip
    if message is None:
        assert run.check_world(world) == 2
    else:
        with pytest.raises(ValueError, match=message):
            run.check_world(world)


def test_architecture_ignores_how_it_is_cut() -> None:
    run = preset("debug")
    cut: Any = replace(run, parallel=ParallelConfig(tensor_parallel_size=2), data=DataConfig(path=("x",)), out="y")
    assert run.architecture() == cut.architecture() and run.digest() != cut.digest()
    absolute = replace(run, lowrank=replace(run.lowrank, rank=0.25))
    assert run.architecture() == absolute.architecture(), "a ratio that resolves to the same rank is the same model"


def test_a_pair_that_saves_nothing_is_advised_against() -> None:
    """R >= in * out / (in + out): 64 x 64 breaks even at 32, 176 x 64 at 47 (rounded up)."""
    run = preset("debug")
    assert run.advice() == []
    at_32 = replace(run, lowrank=replace(run.lowrank, rank=32)).advice()
    assert len(at_32) == 4 and "rank 32 of q, a 64 x 64 matrix" in at_32[0] and "2 layers" in at_32[0]
    assert replace(run, lowrank=replace(run.lowrank, rank=31)).advice() == []
    assert len(replace(run, lowrank=replace(run.lowrank, rank=47)).advice()) == 7
    assert replace(run, lowrank=replace(run.lowrank, rank=64, dense_roles=ROLES)).advice() == []


def test_layers_per_stage() -> None:
    assert ParallelConfig(pipeline_parallel_size=2, num_layers_in_first_pipeline_stage=2).layers_per_stage(3) == [2, 1]
    assert ParallelConfig(pipeline_parallel_size=3, num_layers_in_last_pipeline_stage=1).layers_per_stage(5) == [
        2,
        2,
        1,
    ]
    with pytest.raises(ValueError, match="cannot share"):
        ParallelConfig(pipeline_parallel_size=2, num_layers_in_first_pipeline_stage=3).layers_per_stage(3)


def test_settings_that_change_nothing_are_said() -> None:
    sharded = preset("cola_debug")
    sharded = replace(sharded, train=replace(sharded.train, latent_store="sharded"))
    (line,) = sharded.advice()
    assert line.startswith("train.latent_store: sharded changes nothing")
    latent = replace(sharded, train=replace(sharded.train, recompute="latent"))
    assert latent.advice() == []
    dense = replace(latent, lowrank=replace(latent.lowrank, dense_layers=tuple(range(latent.model.num_layers))))
    assert dense.advice() == ["train.recompute: latent keeps bottlenecks, and no layer has one"]
    with pytest.raises(ValueError, match="parallel.tp_bandwidth: found None"):
        replace(latent.parallel, tp_bandwidth=None)
