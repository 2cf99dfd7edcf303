"""How the model is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowrank.placement import PLACEMENTS

AUTO = "auto"
"""The placement that is still to be chosen; see `estimate.choose_placement`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the tensor- and pipeline-parallel groups; data parallelism takes what is left of the world."""

    tensor_parallel_size: int = 1
    """Ranks t that share every layer. t > 1 runs with sequence parallelism (but not `vanilla_replicated`)."""
    pipeline_parallel_size: int = 1
    """Pipeline stages."""
    virtual_pipeline_size: int | None = None
    """Model chunks per stage (interleaved 1F1B). Default: one, not interleaved."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; the others share the rest evenly. Default: an even split."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; the others share the rest evenly. Default: an even split."""
    placement: str | None = None
    """Row of the placement table for low-rank layers, or `auto`: the cheaper of `btp_sp` and `btp` that fits into
    memory, with the reason printed. Default: `btp_sp`, or `dense` for a dense model."""
    grouping: bool = True
    """Compute the projections that share an input together, and reduce their bottlenecks in one collective."""
    overlap_latent_grad: bool | None = None
    """Reduce a bottleneck's gradient while the weight gradient is computed. Default: with NCCL."""
    device_memory_gib: float | None = None
    """Memory of one device, for placement `auto`. Default: what the GPU has; a CPU sets no limit."""
    tp_bandwidth: float = 144.0
    """GB/s of a collective inside the tensor-parallel group, for placement `auto`."""
    dp_bandwidth: float = 25.0
    """GB/s of a collective between data-parallel replicas, for placement `auto`."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during backward."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward (needs the distributed optimizer and overlap_grad_reduce)."""
    distributed_timeout_seconds: int = 600
    """A collective that waits longer than this ends the run on every rank."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if not 1 <= getattr(self, name) <= 100_000:
                raise ValueError(f"parallel.{name}: found {getattr(self, name)}, allowed: 1 to 100000")
        if not 5 <= self.distributed_timeout_seconds <= 604_800:
            raise ValueError(
                f"parallel.distributed_timeout_seconds: found {self.distributed_timeout_seconds}, allowed: 5 to 604800 "
                "(a week)"
            )
        if self.virtual_pipeline_size is not None:
            if self.virtual_pipeline_size < 2:
                raise ValueError(
                    f"parallel.virtual_pipeline_size: found {self.virtual_pipeline_size}, allowed: none, or at least 2"
                )
            if self.pipeline_parallel_size < 2:
                raise ValueError(
                    f"parallel.virtual_pipeline_size: found {self.virtual_pipeline_size} with "
                    "parallel.pipeline_parallel_size 1; interleaving needs at least 2 stages"
                )
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            layers = getattr(self, name)
            if layers is not None and (layers < 1 or self.pipeline_parallel_size < 2 or self.virtual_pipeline_size):
                raise ValueError(
                    f"parallel.{name}: found {layers}, allowed: a positive integer, with at least 2 stages and "
                    "without parallel.virtual_pipeline_size"
                )
        if self.placement not in (None, AUTO, *PLACEMENTS):
            raise ValueError(f"parallel.placement: found {self.placement!r}, allowed: {', '.join((*PLACEMENTS, AUTO))}")
        positive = {"tp_bandwidth": self.tp_bandwidth, "dp_bandwidth": self.dp_bandwidth}
        if self.device_memory_gib is not None:
            positive["device_memory_gib"] = self.device_memory_gib
        for name, value in positive.items():
            if value is None or not 0 < value < 1e9:
                raise ValueError(f"parallel.{name}: found {value}, allowed: a positive number below 1e9")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "parallel.overlap_param_gather: found True, allowed only with parallel.use_distributed_optimizer "
                "and parallel.overlap_grad_reduce"
            )

    def placement_of(self, method: str) -> str:
        """Row of the placement table for the low-rank layers of a method, the default resolved; or `auto`."""
        return self.placement or ("dense" if method == "dense" else "btp_sp")

    def sequence_parallel(self, method: str) -> bool:
        """Whether megatron-core's sequence parallelism is on."""
        row = PLACEMENTS.get(self.placement_of(method))  # `auto` ends in a row that has it
        return self.tensor_parallel_size > 1 and (row is None or row.sequence_parallel)

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage (of each model chunk, when interleaved).

        Raises:
            ValueError: the layers cannot be dealt out.
        """
        stages, chunks = self.pipeline_parallel_size, self.virtual_pipeline_size or 1
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        rest = num_layers - (first or 0) - (last or 0)
        middle = stages - (first is not None) - (last is not None)
        if rest < 0 or (middle == 0 and rest) or (middle and (rest % (middle * chunks) or rest < middle * chunks)):
            where = f" x virtual_pipeline_size {chunks}" if chunks > 1 else ""
            raise ValueError(
                f"parallel.pipeline_parallel_size: found {stages}{where}, which cannot share model.num_layers "
                f"{num_layers} evenly; choose a divisor, or set parallel.num_layers_in_first_pipeline_stage or "
                "parallel.num_layers_in_last_pipeline_stage"
            )
        even = rest // (middle * chunks) if middle else 0
        sizes = [even] * stages
        if first is not None:
            sizes[0] = first
        if last is not None:
            sizes[-1] = last
        return sizes

    def stage_layers(self, num_layers: int, stage: int, chunk: int | None = None) -> range:
        """Global indices of the layers of a pipeline stage (and model chunk), in megatron-core's order."""
        sizes = self.layers_per_stage(num_layers)
        first = (chunk or 0) * sum(sizes) + sum(sizes[:stage])
        return range(first, first + sizes[stage])

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model in a world of this many ranks.

        Raises:
            ValueError: the world is no multiple of tensor_parallel_size * pipeline_parallel_size.
        """
        model_ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if world_size % model_ranks:
            raise ValueError(
                f"world size: found {world_size} ranks, allowed: a multiple of parallel.tensor_parallel_size "
                f"{self.tensor_parallel_size} x parallel.pipeline_parallel_size {self.pipeline_parallel_size} "
                f"= {model_ranks}"
            )
        return world_size // model_ranks
