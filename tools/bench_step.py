"""Step time, FLOPs and saved activations of the decoder layers: low-rank against dense, in one process.

    python tools/bench_step.py [--preset cola_350m] [--width 1024] [--layers 2] [--batch 4] [--sequence 256]
                               [--rounds 15] [--threads 2] [--json FILE]

Three candidates alternate: our low-rank layers on megatron-core, the dense control on the same path, and a plain torch
re-statement of the published low-rank layer without megatron-core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.config.cli import fail


def main() -> None:
    """Measure, print a table, write JSON when asked."""
    args = _arguments()
    try:
        run = _at_width(preset(args.preset), args)
    except ValueError as error:
        text = str(error)
        flag = f"--{text}" if text.startswith("preset:") else f"--width {args.width}: {text}"
        fail(ValueError(flag), PROG)
    from megatron_lowrank.platform import cpu

    if not torch.cuda.is_available():
        cpu.install()
    import torch.distributed as dist

    compat.silence_known_notices()
    from megatron_lowrank.estimate.flops import layer_flops
    from megatron_lowrank.testing.measure import alternate, matmul_flops, paired_ratio, saved_elements
    from megatron_lowrank.testing.plain_layer import PlainStack
    from megatron_lowrank.testing.ranks import initialize

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize()
    dense = replace(run, lowrank=replace(run.lowrank, method="dense"))
    x = torch.randn(args.sequence, args.batch, args.width, generator=torch.Generator().manual_seed(0))
    stacks: dict[str, Any] = {
        "low-rank": _decoder(run), "dense": _decoder(dense), "plain torch": PlainStack(run.model, run.lowrank)
    }  # fmt: skip
    rows_first = x.transpose(0, 1).contiguous()
    shaped = {"low-rank": x, "dense": x, "plain torch": rows_first}
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in shaped.items()}
    gradients = {name: torch.randn(tensor.shape) for name, tensor in inputs.items()}

    def forward(name: str) -> torch.Tensor:
        return stacks[name](inputs[name])  # type: ignore[no-any-return]

    def step(name: str) -> None:
        # The layers alone: their output's gradient is given, so that no loss is timed with them.
        for tensor in (inputs[name], *_parameters(stacks[name])):
            tensor.grad = None
        forward(name).backward(gradients[name])

    timings = alternate({name: (lambda name=name: step(name)) for name in stacks}, args.rounds)  # type: ignore[misc]
    configs: dict[str, RunConfig] = {"low-rank": run, "dense": dense, "plain torch": run}
    rows = []
    for name, timing in timings.items():
        closed = layer_flops(configs[name].model, configs[name].lowrank, 0, tokens=args.sequence, attention="full")
        expected = 3 * closed.projections * args.batch * args.layers
        counted = matmul_flops(lambda name=name: step(name))  # type: ignore[misc]
        rows.append({
            "candidate": name, "median_ms": timing.median * 1e3, "min_ms": timing.minimum * 1e3,
                "max_ms": max(timing.times) * 1e3,
            "matmul_gflop": counted / 1e9, "closed_form_gflop": expected / 1e9,
            "matmul_over_closed_form": counted / expected,
            "saved_megabytes": saved_elements(lambda name=name: forward(name), _parameters(stacks[name])) * 4 / 1e6,  # type: ignore[misc]
            "weights_megabytes": sum(p.numel() for p in _parameters(stacks[name])) * 4 / 1e6,
        })  # fmt: skip
    result = {
        "settings": f"{args.preset} at width {args.width}, rank {run.rank_of(0, 'q')}, {args.layers} layers, batch "
        f"{args.batch}, sequence {args.sequence}, fp32, {args.threads} threads, {args.rounds} rounds",
        "date": date.today().isoformat(), "command": f"python tools/bench_step.py {' '.join(sys.argv[1:])}".strip(),
        **compat.versions(), "threads": args.threads, "rounds": args.rounds,
        "rank": run.rank_of(0, "q"), "rows": rows,
        "dense_over_low_rank": paired_ratio(timings["dense"], timings["low-rank"]),
        "low_rank_over_plain_torch": paired_ratio(timings["low-rank"], timings["plain torch"]),
        "minima": {
            "dense_over_low_rank": timings["dense"].minimum / timings["low-rank"].minimum,
            "low_rank_over_plain_torch": timings["low-rank"].minimum / timings["plain torch"].minimum,
        },
    }  # fmt: skip
    _print(result)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


PROG = "bench_step"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        fail(ValueError(message), PROG)


def _arguments() -> argparse.Namespace:
    parser = _Parser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cola_350m", help="its method, activations and recipe; a low-rank one")
    parser.add_argument("--width", type=int, default=1024, help="hidden size; ffn and heads scale with it")
    parser.add_argument("--ratio", type=float, default=0.25, help="rank / width")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers in the stack")
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per row")
    parser.add_argument("--rounds", type=int, default=15, help="times each candidate runs, in turn with the others")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    for name in ("width", "layers", "batch", "sequence", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: found {getattr(args, name)}, allowed: a positive integer")
    # Torch's runtime ends the process, with a text of its own, when it cannot start as many.
    if args.threads > (most := max(2, os.cpu_count() or 1)):
        parser.error(f"--threads: found {args.threads}, allowed: 1 to {most} on this machine")
    if not 0 < args.ratio <= 1:
        parser.error(f"--ratio: found {args.ratio:g}, allowed: more than 0 and at most 1")
    if args.json is not None:
        _check_writable(args.json, parser)
    return args


def _check_writable(path: str, parser: argparse.ArgumentParser) -> None:
    """Fails before the benchmark runs and not after it."""
    existed = os.path.lexists(path)
    try:
        with open(path, "a"):
            pass
        if not existed:
            os.remove(path)
    except OSError as error:
        parser.error(f"--json: cannot write {path!r} ({error.strerror})")


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
        train=replace(run.train, precision="fp32", sequence_length=args.sequence),
    )  # fmt: skip


def _decoder(run: Any) -> Any:
    from megatron_lowrank.model import build_model

    model = build_model(run)[0]
    angles = model.rotary_pos_emb(run.train.sequence_length)
    # The final norm belongs to no layer.
    model.decoder.final_layernorm = None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=angles)  # type: ignore[no-any-return]

    forward.parameters = list(model.decoder.layers.parameters())  # type: ignore[attr-defined]
    return forward


def _parameters(stack: Any) -> list[torch.Tensor]:
    return stack.parameters if isinstance(stack.parameters, list) else list(stack.parameters())


def _print(result: dict[str, Any]) -> None:
    print(result["settings"])
    print(
        f"{'candidate':<14}{'median ms':>11}{'min ms':>9}{'max ms':>9}{'GFLOP':>10}{'/formula':>10}{'saved MB':>10}"
        f"{'weights MB':>12}"
    )
    for row in result["rows"]:
        print(
            f"{row['candidate']:<14}{row['median_ms']:>11.1f}{row['min_ms']:>9.1f}{row['max_ms']:>9.1f}"
            f"{row['matmul_gflop']:>10.3f}{row['matmul_over_closed_form']:>10.4f}{row['saved_megabytes']:>10.1f}"
            f"{row['weights_megabytes']:>12.1f}"
        )
    print("GFLOP: matrix products of a step (forward and backward) as counted; /formula: over the closed form")
    for name, label in (
        ("dense_over_low_rank", "dense / low-rank"),
        ("low_rank_over_plain_torch", "low-rank / plain torch"),
    ):
        print(f"{label} step time: {result[name]:.3f} (median of paired ratios), {result['minima'][name]:.3f} (minima)")
    if result["rows"][0]["median_ms"] > 1.5 * result["rows"][0]["min_ms"]:
        print(
            "unstable: the median is far above the minimum, something else uses this machine; trust the minima at most"
        )


if __name__ == "__main__":
    main()
