"""Closed forms: what a run costs, exactly and without running it. Each row is a small pure function of the configs.

Two ways of counting are kept apart by name everywhere: **actual** is the model as configured, low-rank pairs and all;
**dense_equivalent** is the same shape with every pair replaced by the one matrix that it stands for. Throughput and
utilisation are reported in actual FLOPs; the dense equivalent only says how much was saved. What depends on how layers
are cut over ranks (wire, activations, replay, step) interprets the placement table and takes the run, whose placement
has to be resolved: `resolve_placement` replaces `auto`.

Reading order: parameters, flops, state_bytes, wire, activations, replay, step, choose
"""

from megatron_lowrank.estimate.activations import Kept, kept_activations, kept_bytes, kept_elements
from megatron_lowrank.estimate.choose import Candidate, Choice, choose_placement, resolve_placement
from megatron_lowrank.estimate.flops import Flops, flops_per_step, flops_per_token, layer_flops, model_flops
from megatron_lowrank.estimate.parameters import (
    ParameterCount,
    count_parameters,
    dense_equivalent,
    rank_parameters,
    summed_parameters,
)
from megatron_lowrank.estimate.replay import replay_collectives, replay_flops
from megatron_lowrank.estimate.state_bytes import StateBytes, state_bytes
from megatron_lowrank.estimate.step import StepWire, pipeline_payload, step_wire
from megatron_lowrank.estimate.wire import (
    Exchange,
    Traffic,
    end_collectives,
    layer_collectives,
    layout_changes,
    ring_bytes,
)

__all__ = [
    "Candidate", "Choice", "Exchange", "Flops", "Kept", "ParameterCount", "StateBytes", "StepWire", "Traffic",
    "choose_placement", "count_parameters", "dense_equivalent", "end_collectives", "flops_per_step", "flops_per_token",
    "kept_activations", "kept_bytes", "kept_elements", "layer_collectives", "layer_flops", "layout_changes",
    "model_flops", "pipeline_payload", "rank_parameters", "replay_collectives", "replay_flops", "resolve_placement",
    "ring_bytes", "state_bytes", "step_wire", "summed_parameters",
]  # fmt: skip
