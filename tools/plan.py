"""What a run costs before it is started: python tools/plan.py count --preset NAME [--tp N] [--SECTION.FIELD VALUE ...].

`count` prints parameters, FLOPs per token, and the bytes of weights, gradients and optimizer state on each rank, all in
closed form. Activations and communication are not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, NoReturn

from megatron_lowrank.config import RunConfig
from megatron_lowrank.config.cli import UsageError, fail, parse_run
from megatron_lowrank.estimate import (
    count_parameters,
    dense_equivalent,
    flops_per_token,
    rank_parameters,
    state_bytes,
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        fail(ValueError(message), "plan")


def main(arguments: list[str]) -> int:
    """Runs a subcommand."""
    parser = _Parser(prog="plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    count = commands.add_parser(
        "count", allow_abbrev=False, usage="plan count [--preset NAME] [--config FILE] [--SECTION.FIELD VALUE ...] "
        "[--tp N] [--dp N] [--tokens N] [--json]",
        description="Parameters, FLOPs per token and bytes of state. Presets and fields are those of pretrain.py.",
    )  # fmt: skip
    count.add_argument("--tp", type=_positive, metavar="N", help="short for --parallel.tensor_parallel_size N")
    count.add_argument("--dp", type=_positive, default=1, metavar="N", help="data-parallel size, default 1")
    count.add_argument("--tokens", type=_positive, metavar="N", help="tokens of a row, default train.sequence_length")
    count.add_argument("--json", action="store_true", help="one JSON object")
    given, fields = parser.parse_known_args(arguments)
    try:
        short = [] if given.tp is None else [f"--parallel.tensor_parallel_size={given.tp}"]
        counted = count_run(parse_run([*fields, *short], prog="plan count"), given.tokens, given.dp)
    except UsageError as error:
        fail(error, "plan")
    print(json.dumps(counted, indent=1) if given.json else as_text(counted))
    return 0


def count_run(run: RunConfig, tokens: int | None = None, data_parallel_size: int = 1) -> dict[str, Any]:
    """The counts of a run as plain JSON values.

    Args:
        run: the run.
        tokens: tokens of a row. Default: `train.sequence_length`.
        data_parallel_size: replicas of the model.
    """
    length, dense = tokens or run.train.sequence_length, dense_equivalent(run.lowrank)
    count, twin = count_parameters(run.model, run.lowrank), count_parameters(run.model, dense)
    actual, equivalent = (
        flops_per_token(run.model, low, sequence_length=length, attention="causal") for low in (run.lowrank, dense)
    )
    stages = []
    for stage in range(run.parallel.pipeline_parallel_size):
        held = state_bytes(
            run.model, run.lowrank, run.parallel, precision=run.train.precision, stage=stage,
            data_parallel_size=data_parallel_size,
        )  # fmt: skip
        parameters = rank_parameters(run.model, run.lowrank, run.parallel, stage)
        stages.append({"stage": stage, "parameters": parameters, **asdict(held), "total": held.total})
    return {
        "preset": run.preset, "method": run.lowrank.method, "placement": run.placement,
        "tensor_parallel_size": run.parallel.tensor_parallel_size, "data_parallel_size": data_parallel_size,
        "precision": run.train.precision, "tokens": length,
        "parameters": count.total, "parameters_by_kind": asdict(count), "dense_equivalent_parameters": twin.total,
        "flops_per_token": actual, "dense_equivalent_flops_per_token": equivalent, "bytes_per_rank": stages,
    }  # fmt: skip


def as_text(counted: dict[str, Any]) -> str:
    """The counts as lines."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in counted["parameters_by_kind"].items())
    dense, flops = counted["dense_equivalent_parameters"], counted["dense_equivalent_flops_per_token"]
    lines = [
        f"{counted['preset']}: {counted['method']}, placement {counted['placement']}, {counted['precision']}, tensor "
        f"{counted['tensor_parallel_size']} x data {counted['data_parallel_size']}",
        f"parameters: {counted['parameters']:,} ({kinds}); dense model of the same shape: {dense:,} "
        f"({counted['parameters'] / dense:.1%})",
        f"FLOPs per token, forward and backward, rows of {counted['tokens']} tokens, attention causal: "
        f"{counted['flops_per_token']:,.0f}; dense-equivalent: {flops:,.0f} ({counted['flops_per_token'] / flops:.1%})",
    ]
    for row in counted["bytes_per_rank"]:
        sizes = ", ".join(f"{name} {row[name] / 2**20:,.1f}" for name in ("weights", "gradients", "optimizer", "total"))
        lines.append(f"rank of stage {row['stage']}: {row['parameters']:,} parameters; MiB: {sizes}")
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a positive integer")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
