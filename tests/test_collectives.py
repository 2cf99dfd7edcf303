"""What one decoder layer communicates, counted on real process groups, and that the ops are each other's adjoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_lowrank.placement import OPS
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import initialize, run_ranks

S, B = 16, 2
MODEL = ModelConfig(num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=8, num_query_groups=8,
                    kv_channels=6, vocab_size=128, pad_token_id=None)  # fmt: skip
D, Q, KV, F, R = 32, 48, 48, 48, 8


def _run(placement: str, tp: int, *, rank: int = R, recompute: Any = "none", **parallel: Any) -> RunConfig:
    return RunConfig(
        model=MODEL,
        lowrank=LowRankConfig(method="dense" if placement == "dense" else "cola", rank=rank),
        parallel=ParallelConfig(tensor_parallel_size=tp, placement=placement, **parallel),
        train=TrainConfig(sequence_length=S, recompute=recompute),
    )


def _count(run: RunConfig, layer: int = 1) -> dict[str, list[tuple[str, int]]]:
    """Collectives of one layer; the one in the middle converts nothing."""
    from megatron_lowrank.model import build_model
    from megatron_lowrank.testing.collectives import CollectiveCounter

    t = run.parallel.tensor_parallel_size
    initialize(t)
    model: Any = build_model(run)[0]
    angles = model.rotary_pos_emb(S)
    rows = S // t if model.config.sequence_parallel else S
    x = torch.randn(rows, B, D, requires_grad=True)
    with CollectiveCounter() as counter:
        with counter.phase("forward"):
            out, _ = model.decoder.layers[layer](hidden_states=x, attention_mask=None, rotary_pos_emb=angles)
        with counter.phase("backward"):
            out.sum().backward()
    per_token = {
        phase: [(kind, elements / (S * B)) for kind, elements in counter.sequence(phase)]
        for phase in ("forward", "backward")
    }
    assert all(record.group_size == t for record in counter.records)
    return per_token


AG, RS, AR, A2A = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
EXPECTED = {
    "dense": {
        "forward": [(AG, D), (RS, D), (AG, D), (RS, D)],
        # Stock linears gather their input once more for the weight gradient.
        "backward": [(AG, D), (AG, D), (RS, D), (AG, D), (AG, D), (RS, D)],
    },
    "vanilla": {
        "forward": [(AG, D), (RS, Q + 2 * KV), (AG, Q), (RS, D), (AG, D), (RS, 2 * F), (AG, F), (RS, D)],
        "backward": [(AG, D), (RS, F), (AG, 2 * F), (RS, D), (AG, D), (RS, Q), (AG, Q + 2 * KV), (RS, D)],
    },
    "vanilla_replicated": {
        "forward": [(AR, Q + 2 * KV), (AR, D), (AR, 2 * F), (AR, D)],
        "backward": [(AR, F), (AR, D), (AR, Q), (AR, D)],
    },
    # One more column carries the statistic of the norm.
    "btp": {
        "forward": [(AR, 3 * R + 1), (AR, R), (AR, 2 * R + 1), (AR, R)],
        "backward": [(AR, R), (AR, 2 * R), (AR, R), (AR, 3 * R)],
    },
    "btp_sp": {
        "forward": [(AG, 3 * R), (RS, R), (AG, 2 * R), (RS, R)],
        "backward": [(AG, R), (RS, 2 * R), (AG, R), (RS, 3 * R)],
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("placement", EXPECTED)
def test_collectives_of_a_layer(placement: str, tp: int) -> None:
    """Whole sequences, in the order of issue: nothing else happens in a block."""
    for counted in run_ranks(tp, _count, _run(placement, tp)):
        assert counted == EXPECTED[placement]


@pytest.mark.parametrize("placement", ["btp", "btp_sp"])
def test_bottlenecks_one_by_one(placement: str) -> None:
    kinds = {"btp": (AR, AR, AR, AR), "btp_sp": (AG, RS, RS, AG)}[placement]
    column, row, column_back, row_back = kinds
    statistic = int(placement == "btp")
    counted = run_ranks(2, _count, _run(placement, 2, grouping=False))[0]
    assert counted["forward"] == [
        (column, R + statistic), (column, R), (column, R), (row, R),
        (column, R + statistic), (column, R), (row, R),
    ]  # fmt: skip
    assert counted["backward"] == [(kind, R) for kind in (row_back, *[column_back] * 2, row_back, *[column_back] * 3)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("placement", "store"), [("btp", "gathered"), ("btp_sp", "gathered"), ("btp_sp", "sharded")])
@pytest.mark.parametrize("recompute", ["latent", "latent_keep_attention"])
def test_replay_communicates_nothing(placement: str, store: Any, recompute: str, overlap: bool) -> None:
    """Except that shards of kept bottlenecks, where asked for, are gathered again: once per column group."""
    run = _run(placement, 4, recompute=recompute, overlap_latent_grad=overlap)
    run = replace(run, train=replace(run.train, latent_store=store))
    counted = run_ranks(4, _count, run)[0]
    assert counted["forward"] == EXPECTED[placement]["forward"]
    again = [(AG, 2 * R), (AG, 3 * R)] if store == "sharded" else []
    expected = EXPECTED[placement]["backward"]
    assert sorted(counted["backward"]) == sorted([*expected, *again])
    assert [call for call in counted["backward"] if call not in again] == expected


def test_odd_rank_and_bf16_statistic() -> None:
    run = _run("btp", 4, rank=7)
    assert run_ranks(4, _count, run)[0]["forward"] == [(AR, 22), (AR, 7), (AR, 15), (AR, 7)]

    def in_bf16() -> list[tuple[str, float]]:
        from megatron_lowrank.layers.online_norm import OnlineNorm, online_norm_down
        from megatron_lowrank.testing.collectives import CollectiveCounter

        norm = OnlineNorm(hidden_size=D, epsilon=1e-6, group=torch.distributed.group.WORLD)  # type: ignore[arg-type]
        x, gain, weight = torch.randn(S, B, D // 4), torch.ones(D // 4), torch.randn(7, D // 4)
        with CollectiveCounter() as counter:
            online_norm_down(norm, x.bfloat16(), gain.bfloat16(), [weight.bfloat16()])
        return [(kind, elements / (S * B)) for kind, elements in counter.sequence()]

    # Three bf16 limbs of each of four ranks, rounded up to sixteen columns.
    assert run_ranks(4, in_bf16)[0] == [(AR, 7 + 16)]


def test_the_ends_of_a_hidden_sharded_model_convert() -> None:
    """One all-to-all of the local buffer in front of the first layer and one behind the last, either direction."""
    first, last = (run_ranks(2, _count, _run("btp", 2), layer)[0] for layer in (0, 2))
    inside = EXPECTED["btp"]
    assert first["forward"] == [(A2A, D / 2), *inside["forward"]]
    assert first["backward"] == [*inside["backward"], (A2A, D / 2)]
    assert last["forward"] == [*inside["forward"], (A2A, D / 2)]
    assert last["backward"] == [(A2A, D / 2), *inside["backward"]]


@pytest.mark.parametrize("placement", ["vanilla", "vanilla_replicated", "btp", "btp_sp"])
def test_one_rank_communicates_nothing(placement: str) -> None:
    assert run_ranks(1, _count, _run(placement, 1)) == [{"forward": [], "backward": []}]


SHAPES = {"ag_seq": (3, 2, 8), "rs_seq": (12, 2, 8), "ag_hid": (3, 2, 8), "rs_hid": (3, 2, 32), "f": (3, 2, 8),
          "g": (3, 2, 8), "seq_to_hid": (3, 2, 32), "hid_to_seq": (12, 2, 8)}  # fmt: skip


def _adjoint(op: str) -> tuple[torch.Tensor, ...]:
    import torch.distributed as dist

    from megatron_lowrank.layers.collectives import apply_op

    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = SHAPES[op]
    x = torch.randint(-4, 5, shape, generator=generator).double().requires_grad_()
    kept = x.detach().clone()
    out = apply_op(op, x, dist.group.WORLD)  # type: ignore[arg-type]
    # A strided gradient: a collective that ignored strides would send other numbers.
    weight = torch.randint(-4, 5, out.shape[::-1], generator=generator).double().permute(2, 1, 0)
    (out * weight).sum().backward()
    assert_equal(x.detach(), kept, "the input of a collective")
    return kept, weight, x.grad, out.detach()  # type: ignore[return-value]


@pytest.mark.parametrize("op", SHAPES)
def test_ops_on_small_integers_are_exact(op: str) -> None:
    ranks = run_ranks(4, _adjoint, op)
    outputs, weights = [r[3] for r in ranks], [r[1] for r in ranks]
    xs = [r[0] for r in ranks]
    for rank, (x, _, gradient, _) in enumerate(ranks):
        assert x.shape == gradient.shape
        assert_equal(outputs[rank], _moved(OPS[op][0], xs, rank), f"{op} on rank {rank}")
        assert_equal(gradient, _moved(OPS[op][1], weights, rank), f"{op} gradient on rank {rank}")


def _moved(move: str | None, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What a collective gives, from the tensors of all ranks."""
    if move is None:
        return tensors[rank]
    total = torch.stack(tensors).sum(0)
    if move == "reduce":
        return total
    axis = {"sequence": 0, "hidden": -1}
    if move.endswith(("_to_hidden", "_to_sequence")):  # all shards of one dimension, then one of the other
        source, _, target = move.split("_")
        return torch.cat(tensors, axis[source]).chunk(4, axis[target])[rank]
    kind, _, dimension = move.partition("_")
    return torch.cat(tensors, axis[dimension]) if kind == "gather" else total.chunk(4, axis[dimension])[rank]


def test_tensors_that_travel_together_arrive_apart() -> None:
    def together(op: str, widths: tuple[int, ...]) -> bool:
        from megatron_lowrank.layers.collectives import apply_op, apply_together

        group: Any = torch.distributed.group.WORLD
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        rows, scale = (12, 4) if op == "rs_seq" else (3, 4 if op == "rs_hid" else 1)
        xs = [torch.randint(-4, 5, (rows, 2, scale * w), generator=generator).double() for w in widths]
        once, alone = ([x.clone().requires_grad_() for x in xs] for _ in range(2))
        for i, (a, x) in enumerate(zip(apply_together(op, once, group), alone, strict=True)):  # type: ignore[arg-type]
            b = apply_op(op, x, group)  # type: ignore[arg-type]
            assert_equal(a.detach(), b.detach(), f"{op} of tensor {i}")
            (a * (i + 1)).sum().backward(retain_graph=True)
            (b * (i + 1)).sum().backward()
        for a, b in zip(once, alone, strict=True):
            assert_equal(a.grad, b.grad, f"{op} gradient")  # type: ignore[arg-type]
        return True

    for op in ("f", "g", "ag_seq", "rs_seq", "ag_hid", "rs_hid"):
        assert all(run_ranks(4, together, op, (3, 5, 1)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("op", "function"), [("f", "all_reduce"), ("ag_seq", "reduce_scatter_tensor")])
def test_a_reduction_is_under_way_while_weight_gradients_are_computed(op: Any, function: str, overlap: bool) -> None:
    def order() -> list[str]:
        import torch.distributed as dist
        from torch.utils._python_dispatch import TorchDispatchMode

        from megatron_lowrank.layers.products import Branch, UpPlan, up

        seen: list[str] = []
        real = getattr(dist, function)

        class Work:
            def __init__(self, work: Any) -> None:
                self.work = work

            def wait(self) -> None:
                seen.append("wait")
                self.work.wait()

        def reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            seen.append("start" if async_op else "reduce")
            work = real(*args, async_op=async_op, **kwargs)
            return Work(work) if async_op else work

        class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function.overloadpacket is torch.ops.aten.mm:
                    seen.append("product")
                return function(*args, **(kwargs or {}))

        branches = tuple(Branch(latent=0, columns=(4 * i, 4 * i + 4), weight=i, rows=(0, 6)) for i in range(2))
        plan = UpPlan(branches=branches, op=op, group=dist.group.WORLD, overlap=overlap)  # type: ignore[arg-type]
        h, weights = torch.randn(4, 2, 8, requires_grad=True), [torch.randn(6, 4, requires_grad=True) for _ in range(2)]
        out = sum(y.sum() for y in up(plan, (h,), weights))
        setattr(dist, function, reduce)
        try:
            with Products():
                out.backward()  # type: ignore[union-attr]
        finally:
            setattr(dist, function, real)
        return seen

    expected = ["start", "product", "product", "wait"] if overlap else ["reduce", "product", "product"]
    assert run_ranks(2, order) == [["product", "product", *expected]] * 2


def test_a_known_result_moves_only_its_gradient() -> None:
    def known(op: Any) -> bool:
        from megatron_lowrank.layers.collectives import apply_op, known_result
        from megatron_lowrank.testing.collectives import CollectiveCounter

        group: Any = torch.distributed.group.WORLD
        x, again = (torch.full((3, 2, 4), 1.0 + torch.distributed.get_rank(), requires_grad=True) for _ in range(2))
        full = apply_op(op, x, group)
        with CollectiveCounter() as counter:
            same = known_result(op, again, full.detach(), group)
        assert not counter.records
        assert_equal(same.detach(), full.detach(), "value")
        for out in (full, same):
            (out * out.detach()).sum().backward()
        assert_equal(again.grad, x.grad, "gradient")  # type: ignore[arg-type]
        return True

    for op in ("f", "ag_seq"):
        assert all(run_ranks(2, known, op))


def test_a_model_wants_a_row() -> None:
    from megatron_lowrank.model import build_model

    with pytest.raises(ValueError, match="parallel.placement: found 'auto', allowed in a model: a row"):
        build_model(_run("auto", 2))


def test_mixed_groups_gather_once_more() -> None:
    """A group with a dense and a low-rank role runs both its parts, each with its own gather."""
    lowrank = LowRankConfig(rank=8, dense_roles=("q",))
    run = replace(_run("vanilla", 2), lowrank=lowrank)
    counted = run_ranks(2, _count, run)[0]
    assert counted["forward"][:4] == [(AG, D), (AG, D), (RS, 2 * KV), (AG, Q)]


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
        with pytest.raises(TypeError, match="is_expert"):
            QKVGroup(config=model.config, lr_plan=group.plan, is_expert=True)  # type: ignore[call-arg]
        try:
            cut = ParallelConfig(tensor_parallel_size=2, placement="vanilla")
            replace(run, lowrank=replace(run.lowrank, rank=9), parallel=cut)
        except ValueError as error:
            return str(error)
        return ""

    assert "does not divide the rank 9" in run_ranks(1, build)[0]
