"""Initial weights that depend on the seed and on canonical names, and on nothing else.

Every run starts from the same full tensors whatever its tensor, pipeline or data parallelism, placement or grouping:
the full tensor is drawn in fp32 by a generator seeded with its name, and a rank keeps its block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from megatron_lowrank.config import LowRankConfig, ModelConfig
from megatron_lowrank.layers.canonical import Part
from megatron_lowrank.names import CanonicalParameter, canonical_parameters


def seed_of(seed: int, name: str) -> int:
    """63-bit seed of one tensor: first 8 bytes of sha256("{seed}|{name}"), little-endian."""
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def draw(parameter: CanonicalParameter, seed: int, pad_token_id: int | None = None) -> torch.Tensor:
    """The full initial tensor, fp32, on the CPU.

    Args:
        parameter: Name, shape and distribution.
        seed: Of the run.
        pad_token_id: Embedding row that starts at zero.
    """
    generator = torch.Generator("cpu").manual_seed(seed_of(seed, parameter.name))
    if parameter.std is not None:
        full = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu") * parameter.std
    elif parameter.uniform is not None:
        full = torch.rand(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        full = (full * 2 - 1) * parameter.uniform
    else:
        full = torch.ones(parameter.shape, dtype=torch.float32, device="cpu")
    if parameter.kind == "embedding" and pad_token_id is not None:
        full[pad_token_id] = 0
    return full


@torch.no_grad()
def initialize(
    parts: Iterable[Part], model: ModelConfig, lowrank: LowRankConfig, seed: int, tp_rank: int, tp_size: int
) -> None:
    """Overwrite live parameters with their initial values, one full tensor at a time.

    Args:
        parts: Of the model's chunks on this rank.
        model: Shape.
        lowrank: Method and ranks.
        seed: Of the run.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of that group.
    """
    known = {parameter.name: parameter for parameter in canonical_parameters(model, lowrank)}
    for part in parts:
        set_part(part, draw(known[part.key], seed, model.pad_token_id), tp_rank, tp_size)


@torch.no_grad()
def set_part(part: Part, full: torch.Tensor, tp_rank: int, tp_size: int) -> None:
    """Copy this rank's block of a full canonical tensor into the live parameter; vocabulary padding becomes zero.

    Raises:
        ValueError: the shapes do not fit.
    """
    if part.vocabulary:
        rows = part.block.shape[0] * tp_size
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], full.shape[1])])
    block = part.slice_of(full, tp_rank, tp_size)
    if block.shape != part.block.shape:
        raise ValueError(f"{part.key}: found a block of {tuple(block.shape)}, the model has {tuple(part.block.shape)}")
    part.block.copy_(block)
