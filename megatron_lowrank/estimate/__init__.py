"""Closed forms: what a run costs, exactly and without running it. Each row is a small pure function of the configs.

Two ways of counting are kept apart by name everywhere: **actual** is the model as configured, low-rank pairs and all;
**dense_equivalent** is the same shape with every pair replaced by the one matrix that it stands for. Throughput and
utilisation are reported in actual FLOPs; the dense equivalent only says how much was saved.

Reading order: parameters, flops, state_bytes
"""

from megatron_lowrank.estimate.flops import Flops, flops_per_step, flops_per_token, layer_flops, model_flops
from megatron_lowrank.estimate.parameters import ParameterCount, count_parameters, dense_equivalent, rank_parameters
from megatron_lowrank.estimate.state_bytes import StateBytes, state_bytes

__all__ = [
    "Flops", "ParameterCount", "StateBytes", "count_parameters", "dense_equivalent", "flops_per_step",
    "flops_per_token", "layer_flops", "model_flops", "rank_parameters", "state_bytes",
]  # fmt: skip
