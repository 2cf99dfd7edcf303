"""Bytes of weights, gradients and optimizer state on one rank; activations and communication are not in it.

Bytes per parameter, as megatron-core keeps them with Adam:

| precision | weight | gradient buffer | main weight | two moments |
|-----------|--------|-----------------|-------------|-------------|
| fp32      | 4      | 4               | -           | 8           |
| bf16      | 2      | 4 (fp32)        | 4           | 8           |

The distributed optimizer divides the last two columns by the data-parallel size. Padding of its buckets is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.parallel import ParallelConfig
from megatron_lowrank.estimate.parameters import rank_parameters

BYTES_PER_PARAMETER = {"fp32": (4, 4, 8), "bf16": (2, 4, 12)}
"""precision -> bytes of weight, gradient, optimizer (main weight and moments)."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    model: ModelConfig,
    lowrank: LowRankConfig,
    parallel: ParallelConfig,
    *,
    precision: Literal["fp32", "bf16"],
    data_parallel_size: int = 1,
    stage: int = 0,
) -> StateBytes:
    """Bytes of the state on a rank of a pipeline stage, as configured (actual).

    Args:
        model: shape of the model.
        lowrank: method and ranks.
        parallel: sizes, placement, and whether the optimizer is distributed.
        precision: of the training run.
        data_parallel_size: ranks over which a distributed optimizer is cut.
        stage: pipeline stage, from 0.
    """
    count = rank_parameters(model, lowrank, parallel, stage)
    weight, gradient, optimizer = BYTES_PER_PARAMETER[precision]
    shares = data_parallel_size if parallel.use_distributed_optimizer else 1
    return StateBytes(weights=count * weight, gradients=count * gradient, optimizer=-(-count * optimizer // shares))
