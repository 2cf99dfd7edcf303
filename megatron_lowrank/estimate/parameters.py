"""How many parameters a model has, by kind, and how many of them live on one rank.

layer = sum over roles of R (in + out) + 2 H, plus out per bias; model = L layers + H + V H + (untied) V H. The numbers
come from the list of canonical parameters, so they count what is really built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.parallel import ParallelConfig
from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.names import CanonicalParameter, canonical_parameters
from megatron_lowrank.placement import PartKind, shard_axis


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


def rank_parameters(
    model: ModelConfig,
    lowrank: LowRankConfig,
    parallel: ParallelConfig,
    stage: int,
    *,
    kinds: Collection[PartKind] | None = None,
) -> int:
    """Parameters held by one tensor-parallel rank of a pipeline stage, vocabulary padding included.

    Every rank of a tensor-parallel group holds the same number. The embedding is on the first stage and the output
    layer on the last; a tied output layer has a copy of the embedding there.

    Args:
        model: shape of the model.
        lowrank: method and ranks.
        parallel: sizes and placement. With interleaving, layers go round the stages chunk by chunk.
        stage: pipeline stage, from 0.
        kinds: count these alone. Default: every kind.
    """
    return sum(
        _local_size(parameter, model, lowrank, parallel)
        for parameter in _stage_parameters(model, lowrank, parallel, stage)
        if kinds is None or parameter.kind in kinds
    )


def summed_parameters(run: RunConfig, stage: int, *, kinds: Collection[PartKind] | None = None) -> int:
    """Parameters whose gradients are summed over the tensor-parallel ranks, once per optimizer step.

    They are held by every rank, and each rank has met its own tokens only.

    Args:
        run: the run, its placement resolved.
        stage: pipeline stage, from 0.
        kinds: count these alone. Default: every kind.
    """
    if not run.parallel.sequence_parallel(run.lowrank.method):
        return 0
    return sum(
        math.prod(parameter.shape)
        for parameter in _stage_parameters(run.model, run.lowrank, run.parallel, stage)
        if _axis(parameter, run.lowrank, run.parallel) is None and (kinds is None or parameter.kind in kinds)
    )


def layers_of_stage(model: ModelConfig, parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """Global indices of the layers of a pipeline stage, all its model chunks together."""
    chunks = range(parallel.virtual_pipeline_size or 1)
    return tuple(layer for chunk in chunks for layer in parallel.stage_layers(model.num_layers, stage, chunk))


def _stage_parameters(
    model: ModelConfig, lowrank: LowRankConfig, parallel: ParallelConfig, stage: int
) -> Iterator[CanonicalParameter]:
    last, here = parallel.pipeline_parallel_size - 1, layers_of_stage(model, parallel, stage)
    for parameter in canonical_parameters(model, lowrank):
        if parameter.kind == "embedding":
            held = stage == 0 or (model.tie_embeddings and stage == last)
        else:
            held = stage == last if parameter.layer is None else parameter.layer in here
        if held:
            yield parameter


def _axis(parameter: CanonicalParameter, lowrank: LowRankConfig, parallel: ParallelConfig) -> int | None:
    layer, role = parameter.layer, parameter.role
    if layer is None:
        return 0 if parameter.kind in ("embedding", "output") else None  # the final norm is on every rank
    return shard_axis(
        parallel.placement_of(lowrank.method),
        parameter.kind,
        role,
        dense=role is not None and lowrank.is_dense(layer, role),
        dense_layer=lowrank.is_dense_layer(layer),
    )


def _local_size(
    parameter: CanonicalParameter, model: ModelConfig, lowrank: LowRankConfig, parallel: ParallelConfig
) -> int:
    t = parallel.tensor_parallel_size
    if parameter.kind in ("embedding", "output"):
        return model.padded_vocab_size(t) // t * model.hidden_size
    return math.prod(parameter.shape) // (1 if _axis(parameter, lowrank, parallel) is None else t)
