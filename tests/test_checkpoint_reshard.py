"""A checkpoint means the same in every layout: tensors bitwise, losses within rounding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from training_steps import small_run, start

from megatron_lowrank.checkpoint import checkpoint_tensors, load_checkpoint, save_checkpoint
from megatron_lowrank.checkpoint.read import CachedReader
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import run_ranks

LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"tp": 2}, {"overlap": True}, {"distributed": False}]
MODELS: dict[str, dict[str, Any]] = {
    "cola": {"name": "cola_debug"},
    "dense": {"name": "dense_debug", "model": {"attention_bias": True, "num_query_groups": 2}},
    "mixed, tied": {
        "model": {"tie_embeddings": True, "mlp_bias": True},
        "lowrank": {"dense_layers": (1,), "dense_roles": ("q", "gate", "k"), "rank_overrides": {"0.v": 8, "mlp": 32}},
    },
}


def everything(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, padded as it is stored."""
    reader = CachedReader(path)
    found: dict[str, torch.Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=reader, no_dist=True)
    return found


def assert_same_tensors(actual: Path, expected: Path, vocabulary: int) -> None:
    """Bitwise, weights and optimizer states; rows of vocabulary padding are zero on both sides."""
    one, other = everything(actual), everything(expected)
    assert one.keys() == other.keys()
    for name in one:
        rows = slice(vocabulary) if "word_embeddings" in name or "output_layer" in name else slice(None)
        assert_equal(one[name][rows], other[name][rows], name)
        for padding in (one[name][vocabulary:], other[name][vocabulary:]) if rows.stop else ():
            assert not padding.any(), f"{name} has a padding row that is not zero"


@pytest.mark.parametrize("model", MODELS)
def test_resharding_keeps_every_bit(model: str, tmp_path: Path) -> None:
    """TP 2 -> PP 2 -> TP 2 -> DP 2: the vocabulary is padded to 384 or 512 rows, and fused rows are cut anew.

    DP 2 once in many small buckets, with padding between them, and once without the distributed optimizer.
    """

    def ranks() -> list[list[float]]:
        losses: list[list[float]] = []
        for number, layout in enumerate(LAYOUTS):
            run = small_run(**{**MODELS[model], **layout}, seed=number)
            training = start(run)
            if number == 0:
                training.steps(2)
            else:
                for parameter in (p for chunk in training.chunks for p in chunk.parameters()):
                    parameter.data.fill_(3.0)  # padding rows, too
                load_checkpoint(
                    tmp_path / str(number - 1), run, training.chunks, training.optimizer, training.scheduler
                )
                training.step = 2
            save_checkpoint(
                tmp_path / str(number), 2, run, training.chunks, training.optimizer, training.scheduler, {}
            )  # fmt: skip
            losses.append(training.steps(2))
        return losses

    losses = run_ranks(2, ranks, timeout=120)[0]
    for number in range(1, len(LAYOUTS)):
        assert_same_tensors(tmp_path / str(number) / "iter_0000002", tmp_path / "0" / "iter_0000002", 257)
        assert losses[number] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[0], "back in the first layout"
    for name, tensor in checkpoint_tensors(tmp_path / "0"):
        assert tensor.shape[0] == 257 or ("embedding" not in name and "output_layer" not in name)
