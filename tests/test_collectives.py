"""What one decoder layer communicates, counted on real process groups, and that the ops are each other's adjoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import initialize, run_ranks

S, B = 16, 2
MODEL = ModelConfig(num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=4,
                    kv_channels=12, vocab_size=128, pad_token_id=None)  # fmt: skip
D, Q, KV, F = 32, 48, 48, 48


def _count(run: RunConfig) -> dict[str, list[tuple[str, int]]]:
    from megatron_lowrank.model import build_model
    from megatron_lowrank.testing.collectives import CollectiveCounter

    t = run.parallel.tensor_parallel_size
    initialize(t)
    model: Any = build_model(run)[0]
    angles = model.rotary_pos_emb(S)
    x = torch.randn(S // t, B, D, requires_grad=True)
    with CollectiveCounter() as counter:
        with counter.phase("forward"):
            out, _ = model.decoder.layers[0](x, attention_mask=None, rotary_pos_emb=angles)
        with counter.phase("backward"):
            out.sum().backward()
    per_token = {
        phase: [(kind, elements // (S * B)) for kind, elements in counter.sequence(phase)]
        for phase in ("forward", "backward")
    }
    assert all(record.group_size == t for record in counter.records)
    return per_token


AG, RS = "all_gather", "reduce_scatter"
EXPECTED = {
    "dense": {
        "forward": [(AG, D), (RS, D), (AG, D), (RS, D)],
        # Stock linears gather their input once more for the weight gradient.
        "backward": [(AG, D), (AG, D), (RS, D), (AG, D), (AG, D), (RS, D)],
    },
    "vanilla": {
        "forward": [(AG, D), (RS, Q), (RS, KV), (RS, KV), (AG, Q), (RS, D),
                    (AG, D), (RS, F), (RS, F), (AG, F), (RS, D)],
        "backward": [(AG, D), (RS, F), (AG, F), (AG, F), (RS, D),
                     (AG, D), (RS, Q), (AG, KV), (AG, KV), (AG, Q), (RS, D)],
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("placement", EXPECTED)
def test_collectives_of_a_layer(placement: str, tp: int) -> None:
    lowrank = LowRankConfig(method="dense" if placement == "dense" else "cola", rank=8)
    run = RunConfig(model=MODEL, lowrank=lowrank, parallel=ParallelConfig(tensor_parallel_size=tp),
                    train=TrainConfig(sequence_length=S))  # fmt: skip
    for counted in run_ranks(tp, _count, run):
        assert counted["forward"] == EXPECTED[placement]["forward"]
        # Autograd orders independent branches as it likes; what is issued is exact.
        assert sorted(counted["backward"]) == sorted(EXPECTED[placement]["backward"])


def test_one_rank_communicates_nothing() -> None:
    run = RunConfig(model=MODEL, lowrank=LowRankConfig(rank=8), train=TrainConfig(sequence_length=S))
    assert run_ranks(1, _count, run) == [{"forward": [], "backward": []}]


def _adjoint(op: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    from megatron_lowrank.layers.collectives import apply_op

    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = {"ag_seq": (3, 2, 8), "rs_seq": (12, 2, 8), "ag_hid": (3, 2, 8), "rs_hid": (3, 2, 32)}[op]
    x = torch.randint(-4, 5, shape, generator=generator).double().requires_grad_()
    kept = x.detach().clone()
    out = apply_op(op, x, dist.group.WORLD)  # type: ignore[arg-type]
    # A strided gradient: a collective that ignored strides would send other numbers.
    weight = torch.randint(-4, 5, out.shape[::-1], generator=generator).double().permute(2, 1, 0)
    (out * weight).sum().backward()
    assert_equal(x.detach(), kept, "the input of a collective")
    return kept, weight, x.grad


@pytest.mark.parametrize("op", ["ag_seq", "rs_seq", "ag_hid", "rs_hid"])
def test_ops_on_small_integers_are_exact(op: str) -> None:
    ranks = run_ranks(4, _adjoint, op)
    xs, weights = [r[0] for r in ranks], [r[1] for r in ranks]
    axis = 0 if op.endswith("seq") else -1
    for rank, (_, _, gradient) in enumerate(ranks):
        summed = torch.stack(weights).sum(0) if op.startswith("ag") else None
        want = torch.cat(weights, axis) if summed is None else summed.chunk(4, axis)[rank]
        assert_equal(gradient, want, f"{op} gradient on rank {rank}")
    assert xs[0].shape == ranks[0][2].shape


def test_mixed_groups_gather_once_more() -> None:
    """A group with a dense and a low-rank role runs both its parts, each with its own gather."""
    lowrank = LowRankConfig(rank=8, dense_roles=("q",))
    run = RunConfig(model=MODEL, lowrank=lowrank, parallel=ParallelConfig(tensor_parallel_size=2),
                    train=TrainConfig(sequence_length=S))  # fmt: skip
    counted = run_ranks(2, _count, run)[0]
    assert counted["forward"][:4] == [(AG, D), (RS, KV), (RS, KV), (AG, D)]


def test_unknown_op_is_refused() -> None:
    from megatron_lowrank.layers.collectives import apply_op

    with pytest.raises(ValueError, match="placement op: found 'ring'"):
        apply_op("ring", torch.zeros(1), None)  # type: ignore[arg-type]


def test_expert_linears_are_refused() -> None:
    def build() -> str:
        from megatron_lowrank.layers.linear import QKVGroup
        from megatron_lowrank.model import build_model

        initialize()
        run = RunConfig(model=MODEL, lowrank=LowRankConfig(rank=8), train=TrainConfig(sequence_length=S))
        model: Any = build_model(run)[0]
        group = model.decoder.layers[0].self_attention.linear_qkv
        with pytest.raises(ValueError, match="is_expert=True"):
            QKVGroup(32, 96, config=model.config, lr_plan=group.plan, is_expert=True)
        try:
            replace(run, lowrank=replace(run.lowrank, rank=9), parallel=ParallelConfig(tensor_parallel_size=2))
        except ValueError as error:
            return str(error)
        return ""

    assert "does not divide the rank 9" in run_ranks(1, build)[0]
