"""The test helpers themselves: ranks, comparisons, the collective counter."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_lowrank.testing.collectives import CollectiveCounter
from megatron_lowrank.testing.compare import TOLERANCE, assert_close, assert_equal
from megatron_lowrank.testing.ranks import RankError, initialize, run_ranks


def _sum_of_ranks(start: int) -> torch.Tensor:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return torch.cat([total, torch.tensor([dist.get_rank()])])


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(3, _sum_of_ranks, 10)
    assert [result.tolist() for result in results] == [[33, 0], [33, 1], [33, 2]]


def test_two_ranks_start_within_four_seconds() -> None:
    run_ranks(1, int)  # the parent imports megatron-core, once
    start = time.perf_counter()
    run_ranks(2, initialize, 2)
    assert time.perf_counter() - start < 4


def test_closures_and_objects_are_fine() -> None:
    offset = 5
    results = run_ranks(2, lambda: {"rank": dist.get_rank() + offset, "none": None})
    assert results == [{"rank": 5, "none": None}, {"rank": 6, "none": None}]


def _fails_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason of rank one")
    dist.barrier()  # waits for ever unless killed


def test_traceback_of_the_first_failing_rank_surfaces() -> None:
    start = time.perf_counter()
    with pytest.raises(
        RankError, match=r"rank 1 of 2 failed first:(.|\n)*_fails_on_rank_one(.|\n)*the reason of rank one"
    ):
        run_ranks(2, _fails_on_rank_one, timeout=30)
    assert time.perf_counter() - start < 10


def _dies_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankError, match="without a traceback.*-9"):
        run_ranks(2, _dies_on_rank_zero, timeout=30)


def _hangs_on_rank_one(folder: str) -> None:
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_hanging_rank_is_killed_at_the_timeout_and_its_stack_shown(tmp_path: os.PathLike[str]) -> None:
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match="_hangs_on_rank_one"):
        run_ranks(2, _hangs_on_rank_one, str(tmp_path), timeout=2)
    assert time.perf_counter() - start < 6
    for rank in range(2):
        with open(f"{tmp_path}/{rank}") as file, pytest.raises(ProcessLookupError):
            os.kill(int(file.read()), 0)


def test_the_parent_must_not_hold_a_process_group() -> None:
    def nested() -> str:
        try:
            run_ranks(1, int)
        except RuntimeError as error:
            return str(error)
        return ""

    assert "must not have initialised" in run_ranks(1, nested)[0]


def _known_sequence() -> list[tuple[object, ...]]:
    initialize(tp=2)
    from megatron.core.tensor_parallel import mappings

    with CollectiveCounter() as counter:
        hidden = torch.ones(4, 3, requires_grad=True)
        with counter.phase("forward"):
            full = mappings.gather_from_sequence_parallel_region(hidden)  # all-gather of [8, 3]
            output = mappings.reduce_scatter_to_sequence_parallel_region(full)  # reduce-scatter of [8, 3]
            output = mappings.reduce_from_tensor_model_parallel_region(output.bfloat16())  # all-reduce of [4, 3]
        with counter.phase("backward"):
            output.sum().backward()  # mirrors: nothing, all-gather, reduce-scatter
        buffers = [torch.zeros(4) for _ in range(2)]
        dist.all_to_all_single(torch.zeros(6), torch.zeros(6))
        dist.all_gather(buffers, torch.zeros(4), group=dist.group.WORLD)
        dist.broadcast(torch.zeros(5, dtype=torch.int64), src=0)
        peer = 1 - dist.get_rank()
        batch = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    dist.all_reduce(torch.zeros(1))  # outside: not recorded
    return [(one.kind, one.elements, str(one.dtype), one.group_size, one.phase) for one in counter.records]


def test_counter_records_a_known_sequence_exactly() -> None:
    fp32 = "torch.float32"
    expected = [
        ("all_gather", 24, fp32, 2, "forward"),
        ("reduce_scatter", 24, fp32, 2, "forward"),
        ("all_reduce", 12, "torch.bfloat16", 2, "forward"),
        ("all_gather", 24, fp32, 2, "backward"),
        ("reduce_scatter", 24, fp32, 2, "backward"),
        ("all_to_all", 6, fp32, 2, ""),
        ("all_gather", 8, fp32, 2, ""),
        ("broadcast", 5, "torch.int64", 2, ""),
        ("send", 2, fp32, 2, ""),
        ("recv", 2, fp32, 2, ""),
    ]
    for records in run_ranks(2, _known_sequence):
        assert records == expected


def _linears_under_sequence_parallel() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    initialize(tp=2)
    from megatron.core import tensor_parallel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    up = tensor_parallel.ColumnParallelLinear(
        8, 16, config=config, init_method=torch.nn.init.ones_, bias=False, gather_output=False
    )
    with CollectiveCounter() as counter:
        with counter.phase("forward"):
            output, _ = up(torch.ones(3, 1, 8, requires_grad=True))
        with counter.phase("backward"):
            output.sum().backward()
    return counter.sequence("forward"), counter.sequence("backward")


def test_counter_sees_the_aliases_that_megatron_core_bound_at_import() -> None:
    full = 2 * 3 * 8
    for forward, backward in run_ranks(2, _linears_under_sequence_parallel):
        assert forward == [("all_gather", full)]
        assert backward == [("all_gather", full), ("reduce_scatter", full)]


def test_assert_equal() -> None:
    assert_equal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    with pytest.raises(
        AssertionError, match=r"gain is not bitwise equal.*1 of 3 entries.*first at \(1,\): 2.5, expected 2.0"
    ):
        assert_equal(torch.tensor([1.0, 2.5, 3.0]), torch.tensor([1.0, 2.0, 3.0]), "gain")
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="shape"):
        assert_equal(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(AssertionError):
        assert_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_assert_close_is_relative_to_the_largest_entry(dtype: torch.dtype) -> None:
    expected = torch.tensor([0.0, 100.0], dtype=dtype)
    step = 100 * TOLERANCE[dtype]
    assert_close(expected + torch.tensor([0.9 * step, 0], dtype=dtype), expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(expected + torch.tensor([1.1 * step, 0], dtype=dtype), expected)
    with pytest.raises(AssertionError):
        assert_close(expected * float("nan"), expected)
    with pytest.raises(ValueError, match="no tolerance"):
        assert_close(expected.long(), expected.long())
