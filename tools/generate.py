"""Samples text from a training checkpoint, in one process: python tools/generate.py CHECKPOINT --prompt "The "."""

from __future__ import annotations

import argparse
import sys

from megatron_lowrank.config import RunConfig
from megatron_lowrank.train.failure import run_program
from megatron_lowrank.train.launch import World, launched


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of them (its latest), of any parallel layout")
    parser.add_argument("--prompt", default="", help="text to continue; empty: from the end-of-document token")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    parser.add_argument("--top-k", type=int, default=None, help="draw among the k most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--tokenizer-path", default=None, help="where the tokenizer's file is, if it has moved")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Prints prompt and continuation."""
    given = _parse(arguments)
    with launched(RunConfig, World()):  # one rank, whatever the environment says
        # Only now: on a CPU, the platform layer has to be there before megatron-core is imported.
        from megatron_lowrank.checkpoint.agree import agreed
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
    run_program("generate", main, sys.argv[1:])
