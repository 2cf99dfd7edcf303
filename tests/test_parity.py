"""The sharded model equals the published numbers and the naive reference, outputs and every gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megatron_lowrank.convert.canonical import read_canonical, save_canonical
from megatron_lowrank.convert.cola import open_cola
from megatron_lowrank.convert.cola_layout import reference_key
from megatron_lowrank.layers.init import draw, seed_of
from megatron_lowrank.layers.reference import reference_logits, reference_loss
from megatron_lowrank.names import canonical_parameters
from megatron_lowrank.testing.compare import assert_close, assert_equal
from megatron_lowrank.testing.whole_model import Outcome, run_whole_model

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str, tmp_path: Path) -> tuple[RunConfig, dict[str, Tensor], dict[str, Tensor]]:
    """A public checkpoint through the converter: (run, canonical tensors, expected numbers under canonical names)."""
    save_canonical(open_cola(FIXTURES / name), tmp_path / "canonical", overwrite=True)
    model, lowrank, tensors = read_canonical(tmp_path / "canonical")
    expected = load_file(FIXTURES / name / "expected.safetensors")
    return RunConfig(model=model, lowrank=lowrank, train=TrainConfig(sequence_length=48)), dict(tensors), expected


def with_parallel(run: RunConfig, tp: int, pp: int, vpp: int | None = None) -> RunConfig:
    """The run at other parallel sizes; an odd layer goes to the first stage."""
    first = -(-run.model.num_layers // pp) if pp > 1 and run.model.num_layers % pp else None
    return replace(
        run,
        parallel=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            virtual_pipeline_size=vpp,
            num_layers_in_first_pipeline_stage=first,
        ),
    )


def next_token_batch(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and mask whose last position does not count."""
    labels = torch.roll(ids, -1, 1)
    mask = torch.ones(ids.shape)
    mask[:, -1] = 0
    return ids, labels, mask


def assert_meets_fixture(outcome: Outcome, run: RunConfig, expected: dict[str, Tensor]) -> None:
    """The tolerances of the fixture's README."""
    assert (outcome.logits - expected["logits"]).abs().max() < 2e-4
    assert (outcome.token_losses[:, :-1] - expected["token_losses"]).abs().max() < 2e-4
    assert (outcome.loss - expected["loss"]).abs() < 1e-5
    names = {
        p.name: reference_key(p, "cola", run.model.num_layers) for p in canonical_parameters(run.model, run.lowrank)
    }
    assert set(outcome.gradients) == set(names)
    for name, (key, transposed) in names.items():
        want = expected[f"grad.{key}"]
        want = want.T if transposed else want
        worst = (outcome.gradients[name] - want).abs().max() / want.abs().max()
        assert worst < 3e-4, f"{name}: {worst:.2e} of the largest entry"


LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("tp,pp", LAYOUTS)
@pytest.mark.parametrize("name", ["cola_tiny", "cola_tiny_both_sigma"])
def test_fixture_numbers(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    run, tensors, expected = fixture(name, tmp_path)
    outcome = run_whole_model(with_parallel(run, tp, pp), tensors, *next_token_batch(expected["input_ids"]))
    assert_meets_fixture(outcome, run, expected)


@pytest.mark.parametrize("fault", ["epsilon", "gate_up"])
def test_fixture_notices_faults(fault: str, tmp_path: Path) -> None:
    run, tensors, expected = fixture("cola_tiny_both_sigma", tmp_path)
    if fault == "epsilon":
        run = replace(run, model=replace(run.model, norm_epsilon=1e-5))
    else:
        swapped = {".gate.": ".up.", ".up.": ".gate."}
        tensors = {next((n.replace(a, b) for a, b in swapped.items() if a in n), n): t for n, t in tensors.items()}
    outcome = run_whole_model(with_parallel(run, 2, 1), tensors, *next_token_batch(expected["input_ids"]))
    with pytest.raises(AssertionError):
        assert_meets_fixture(outcome, run, expected)


MODEL = ModelConfig(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=131,
                    pad_token_id=None)  # fmt: skip
VARIANTS = {
    "cola": (MODEL, LowRankConfig(method="cola", rank=8)),
    "svd": (MODEL, LowRankConfig(method="svd", rank=8)),
    "dense": (MODEL, LowRankConfig(method="dense")),
    "gqa_bias_gelu_unequal": (
        replace(MODEL, num_query_groups=2, attention_bias=True, mlp_bias=True),
        LowRankConfig(method="cola", latent_activation="gelu_tanh", mlp_activation="keep", rank=8,
                      rank_overrides={"mlp": 12, "2": 4, "1.q": 16, "v": 16}),
    ),
    "mixed_dense_tied": (
        replace(MODEL, tie_embeddings=True, kv_channels=16, mlp_bias=True),
        LowRankConfig(method="cola", rank=8, dense_layers=(1,), dense_roles=("q", "down")),
    ),
    "dense_gqa_bias": (replace(MODEL, num_query_groups=2, attention_bias=True, mlp_bias=True),
                       LowRankConfig(method="dense")),
}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """Per variant: fp64 weights, a batch with an uneven mask, and the naive reference's logits, loss and gradients."""
    out = {}
    for name, (model, lowrank) in VARIANTS.items():
        tensors = {p.name: draw(p, 3).double() for p in canonical_parameters(model, lowrank)}
        for key, tensor in tensors.items():
            if "norm" in key:  # not all ones, so that a misplaced gain shows
                tensor *= torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        ids = torch.randint(0, model.vocab_size, (4, 24), generator=torch.Generator().manual_seed(5))
        tokens, labels, mask = next_token_batch(ids)
        mask[0, :7] = 0
        mask[3, 2:] = 0
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
        loss, _ = reference_loss(model, lowrank, leaves, tokens, labels, mask)
        loss.backward()
        logits = reference_logits(model, lowrank, tensors, tokens)
        out[name] = (tensors, (tokens, labels, mask), logits, loss.detach(), {k: v.grad for k, v in leaves.items()})
    return out


CASES = [(1, 1, None, 1), (2, 1, None, 1), (4, 1, None, 1), (1, 2, None, 1), (1, 2, 2, 1), (2, 2, None, 1),
         (2, 1, None, 2), (1, 1, None, 2)]  # fmt: skip


# Key/value heads are cut whole: two of them do not fit four ranks.
FITTING = [(name, *case) for name in VARIANTS for case in CASES if VARIANTS[name][0].query_groups % case[0] == 0]


@pytest.mark.parametrize(("name", "tp", "pp", "vpp", "dp"), FITTING)
def test_equals_reference_in_fp64(name: str, tp: int, pp: int, vpp: int | None, dp: int, references) -> None:  # type: ignore[no-untyped-def]
    """Groups smaller than the world included; a wrong reduction, scale or shard shows at 1e-12."""
    model, lowrank = VARIANTS[name]
    tensors, batch, logits, loss, gradients = references[name]
    run = with_parallel(RunConfig(model=model, lowrank=lowrank, train=TrainConfig(sequence_length=24)), tp, pp, vpp)
    outcome = run_whole_model(run, tensors, *batch, world_size=tp * pp * dp)
    assert_close(outcome.logits, logits, "logits")
    assert_close(outcome.loss, loss, "loss")
    assert set(outcome.gradients) == set(gradients)
    # The token count by which megatron-core divides travels as fp32 inside: 1e-12 holds only for exact counts.
    for key, want in gradients.items():
        assert_close(outcome.gradients[key], want, key)


def test_initial_weights_depend_on_seed_and_name() -> None:
    run = preset("debug")
    parameters = [p for p in canonical_parameters(run.model, run.lowrank) if p.std is not None]
    first, second = parameters[1], next(p for p in parameters[2:] if p.shape == parameters[1].shape)
    assert first.name != second.name and not torch.equal(draw(first, 1), draw(second, 1))
    assert not torch.equal(draw(parameters[0], 1), draw(parameters[0], 2))
    assert torch.equal(draw(parameters[0], 1), draw(parameters[0], 1))
    # The rule is public: first 8 bytes of sha256("{seed}|{name}"), little-endian, 63 bits.
    assert seed_of(42, "embedding.word_embeddings.weight") == 2017563213024532514


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    """Every rank's block is bitwise that of the one full tensor."""
    run = preset("debug")
    run = replace(run, model=replace(run.model, num_layers=4, vocab_size=131, eos_token_id=1, bos_token_id=1))
    from megatron_lowrank.testing.ranks import run_ranks

    full = {p.name: draw(p, run.train.seed) for p in canonical_parameters(run.model, run.lowrank)}
    for tp, pp, vpp in ((1, 1, None), (2, 1, None), (4, 1, None), (1, 2, None), (2, 2, 2)):
        cut = with_parallel(run, tp, pp, vpp)
        for rank_blocks in run_ranks(tp * pp, _blocks, cut):
            for key, rank, axis, block in rank_blocks:
                want = full[key] if axis is None else _padded(full[key], key, run, tp).chunk(tp, axis)[rank]
                assert_equal(block, want, f"{key} at TP {tp} PP {pp}")


def _padded(full: Tensor, key: str, run: RunConfig, tp: int) -> Tensor:
    if "word_embeddings" not in key and "output_layer" not in key:
        return full
    return torch.cat([full, full.new_zeros(run.model.padded_vocab_size(tp) - full.shape[0], full.shape[1])])


def _blocks(run: RunConfig) -> list[tuple[str, int, int | None, Tensor]]:
    from megatron.core import parallel_state

    from megatron_lowrank.model import all_parts, build_model
    from megatron_lowrank.testing.ranks import initialize

    p = run.parallel
    initialize(p.tensor_parallel_size, p.pipeline_parallel_size, p.virtual_pipeline_size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return [(part.key, rank, part.axis, part.block.clone()) for part in all_parts(build_model(run))]
