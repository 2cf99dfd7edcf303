"""What a run says on the terminal: a progress bar, or lines in Megatron's words for those who grep them."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron_lowrank.config import RunConfig


class Console:
    """Speaks on rank 0, is silent elsewhere."""

    def __init__(self, run: RunConfig, rank: int, first_step: int) -> None:
        """Starts the bar if there is to be one.

        Args:
            run: The run.
            rank: This process; only rank 0 prints.
            first_step: Steps that are done already.
        """
        self._steps, self._speaks = run.train.steps, rank == 0
        bar = run.log.progress == "bar" or (run.log.progress == "auto" and sys.stderr.isatty())
        self._bar: Any = None
        if bar and self._speaks:
            from tqdm import tqdm

            self._bar = tqdm(total=self._steps, initial=first_step, unit="step", dynamic_ncols=True, file=sys.stderr)

    def say(self, text: str) -> None:
        """Prints one or more lines, above the bar if there is one."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update()

    def step(self, line: dict[str, Any]) -> None:
        """Reports a training step.

        Args:
            line: As written to metrics.jsonl.
        """
        clock = line["time"]
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {line['loss']:.4f}, lr {line['learning_rate']:.2e}, {clock['tokens_per_second']:.0f} tok/s"
            )
            return
        norm = line["grad_norm"]
        # Order and wording of Megatron-LM up to the number of nan iterations; what follows is ours. Loss scale and both
        # numbers are constant: there is no fp16, and a step that is not finite ends the run.
        parts = [
            f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {line['step']:8d}/{self._steps:8d}",
            f"consumed samples: {line['consumed_rows']:12d}",
            f"elapsed time per iteration (ms): {clock['seconds'] * 1000:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {clock['tflops_actual']:.4g}",
            f"learning rate: {line['learning_rate']:.6E}",
            f"global batch size: {line['global_batch_size']:5d}",
            f"lm loss: {line['loss']:.6E}",
            "loss scale: 1.0",
            f"grad norm: {norm:.3f}",
            "number of skipped iterations:   0",
            "number of nan iterations:   0",
            f"dense-equivalent throughput (TFLOP/s/GPU): {clock['tflops_dense_equivalent']:.4g}",
            f"tokens per second: {clock['tokens_per_second']:.0f}",
            f"{clock['memory_kind']} (MiB): {clock['memory_bytes'] / 2**20:.0f}",
        ]
        if clock["mfu"] is not None:
            parts.append(f"MFU of actual FLOPs: {clock['mfu']:.1%}")
        self.say(" | ".join(parts) + " |")

    def evaluation(self, step: int, loss: float, perplexity: float, entropy: float | None) -> None:
        """Reports an evaluation, beside the loss of a model that knows token frequencies only."""
        reference = "" if entropy is None else f" | unigram entropy of the whole text: {entropy:.6E}"
        self.say(
            f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E}"
            f"{reference} |"
        )

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
