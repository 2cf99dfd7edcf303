"""What a run is, in words, before its first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_lowrank.compat import versions
from megatron_lowrank.config import RunConfig
from megatron_lowrank.data.datasets import Datasets
from megatron_lowrank.data.tokenizers import Tokenizer
from megatron_lowrank.estimate import count_parameters, dense_equivalent
from megatron_lowrank.model import describe_slots


def describe_run(run: RunConfig, models: Sequence[nn.Module], datasets: Datasets, tokenizer: Tokenizer) -> str:
    """Several lines: config, versions, ranks, parameters beside the dense model's, data, and the class in every slot.

    Collective over each pipeline.

    Args:
        run: The run.
        models: Chunks of this rank, not wrapped.
        datasets: With training rows.
        tokenizer: Of the data.
    """
    p, found = run.parallel, versions()
    actual, dense = (
        count_parameters(run.model, method).total for method in (run.lowrank, dense_equivalent(run.lowrank))
    )
    train, valid = datasets.train, datasets.valid
    assert train is not None
    files = ", ".join(
        f"{name} ({digest}{'' if len(train.description['files']) == 1 else f', weight {weight:g}'})"
        for name, (weight, digest) in zip(train.description["names"], train.description["files"], strict=True)
    )
    interleaved = f" x {p.virtual_pipeline_size} chunks" if p.virtual_pipeline_size else ""
    return "\n".join([
        f"run {run.preset}, config {run.digest()}, folder {run.out}",
        ", ".join(f"{package} {version}" for package, version in found.items()),
        f"{dist.get_world_size()} ranks over {dist.get_backend()}: tensor {p.tensor_parallel_size}, pipeline "
        f"{p.pipeline_parallel_size}{interleaved}, data {parallel_state.get_data_parallel_world_size()}; placement "
        f"{run.placement}, recompute {run.train.recompute}, {run.train.precision}",
        f"parameters: {actual:,}; dense model of the same shape: {dense:,} ({actual / dense:.1%})",
        f"data: {files}; {len(train):,} training rows of {run.train.sequence_length} tokens, "
        f"{0 if valid is None else len(valid):,} validation rows; {tokenizer.kind} tokenizer",
        "throughput counts the FLOPs of the model as configured, attention causal, recomputation left out; "
        "dense-equivalent is what the dense model would have cost",
        _all_slots(models),
    ])  # fmt: skip


def _all_slots(models: Sequence[nn.Module]) -> str:
    """`describe_slots` of every chunk of this rank's pipeline; layers with the same slots share their lines."""
    stages: list[list[str]] = [[]] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(
        stages, [describe_slots(model) for model in models], group=parallel_state.get_pipeline_model_parallel_group()
    )
    layers: dict[str, list[str]] = {}
    for chunks in zip(*stages, strict=True):  # chunk by chunk, over all stages: the order of the layers
        for text in "".join(f"{chunk}\n" for chunk in chunks).split("layers ")[1:]:
            numbers, _, slots = text.rstrip().partition(":\n")
            layers.setdefault(slots, []).append(numbers)
    return "\n".join(f"layers {', '.join(numbers)}:\n{slots}" for slots, numbers in layers.items())
