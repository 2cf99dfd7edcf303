"""Step time of the decoder layers under every placement, and the bytes that their ranks exchange, side by side.

    python tools/bench_placements.py [--preset cola_350m] [--width 1024] [--layers 2] [--batch 1] [--sequence 512]
                                     [--ranks 2] [--micro-batches 4] [--rounds 15] [--json FILE]

A step is forward and backward of all micro-batches, then megatron-core's `finalize_model_grads`, which sums the
gradients of what every rank holds whole. All candidates live in one process group of real ranks over gloo, one thread
each, and alternate; the time of a step is that of the slowest rank. Wire bytes are sent by one rank, in closed form.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig
from megatron_lowrank.config.cli import fail
from megatron_lowrank.testing.bench import BenchParser, origin, stack_of, write_result
from megatron_lowrank.testing.planned import MOST_RANKS

PROG = "bench_placements"
REFERENCE = "btp_sp"
_DAY = 24 * 3600  # a benchmark has no time limit
# Candidate -> fields of `parallel` and of `train`.
CANDIDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"placement": "dense"}, {}),
    "vanilla": ({"placement": "vanilla"}, {}),
    "vanilla_replicated": ({"placement": "vanilla_replicated"}, {}),
    "btp": ({"placement": "btp"}, {}),
    REFERENCE: ({"placement": "btp_sp"}, {}),
    "btp, grouping off": ({"placement": "btp", "grouping": False}, {}),
    "btp_sp, recompute latent": ({"placement": "btp_sp"}, {"recompute": "latent"}),
}


def main() -> None:
    """Measure, print a table, write JSON when asked."""
    args = _arguments()
    try:
        runs = {name: _run(args, parallel, train) for name, (parallel, train) in CANDIDATES.items()}
    except ValueError as error:
        fail(ValueError(f"--ranks {args.ranks}: {error}"), PROG)
    from megatron_lowrank.platform import cpu

    compat.silence_known_notices()
    try:
        cpu.install()
    except RuntimeError as error:
        fail(error, PROG)
    from megatron_lowrank.testing.measure import Timing, paired_ratio
    from megatron_lowrank.testing.ranks import RankError, run_ranks

    try:
        ranks = run_ranks(args.ranks, _times, runs, args, timeout=_DAY)
    except (RankError, TimeoutError) as error:
        fail(RuntimeError(str(error).strip().splitlines()[-1]), PROG)
    timings = {name: Timing(times=tuple(map(max, zip(*(rank[name] for rank in ranks), strict=True)))) for name in runs}
    rows = [
        {
            "candidate": name, "median_ms": timing.median * 1e3, "min_ms": timing.minimum * 1e3,
            "max_ms": max(timing.times) * 1e3, f"over_{REFERENCE}": paired_ratio(timing, timings[REFERENCE]),
            f"minimum_over_{REFERENCE}": timing.minimum / timings[REFERENCE].minimum, **_wire(runs[name], args.batch),
        }
        for name, timing in timings.items()
    ]  # fmt: skip
    run = runs[REFERENCE]
    result = {
        "settings": f"{args.preset} at width {args.width}, rank {run.rank_of(0, 'q')}, {args.layers} layers, "
        f"{args.micro_batches} micro-batches of {args.batch} x {args.sequence} tokens, fp32, {args.ranks} ranks on "
        f"gloo with one thread each, {args.rounds} rounds",
        **origin(PROG), "ranks": args.ranks, "rounds": args.rounds, "rank": run.rank_of(0, "q"), "rows": rows,
        "unstable": any(t.median > 1.5 * t.minimum for t in timings.values()),
    }  # fmt: skip
    _print(result)
    write_result(args.json, result)


def _arguments() -> Any:
    parser = BenchParser(PROG, __doc__)
    parser.add_size("batch", 1, "rows of a micro-batch")
    parser.add_size("sequence", 512, "tokens per row")
    parser.add_size("ranks", 2, "tensor-parallel size")
    parser.add_size("micro-batches", 4, "forward and backward passes of a step")
    args = parser.checked()
    if args.ranks > MOST_RANKS:
        parser.error(f"--ranks: found {args.ranks}, allowed: 1 to {MOST_RANKS}")
    return args


def _run(args: Any, parallel: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    run: RunConfig = args.run
    method = "dense" if parallel["placement"] == "dense" else run.lowrank.method
    return replace(
        run, lowrank=replace(run.lowrank, method=method),
        parallel=replace(
            run.parallel, tensor_parallel_size=args.ranks, use_distributed_optimizer=False, overlap_grad_reduce=False,
            overlap_param_gather=False, **parallel,
        ),
        train=replace(run.train, **train),
    )  # fmt: skip


def _times(runs: dict[str, RunConfig], args: Any) -> dict[str, tuple[float, ...]]:
    """Seconds of every step of every candidate; runs on each rank."""
    from megatron_lowrank.testing.measure import alternate
    from megatron_lowrank.testing.ranks import initialize

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core warns otherwise
    initialize(args.ranks)
    steps = {name: _step(run, args.micro_batches) for name, run in runs.items()}
    return {name: timing.times for name, timing in alternate(steps, args.rounds).items()}


def _step(run: RunConfig, micro_batches: int) -> Callable[[], None]:
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads

    from megatron_lowrank.model import build_model
    from megatron_lowrank.train.optimizer import wrap_for_ddp

    (model,) = build_model(run)
    forward = stack_of(model, run.train.sequence_length)
    chunks = wrap_for_ddp(run, [model])
    shards = run.parallel.tensor_parallel_size if model.config.sequence_parallel else 1
    shape = (run.train.sequence_length // shards, run.train.micro_batch_size, run.model.hidden_size)
    x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def step() -> None:
        chunks[0].zero_grad_buffer()
        for _ in range(micro_batches):
            # The layers alone: their output's gradient is given, so that no loss is timed with them.
            forward(x).backward(gradient)
        x.grad = None
        finalize_model_grads(chunks)
        dist.barrier()  # the next candidate starts together

    return step


def _wire(run: RunConfig, rows: int) -> dict[str, int]:
    """What one rank sends for one layer."""
    from megatron_lowrank.estimate import layer_collectives, replay_collectives, ring_bytes, summed_parameters
    from megatron_lowrank.estimate.step import gradient_sum_bytes

    sent = (*layer_collectives(run, 0).both, *replay_collectives(run, 0))
    tokens = rows * run.train.sequence_length
    # Two stacks differ in whole layers; what belongs to none, such as the final norm, drops out.
    longer = replace(run.model, num_layers=run.model.num_layers + 1)
    summed = [summed_parameters(replace(run, model=model), 0) for model in (run.model, longer)]
    return {
        "wire_bytes_per_layer_and_micro_batch": ring_bytes(run, sent, tokens=tokens)
        + ring_bytes(run, sent, tokens=tokens, statistic=True),
        "gradient_sum_bytes_per_layer_and_step": gradient_sum_bytes(run, summed[1] - summed[0]),
        "collectives_per_layer_and_micro_batch": len(sent),
    }


def _print(result: dict[str, Any]) -> None:
    print(result["settings"])
    print(
        f"{'candidate':<26}{'median ms':>11}{'min ms':>9}{'max ms':>9}{'/' + REFERENCE:>9}{'by min':>8}"
        f"{'wire bytes':>13}{'gradient sum':>14}{'calls':>7}"
    )
    for row in result["rows"]:
        print(
            f"{row['candidate']:<26}{row['median_ms']:>11.1f}{row['min_ms']:>9.1f}{row['max_ms']:>9.1f}"
            f"{row[f'over_{REFERENCE}']:>9.3f}{row[f'minimum_over_{REFERENCE}']:>8.3f}"
            f"{row['wire_bytes_per_layer_and_micro_batch']:>13,}{row['gradient_sum_bytes_per_layer_and_step']:>14,}"
            f"{row['collectives_per_layer_and_micro_batch']:>7}"
        )
    spread = statistics.median(row["median_ms"] / row["min_ms"] for row in result["rows"])
    print(
        f"/{REFERENCE}: median over the rounds of the ratio to {REFERENCE} in the same round; wire bytes and calls: "
        f"per layer and micro-batch, gradient sum: per layer and step; median over minimum of a candidate: {spread:.2f}"
    )
    if result["unstable"]:
        print("unstable: a median is far above its minimum, something else uses this machine; trust the minima at most")


if __name__ == "__main__":
    main()
