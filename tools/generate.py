"""Samples text from a training checkpoint, in one process: python tools/generate.py CHECKPOINT --prompt "The "."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_lowrank import disk
from megatron_lowrank.checkpoint.files import FORMAT, latest, resolve
from megatron_lowrank.config import RunConfig

EXAMPLES = """examples:
  python tools/generate.py runs/quickstart/cola --prompt "The " --tokens 60
  python tools/generate.py runs/mine/checkpoints/iter_0001000 --prompt "The " --temperature 0
"""
CANONICAL = "lowrank_config.json"  # convert.description.DESCRIPTION, whose import takes torch
EXPECTED = "expected a training checkpoint: a folder iter_..., the folder that holds these, or the run's folder"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr and code 2, as for every other mistake."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not least <= value < 1 << 63:
            raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a whole number, {least} or more")
        return value

    return read


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a number, 0 or more")
    return value


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, the latest of a folder of them, or of the folder of a run.

    Raises:
        OSError: there is none.
        ValueError: it is incomplete, or a folder of another kind.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is {'not a folder' if path.exists() else 'not there'}; {EXPECTED}")
    if (path / CANONICAL).is_file():
        raise ValueError(f"{path} holds {CANONICAL}: it is a canonical folder or another export; {EXPECTED}")
    below = path / "checkpoints"
    if below.is_dir() and not disk.is_complete(path) and latest(path) is None:
        path = below
    try:
        found = resolve(path)
    except OSError as error:
        raise FileNotFoundError(f"{error}; {EXPECTED}") from error
    manifest = disk.read_json(found / disk.MANIFEST)
    kind = manifest.get("format") if isinstance(manifest, dict) else None
    if kind != FORMAT:
        raise ValueError(f"{found} is a folder of the format {kind}; {EXPECTED}")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked as far as is possible without torch, whose import takes seconds."""
    parser = _Parser(
        prog="generate", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, a folder of them or of a run (its latest), of any parallel layout"
    )
    parser.add_argument("--prompt", default="", help="text to continue (default: from the end-of-document token)")
    parser.add_argument(
        "--tokens", type=_at_least(0), default=100, metavar="N", help="how many tokens to add (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.8, help="0 takes the most likely token (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=_at_least(1), metavar="K", help="draw among the K most likely tokens (default: among all)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="seed of the draws (default: %(default)s)")
    parser.add_argument("--tokenizer-path", metavar="FILE", help="where the tokenizer's file is, if it has moved")
    given = parser.parse_args(arguments)
    try:
        given.checkpoint = find_checkpoint(given.checkpoint)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return given


def main(given: argparse.Namespace) -> None:
    """Prints prompt and continuation."""
    from megatron_lowrank.checkpoint.agree import agreed
    from megatron_lowrank.train.launch import World, launched

    with launched(RunConfig, World()):  # one rank, whatever the environment says
        # Only now: on a CPU, the platform layer has to be there before megatron-core is imported.
        from megatron_lowrank.train.generate import load_for_sampling, recorded_tokenizer, sample

        with agreed():
            run, model = load_for_sampling(given.checkpoint)
            tokenizer = recorded_tokenizer(run, given.tokenizer_path)
            prompt = tokenizer.encode(given.prompt) or [tokenizer.eod]
            added = sample(
                model, run, prompt, given.tokens, temperature=given.temperature, top_k=given.top_k, seed=given.seed,
                stop=tokenizer.eod,
            )  # fmt: skip
        print(given.prompt + tokenizer.decode(added))


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    from megatron_lowrank.train.failure import run_program

    run_program("generate", lambda _: main(arguments), sys.argv[1:])
