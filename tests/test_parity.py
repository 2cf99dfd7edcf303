"""The sharded model equals the published numbers and the naive reference, outputs and every gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_cases import (
    MODEL,
    PLACEMENTS,
    Tensors,
    assert_equals_reference,
    next_token_batch,
    reference_of,
    with_parallel,
)
from safetensors.torch import load_file
from torch import Tensor

from megatron_lowrank.config import LowRankConfig, RunConfig, TrainConfig, preset
from megatron_lowrank.convert.canonical import read_canonical, save_canonical
from megatron_lowrank.convert.cola import open_cola
from megatron_lowrank.convert.cola_layout import reference_key
from megatron_lowrank.layers.init import draw, seed_of
from megatron_lowrank.names import EMBEDDING, canonical_parameters, role_key
from megatron_lowrank.testing.compare import TOLERANCE, assert_equal
from megatron_lowrank.testing.ranks import run_ranks
from megatron_lowrank.testing.whole_model import Outcome, run_whole_model

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str, tmp_path: Path) -> tuple[RunConfig, dict[str, Tensor], dict[str, Tensor]]:
    """A public checkpoint through the converter: (run, canonical tensors, expected numbers under canonical names)."""
    save_canonical(open_cola(FIXTURES / name), tmp_path / "canonical", overwrite=True)
    model, lowrank, tensors = read_canonical(tmp_path / "canonical")
    expected = load_file(FIXTURES / name / "expected.safetensors")
    return RunConfig(model=model, lowrank=lowrank, train=TrainConfig(sequence_length=48)), dict(tensors), expected


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


POLICIES = ("none", "latent", "latent_keep_attention", "full")
BY_PLACEMENT = [
    *((1, 1, placement, policy) for placement, policy in zip(PLACEMENTS, POLICIES, strict=True)),
    *((2, 1, placement, policy) for placement in PLACEMENTS for policy in POLICIES),
    *((4, 1, placement, "latent") for placement in PLACEMENTS),
    *((2, 2, placement, "none") for placement in ("btp", "btp_sp")),
]


@pytest.mark.parametrize("tp,pp,placement,policy", BY_PLACEMENT)
@pytest.mark.parametrize("name", [pytest.param("cola_tiny", marks=pytest.mark.extended), "cola_tiny_both_sigma"])
def test_fixture_numbers_under_every_placement(
    name: str, tp: int, pp: int, placement: str, policy: str, tmp_path: Path
) -> None:
    run, tensors, expected = fixture(name, tmp_path)
    cut = with_parallel(run, tp, pp, placement=placement, recompute=policy)
    assert_meets_fixture(run_whole_model(cut, tensors, *next_token_batch(expected["input_ids"])), run, expected)


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


CASES = [(1, 1, None, 1), (2, 1, None, 1), (4, 1, None, 1), (1, 2, None, 1), (1, 2, 2, 1), (2, 2, None, 1),
         (2, 1, None, 2), (1, 1, None, 2)]  # fmt: skip


# Key/value heads are cut whole: two of them do not fit four ranks.
FITTING = [(name, *case) for name in VARIANTS for case in CASES if VARIANTS[name][0].query_groups % case[0] == 0]


@pytest.mark.parametrize(("name", "tp", "pp", "vpp", "dp"), FITTING)
def test_equals_reference_in_fp64(name: str, tp: int, pp: int, vpp: int | None, dp: int) -> None:
    """The default placements; the others are in `test_placements.py`. Groups smaller than the world included."""
    assert_equals_reference(reference_of(*VARIANTS[name]), tp, pp, vpp, replicas=dp)


def unbalance(tensors: Tensors) -> None:
    """A few large channels of the residual, all on the first rank, and nothing on the last of two or four."""
    tensors[EMBEDDING][:, [1, 2, 6]] *= 40
    tensors[EMBEDDING][:, 16:] = 0


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_unbalanced_residual(tp: int, grouping: bool) -> None:
    """Where the residual is cut by width, its norm needs the whole row; similar shards would hide a local one."""
    reference = reference_of(*VARIANTS["cola"], unbalance)
    assert_equals_reference(reference, tp, placement="btp", grouping=grouping)


def local_norms(x: Tensor, scaled: Tensor, a: Tensor, size: int, epsilon: float) -> dict[str, list[Tensor]]:
    """Three ways to norm a residual that is cut by width: what each rank would take for the bottleneck.

    Args:
        x: The residual [tokens, H].
        scaled: x * gain.
        a: A [R, H].
        size: Ranks.
        epsilon: Of the norm.
    """
    squares = [part.square() for part in x.chunk(size, -1)]
    products = [part @ columns.T for part, columns in zip(scaled.chunk(size, -1), a.chunk(size, -1), strict=True)]
    rms = [(square.mean(-1, keepdim=True) + epsilon).sqrt() for square in squares]
    rho = (sum(square.sum(-1, keepdim=True) for square in squares) / x.shape[-1] + epsilon).sqrt()
    of_slices = sum(product / local for product, local in zip(products, rms, strict=True))
    return {
        "scaled after the sum": [sum(products) / rho] * size,
        # The listing of the paper: scale by the local RMS, sum, then multiply by local RMS / global RMS.
        "scaled before the sum, then again": [of_slices * local / rho for local in rms],
        "each slice by itself": [of_slices] * size,
    }  # type: ignore[dict-item]


@pytest.mark.parametrize("tp", [2, 4])
def test_local_norms_fail_on_the_unbalanced_residual(tp: int) -> None:
    """The input of the test above tells the exact norm from the published listing, and a balanced one does not."""
    reference = reference_of(*VARIANTS["cola"], unbalance)
    tensors, epsilon = reference.tensors, reference.model.norm_epsilon
    a = tensors[f"decoder.layers.0.{role_key('q', 'a')}"]
    gain = tensors["decoder.layers.0.input_layernorm.weight"]
    unbalanced = tensors[EMBEDDING][reference.batch[0]].flatten(0, -2)
    balanced = unbalanced[:, : 32 // tp].repeat(1, tp)
    for x, passing in ((unbalanced, 1), (balanced, 3)):
        want = (x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain) @ a.T
        errors = {
            name: max((z - want).abs().max().item() for z in ranks) / want.abs().max().item()
            for name, ranks in local_norms(x, x * gain, a, tp, epsilon).items()
        }
        assert sum(error < TOLERANCE[torch.float64] for error in errors.values()) == passing, errors
        assert errors["scaled after the sum"] < TOLERANCE[torch.float64]
        assert passing == 3 or min(errors[name] for name in list(errors)[1:]) > 0.2, errors


def test_initial_weights_depend_on_seed_and_name() -> None:
    run = preset("debug")
    parameters = [p for p in canonical_parameters(run.model, run.lowrank) if p.std is not None]
    first, second = parameters[1], next(p for p in parameters[2:] if p.shape == parameters[1].shape)
    assert first.name != second.name and not torch.equal(draw(first, 1), draw(second, 1))
    assert not torch.equal(draw(parameters[0], 1), draw(parameters[0], 2))
    assert torch.equal(draw(parameters[0], 1), draw(parameters[0], 1))
    # The rule is public: first 8 bytes of sha256("{seed}|{name}"), little-endian, 63 bits.
    assert seed_of(42, "embedding.word_embeddings.weight") == 2017563213024532514


INIT_CASES = [
    *((None, True, layout) for layout in ((1, 1, None), (1, 2, None))),
    *((placement, True, (4, 1, None)) for placement in PLACEMENTS),
    *((placement, False, (2, 1, None)) for placement in PLACEMENTS),
    ("btp", True, (2, 2, 2)),
]


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    """Every rank's block is bitwise that of the one full tensor, under every placement, stacked or not."""
    run = preset("debug")
    run = replace(run, model=replace(run.model, num_layers=4, vocab_size=131, eos_token_id=1, bos_token_id=1))
    full = {p.name: draw(p, run.train.seed) for p in canonical_parameters(run.model, run.lowrank)}
    for placement, grouping, (tp, pp, vpp) in INIT_CASES:
        cut = with_parallel(run, tp, pp, vpp, placement=placement, grouping=grouping)
        seen = set()
        for rank_blocks in run_ranks(tp * pp, _blocks, cut):
            for key, rank, axis, block in rank_blocks:
                want = full[key] if axis is None else _padded(full[key], key, run, tp).chunk(tp, axis)[rank]
                assert_equal(block, want, f"{key} at TP {tp} PP {pp}, {placement}")
                seen.add(key)
        assert seen == set(full)


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
