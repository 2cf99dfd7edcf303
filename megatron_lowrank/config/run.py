"""One frozen object that says everything about a run; it is saved, hashed and compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from megatron_lowrank.config.data import DataConfig
from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.parallel import AUTO, ParallelConfig
from megatron_lowrank.config.train import CheckpointConfig, LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from megatron_lowrank.messages import counted
from megatron_lowrank.placement import PLACEMENTS, Placement, Residual, residual_of
from megatron_lowrank.roles import ROLES, Role


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about a run. Built by a preset, changed by a file and by flags, then checked as a whole."""

    preset: str = "debug"
    """Name of the preset that the other fields started from."""
    out: str = "runs/default"
    """Folder of the run: resolved config, metrics, TensorBoard events, checkpoints."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    lowrank: LowRankConfig = field(default_factory=LowRankConfig)
    """Method, ranks and activations."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Cut over ranks."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and tokenizer."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Batch, steps, precision."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Reports."""

    def __post_init__(self) -> None:
        if not str(self.out).strip():
            raise ValueError("out: found an empty name, allowed: a folder")
        self._check_ranks()
        self._check_parallel()
        self._check_lengths()

    @property
    def placement(self) -> str:
        """Row of the placement table for the low-rank layers, the default resolved; `auto` until it is chosen."""
        return self.parallel.placement_of(self.lowrank.method)

    def rank_of(self, layer: int, role: Role) -> int:
        """Rank of a role in a layer (global index)."""
        return self.lowrank.rank_of(layer, role, self.model.hidden_size)

    def residual(self, layer: int | None) -> Residual:
        """Layout of the residual in a layer (global index); None: where embedding and final norm see it."""
        dense = layer is None or self.lowrank.is_dense_layer(layer)
        return residual_of(self.placement, dense_layer=dense)

    def check_world(self, world_size: int) -> int:
        """The data-parallel size in a world of this many ranks.

        Raises:
            ValueError: the world does not fit the parallel sizes, or the batch does not fit the data-parallel size.
        """
        data_parallel = self.parallel.data_parallel_size(world_size)
        row_step = self.train.micro_batch_size * data_parallel
        sizes = {"train.global_batch_size": self.train.global_batch_size}
        if self.train.batch_ramp is not None:
            sizes |= {
                "train.batch_ramp start": self.train.batch_ramp[0],
                "train.batch_ramp increment": self.train.batch_ramp[1],
            }
        for name, size in sizes.items():
            if size % row_step:
                raise ValueError(
                    f"{name}: found {size}, allowed: a multiple of train.micro_batch_size "
                    f"{self.train.micro_batch_size} x data-parallel size {data_parallel} = {row_step}"
                )
            stages = self.parallel.pipeline_parallel_size
            if self.parallel.virtual_pipeline_size is not None and size // row_step % stages:
                raise ValueError(
                    f"{name}: found {size}, which makes {size // row_step} micro-batches; with "
                    f"parallel.virtual_pipeline_size their number has to be a multiple of the {stages} stages"
                )
        return data_parallel

    def advice(self) -> list[str]:
        """What is allowed and hardly meant, one line each."""
        wide: dict[str, list[int]] = {}
        for layer in range(self.model.num_layers):
            for role in ROLES:
                width_in, width_out = self.model.role_widths(role)
                rank = self.rank_of(layer, role)
                if not self.lowrank.is_dense(layer, role) and rank * (width_in + width_out) >= width_in * width_out:
                    wide.setdefault(f"rank {rank} of {role}, a {width_out} x {width_in} matrix", []).append(layer)
        latent = self.train.recompute.startswith("latent")
        idle = []
        if latent and all(map(self.lowrank.is_dense_layer, range(self.model.num_layers))):
            idle.append(f"train.recompute: {self.train.recompute} keeps bottlenecks, and no layer has one")
        if self.train.latent_store == "sharded" and not (latent and self.placement in (AUTO, "btp_sp")):
            idle.append("train.latent_store: sharded changes nothing without a latent recompute under btp_sp")
        return idle + [
            f"lowrank.rank: {what}, makes a pair no smaller than the dense matrix ({counted(len(layers), 'layer')})"
            for what, layers in wide.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=dict))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Inverse of `to_dict`.

        Raises:
            ValueError: an unknown field, or a value out of range.
        """
        sections = {f.name: f.type for f in dataclasses.fields(cls)}
        built: dict[str, Any] = {}
        for name, value in values.items():
            if name not in sections:
                raise ValueError(f"config: unknown field {name!r}, allowed: {', '.join(sections)}")
            built[name] = _section(name, value) if isinstance(value, dict) else value
        try:
            return cls(**built)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"config: a field holds a value of the wrong type ({error})") from error

    def architecture(self) -> dict[str, Any]:
        """The fields that fix the function computed and the shape of every parameter, defaults resolved.

        Two runs with equal `architecture()` can read each other's checkpoints, whatever their parallel sizes.
        """
        m = self.model
        layers = range(m.num_layers)
        ranks = {
            f"rank.{layer}.{role}": "dense" if self.lowrank.is_dense(layer, role) else self.rank_of(layer, role)
            for layer in layers
            for role in ROLES
        }
        return {
            "num_layers": m.num_layers, "hidden_size": m.hidden_size, "ffn_hidden_size": m.ffn_hidden_size,
            "num_attention_heads": m.num_attention_heads, "num_query_groups": m.query_groups,
            "kv_channels": m.head_dim, "vocab_size": m.vocab_size, "norm_epsilon": m.norm_epsilon,
            "rotary_base": m.rotary_base, "tie_embeddings": m.tie_embeddings, "attention_bias": m.attention_bias,
            "mlp_bias": m.mlp_bias, "latent_activation": self.lowrank.sigma, "mlp_activation": self.lowrank.mlp,
            **ranks,
        }  # fmt: skip

    def digest(self) -> str:
        """Hash of the resolved config, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def _check_ranks(self) -> None:
        for layer in self.lowrank.override_layers():
            if layer >= self.model.num_layers:
                raise ValueError(
                    f"lowrank.rank_overrides or lowrank.dense_layers: found layer {layer}, allowed: 0 to "
                    f"{self.model.num_layers - 1}"
                )
        for layer in range(self.model.num_layers):
            for role in ROLES:
                if self.lowrank.is_dense(layer, role):
                    continue
                rank, widths = self.rank_of(layer, role), self.model.role_widths(role)
                if rank > min(widths):
                    raise ValueError(
                        f"lowrank.rank: found {rank} for {role} of layer {layer}, allowed: at most {min(widths)}, "
                        f"the smaller side of its {widths[1]} x {widths[0]} matrix"
                    )

    def _check_parallel(self) -> None:
        m, p, t = self.model, self.parallel, self.parallel.tensor_parallel_size
        low_rank = self.lowrank.method != "dense"
        if not low_rank and self.placement != "dense":
            raise ValueError(f"parallel.placement: found {self.placement!r}, allowed with lowrank.method dense: dense")
        if not low_rank and self.train.recompute.startswith("latent"):
            raise ValueError(
                f"train.recompute: found {self.train.recompute!r}, allowed with lowrank.method dense, which has no "
                "bottleneck to keep: none, full"
            )
        for name in ("num_attention_heads", "query_groups", "ffn_hidden_size"):
            self._check_divides(t, f"model.{name}", getattr(m, name))
        # The choice between `btp_sp` and `btp` drops what does not fit; what is left was checked like any other.
        if low_rank and self.placement != AUTO:
            self._check_placement(PLACEMENTS[self.placement])
        p.layers_per_stage(m.num_layers)

    def _check_placement(self, row: Placement) -> None:
        t = self.parallel.tensor_parallel_size
        if row.pairs is None:
            rows = [name for name, other in PLACEMENTS.items() if other.pairs is not None]
            raise ValueError(
                f"parallel.placement: found {self.placement!r}, allowed with lowrank.method {self.lowrank.method}: "
                f"{', '.join((*rows, AUTO))}"
            )
        if self.parallel.overlap_latent_grad and self.model.transformer_impl != "local":
            raise ValueError(
                f"parallel.overlap_latent_grad: found True, allowed with model.transformer_impl "
                f"{self.model.transformer_impl!r}, whose products reduce nothing: False or none"
            )
        if not row.sequence_parallel and self.model.transformer_impl != "local":
            raise ValueError(
                f"model.transformer_impl: found {self.model.transformer_impl!r}, allowed with placement "
                f"{self.placement!r}, where a rank attends over all heads: local"
            )
        if row.hidden_divides:
            self._check_divides(t, "model.hidden_size", self.model.hidden_size)
        for layer in range(self.model.num_layers):
            dense = [role for role in ROLES if self.lowrank.is_dense(layer, role)]
            if dense and len(dense) < len(ROLES) and not row.dense_roles:
                raise ValueError(
                    f"lowrank.dense_roles: found {', '.join(dense)} dense in layer {layer}; placement "
                    f"{self.placement!r} allows a layer whose roles are all dense (lowrank.dense_layers), or none"
                )
            for role in ROLES:
                rank = self.rank_of(layer, role)
                if row.rank_divides and role not in dense and rank % t:
                    raise ValueError(
                        f"parallel.tensor_parallel_size: found {t}, which does not divide the rank {rank} of {role} in "
                        f"layer {layer}, as placement {self.placement!r} demands; the nearest that does: "
                        f"{_nearest_multiple(rank, t)}; btp_sp and btp take any rank"
                    )

    def _check_divides(self, t: int, name: str, value: int) -> None:
        if value % t:
            raise ValueError(
                f"parallel.tensor_parallel_size: found {t}, which does not divide {name} {value}; the nearest {name} "
                f"that it divides is {_nearest_multiple(value, t)}"
            )

    def _check_lengths(self) -> None:
        length, t = self.train.sequence_length, self.parallel.tensor_parallel_size
        if length > self.model.max_position_embeddings:
            raise ValueError(
                f"train.sequence_length: found {length}, allowed: at most model.max_position_embeddings "
                f"{self.model.max_position_embeddings}"
            )
        if length % t and self.parallel.sequence_parallel(self.lowrank.method):
            raise ValueError(
                f"train.sequence_length: found {length}, allowed with placement {self.placement!r}: a multiple of "
                f"parallel.tensor_parallel_size {t}, such as {_nearest_multiple(length, t)}"
            )


SECTIONS: dict[str, type] = {
    "model": ModelConfig, "lowrank": LowRankConfig, "parallel": ParallelConfig, "data": DataConfig,
    "optimizer": OptimizerConfig, "schedule": ScheduleConfig, "train": TrainConfig, "checkpoint": CheckpointConfig,
    "log": LogConfig,
}  # fmt: skip


def _nearest_multiple(value: int, of: int) -> int:
    return max(1, (value + of // 2) // of) * of


def _section(name: str, values: dict[str, Any]) -> Any:
    if name not in SECTIONS:
        raise ValueError(f"config: field {name!r} takes one value, found {values!r}")
    known = {f.name for f in dataclasses.fields(SECTIONS[name])}
    for key in values:
        if key not in known:
            raise ValueError(f"config: unknown field {name}.{key}, allowed: {', '.join(sorted(known))}")
    try:
        return SECTIONS[name](**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"config: a field of {name} holds a value of the wrong type ({error})") from error
