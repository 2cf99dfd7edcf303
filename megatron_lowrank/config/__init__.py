"""Frozen dataclasses that describe a run, presets, and the command line made from them.

Reading order: activations, lowrank, model, parallel, data, train, run, presets, cli
"""

from megatron_lowrank.config.activations import activation_by_name
from megatron_lowrank.config.data import DataConfig
from megatron_lowrank.config.lowrank import METHODS, LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.parallel import ParallelConfig
from megatron_lowrank.config.presets import preset, preset_names
from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.config.train import CheckpointConfig, LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from megatron_lowrank.roles import ROLES, Role

__all__ = [
    "METHODS", "ROLES", "CheckpointConfig", "DataConfig", "LogConfig", "LowRankConfig", "ModelConfig",
    "OptimizerConfig", "ParallelConfig", "Role", "RunConfig", "ScheduleConfig", "TrainConfig", "activation_by_name",
    "preset", "preset_names",
]  # fmt: skip
