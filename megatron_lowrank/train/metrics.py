"""metrics.jsonl, TensorBoard and the terminal: one call per step and per evaluation.

metrics.jsonl holds one JSON object per logged step (`"kind": "train"`) and evaluation (`"kind": "valid"`). All that
depends on the clock or the machine is under `time`; the rest of two runs is equal where their training is. A run that
resumes drops the lines behind the restored step, so that each step is there once.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from megatron_lowrank.config import RunConfig
from megatron_lowrank.train.console import Console
from megatron_lowrank.train.evaluate import EvalResult
from megatron_lowrank.train.plot import plot_losses
from megatron_lowrank.train.step import StepResult
from megatron_lowrank.train.throughput import Throughput, peak_memory

FILE, PREVIOUS, PLOT = "metrics.jsonl", "metrics.previous.{}.jsonl", "loss.png"

_FIELDS: dict[str, tuple[type, ...]] = {"kind": (str,), "step": (int,), "loss": (int, float)}
"""Of every line -> types."""


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl; what is no such line, as one that a kill cut short, is left out."""
    path, lines = Path(folder) / FILE, []
    for text in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and all(type(line.get(name)) in types for name, types in _FIELDS.items()):
            lines.append(line)
    return lines


class Metrics:
    """Writes on rank 0; `step` is called on every rank, because peak memory is a maximum over all of them."""

    def __init__(
        self, run: RunConfig, *, rank: int, world_size: int, first_step: int, entropy: float | None, console: Console
    ) -> None:
        """Opens the files; nothing of them fails on other ranks, so wrap the call in `agreed`.

        Args:
            run: The run; `run.out` exists.
            rank: This process.
            world_size: All processes.
            first_step: Steps that are done already.
            entropy: Unigram entropy of the whole text in nats, if known.
            console: The terminal.
        """
        self._folder, self._interval, self._last = Path(run.out), run.log.interval, run.train.steps
        self._title, self._entropy, self._console = f"{run.preset} ({self._folder.name})", entropy, console
        self._world_size, self._throughput = world_size, Throughput(run, world_size)
        self._file: Any = None
        self._board: Any = None
        if rank:
            return
        _keep_until(self._folder, first_step)
        self._file = open(self._folder / FILE, "a", encoding="utf-8")  # noqa: SIM115  (closed by `close`)
        if run.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=first_step + 1)

    def step(self, step: int, result: StepResult, consumed_rows: int, seconds: float) -> None:
        """Records a training step, if it is one of the logged ones (every interval, and the last); a collective.

        Args:
            step: Number of the step, from 1.
            result: What it did.
            consumed_rows: Rows of the run so far.
            seconds: Duration.
        """
        self._console.advance()
        if step % self._interval and step != self._last:
            return
        rates, (memory_kind, memory_bytes) = self._throughput.rates(result.rows, seconds), peak_memory()
        line = {
            "kind": "train", "step": step, "loss": result.loss, "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm, "global_batch_size": result.rows, "tokens": result.tokens,
            "consumed_rows": consumed_rows,
            "time": {
                "seconds": seconds, "tokens_per_second": rates.tokens_per_second,
                "tflops_actual": rates.tflops_actual, "tflops_dense_equivalent": rates.tflops_dense_equivalent,
                "mfu": rates.mfu, "memory_kind": memory_kind, "memory_bytes": memory_bytes,
            },
        }  # fmt: skip
        self._console.step(line)
        self._write(line)
        points = {
            "lm loss": result.loss, "learning-rate": result.learning_rate, "grad-norm": result.grad_norm,
            "batch-size": result.rows, "world-size": self._world_size, "iteration-time": seconds,
            "throughput": rates.tflops_actual, "throughput dense-equivalent": rates.tflops_dense_equivalent,
            "tokens-per-second": rates.tokens_per_second, "mfu": rates.mfu, "loss-scale": 1.0,
            "mem-max-allocated-bytes" if "GPU" in memory_kind else "mem-process-peak-rss-bytes": memory_bytes,
        }  # fmt: skip
        self._point(points, step, consumed_rows)

    def evaluation(self, step: int, result: EvalResult, consumed_rows: int) -> None:
        """Records an evaluation after a step."""
        perplexity = math.exp(min(result.loss, 80.0))
        self._console.evaluation(step, result.loss, perplexity, self._entropy)
        self._write({
            "kind": "valid", "step": step, "loss": result.loss, "perplexity": perplexity, "tokens": result.tokens,
            "consumed_rows": consumed_rows, "unigram_entropy": self._entropy,
        })  # fmt: skip
        self._point({"lm loss validation": result.loss, "lm loss validation ppl": perplexity}, step, consumed_rows)

    def close(self) -> None:
        """Flushes everything and draws loss.png; what fails is a warning, as it must not hide the end of the run."""
        file, self._file = self._file, None
        steps: list[tuple[str, Callable[[], object]]] = [("the terminal", self._console.close)]
        if self._board is not None:
            steps.append(("tensorboard", self._board.close))
        if file is not None:
            steps += [(FILE, file.close), (PLOT, self._draw)]
        for name, step in steps:
            try:
                step()
            except Exception as error:
                warnings.warn(f"{name} is not complete: {type(error).__name__}: {error}", stacklevel=1)

    def _draw(self) -> None:
        if lines := read_metrics(self._folder):
            plot_losses(lines, self._entropy, self._title, self._folder / PLOT)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _point(self, points: dict[str, float | None], step: int, consumed_rows: int) -> None:
        if self._board is None:
            return
        for name, value in points.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
                if name.startswith("lm loss"):
                    self._board.add_scalar(f"{name} vs samples", value, consumed_rows)


def _keep_until(folder: Path, step: int) -> None:
    """Drops lines behind `step`; of a run that starts anew the old file is set aside."""
    path = folder / FILE
    if not path.exists():
        return
    if step == 0:
        path.replace(next(free for n in count(1) if not (free := folder / PREVIOUS.format(n)).exists()))
        return
    kept = [line for line in read_metrics(folder) if line["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    temporary.replace(path)
