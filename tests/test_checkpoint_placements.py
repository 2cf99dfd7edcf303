"""A checkpoint means the same under every placement, size and grouping: weights, Adam's state, the next two steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from test_checkpoint_reshard import assert_same_tensors, everything
from training_steps import Training, small_run, start

from megatron_lowrank.checkpoint import load_checkpoint, save_checkpoint
from megatron_lowrank.checkpoint.optimizer import adam_step, pieces
from megatron_lowrank.checkpoint.read import OPTIMIZER_PREFIX, OPTIMIZER_STATES
from megatron_lowrank.checkpoint.state import model_state
from megatron_lowrank.layers.canonical import Part
from megatron_lowrank.model import all_parts
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import run_ranks

VOCABULARY = 257
LEARNING_RATE = small_run().optimizer.lr
Layout = tuple[str, bool, dict[str, Any]]
"""Placement, grouping, sizes; what is left of four ranks is data parallel."""
CIRCLE: list[Layout] = [
    ("vanilla", True, {"tp": 2}),
    ("btp", False, {"tp": 4}),
    ("vanilla_replicated", True, {"tp": 2}),
    ("btp_sp", True, {"tp": 4}),
    ("btp", True, {"tp": 2, "pp": 2}),
    ("vanilla", False, {"tp": 4}),
    ("btp_sp", False, {"tp": 2, "distributed": False}),
    ("btp", False, {"tp": 1, "pp": 2}),
    ("vanilla_replicated", False, {"tp": 4}),
    ("btp_sp", True, {"tp": 1}),
    ("vanilla", False, {"tp": 2, "overlap": True}),
    ("btp", True, {"tp": 2}),
    ("vanilla_replicated", False, {"tp": 2, "pp": 2}),
    ("btp_sp", True, {"tp": 2}),
    ("btp", False, {"tp": 2, "distributed": False}),
    ("vanilla", True, {"tp": 2}),
]
MODELS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "biases, unequal ranks": (
        {"model": {"attention_bias": True, "mlp_bias": True}, "lowrank": {"rank_overrides": {"1.v": 8, "mlp": 32}}},
        list(range(len(CIRCLE))),
    ),
    "tied, a dense layer": (
        {"model": {"tie_embeddings": True, "mlp_bias": True}, "lowrank": {"dense_layers": (1,)}},
        [0, 4, 6, 1, 7, 3, 0],
    ),
}
"""Model, and where its checkpoint goes in turn."""


def training_of(model: dict[str, Any], layout: Layout, seed: int) -> Training:
    """A start of its own under a layout."""
    placement, grouping, sizes = layout
    return start(small_run(**model, **sizes, parallel={"placement": placement, "grouping": grouping}, seed=seed))


def forget(training: Training) -> None:
    """Overwrites what the start gave, padding rows too."""
    for chunk in training.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(3.0)


def parts_of(training: Training) -> list[Part]:
    """Of all chunks of this rank."""
    return list(all_parts(chunk.module for chunk in training.chunks))


def own_block(part: Part, full: torch.Tensor) -> torch.Tensor:
    """What this rank should hold of a canonical tensor; vocabulary padding is zero."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if part.vocabulary:
        rows = part.block.shape[0] * size
        full = torch.cat([full[:VOCABULARY], full.new_zeros(rows - VOCABULARY, full.shape[1])])
    return part.slice_of(full, rank, size)


def assert_holds(training: Training, stored: dict[str, torch.Tensor], name: str) -> None:
    """Weights, main parameters and moments of this rank are, bitwise, its blocks of the stored tensors."""
    parts = parts_of(training)
    for part in parts:
        assert_equal(part.block, own_block(part, stored[part.key]), f"{name}: {part.key}")
    weights = [weight for chunk in model_state(training.chunks) for weight in chunk.values()]
    for piece in pieces(training.optimizer, weights):
        parameter = piece.sharded.data
        for state in piece.live:
            wanted = torch.zeros_like(parameter)
            for part in parts:
                if part.parameter is parameter:
                    full = stored[f"{OPTIMIZER_PREFIX}{state}.{part.key}"]
                    part.gradient_block(wanted).copy_(own_block(part, full))
            held = wanted if piece.span is None else wanted.flatten()[piece.span]
            assert_equal(piece.live[state], held, f"{name}: {state} of {piece.sharded.key}")
    assert adam_step(training.optimizer) == 2


def full_weights(training: Training) -> dict[str, torch.Tensor]:
    """Canonical name -> full tensor, gathered from all ranks."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    own = [(part.key, part.axis, part.vocabulary, rank, part.block.clone()) for part in parts_of(training)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    blocks: dict[str, dict[int, torch.Tensor]] = {}
    axes: dict[str, tuple[int | None, bool]] = {}
    for key, axis, vocabulary, number, block in (entry for entries in ranks for entry in entries):
        axes[key] = axis, vocabulary
        known = blocks.setdefault(key, {}).setdefault(number, block)
        assert_equal(block, known, f"replicas of {key}")
    found: dict[str, torch.Tensor] = {}
    for key, (axis, vocabulary) in axes.items():
        ordered = [blocks[key][number] for number in sorted(blocks[key])]
        full = ordered[0] if axis is None else torch.cat(ordered, dim=axis)
        found[key] = full[:VOCABULARY] if vocabulary else full
    return found


def assert_near(weight: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Within a hundredth of one update: Adam makes full steps of gradients near zero too, rounding and all.

    The bias of k, which the softmax all but cancels, has nothing but such gradients.
    """
    worst = float((weight - expected).abs().max())
    assert worst < LEARNING_RATE / 100, f"{name}: {worst:.1e}"


def test_the_circle_visits_everything() -> None:
    saved = {(placement, grouping) for placement, grouping, sizes in CIRCLE if sizes["tp"] == 2}
    loaded = Counter(placement for placement, _, sizes in CIRCLE[1:] if sizes["tp"] > 1)
    assert len(saved) == 8 and len(loaded) == 4 and min(loaded.values()) > 2
    assert {sizes["tp"] for _, _, sizes in CIRCLE} == {1, 2, 4} and CIRCLE[0] == CIRCLE[-1]


@pytest.mark.parametrize(
    "model",
    [
        name if len(way) == len(CIRCLE) else pytest.param(name, marks=pytest.mark.extended)
        for name, (_, way) in MODELS.items()
    ],
)
def test_every_placement_reads_what_every_other_wrote(model: str, tmp_path: Path) -> None:
    """Each layout loads what the one before it saved; the stored tensors stay the same bits all the way round.

    So any layout of the circle could have read from any other. A stored tensor may not be permuted unnoticed by a load
    that undoes it: live blocks are compared with the stored tensors, and the next two steps with those of the first.
    """
    fields, way = MODELS[model]

    def ranks() -> None:
        first: tuple[list[float], dict[str, torch.Tensor]] | None = None
        stored: dict[str, torch.Tensor] = {}
        for number, visited in enumerate(way):
            training, name = training_of(fields, CIRCLE[visited], number), f"{number}: {CIRCLE[visited]}"
            live = training.run, training.chunks, training.optimizer, training.scheduler
            if number == 0:
                training.steps(2)
            else:
                forget(training)
                load_checkpoint(tmp_path / str(number - 1), *live)
                training.step = 2
                assert_holds(training, stored, name)
            save_checkpoint(tmp_path / str(number), 2, *live, {})
            losses, weights = training.steps(2), full_weights(training)
            if first is None:
                first, stored = (losses, weights), everything(tmp_path / "0" / "iter_0000002")
                assert {f"{OPTIMIZER_PREFIX}{s}.{key}" for s in OPTIMIZER_STATES for key in weights} <= stored.keys()
                continue
            assert losses == pytest.approx(first[0], rel=1e-5), name
            assert weights.keys() == first[1].keys()
            for key, weight in weights.items():
                assert_near(weight, first[1][key], f"{name}: {key} after two steps")
            if CIRCLE[visited] == CIRCLE[way[0]]:
                assert losses == first[0], "back in the first layout"

    run_ranks(4, ranks, timeout=400)
    for number in range(1, len(way)):
        assert_same_tensors(tmp_path / str(number) / "iter_0000002", tmp_path / "0" / "iter_0000002", VOCABULARY)
