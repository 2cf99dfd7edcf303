"""Optimizer, learning-rate schedule, steps, checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RECOMPUTE = ("none", "latent", "latent_keep_attention", "full")
"""Policies of activation recompute."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW on fp32 main parameters."""

    lr: float = 3e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    decay_norms_and_biases: bool = True
    """Decay one-dimensional parameters too, as the published recipe does; Megatron's habit is False."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.999
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 0.5
    """Global-norm clipping; 0 switches it off."""

    def __post_init__(self) -> None:
        _positive("optimizer", lr=self.lr, eps=self.eps)
        _share("optimizer", min_lr_ratio=self.min_lr_ratio)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}: found {getattr(self, name)}, allowed: at least 0 and less than 1")
        _not_negative("optimizer", weight_decay=self.weight_decay, clip_grad=self.clip_grad)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the steps: linear warm-up, then a decay."""

    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; `wsd` stays at the peak and decays over the last wsd_decay_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = None
    """Step at which the decay ends. Default: the last step of the run."""
    wsd_decay_steps: int | None = None
    """Length of the final decay of `wsd`. Default: a tenth of decay_steps."""
    wsd_decay: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "linear"
    """Shape of the final decay of `wsd`."""

    def __post_init__(self) -> None:
        if self.decay not in ("cosine", "linear", "wsd", "constant"):
            raise ValueError(f"schedule.decay: found {self.decay!r}, allowed: cosine, linear, wsd, constant")
        _not_negative("schedule", warmup_steps=self.warmup_steps)
        if self.decay_steps is not None:
            _positive("schedule", decay_steps=self.decay_steps)
        if self.wsd_decay_steps is not None:
            _positive("schedule", wsd_decay_steps=self.wsd_decay_steps)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch, steps, precision, and when to stop."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    sequence_length: int = 256
    """Tokens per row."""
    micro_batch_size: int = 1
    """Rows per forward pass and rank."""
    global_batch_size: int = 8
    """Rows per optimizer step over all ranks."""
    batch_ramp: tuple[int, int, int] | None = None
    """(start, increment, rows): grow the global batch from `start` by `increment` over this many rows."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 keeps fp32 main parameters and fp32 gradient buffers."""
    recompute: Literal["none", "latent", "latent_keep_attention", "full"] = "none"
    """What backward computes anew: `latent` keeps the bottlenecks and the residual alone (CoLA-M),
    `latent_keep_attention` also the attention's output, `full` only each layer's input."""
    latent_store: Literal["gathered", "sharded"] = "gathered"
    """With recompute under `btp_sp`: keep q, k, v, gate and up bottlenecks whole, or shards to gather again."""
    seed: int = 42
    """Seed of the initial weights and of every random draw of training."""
    deterministic: bool = True
    """Refuse kernels whose results differ between runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` runs megatron-core on gloo through the CPU platform layer; `auto` takes a GPU when there is one."""
    eval_interval: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_rows: int = 64
    """Validation rows per evaluation; 0: no evaluation."""
    exit_interval: int | None = None
    """Save and exit when the step is a multiple of this."""
    exit_duration_minutes: float | None = None
    """Save and exit after this many minutes."""
    exit_trigger: str | None = None
    """Save and exit when this file appears (for launchers that keep signals from the workers)."""
    spike_factor: float | None = None
    """Stop when the loss exceeds this many times its running mean. Default: never; a NaN always stops."""

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "micro_batch_size", "global_batch_size"):
            _positive("train", **{name: getattr(self, name)})
        _not_negative("train", eval_interval=self.eval_interval, eval_rows=self.eval_rows)
        check_seed("train.seed", self.seed)
        for name in ("exit_interval", "exit_duration_minutes"):
            if getattr(self, name) is not None:
                _positive("train", **{name: getattr(self, name)})
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise ValueError(f"train.spike_factor: found {self.spike_factor}, allowed: more than 1")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"train.precision: found {self.precision!r}, allowed: fp32, bf16")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"train.recompute: found {self.recompute!r}, allowed: {', '.join(RECOMPUTE)}")
        if self.latent_store not in ("gathered", "sharded"):
            raise ValueError(f"train.latent_store: found {self.latent_store!r}, allowed: gathered, sharded")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"train.device: found {self.device!r}, allowed: auto, cpu, cuda")
        if self.batch_ramp is not None:
            start, increment, rows = self.batch_ramp
            growth = self.global_batch_size - start
            if min(self.batch_ramp) < 1 or growth < 0 or growth % increment:
                raise ValueError(
                    f"train.batch_ramp: found {list(self.batch_ramp)}, allowed: START INCREMENT ROWS, all positive, "
                    f"with global_batch_size {self.global_batch_size} - START a multiple of INCREMENT"
                )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    folder: str | None = None
    """Folder of checkpoints. Default: `checkpoints/` in the run's folder."""
    load: str | None = None
    """Start from this checkpoint, or from the latest of this folder. Default: resume from `folder` if it holds one."""
    load_weights_only: bool = False
    """With load: take the weights, start optimizer, schedule and data anew."""
    save_interval: int = 0
    """Steps between saves; 0: only at the end."""
    keep: int = 2
    """How many complete checkpoints stay; older ones are removed. 0: all stay."""
    save: bool = True
    """False: nothing is written."""

    def __post_init__(self) -> None:
        _not_negative("checkpoint", save_interval=self.save_interval, keep=self.keep)
        if self.load_weights_only and self.load is None:
            raise ValueError("checkpoint.load_weights_only: found True, but checkpoint.load names no checkpoint")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run reports."""

    interval: int = 1
    """Steps between console lines and TensorBoard points."""
    tensorboard: bool = True
    """Write TensorBoard events under `tensorboard/` in the run's folder."""
    progress: Literal["auto", "bar", "plain"] = "auto"
    """A progress bar on a terminal, else one line per interval in Megatron's wording."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for MFU. Default: known GPUs by name; unknown on a CPU, then MFU is not shown."""

    def __post_init__(self) -> None:
        _positive("log", interval=self.interval)
        if self.peak_tflops is not None:
            _positive("log", peak_tflops=self.peak_tflops)
        if self.progress not in ("auto", "bar", "plain"):
            raise ValueError(f"log.progress: found {self.progress!r}, allowed: auto, bar, plain")


def check_seed(name: str, seed: int) -> None:
    """Raise a ValueError unless every random generator that a run uses can take this seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name}: found {seed}, allowed: 0 to {2**32 - 1}")


def _positive(group: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1e12:
            raise ValueError(f"{group}.{name}: found {value}, allowed: a positive number below 1e12")


def _not_negative(group: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1e12:
            raise ValueError(f"{group}.{name}: found {value}, allowed: zero or more, below 1e12")


def _share(group: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{group}.{name}: found {value}, allowed: 0 to 1")
