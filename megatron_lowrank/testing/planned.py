"""The closed forms of a layer beside what real ranks count when they run it: a small shape, equal to the last element.

A layer of any run is brought to a shape that this machine runs in seconds (`small_run`), with its ranks, widths and
heads in proportion; the closed forms are evaluated at that shape, and `layer_costs` counts it on forked ranks.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_lowrank.config import RunConfig
from megatron_lowrank.estimate.activations import kept_bytes, kept_elements
from megatron_lowrank.estimate.flops import layer_flops
from megatron_lowrank.estimate.replay import replay_collectives, replay_flops
from megatron_lowrank.estimate.wire import ELEMENT_BYTES, Exchange, layer_collectives
from megatron_lowrank.placement import PLACEMENTS
from megatron_lowrank.roles import ROLES, Role
from megatron_lowrank.testing.collectives import CollectiveCounter
from megatron_lowrank.testing.layer_costs import LayerCosts, layer_costs
from megatron_lowrank.testing.ranks import initialize, run_ranks

MOST_RANKS = 8
"""Ranks that one machine is asked to fork."""
_WIDTHS, _TOKENS, _VOCABULARY = (64, 128), 32, 128
_PAUSES = (0.005, 0.1, 0.5)
"""Seconds that a try gives the threads of gloo to let go of what they reduced."""
Calls = dict[tuple[str, int], int]
"""(kind, elements of the full buffer) -> calls."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity of a layer on one rank."""

    predicted: Any
    """By the closed forms."""
    counted: Any
    """While the ranks ran it."""

    @property
    def equal(self) -> bool:
        """Whether they agree, to the last element."""
        return bool(self.predicted == self.counted)


def small_run(run: RunConfig, layer: int = 0) -> RunConfig:
    """A run of layers like one layer of `run`, in a shape that a CPU runs in seconds, in fp32.

    Heads keep their number per key group, widths and ranks their ratio to the hidden size as far as the divisions by
    the tensor-parallel size allow.

    Args:
        run: the run, its placement resolved.
        layer: global index; its dense roles and ranks become those of every layer.

    Raises:
        ValueError: more ranks than one machine is asked for.
    """
    m, t = run.model, run.parallel.tensor_parallel_size
    if t > MOST_RANKS:
        raise ValueError(f"parallel.tensor_parallel_size: found {t}, allowed where ranks are run: 1 to {MOST_RANKS}")
    groups = max(2, t)
    heads = groups * (m.num_attention_heads // m.query_groups)
    hidden, head_dim = min(
        ((width, _nearest(width * m.query_width / m.hidden_size / heads, 2)) for width in _widths(t)),
        key=lambda size: abs(heads * size[1] / size[0] - m.query_width / m.hidden_size),
    )
    model = replace(
        m, num_layers=2, hidden_size=hidden, ffn_hidden_size=_nearest(m.ffn_hidden_size * hidden / m.hidden_size, t),
        num_attention_heads=heads, num_query_groups=groups, kv_channels=head_dim, vocab_size=_VOCABULARY,
        max_position_embeddings=max(m.max_position_embeddings, 2 * _TOKENS),
        vocab_multiple=1, pad_token_id=None, bos_token_id=None, eos_token_id=None, transformer_impl="local",
    )  # fmt: skip
    step = t if PLACEMENTS[run.placement].rank_divides else 1

    def rank(role: Role) -> int:
        most = min(model.role_widths(role)) // step * step
        return min(most, _nearest(run.rank_of(layer, role) * hidden / m.hidden_size, step))

    dense = tuple(role for role in ROLES if run.lowrank.is_dense(layer, role))
    lowrank = replace(
        run.lowrank, rank=step, rank_overrides={role: rank(role) for role in ROLES}, dense_layers=(),
        dense_roles=() if run.lowrank.method == "dense" else dense,
    )  # fmt: skip
    tokens = _nearest(_TOKENS, t)
    return replace(
        run, model=model, lowrank=lowrank,
        parallel=replace(
            run.parallel, placement=run.placement, pipeline_parallel_size=1, virtual_pipeline_size=None,
            num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
        ),
        train=replace(run.train, sequence_length=tokens, micro_batch_size=1, precision="fp32"),
    )  # fmt: skip


def shape_of(run: RunConfig) -> str:
    """The shape of `small_run` in words."""
    m = run.model
    ranks = ", ".join(f"{role} {'dense' if run.lowrank.is_dense(0, role) else run.rank_of(0, role)}" for role in ROLES)
    return (
        f"hidden {m.hidden_size}, ffn {m.ffn_hidden_size}, {m.num_attention_heads} heads in {m.query_groups} groups of "
        f"dimension {m.head_dim}, ranks {ranks}, one row of {run.train.sequence_length} tokens, {run.train.precision}"
    )


def measure_layers(runs: Sequence[RunConfig]) -> list[dict[str, Pair]]:
    """Predicted and counted costs of a layer of each run, on forked ranks; a run's layers have to be all alike.

    Args:
        runs: As `small_run` gives them, of one tensor-parallel size, which is that of the world.
    """
    assert len({run.parallel.tensor_parallel_size for run in runs}) == 1, "runs of one world have one size"
    measured: list[dict[str, Pair]] = [{} for _ in runs]
    open_cases = list(range(len(runs)))
    for pause in _PAUSES:  # no difference is believed at once
        counts = _count_on_ranks([runs[case] for case in open_cases], pause)
        for case, counted in zip(open_cases, counts, strict=True):
            measured[case] = {
                name: Pair(predicted=value, counted=counted[name]) for name, value in _predicted(runs[case]).items()
            }
        open_cases = [case for case in open_cases if not all(pair.equal for pair in measured[case].values())]
        if not open_cases:
            break
    return measured


def measure_layer(run: RunConfig) -> dict[str, Pair]:
    """`measure_layers` of one run."""
    return measure_layers([run])[0]


def _count_on_ranks(runs: list[RunConfig], pause: float) -> list[dict[str, Any]]:
    """Counts of each run: one value where all ranks agree, else the list of what each of them counted."""
    ranks = run_ranks(runs[0].parallel.tensor_parallel_size, _count, runs, pause, timeout=60 + 10 * len(runs))
    counts = []
    for number, run in enumerate(runs):
        each = [_counted(run, *rank[number]) for rank in ranks]
        agreed = {name: len({repr(counted[name]) for counted in each}) == 1 for name in each[0]}
        counts.append({name: each[0][name] if agreed[name] else [c[name] for c in each] for name in each[0]})
    return counts


def _predicted(run: RunConfig) -> dict[str, Any]:
    tokens, t = run.train.sequence_length * run.train.micro_batch_size, run.parallel.tensor_parallel_size
    traffic, replayed = layer_collectives(run, 0), replay_collectives(run, 0)
    forward, backward = _calls(traffic.forward, tokens), _calls((*traffic.backward, *replayed), tokens)
    length, rows = run.train.sequence_length, run.train.micro_batch_size
    flops = layer_flops(run.model, run.lowrank, 0, tokens=length, attention="full")
    again = replay_flops(run, 0, tokens=length, attention="full")
    # Where the residual is whole, so is the attention.
    cut = t if PLACEMENTS[run.placement].sequence_parallel or run.lowrank.is_dense_layer(0) else 1
    once, more = (rows * (part.projections // t + part.attention // cut) for part in (flops, again))
    return {
        **_wire(forward, backward, run, ELEMENT_BYTES[run.train.precision]),
        "kept_elements": kept_elements(run, 0, tokens=tokens),
        "kept_bytes": kept_bytes(run, 0, tokens=tokens), "forward_flops": once, "backward_flops": 2 * once + more,
        "replayed_flops": more,
    }  # fmt: skip


def _count(runs: list[RunConfig], pause: float) -> list[tuple[LayerCosts, list[int]]]:
    gc.freeze()  # what the fork inherited is nobody's garbage, and searching it takes most of the time
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core warns otherwise
    initialize(runs[0].parallel.tensor_parallel_size)
    counts = []
    for run in runs:
        with CollectiveCounter() as counter:
            costs = layer_costs(run, settle=pause)
        counts.append((costs, sorted({record.dtype.itemsize for record in counter.records})))
    return counts


def _counted(run: RunConfig, costs: LayerCosts, sizes: list[int]) -> dict[str, Any]:
    assert len(sizes) < 2, f"the collectives of a layer carry elements of {sizes} bytes"
    return {
        **_wire(costs.forward, costs.backward, run, *sizes), "kept_elements": costs.retained,
        "kept_bytes": costs.retained_bytes, "forward_flops": costs.forward_flops,
        "backward_flops": costs.backward_flops, "replayed_flops": costs.backward_flops - 2 * costs.forward_flops,
    }  # fmt: skip


def _calls(exchanges: Iterable[Exchange], tokens: int) -> Calls:
    return dict(Counter((e.kind, (e.width + e.statistic) * tokens) for e in exchanges))


def _wire(forward: Calls, backward: Calls, run: RunConfig, size: int = 0) -> dict[str, Any]:
    """What a rank of a ring sends: (t - 1)/t of a full buffer, twice for an all-reduce; the statistic is in it."""
    t, both = run.parallel.tensor_parallel_size, (*forward.items(), *backward.items())
    sent = sum((2 if kind == "all_reduce" else 1) * elements * calls for (kind, elements), calls in both)
    wire = sent * (t - 1) // t
    return {
        "wire_elements": wire, "wire_bytes": wire * size,
        "collectives": sum(calls for _, calls in both), "forward_calls": _sorted(forward),
        "backward_calls": _sorted(backward),
    }  # fmt: skip


def _sorted(calls: Calls) -> list[list[Any]]:
    return [[kind, elements, count] for (kind, elements), count in sorted(calls.items())]


def _widths(t: int) -> list[int]:
    """Hidden sizes to try: even multiples of t."""
    least, most = _WIDTHS
    return [width for width in range(least, most + 1) if width % (2 * t) == 0]


def _nearest(value: float, of: int) -> int:
    """The multiple of `of` that is nearest, at least one."""
    return of * max(1, int(value / of + 0.5))
