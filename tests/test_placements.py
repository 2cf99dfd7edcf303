"""Every placement equals the naive reference, in every pair of its options, in groups of every kind."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from parity_cases import (
    MODEL,
    PLACEMENTS,
    Reference,
    Tensors,
    assert_equals_reference,
    reference_of,
    run_of,
)
from torch import Tensor
from training_steps import LENGTH, ROWS, small_run, start

from megatron_lowrank.config import LowRankConfig, ModelConfig, RunConfig
from megatron_lowrank.model import all_parts
from megatron_lowrank.names import canonical_parameters
from megatron_lowrank.testing.compare import assert_close, assert_equal
from megatron_lowrank.testing.ranks import run_ranks
from megatron_lowrank.testing.whole_model import Outcome, run_whole_model
from megatron_lowrank.train.step import train_step

BOTTLENECK = ("btp", "btp_sp")
CONTROLS = ("vanilla", "vanilla_replicated")
WITH_DENSE_ROLES = ("vanilla", "btp_sp")

# Four key/value heads, so that four ranks can share them.
GQA = replace(MODEL, num_attention_heads=8, num_query_groups=4, attention_bias=True, mlp_bias=True)
UNEQUAL = {"mlp": 12, "2": 4, "1.q": 16, "v": 16}
MODELS: dict[str, tuple[ModelConfig, LowRankConfig]] = {
    "cola": (MODEL, LowRankConfig(method="cola", rank=8)),
    "svd": (MODEL, LowRankConfig(method="svd", rank=8)),
    "unequal": (GQA, LowRankConfig(method="cola", latent_activation="gelu_tanh", mlp_activation="keep", rank=8,
                                   rank_overrides=UNEQUAL)),
    # One layer is dense, and where a layer may hold both, so are two roles of the others.
    "mixed": (replace(MODEL, tie_embeddings=True, kv_channels=16, mlp_bias=True, attention_bias=True),
              LowRankConfig(method="cola", rank=8, dense_layers=(1,), dense_roles=("q", "down"))),
}  # fmt: skip

MATRIX = [
    # model     recompute                 TP  grouping  store
    ("cola",    "none",                   2,  True,     "gathered"),
    ("cola",    "latent",                 4,  True,     "gathered"),
    ("cola",    "latent_keep_attention",  2,  False,    "sharded"),
    ("cola",    "full",                   4,  False,    "sharded"),
    ("svd",     "none",                   4,  True,     "sharded"),
    ("svd",     "latent",                 2,  True,     "sharded"),
    ("svd",     "latent_keep_attention",  4,  False,    "gathered"),
    ("svd",     "full",                   2,  False,    "gathered"),
    ("unequal", "none",                   2,  False,    "gathered"),
    ("unequal", "latent",                 4,  False,    "gathered"),
    ("unequal", "latent_keep_attention",  2,  True,     "sharded"),
    ("unequal", "full",                   4,  True,     "sharded"),
    ("mixed",   "none",                   4,  False,    "sharded"),
    ("mixed",   "latent",                 2,  False,    "sharded"),
    ("mixed",   "latent_keep_attention",  4,  True,     "gathered"),
    ("mixed",   "full",                   2,  True,     "gathered"),
]  # fmt: skip
"""The same rows for every placement: each pair of options occurs."""


def model_for(placement: str, name: str) -> tuple[ModelConfig, LowRankConfig]:
    """A model of the table, without dense roles where the placement refuses them."""
    model, lowrank = MODELS[name]
    return model, lowrank if placement in WITH_DENSE_ROLES else replace(lowrank, dense_roles=())


def test_matrix_has_every_pair_of_options() -> None:
    options = [set(column) for column in zip(*MATRIX, strict=True)]
    assert [len(values) for values in options] == [len(MODELS), 4, 2, 2, 2]
    for first, second in itertools.combinations(range(len(options)), 2):
        pairs = {(row[first], row[second]) for row in MATRIX}
        assert pairs == set(itertools.product(options[first], options[second]))


@pytest.mark.parametrize(
    ("placement", "name", "recompute", "tp", "grouping", "store"),
    [
        # Of the controls, each model and each policy once.
        pytest.param(placement, *row, marks=() if placement in BOTTLENECK or not number % 5 else pytest.mark.extended)
        for placement in PLACEMENTS
        for number, row in enumerate(MATRIX)
    ],
)
def test_equals_reference(placement: str, name: str, recompute: str, tp: int, grouping: bool, store: str) -> None:
    reference = reference_of(*model_for(placement, name))
    assert_equals_reference(reference, tp, placement=placement, recompute=recompute, grouping=grouping, store=store)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_dense_roles_and_dense_models_are_refused_where_no_cell_holds_them(placement: str) -> None:
    reference = reference_of(*MODELS["mixed"])
    if placement in WITH_DENSE_ROLES:
        run_of(reference, 2, placement=placement)
    else:
        with pytest.raises(ValueError, match=f"dense_roles: found q, down dense in layer 0; placement '{placement}'"):
            run_of(reference, 2, placement=placement)
    with pytest.raises(ValueError, match=f"placement: found '{placement}', allowed with lowrank.method dense: dense"):
        run_of(replace(reference, lowrank=LowRankConfig(method="dense")), 2, placement=placement)


SMALLER_GROUPS = [
    # TP  PP  VPP   replicas
    (2,   1,  None, 2),
    (1,   2,  None, 1),
    (1,   2,  2,    1),
    (2,   2,  None, 1),
    (2,   2,  2,    1),
]  # fmt: skip


@pytest.mark.parametrize("recompute", ["latent", pytest.param("full", marks=pytest.mark.extended)])
@pytest.mark.parametrize(("tp", "pp", "vpp", "replicas"), SMALLER_GROUPS)
@pytest.mark.parametrize("placement", BOTTLENECK)
def test_groups_smaller_than_the_world(
    placement: str, tp: int, pp: int, vpp: int | None, replicas: int, recompute: str
) -> None:
    """Stages exchange the residual as a rank holds it; replicas have rows, and so token counts, of their own."""
    reference = reference_of(*MODELS["unequal"])
    assert_equals_reference(reference, tp, pp, vpp, replicas=replicas, placement=placement, recompute=recompute)


@pytest.mark.parametrize("placement", CONTROLS)
def test_controls_on_stages_and_replicas(placement: str) -> None:
    reference = reference_of(*MODELS["unequal"])
    assert_equals_reference(reference, 2, 2, None, placement=placement)
    assert_equals_reference(reference, 2, 1, None, replicas=2, placement=placement)


ODD = LowRankConfig(method="cola", rank=7, latent_activation="tanh", mlp_activation="drop",
                    rank_overrides={"mlp": 5, "2": 3, "1.q": 9, "v": 11})  # fmt: skip


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("placement", BOTTLENECK)
def test_ranks_that_four_ranks_cannot_share(placement: str, grouping: bool) -> None:
    """Bottlenecks are whole, so no rank R has to be a multiple of anything; equal ones stack, others do not."""
    for lowrank in (ODD, replace(ODD, rank_overrides={}, mlp_activation="keep")):
        assert_equals_reference(reference_of(GQA, lowrank), 4, placement=placement, grouping=grouping)


@pytest.mark.parametrize("placement", CONTROLS)
def test_placements_that_cut_the_rank_refuse_odd_ones(placement: str) -> None:
    with pytest.raises(ValueError, match="found 4, which does not divide the rank 7 of k in layer 0"):
        run_of(reference_of(GQA, replace(ODD, rank_overrides={"q": 8})), 4, placement=placement)


MORE_SIGMAS = (("tanh", "keep"), ("gelu", "drop"))


def saturate(tensors: Tensors) -> None:
    """Bottlenecks far beyond where sigma is linear: sigma of a partial sum would be another number altogether."""
    for name, tensor in tensors.items():
        if "_down_proj" in name:
            tensor *= 3


@pytest.mark.parametrize(
    "sigma,mlp",
    [("tanh", "drop"), ("gelu", "keep"), *(pytest.param(*pair, marks=pytest.mark.extended) for pair in MORE_SIGMAS)],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_strong_sigma(placement: str, sigma: str, mlp: Any) -> None:
    """Two key/value heads on two ranks, with biases."""
    lowrank = LowRankConfig(method="cola", rank=8, rank_overrides=UNEQUAL, latent_activation=sigma, mlp_activation=mlp)
    model = replace(MODEL, num_query_groups=2, attention_bias=True, mlp_bias=True)
    reference = reference_of(model, lowrank, saturate)
    assert_equals_reference(reference, 2, placement=placement)


@pytest.mark.parametrize(
    ("pp", "vpp", "recompute", "dense_layers"),
    [
        pytest.param(*layout, layers, marks=pytest.mark.extended if layout[0] > 1 and len(layers) == 1 else ())
        for layout in ((1, None, "latent"), (2, None, "none"), (2, 2, "full"))
        for layers in ((0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 2))
    ],
)
def test_dense_layers_between_hidden_shards(
    pp: int, vpp: int | None, recompute: str, dense_layers: tuple[int, ...]
) -> None:
    """The layout changes where a dense layer begins and ends: at the ends of the stack, inside, at stage borders."""
    model, lowrank = MODELS["mixed"]
    lowrank = replace(lowrank, dense_roles=(), dense_layers=dense_layers)
    assert_equals_reference(reference_of(model, lowrank), 2, pp, vpp, placement="btp", recompute=recompute)


def outcome_of(reference: Reference, *sizes: Any, **options: Any) -> Outcome:
    """Without comparison."""
    return run_whole_model(run_of(reference, *sizes, **options), reference.tensors, *reference.batch)


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    """All values, and all gradients."""
    for field in ("logits", "token_losses", "loss"):
        assert_equal(getattr(actual, field), getattr(expected, field), field)
    assert set(actual.gradients) == set(expected.gradients)
    for name, want in expected.gradients.items():
        assert_equal(actual.gradients[name], want, name)


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("placement", BOTTLENECK)
def test_overlap_changes_no_bit(placement: str, grouping: bool) -> None:
    reference = reference_of(*MODELS["unequal"])
    plain, overlapped = (
        outcome_of(reference, 2, placement=placement, grouping=grouping, overlap_latent_grad=overlap)
        for overlap in (False, True)
    )
    assert_same_bits(overlapped, plain)


REPLAYS = {
    "unequal": [("latent", "gathered"), ("latent", "sharded"), ("latent_keep_attention", "gathered"),
                ("latent_keep_attention", "sharded"), ("full", "gathered")],
    "mixed": [("latent", "gathered"), ("latent_keep_attention", "sharded")],
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize(
    "placement", [*BOTTLENECK, *(pytest.param(name, marks=pytest.mark.extended) for name in CONTROLS)]
)
def test_recompute_changes_no_bit(placement: str, name: str) -> None:
    """Bottlenecks are kept as they were reduced, and a replay runs the same products in the same order."""
    reference = reference_of(*model_for(placement, name))
    plain = outcome_of(reference, 2, placement=placement)
    for recompute, store in REPLAYS[name]:
        assert_same_bits(outcome_of(reference, 2, placement=placement, recompute=recompute, store=store), plain)


@dataclass(frozen=True)
class Trained:
    """What two optimizer steps gave on one rank."""

    elements: int
    """Elements that the gradient norm counts."""
    norms: list[float]
    losses: list[float]
    blocks: list[tuple[str, int, int | None, Tensor]]
    """(canonical name, tensor-parallel rank, axis, this rank's block) of every weight."""


def cut_training(tp: int, pp: int = 1, **parallel: Any) -> RunConfig:
    """A run whose steps all clip, with an epsilon that keeps Adam from turning rounding into full steps."""
    run = small_run("cola_debug", tp=tp, pp=pp, optimizer={"clip_grad": 0.05, "eps": 1e-3})
    return replace(run, parallel=replace(run.parallel, **parallel), train=replace(run.train, recompute="latent"))


def trained(run: RunConfig) -> Trained:
    """In a rank: how many elements a norm counts, then two steps of the product's own loop."""
    training = start(run)
    for parameter in (parameter for chunk in training.chunks for parameter in chunk.parameters()):
        parameter.main_grad.fill_(1)
    training.optimizer.prepare_grads()
    elements = round(float(training.optimizer.get_grad_norm()) ** 2)
    steps = []
    for _ in range(2):
        data = torch.Generator().manual_seed(len(steps))
        rows = torch.randint(0, run.model.vocab_size, (ROWS, LENGTH + 1), generator=data)
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        batches = [
            {"tokens": row[None, :-1], "labels": row[None, 1:], "loss_mask": torch.ones(1, LENGTH),
             "position_ids": torch.arange(LENGTH)[None]}
            for row in rows[rank::ranks]
        ]  # fmt: skip
        steps.append(train_step(run, training.chunks, training.optimizer, training.scheduler, [iter(batches)], ROWS))
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    parts = all_parts(chunk.module for chunk in training.chunks)
    return Trained(
        elements=elements,
        norms=[step.grad_norm for step in steps],
        losses=[step.loss for step in steps],
        blocks=[(part.key, tp_rank, part.axis, part.block.clone()) for part in parts],
    )


@pytest.fixture(scope="module")
def alone() -> Trained:
    """One rank's training."""
    (result,) = run_ranks(1, trained, cut_training(1))
    return result  # type: ignore[no-any-return]


TRAININGS = [
    *((placement, 2, 1, 1) for placement in PLACEMENTS),
    *((placement, 4, 1, 1) for placement in BOTTLENECK),
    *((placement, 2, pp, replicas) for placement in BOTTLENECK for pp, replicas in ((2, 1), (1, 2))),
]


@pytest.mark.parametrize(("placement", "tp", "pp", "replicas"), TRAININGS)
def test_gradient_norm_and_clipped_update(placement: str, tp: int, pp: int, replicas: int, alone: Trained) -> None:
    """The norm counts each element once, wherever its copies are, and so clips alike; in fp32."""
    run = cut_training(tp, pp, placement=placement)
    canonical = sum(math.prod(p.shape) for p in canonical_parameters(run.model, run.lowrank))
    padding = run.model.padded_vocab_size(tp) - run.model.vocab_size
    weights = {key: block for key, _, _, block in alone.blocks}
    assert min(alone.norms) > run.optimizer.clip_grad
    for rank in run_ranks(tp * pp * replicas, trained, run):
        assert rank.elements == canonical + 2 * padding * run.model.hidden_size
        assert rank.norms == pytest.approx(alone.norms, rel=1e-5)
        assert rank.losses == pytest.approx(alone.losses, rel=1e-5)
        for key, number, axis, block in rank.blocks:
            want = weights[key] if axis is None else padded(weights[key], run, key, tp).chunk(tp, axis)[number]
            assert_close(block, want, key)


def padded(weight: Tensor, run: RunConfig, key: str, tp: int) -> Tensor:
    """A weight of one rank with the vocabulary padding of `tp` ranks."""
    if "word_embeddings" not in key and "output_layer" not in key:
        return weight
    rows = run.model.padded_vocab_size(tp)
    return torch.cat([weight, weight.new_zeros(max(0, rows - weight.shape[0]), weight.shape[1])])[:rows]
