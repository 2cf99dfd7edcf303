"""How many parameters a model has, by kind, and how many of them live on one rank.

layer = sum over roles of R (in + out) + 2 H, plus out per bias; model = L layers + H + V H + (untied) V H. The numbers
come from the list of canonical parameters, so they count what is really built.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.parallel import ParallelConfig
from megatron_lowrank.names import CanonicalParameter, canonical_parameters
from megatron_lowrank.placement import shard_axis


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by kind; padding rows of the vocabulary do not count."""

    factors: int
    """Both factors of every low-rank pair."""
    dense: int
    """Roles that are one matrix."""
    norms: int
    biases: int
    embedding: int
    output: int
    """Zero when the output layer is the embedding."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.factors + self.dense + self.norms + self.biases + self.embedding + self.output


def count_parameters(model: ModelConfig, lowrank: LowRankConfig) -> ParameterCount:
    """Parameters of the whole model, as configured (actual)."""
    counts: Counter[str] = Counter()
    for parameter in canonical_parameters(model, lowrank):
        counts[parameter.kind] += math.prod(parameter.shape)
    return ParameterCount(
        factors=counts["a"] + counts["b"], dense=counts["dense"], norms=counts["norm"], biases=counts["bias"],
        embedding=counts["embedding"], output=counts["output"],
    )  # fmt: skip


def dense_equivalent(lowrank: LowRankConfig) -> LowRankConfig:
    """The config of the dense twin: give it to any function here to count in dense equivalents."""
    return replace(lowrank, method="dense")


def rank_parameters(model: ModelConfig, lowrank: LowRankConfig, parallel: ParallelConfig, stage: int) -> int:
    """Parameters held by one tensor-parallel rank of a pipeline stage, vocabulary padding included.

    Every rank of a tensor-parallel group holds the same number. The embedding is on the first stage and the output
    layer on the last; a tied output layer has a copy of the embedding there.

    Args:
        model: shape of the model.
        lowrank: method and ranks.
        parallel: sizes and placement. With interleaving, layers go round the stages chunk by chunk.
        stage: pipeline stage, from 0.
    """
    stages, total = parallel.pipeline_parallel_size, 0
    for parameter in canonical_parameters(model, lowrank):
        size = _local_size(parameter, model, lowrank, parallel)
        if parameter.kind == "embedding":
            copies = int(stage == 0) + int(model.tie_embeddings and stages > 1 and stage == stages - 1)
        elif parameter.layer is None:
            copies = int(stage == stages - 1)
        else:
            copies = int(_on_stage(parameter.layer, model, parallel, stage))
        total += size * copies
    return total


def _on_stage(layer: int, model: ModelConfig, parallel: ParallelConfig, stage: int) -> bool:
    chunks = range(parallel.virtual_pipeline_size or 1)
    return any(layer in parallel.stage_layers(model.num_layers, stage, chunk) for chunk in chunks)


def _local_size(
    parameter: CanonicalParameter, model: ModelConfig, lowrank: LowRankConfig, parallel: ParallelConfig
) -> int:
    t = parallel.tensor_parallel_size
    if parameter.kind in ("embedding", "output"):
        return model.padded_vocab_size(t) // t * model.hidden_size
    dense = parameter.role is not None and lowrank.is_dense(parameter.layer or 0, parameter.role)
    shard_dim = (
        shard_axis(parallel.placement_of(lowrank.method), parameter.kind, parameter.role, dense=dense)
        if parameter.layer is not None
        else None
    )
    return math.prod(parameter.shape) // (1 if shard_dim is None else t)
