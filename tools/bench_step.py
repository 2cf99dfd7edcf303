"""Step time, FLOPs and saved activations of the decoder layers: low-rank against dense, in one process.

    python tools/bench_step.py [--preset cola_350m] [--width 1024] [--layers 2] [--batch 4] [--sequence 256]
                               [--rounds 15] [--threads 2] [--json FILE]

Three candidates alternate: our low-rank layers on megatron-core, the dense control on the same path, and a plain torch
re-statement of the published low-rank layer without megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig
from megatron_lowrank.testing.bench import BenchParser, origin, stack_of, write_result

PROG = "bench_step"


def main() -> None:
    """Measure, print a table, write JSON when asked."""
    args = _arguments()
    run: RunConfig = args.run
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
        **origin(PROG), "threads": args.threads, "rounds": args.rounds,
        "rank": run.rank_of(0, "q"), "rows": rows,
        "dense_over_low_rank": paired_ratio(timings["dense"], timings["low-rank"]),
        "low_rank_over_plain_torch": paired_ratio(timings["low-rank"], timings["plain torch"]),
        "minima": {
            "dense_over_low_rank": timings["dense"].minimum / timings["low-rank"].minimum,
            "low_rank_over_plain_torch": timings["low-rank"].minimum / timings["plain torch"].minimum,
        },
    }  # fmt: skip
    _print(result)
    write_result(args.json, result)
    dist.destroy_process_group()


def _arguments() -> Any:
    parser = BenchParser(PROG, __doc__)
    parser.add_size("batch", 4, "rows")
    parser.add_size("sequence", 256, "tokens per row")
    parser.add_size("threads", 2, "CPU threads of torch")
    return parser.checked()


def _decoder(run: RunConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    from megatron_lowrank.model import build_model

    model = build_model(run)[0]
    forward = stack_of(model, run.train.sequence_length)
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
