"""What a recompute policy costs a layer: matrix products and collectives that its backward pass runs again.

With `latent` and `latent_keep_attention` a replay leads from a bottleneck that was kept to the input of the next A:
c2 (unless what it gathered is kept), sigma, B, c3, attention or gated product, and c0 of the next group; and from the
residual through norm and c0. No A and no dense matrix runs again. `full` runs the whole layer again.
"""

from __future__ import annotations

from megatron_lowrank.config.run import RunConfig
from megatron_lowrank.estimate.activations import online_norm
from megatron_lowrank.estimate.flops import AttentionCount, Flops, attention_flops, layer_flops
from megatron_lowrank.estimate.wire import (
    Exchange,
    Group,
    Place,
    layer_collectives,
    layer_groups,
    op_exchanges,
)


def replay_flops(run: RunConfig, layer: int, *, tokens: int, attention: AttentionCount) -> Flops:
    """FLOPs that run again for one sequence, over all ranks; `Flops.forward` is their sum.

    Args:
        run: the run.
        layer: global index; one without any pair replays nothing but under `full`.
        tokens: length of the sequence.
        attention: how the S x S products are counted.
    """
    policy = run.train.recompute
    if policy == "full":
        return layer_flops(run.model, run.lowrank, layer, tokens=tokens, attention=attention)
    if policy == "none" or run.lowrank.is_dense_layer(layer):
        return Flops(projections=0, attention=0)
    ups = sum(
        run.rank_of(layer, role) * run.model.role_widths(role)[1]
        for group in layer_groups(run, layer)
        if group.kind == "column"
        for role in group.pairs
    )
    scores = attention_flops(run.model, tokens, attention) if policy == "latent" else 0
    return Flops(projections=2 * tokens * ups, attention=scores)


def replay_collectives(run: RunConfig, layer: int) -> tuple[Exchange, ...]:
    """Collectives that run again, in the order of issue: backward meets the last replay of a layer first.

    Args:
        run: the run, its placement resolved.
        layer: global index.
    """
    policy = run.train.recompute
    if policy == "full":
        return layer_collectives(run, layer).forward
    if policy == "none" or run.lowrank.is_dense_layer(layer):
        return ()
    qkv, o, gate_up, down = layer_groups(run, layer)
    apart = policy == "latent_keep_attention"
    return (*_block(run, layer, gate_up, down, apart=False), *_block(run, layer, qkv, o, apart=apart))


def _block(run: RunConfig, layer: int, column: Group, row: Group, *, apart: bool) -> tuple[Exchange, ...]:
    def again(group: Group, *places: Place) -> list[Exchange]:
        return [e for place in places for e in op_exchanges(run, layer, group, place, "forward")]

    columns = again(column, "c2", "c3") if run.train.latent_store == "sharded" else again(column, "c3")
    # An attention that is kept parts the replay in two, and backward meets the one behind it first.
    between = [*again(row, "c0"), *columns] if apart else [*columns, *again(row, "c0")]
    # Dense matrices that read the residual keep what the norm gave them, gathered or not; an online norm is no replay.
    norm = [] if column.dense or online_norm(run, column) else again(column, "c0")
    return (*between, *norm)
