"""Published configurations, one function per run shape, with `svd_` and `dense_` twins.

Shapes, ranks and recipe: the CoLA release. Its batch is 512 rows of 256 tokens, one document per row, padded; AdamW
with weight decay 0.01 on every parameter, clipping at 0.5, linear warm-up, cosine to a tenth of the peak.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from megatron_lowrank.config.data import DataConfig
from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.config.train import CheckpointConfig, LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig

MethodName = Literal["dense", "svd", "cola"]


def _published(
    *, layers: int, hidden: int, ffn: int, heads: int, rank: int, mlp: Literal["keep", "drop"], lr: float, warmup: int,
    steps: int, micro_batch: int,
) -> RunConfig:  # fmt: skip
    return RunConfig(
        model=ModelConfig(
            num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads, vocab_size=32000,
            pad_token_id=0, bos_token_id=0, eos_token_id=1,
        ),
        lowrank=LowRankConfig(method="cola", rank=rank, mlp_activation=mlp),
        data=DataConfig(rows="document"),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, clip_grad=0.5),
        schedule=ScheduleConfig(decay="cosine", warmup_steps=warmup),
        train=TrainConfig(
            steps=steps, sequence_length=256, micro_batch_size=micro_batch, global_batch_size=512, precision="bf16",
            seed=42, eval_interval=1000, eval_rows=4096, deterministic=False,
        ),
    )  # fmt: skip


def cola_60m() -> RunConfig:
    """CoLA at 60M: 42,770,944 parameters against 58,073,600 dense."""
    return _published(layers=8, hidden=512, ffn=1376, heads=8, rank=128, mlp="keep", lr=6e-3, warmup=2000,
                      steps=10000, micro_batch=256)  # fmt: skip


def cola_130m() -> RunConfig:
    """CoLA at 130M: 93,997,824 parameters against 134,105,856 dense."""
    return _published(layers=12, hidden=768, ffn=2048, heads=12, rank=256, mlp="keep", lr=3e-3, warmup=2000,
                      steps=20000, micro_batch=256)  # fmt: skip


def cola_350m() -> RunConfig:
    """CoLA at 350M: 185,222,144 parameters against 367,969,280 dense."""
    return _published(layers=24, hidden=1024, ffn=2736, heads=16, rank=256, mlp="drop", lr=3e-3, warmup=6000,
                      steps=60000, micro_batch=64)  # fmt: skip


def cola_1b() -> RunConfig:
    """CoLA at 1B: 609,310,720 parameters. Its ffn width 5461 is odd: no tensor parallelism (see `cola_1b_tp`)."""
    return _published(layers=24, hidden=2048, ffn=5461, heads=32, rank=512, mlp="drop", lr=2e-3, warmup=10000,
                      steps=100000, micro_batch=32)  # fmt: skip


def cola_1b_tp() -> RunConfig:
    """`cola_1b` with ffn width 5472, which tensor parallelism can cut: 609,716,224 parameters."""
    run = cola_1b()
    return replace(run, model=replace(run.model, ffn_hidden_size=5472))


def cola_7b() -> RunConfig:
    """CoLA at 7B: 2,820,935,680 parameters against 6,738,415,616 dense."""
    return _published(layers=32, hidden=4096, ffn=11008, heads=32, rank=1024, mlp="drop", lr=1e-3, warmup=15000,
                      steps=150000, micro_batch=16)  # fmt: skip


def cola_debug() -> RunConfig:
    """Two small layers over bytes: seconds on one core."""
    return RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, vocab_size=257,
                          pad_token_id=None, bos_token_id=256, eos_token_id=256),
        lowrank=LowRankConfig(method="cola", rank=16),
        train=TrainConfig(steps=20, sequence_length=64, micro_batch_size=2, global_batch_size=4, eval_rows=8),
        schedule=ScheduleConfig(warmup_steps=2),
    )  # fmt: skip


def cola_quickstart() -> RunConfig:
    """A minute on two CPU cores over a small BPE vocabulary: the example of the README."""
    return RunConfig(
        model=ModelConfig(num_layers=4, hidden_size=256, ffn_hidden_size=688, num_attention_heads=4, vocab_size=2048,
                          pad_token_id=None, bos_token_id=0, eos_token_id=0),
        lowrank=LowRankConfig(method="cola", rank=64, mlp_activation="keep"),
        data=DataConfig(split="90,10,0"),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1, beta2=0.95, clip_grad=1.0),
        schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        log=LogConfig(interval=10),
        checkpoint=CheckpointConfig(save_interval=100),
        train=TrainConfig(steps=200, sequence_length=128, micro_batch_size=16, global_batch_size=16,
                          eval_interval=50, eval_rows=64),
    )  # fmt: skip


def _as_method(run: RunConfig, method: MethodName) -> RunConfig:
    """The twin of a CoLA run under another method: same shape, same rank, same recipe."""
    if method == "cola":
        return run
    return replace(run, lowrank=LowRankConfig(method=method, rank=run.lowrank.rank))


_SHAPES: tuple[Callable[[], RunConfig], ...] = (
    cola_debug, cola_quickstart, cola_60m, cola_130m, cola_350m, cola_1b, cola_1b_tp, cola_7b,
)  # fmt: skip
_METHODS: tuple[MethodName, ...] = ("cola", "svd", "dense")


def preset_names() -> list[str]:
    """Every name that `preset` knows."""
    names = [shape.__name__.removeprefix("cola_") for shape in _SHAPES]
    return ["debug", *(f"{method}_{name}" for name in names for method in _METHODS)]


def preset(name: str) -> RunConfig:
    """The run config of a name such as `cola_60m`, `svd_60m`, `dense_60m`; `debug` is `cola_debug`.

    Raises:
        ValueError: unknown name.
    """
    method, _, shape = ("cola_debug" if name == "debug" else name).partition("_")
    for function in _SHAPES:
        if function.__name__ == f"cola_{shape}" and method in _METHODS:
            return replace(_as_method(function(), method), preset=name, out=f"runs/{name}")  # type: ignore[arg-type]
    near = difflib.get_close_matches(name, preset_names(), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"preset: found {name!r}; {hint}allowed: {', '.join(preset_names())}")
