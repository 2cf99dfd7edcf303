"""What a run costs before it is started: python tools/plan.py count --preset NAME [--tp N] [--SECTION.FIELD VALUE ...].

`count` prints parameters, FLOPs per token, and the bytes of weights, gradients and optimizer state on each rank; then,
for one layer and one micro-batch of one row, what its tensor-parallel ranks exchange, what it keeps for backward, and
what recomputation runs again. All of it in closed form, and times are not in it. `--measure` also runs such a layer, in
a smaller shape, on as many ranks of this machine, prints what they count beside what the closed forms predict for that
shape, and exits with 1 if the two differ anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, NoReturn

from megatron_lowrank.config import RunConfig
from megatron_lowrank.config.cli import fail, parse_run
from megatron_lowrank.estimate import (
    Exchange,
    count_parameters,
    dense_equivalent,
    flops_per_token,
    kept_activations,
    layer_collectives,
    layer_flops,
    rank_parameters,
    replay_collectives,
    replay_flops,
    resolve_placement,
    ring_bytes,
    state_bytes,
    step_wire,
)
from megatron_lowrank.estimate.wire import ELEMENT_BYTES

# Option of this program -> the field that it is short for.
_SHORT = {
    "tp": "parallel.tensor_parallel_size",
    "placement": "parallel.placement",
    "recompute": "train.recompute",
}


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
        "[--tp N] [--placement P] [--recompute R] [--dp N] [--tokens N] [--layer N] [--measure] [--json]",
        description="Parameters, FLOPs, bytes of state, and what one layer exchanges, keeps and replays. Presets and "
        "fields are those of pretrain.py.",
    )  # fmt: skip
    count.add_argument("--tp", type=_positive, metavar="N", help=f"short for --{_SHORT['tp']} N")
    count.add_argument("--placement", metavar="P", help=f"short for --{_SHORT['placement']} P")
    count.add_argument("--recompute", metavar="R", help=f"short for --{_SHORT['recompute']} R")
    count.add_argument("--dp", type=_positive, default=1, metavar="N", help="data-parallel size, default 1")
    count.add_argument("--tokens", type=_positive, metavar="N", help="tokens of a row, default train.sequence_length")
    count.add_argument("--layer", type=_index, default=0, metavar="N", help="layer to look into, from 0, default 0")
    count.add_argument("--measure", action="store_true", help="run a small layer on ranks of this machine, and compare")
    count.add_argument("--json", action="store_true", help="one JSON object")
    given, fields = parser.parse_known_args(arguments)
    try:
        short = [
            f"--{field}={getattr(given, name)}" for name, field in _SHORT.items() if getattr(given, name) is not None
        ]
        run = parse_run([*fields, *short], prog="plan count")
        counted = count_run(run, given.tokens, given.dp, given.layer)
        if given.measure:
            counted |= measure(run, counted)
    except (ValueError, RuntimeError, TimeoutError) as error:
        fail(error, "plan")
    print(json.dumps(counted, indent=1) if given.json else as_text(counted))
    differing = [name for name, pair in counted.get("measured", {}).items() if pair["predicted"] != pair["counted"]]
    if differing:
        print(f"plan: error: counted differs from predicted: {', '.join(differing)}", file=sys.stderr)
    return int(bool(differing))


def count_run(run: RunConfig, tokens: int | None = None, data_parallel_size: int = 1, layer: int = 0) -> dict[str, Any]:
    """Everything that `count` prints, as plain values.

    Args:
        run: the run; placement `auto` is resolved.
        tokens: tokens of a row. Default: `train.sequence_length`.
        data_parallel_size: replicas of the model.
        layer: the layer to look into, global index.

    Raises:
        ValueError: no such layer, rows that the replicas or ranks cannot share, or no placement that `auto` could take.
    """
    length, dense = tokens or run.train.sequence_length, dense_equivalent(run.lowrank)
    # A row may be longer here than the run allows; no count looks at the limit.
    limit = max(length, run.model.max_position_embeddings)
    run = replace(
        run, train=replace(run.train, sequence_length=length), model=replace(run.model, max_position_embeddings=limit)
    )
    run.check_world(run.parallel.tensor_parallel_size * run.parallel.pipeline_parallel_size * data_parallel_size)
    run, choice = resolve_placement(run, data_parallel_size=data_parallel_size)
    if layer >= run.model.num_layers:
        raise ValueError(f"--layer: found {layer}, allowed: 0 to {run.model.num_layers - 1}")
    count, twin = count_parameters(run.model, run.lowrank), count_parameters(run.model, dense)
    actual, equivalent = (
        flops_per_token(run.model, low, sequence_length=length, attention="causal") for low in (run.lowrank, dense)
    )
    step_tokens = run.train.global_batch_size // data_parallel_size * length
    stages, wire = [], []
    for stage in range(run.parallel.pipeline_parallel_size):
        held = state_bytes(
            run.model, run.lowrank, run.parallel, precision=run.train.precision, stage=stage,
            data_parallel_size=data_parallel_size,
        )  # fmt: skip
        parameters = rank_parameters(run.model, run.lowrank, run.parallel, stage)
        stages.append({"stage": stage, "parameters": parameters, **asdict(held), "total": held.total})
        sent = step_wire(run, tokens=step_tokens, stage=stage)
        wire.append({"stage": stage, **asdict(sent), "total": sent.total})
    return {
        "preset": run.preset, "method": run.lowrank.method, "placement": run.placement,
        "placement_reason": [] if choice is None else list(choice.reason),
        "tensor_parallel_size": run.parallel.tensor_parallel_size, "data_parallel_size": data_parallel_size,
        "precision": run.train.precision, "tokens": length,
        "parameters": count.total, "parameters_by_kind": asdict(count), "dense_equivalent_parameters": twin.total,
        "flops_per_token": actual, "dense_equivalent_flops_per_token": equivalent, "bytes_per_rank": stages,
        "wire_bytes_per_step": wire, "tokens_per_step": step_tokens, **count_layer(run, layer, length),
    }  # fmt: skip


def count_layer(run: RunConfig, layer: int, tokens: int) -> dict[str, Any]:
    """What one layer takes for a micro-batch of one row; wire and kept tensors are those of one rank."""
    traffic, replayed = layer_collectives(run, layer), replay_collectives(run, layer)
    kept = kept_activations(run, layer, tokens=tokens)
    full = layer_flops(run.model, run.lowrank, layer, tokens=tokens, attention="full")
    causal = layer_flops(run.model, run.lowrank, layer, tokens=tokens, attention="causal")
    again, again_causal = (
        replay_flops(run, layer, tokens=tokens, attention=attention).forward for attention in ("full", "causal")
    )
    return {
        "layer": layer, "num_layers": run.model.num_layers, "recompute": run.train.recompute,
        "latent_store": run.train.latent_store, "grouping": run.parallel.grouping,
        "wire_elements_per_layer": ring_bytes(run, traffic.both, tokens=tokens) // ELEMENT_BYTES[run.train.precision],
        "wire_bytes_per_layer": ring_bytes(run, traffic.both, tokens=tokens),
        "statistic_wire_bytes_per_layer": ring_bytes(run, traffic.both, tokens=tokens, statistic=True),
        "collectives_per_layer": len(traffic.both),
        "collectives": {"forward": _plain(traffic.forward), "backward": _plain(traffic.backward)},
        "saved_elements_per_layer": sum(tensor.elements for tensor in kept),
        "saved_by_tensor": [[tensor.name, tensor.elements] for tensor in kept],
        "forward_flops_per_layer": full.forward, "backward_flops_per_layer": full.backward,
        "forward_flops_causal_per_layer": causal.forward, "backward_flops_causal_per_layer": causal.backward,
        "replay_flops_per_layer": again, "replay_flops_causal_per_layer": again_causal,
        "replay_collectives_per_layer": len(replayed), "replay_collectives": _plain(replayed),
        "replay_wire_bytes_per_layer": ring_bytes(run, replayed, tokens=tokens),
    }  # fmt: skip


def measure(run: RunConfig, counted: dict[str, Any]) -> dict[str, Any]:
    """The layer of `counted` in a small shape: what the closed forms predict, and what ranks of this machine count."""
    # Here, not above: megatron-core takes seconds to import.
    from megatron_lowrank import compat
    from megatron_lowrank.platform import cpu

    compat.silence_known_notices()
    cpu.install()
    from megatron_lowrank.testing.planned import measure_layer, shape_of, small_run

    resolved = replace(
        run, parallel=replace(run.parallel, placement=counted["placement"]),
        train=replace(run.train, latent_store=counted["latent_store"]),
    )  # fmt: skip
    small = small_run(resolved, counted["layer"])
    return {
        "measured_shape": shape_of(small),
        "measured": {
            name: {"predicted": pair.predicted, "counted": pair.counted} for name, pair in measure_layer(small).items()
        },
    }


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
    for row in counted["wire_bytes_per_step"]:
        causes = ", ".join(f"{cause.replace('_', ' ')} {sent / 1e6:,.1f}" for cause, sent in row.items()
                           if cause != "stage" and (sent or cause == "total"))  # fmt: skip
        lines.append(
            f"sent by a rank of stage {row['stage']} per step of {counted['tokens_per_step']:,} tokens, without data "
            f"parallelism; MB: {causes}"
        )
    return "\n".join([*lines, *counted["placement_reason"], *_layer_lines(counted), *_measured_lines(counted)])


def _layer_lines(counted: dict[str, Any]) -> list[str]:
    tokens, collectives = counted["tokens"], counted["collectives"]
    rows = [
        ("forward FLOPs", f"{counted['forward_flops_per_layer']:,}",
         f"attention causal: {counted['forward_flops_causal_per_layer']:,}"),
        ("backward FLOPs", f"{counted['backward_flops_per_layer']:,}",
         f"attention causal: {counted['backward_flops_causal_per_layer']:,}"),
        ("replayed FLOPs", f"{counted['replay_flops_per_layer']:,}",
         f"attention causal: {counted['replay_flops_causal_per_layer']:,}"),
        ("wire entries", f"{counted['wire_elements_per_layer']:,}", "sent by a rank of a ring"),
        ("wire bytes", f"{counted['wire_bytes_per_layer']:,}",
         f"norm statistic {counted['statistic_wire_bytes_per_layer']:,} more, replay "
         f"{counted['replay_wire_bytes_per_layer']:,} more"),
        ("collectives", str(counted["collectives_per_layer"]), "width of each, in entries per token:"),
        ("  forward", str(len(collectives["forward"])), _short_list(collectives["forward"])),
        ("  backward", str(len(collectives["backward"])), _short_list(collectives["backward"])),
        ("  replay", str(counted["replay_collectives_per_layer"]), _short_list(counted["replay_collectives"])),
        ("kept entries", f"{counted['saved_elements_per_layer']:,}", "tensor by tensor:"),
        *(("", f"{elements:,}", name) for name, elements in counted["saved_by_tensor"]),
    ]  # fmt: skip
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [
        f"layer {counted['layer']} of {counted['num_layers']}, one row of {tokens} tokens, recompute "
        f"{counted['recompute']}; FLOPs of all ranks, attention full; the rest on one rank:",
        *(f"  {name:<{first}}  {number:>{second}}  {note}".rstrip() for name, number, note in rows),
    ]


def _measured_lines(counted: dict[str, Any]) -> list[str]:
    if "measured" not in counted:
        return []
    numbers, calls = [("", "predicted", "counted", "")], []
    for key, pair in counted["measured"].items():
        name, predicted, found = key.replace("_", " ").replace("flops", "FLOPs"), pair["predicted"], pair["counted"]
        verdict = "" if predicted == found else "DIFFERS"
        if isinstance(predicted, int):
            numbers.append((name, f"{predicted:,}", f"{found:,}" if isinstance(found, int) else str(found), verdict))
        else:
            both = [_short_calls(predicted), *([f"counted {found}", verdict] if verdict else ["counted the same"])]
            calls.append(f"  {name}: {'; '.join(both)}")
    first, second, third = (max(len(row[column]) for row in numbers) for column in (0, 1, 2))
    return [
        f"the same layer in a small shape, run on {counted['tensor_parallel_size']} ranks here "
        f"({counted['measured_shape']}); one rank, forward and backward:",
        *(f"  {name:<{first}}  {a:>{second}}  {b:>{third}}  {verdict}".rstrip() for name, a, b, verdict in numbers),
        *calls,
    ]


def _short_calls(calls: list[list[Any]]) -> str:
    return ", ".join(f"{count} {kind} of {elements:,}" for kind, elements, count in calls) or "none"


def _plain(exchanges: Iterable[Exchange]) -> list[dict[str, Any]]:
    return [{"kind": e.kind, "width": e.width, "statistic": e.statistic} for e in exchanges]


def _short_list(exchanges: list[dict[str, Any]]) -> str:
    return ", ".join(f"{e['kind']} {e['width']}" + (f"+{e['statistic']}" if e["statistic"] else "") for e in exchanges)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a positive integer")
    return int(text)


def _index(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: an index from 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
