"""What the benchmark programs share: their command line, the shape at a width, and a stack of decoder layers alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.config.cli import fail


class BenchParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage; what cannot run ends the program before it measures."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self._sizes: list[str] = []
        self.add_argument("--preset", default="cola_350m", help="its method, activations and recipe; a low-rank one")
        self.add_argument("--ratio", type=float, default=0.25, help="rank / width")
        self.add_argument("--json", metavar="FILE", help="write the result there")
        self.add_size("width", 1024, "hidden size; ffn and heads scale with it")
        self.add_size("layers", 2, "decoder layers in the stack")
        self.add_size("rounds", 15, "times each candidate runs, in turn with the others")

    def add_size(self, name: str, default: int, text: str) -> None:
        """A positive integer."""
        self._sizes.append(name)
        self.add_argument(f"--{name}", type=int, default=default, help=text)

    def checked(self) -> argparse.Namespace:
        """The arguments; `args.run` is the preset at this width."""
        args = self.parse_args()
        for name in self._sizes:
            value = getattr(args, name.replace("-", "_"))
            if value < 1:
                self.error(f"--{name}: found {value}, allowed: a positive integer")
        # Torch's runtime ends the process, with a text of its own, when it cannot start as many.
        most = max(2, os.cpu_count() or 1)
        if getattr(args, "threads", 1) > most:
            self.error(f"--threads: found {args.threads}, allowed: 1 to {most} on this machine")
        if not 0 < args.ratio <= 1:
            self.error(f"--ratio: found {args.ratio:g}, allowed: more than 0 and at most 1")
        if args.json is not None:
            self._check_writable(args.json)
        try:
            args.run = _at_width(preset(args.preset), args)
        except ValueError as error:
            text = str(error)
            self.error(f"--{text}" if text.startswith("preset:") else f"--width {args.width}: {text}")
        return args

    def _check_writable(self, path: str) -> None:
        """Fails before the benchmark runs and not after it."""
        existed = os.path.lexists(path)
        try:
            with open(path, "a"):
                pass
            if not existed:
                os.remove(path)
        except OSError as error:
            self.error(f"--json: cannot write {path!r} ({error.strerror})")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        fail(ValueError(message), self.prog)


def origin(prog: str) -> dict[str, Any]:
    """Date, command and versions of a result."""
    command = f"python tools/{prog}.py {' '.join(sys.argv[1:])}".strip()
    return {"date": date.today().isoformat(), "command": command, **compat.versions()}


def write_result(path: str | None, result: dict[str, Any]) -> None:
    """The result as JSON, where a file was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


def stack_of(model: Any, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The decoder layers of a model chunk as a function of the residual; the final norm, of no layer, is taken out."""
    angles = model.rotary_pos_emb(length)
    model.decoder.final_layernorm = None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=angles)  # type: ignore[no-any-return]

    return forward


def _at_width(run: RunConfig, args: argparse.Namespace) -> RunConfig:
    m = run.model
    if run.lowrank.method == "dense":
        raise ValueError(f"preset: found {args.preset}, which is dense already, allowed: a low-rank one")
    return replace(
        run,
        model=replace(
            m, num_layers=args.layers, hidden_size=args.width, num_attention_heads=max(1, args.width // 64),
            ffn_hidden_size=8 * round(m.ffn_hidden_size / m.hidden_size * args.width / 8), kv_channels=None,
            num_query_groups=None, vocab_size=128, eos_token_id=1, max_position_embeddings=args.sequence,
        ),
        lowrank=replace(run.lowrank, rank=args.ratio, rank_overrides={}),
        train=replace(run.train, precision="fp32", sequence_length=args.sequence, micro_batch_size=args.batch),
    )  # fmt: skip
