"""Bytes that one rank sends in an optimizer step, by cause. Traffic between data-parallel replicas is not in it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.estimate.parameters import layers_of_stage, summed_parameters
from megatron_lowrank.estimate.replay import replay_collectives
from megatron_lowrank.estimate.wire import (
    ELEMENT_BYTES,
    Exchange,
    end_collectives,
    layer_collectives,
    layout_changes,
    ring_bytes,
)
from megatron_lowrank.placement import PLACEMENTS

GRADIENT_BYTES = 4
"""Of an entry of the gradient buffer, in every precision."""


@dataclass(frozen=True, kw_only=True)
class StepWire:
    """Bytes sent by one rank of a pipeline stage.

    Left out: the gradient of a tied embedding, which first and last stage add up.
    """

    layers: int
    """Collectives of its decoder layers, forward and backward, the norms' statistic left out."""
    statistic: int
    """Columns of the norms' statistic."""
    replay: int
    """Collectives that recomputation runs again, among them the changes of layout where it runs whole layers."""
    layout_changes: int
    """All-to-alls of the residual."""
    ends: int
    """Embedding, output layer and loss."""
    gradient_sum: int
    """All-reduce over the tensor-parallel ranks of the gradients of parameters that each of them holds."""
    pipeline: int
    """The residual to the next stage and its gradient to the one before."""

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.layers + self.statistic + self.replay + self.layout_changes + self.ends + self.gradient_sum
            + self.pipeline
        )  # fmt: skip


def pipeline_payload(run: RunConfig, *, tokens: int) -> int:
    """Entries that a rank sends over a stage boundary in one direction for a micro-batch of this many tokens."""
    whole = tokens * run.model.hidden_size
    return whole // run.parallel.tensor_parallel_size if PLACEMENTS[run.placement].sequence_parallel else whole


def step_wire(run: RunConfig, *, tokens: int, stage: int = 0) -> StepWire:
    """What one rank of a stage sends in a step.

    Args:
        run: the run, its placement resolved.
        tokens: of the step that the rank's tensor-parallel group meets, all micro-batches together.
        stage: pipeline stage, from 0.
    """
    here, last = layers_of_stage(run.model, run.parallel, stage), run.parallel.pipeline_parallel_size - 1
    layers = [exchange for layer in here for exchange in layer_collectives(run, layer).both]
    replay = [exchange for layer in here for exchange in replay_collectives(run, layer)]
    changes = layout_changes(run)
    places = [*here, *((None,) if stage == last else ())]
    moved = [changes[place] for place in places if place in changes]
    if run.train.recompute == "full":
        replay += [exchange for change in moved for exchange in change.forward]
    ends = end_collectives(run)
    mine = [*(["embedding"] if stage == 0 else []), *(["output layer", "loss"] if stage == last else [])]
    chunks = run.parallel.virtual_pipeline_size or 1
    sends = 2 * chunks - int(stage == last) - int(stage == 0)

    def sent(exchanges: list[Exchange], statistic: bool = False) -> int:
        return ring_bytes(run, exchanges, tokens=tokens, statistic=statistic)

    return StepWire(
        layers=sent(layers),
        statistic=sent(layers, statistic=True) + sent(replay, statistic=True),
        replay=sent(replay),
        layout_changes=sent([exchange for change in moved for exchange in change.both]),
        ends=sent([exchange for name in mine for exchange in ends[name].both]),
        gradient_sum=gradient_sum_bytes(run, summed_parameters(run, stage)),
        pipeline=sends * pipeline_payload(run, tokens=tokens) * ELEMENT_BYTES[run.train.precision],
    )


def gradient_sum_bytes(run: RunConfig, parameters: int) -> int:
    """Bytes that a rank sends to sum the gradients of this many parameters over the tensor-parallel ranks."""
    t = run.parallel.tensor_parallel_size
    return -(-2 * parameters * GRADIENT_BYTES * (t - 1) // t)
