"""Placement `auto`: `btp_sp` or `btp`, whichever fits into the memory of a device and communicates for less time.

`btp_sp` halves the bytes that the tensor-parallel ranks exchange per token. In return the seven factors at the residual
are whole on every rank: they take memory, their gradients are summed over the tensor-parallel ranks once per step, and
there is more to reduce between data-parallel replicas. With bottlenecks as wide everywhere and no replicas it wins from
T = hidden size x (bytes of a gradient / bytes of an activation) tokens per step and tensor-parallel group.

The times compare, they do not predict a step: only the collectives of the layers, of their replay and of the factors'
gradients are in them. The ends, the norms' statistic and changes of layout are a few per cent of either, and left out.
The memory is that of weights, gradients, optimizer state and kept activations, with as many micro-batches in flight as
megatron-core's schedules hold; logits and what a layer needs while it runs are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_lowrank.config.parallel import AUTO
from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.estimate.activations import kept_bytes
from megatron_lowrank.estimate.parameters import layers_of_stage, rank_parameters, summed_parameters
from megatron_lowrank.estimate.replay import replay_collectives
from megatron_lowrank.estimate.state_bytes import state_bytes
from megatron_lowrank.estimate.step import GRADIENT_BYTES, gradient_sum_bytes
from megatron_lowrank.estimate.wire import ELEMENT_BYTES, layer_collectives, ring_bytes
from megatron_lowrank.placement import PartKind

CANDIDATES = ("btp_sp", "btp")
"""The first wins a tie."""
OVERLAPPED = 0.5
"""Share of the traffic between replicas that `parallel.overlap_grad_reduce` hides behind backward."""
FACTORS: tuple[PartKind, ...] = ("a", "b")
LatentStore = Literal["gathered", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the comparison; of the stage that needs most, where there are several."""

    placement: str
    latent_store: LatentStore
    refused: str | None = None
    """Why it cannot run; None: it can."""
    state_bytes: int = 0
    """Weights, gradients and optimizer state on a rank."""
    kept_bytes: int = 0
    """Activations kept for backward on a rank."""
    tensor_seconds: float = 0.0
    """Communication of a step between tensor-parallel ranks."""
    data_seconds: float = 0.0
    """Communication of a step between data-parallel replicas that backward does not hide."""

    @property
    def memory_bytes(self) -> int:
        """State and activations."""
        return self.state_bytes + self.kept_bytes

    @property
    def seconds(self) -> float:
        """Communication of a step."""
        return self.tensor_seconds + self.data_seconds

    @property
    def name(self) -> str:
        """The placement, and how bottlenecks are kept where that matters."""
        sharded = self.placement == "btp_sp" and self.latent_store == "sharded"
        return self.placement + (" with latent_store sharded" if sharded else "")

    def __str__(self) -> str:
        if self.memory_bytes == 0:
            return f"{self.name}: {self.refused}"
        numbers = (
            f"{self.name}: {self.memory_bytes / 2**30:.4g} GiB (state {self.state_bytes / 2**30:.4g}, activations "
            f"{self.kept_bytes / 2**30:.4g}), {1e3 * self.seconds:.4g} ms of communication per step (tensor-parallel "
            f"{1e3 * self.tensor_seconds:.4g}, data-parallel {1e3 * self.data_seconds:.4g})"
        )
        return numbers if self.refused is None else f"{numbers}; {self.refused}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen and why."""

    placement: str
    latent_store: LatentStore
    reason: tuple[str, ...]
    """Lines to print, the inputs of the decision among them."""
    candidates: tuple[Candidate, ...] = ()
    """What was compared."""


def choose_placement(run: RunConfig, *, data_parallel_size: int, device_memory_gib: float | None = None) -> Choice:
    """The placement for a low-rank run: never `vanilla` or `dense`, which are there to be compared with.

    Args:
        run: the run; its own placement is not looked at.
        data_parallel_size: replicas of the model.
        device_memory_gib: memory of a device, where `parallel.device_memory_gib` is not set; None: no limit.

    Raises:
        ValueError: no candidate can run; the message says what each would take.
    """
    store, t = run.train.latent_store, run.parallel.tensor_parallel_size
    if t == 1:
        reason = "placement btp_sp: with one tensor-parallel rank every placement is the same function"
        return Choice(placement="btp_sp", latent_store=store, reason=(reason,))
    limit = device_memory_gib if run.parallel.device_memory_gib is None else run.parallel.device_memory_gib
    candidates = tuple(_candidates(run, data_parallel_size, limit))
    able = [candidate for candidate in candidates if candidate.refused is None]
    inputs = (
        f"{_step_tokens(run, data_parallel_size)} tokens per step and tensor-parallel group of {t}, "
        f"{data_parallel_size} replicas, recompute {run.train.recompute}, {run.parallel.tp_bandwidth:g} and "
        f"{run.parallel.dp_bandwidth:g} GB/s, {'no limit of memory' if limit is None else f'{limit:g} GiB per device'}"
    )
    if not able:
        table = "".join(f"\n- {candidate}" for candidate in candidates)
        raise ValueError(f"parallel.placement: found 'auto', but no placement can run ({inputs}):{table}")
    best = min(able, key=lambda candidate: candidate.seconds)
    others = [candidate for candidate in able if candidate is not best]
    why = (
        "no other one can run or fits" if not others
        else "no slower than the other" if others[0].seconds == best.seconds
        else f"{1e3 * best.seconds:.4g} ms of communication per step against {1e3 * others[0].seconds:.4g}"
    )  # fmt: skip
    return Choice(
        placement=best.placement,
        latent_store=best.latent_store,
        reason=(f"placement {best.name}: {why}", inputs, *map(str, candidates)),
        candidates=candidates,
    )


def resolve_placement(
    run: RunConfig, *, data_parallel_size: int, device_memory_gib: float | None = None
) -> tuple[RunConfig, Choice | None]:
    """The run with its placement named, and the choice that named it; as it was where the run names one itself.

    Arguments and errors as for `choose_placement`.
    """
    if run.placement != AUTO:
        return run, None
    choice = choose_placement(run, data_parallel_size=data_parallel_size, device_memory_gib=device_memory_gib)
    return _with(run, choice.placement, choice.latent_store), choice


def _candidates(run: RunConfig, replicas: int, limit: float | None) -> Iterator[Candidate]:
    for placement in CANDIDATES:
        stores: list[LatentStore] = [run.train.latent_store]
        if placement == "btp_sp" and run.train.recompute.startswith("latent") and stores == ["gathered"]:
            stores.append("sharded")
        for store in stores:
            try:
                candidate = _estimate(_with(run, placement, store), replicas)
            except ValueError as error:
                yield Candidate(placement=placement, latent_store=store, refused=str(error))
                break
            if limit is None or candidate.memory_bytes <= limit * 2**30:
                yield candidate
                break
            yield replace(candidate, refused=f"more than the {limit:g} GiB of a device")


def _with(run: RunConfig, placement: str, store: LatentStore) -> RunConfig:
    return replace(
        run, parallel=replace(run.parallel, placement=placement), train=replace(run.train, latent_store=store)
    )


def _step_tokens(run: RunConfig, replicas: int) -> int:
    return run.train.global_batch_size * run.train.sequence_length // replicas


def _estimate(run: RunConfig, replicas: int) -> Candidate:
    stages = range(run.parallel.pipeline_parallel_size)
    states = [
        state_bytes(
            run.model, run.lowrank, run.parallel, precision=run.train.precision, stage=stage,
            data_parallel_size=replicas,
        ).total
        for stage in stages
    ]  # fmt: skip
    tokens = run.train.micro_batch_size * run.train.sequence_length
    kept = [
        math.ceil(
            _in_flight(run, replicas, s)
            * sum(kept_bytes(run, layer, tokens=tokens) for layer in layers_of_stage(run.model, run.parallel, s))
        )
        for s in stages
    ]
    heaviest = max(stages, key=lambda stage: states[stage] + kept[stage])
    tensor, data = max((_seconds(run, replicas, stage) for stage in stages), key=sum)
    return Candidate(
        placement=run.placement, latent_store=run.train.latent_store, state_bytes=states[heaviest],
        kept_bytes=kept[heaviest], tensor_seconds=tensor, data_seconds=data,
    )  # fmt: skip


def _in_flight(run: RunConfig, replicas: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, under megatron-core's 1F1B schedules."""
    stages, chunks = run.parallel.pipeline_parallel_size, run.parallel.virtual_pipeline_size or 1
    batches = max(1, run.train.global_batch_size // (run.train.micro_batch_size * replicas))
    if chunks == 1:
        return min(stages - stage, batches)
    # Interleaved: each of these holds one chunk of the stage's layers.
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, batches * chunks) / chunks


def _seconds(run: RunConfig, replicas: int, stage: int) -> tuple[float, float]:
    """Communication of a stage between tensor-parallel ranks, and between replicas."""
    parallel = run.parallel
    exchanges = [
        exchange
        for layer in layers_of_stage(run.model, parallel, stage)
        for exchange in (*layer_collectives(run, layer).both, *replay_collectives(run, layer))
    ]
    summed = summed_parameters(run, stage, kinds=FACTORS)
    sent = ring_bytes(run, exchanges, tokens=_step_tokens(run, replicas)) + gradient_sum_bytes(run, summed)
    held = rank_parameters(run.model, run.lowrank, parallel, stage, kinds=FACTORS)
    # Reduce-scatter of gradients and all-gather of weights, or one all-reduce of the gradients.
    element = ELEMENT_BYTES[run.train.precision] if parallel.use_distributed_optimizer else GRADIENT_BYTES
    between = held * (GRADIENT_BYTES + element) * (replicas - 1) / replicas
    hidden = OVERLAPPED if parallel.overlap_grad_reduce else 0.0
    return sent / (parallel.tp_bandwidth * 1e9), (1 - hidden) * between / (parallel.dp_bandwidth * 1e9)
