"""Runs a function on real ranks over gloo, by forking the process that has imported everything already.

Importing megatron-core takes seconds per process, a fork takes milliseconds: two ranks start in a fraction of a second.
Ranks meet through a file in a temporary folder, so no port is fixed and tests can run side by side.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowrank.platform import cpu

_GRACE = 0.5  # seconds in which the other ranks of a failed run may report what they saw, and a stack be written


class RankError(RuntimeError):
    """A rank raised an exception or died; the message holds its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Calls `function(*args)` on each of `world_size` forked ranks and waits for all of them.

    In a rank, the default process group is initialised on gloo (so `torch.distributed.get_rank()` is its number), and
    torch uses one thread. `function` may be a closure; the parent must not hold a process group.

    Args:
        world_size: Number of ranks.
        function: What to run; whatever `torch.save` can write may be returned, tensors included.
        *args: Its arguments, inherited by the fork and not copied.
        timeout: Seconds after which all ranks are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank failed; the first one's traceback is in the message. The others are killed.
        TimeoutError: The time ran out; the message shows where each rank hung.
    """
    _prepare_parent()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, timeout, function, args))
            for rank in range(world_size)
        ]
        for output in (sys.stdout, sys.stderr):
            output.flush()  # or each rank would print the parent's buffer once more
        try:
            for process in ranks:
                process.start()
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks:
                _kill(process)
        return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(world_size)]


def initialize(tp: int = 1, pp: int = 1, vpp: int | None = None, *, cp: int = 1, seed: int = 1) -> None:
    """Builds megatron-core's process groups and seeds its random streams; call it in a rank.

    Args:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Model chunks per pipeline stage, for the interleaved schedule.
        cp: Context-parallel size; what is left of the world is data parallel.
        seed: Seed of the tensor-parallel random streams, and of torch's default one.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _prepare_parent() -> None:
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("run_ranks forks: the calling process must not have initialised torch.distributed")
    cpu.install()  # says so itself where a GPU is visible
    import megatron.core.tensor_parallel  # noqa: F401  (once, in the parent, so that the ranks inherit it)


def _rank_main(
    rank: int, world_size: int, folder: Path, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.setpgid(0, 0)  # the whole group can be killed with what the rank started itself, such as checkpoint writers
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(timeout) + 30)  # ends the rank should the parent have been killed before it could
    stacks = open(folder / f"{rank}.stack", "w")  # noqa: SIM115  (faulthandler writes to it until the process ends)
    faulthandler.dump_traceback_later(timeout, file=stacks)
    try:
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # does not depend on how the host's name resolves
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 30),
        )
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        dist.barrier()  # a rank that leaves early closes connections that others may still read from
        _destroy_groups()
        _write(folder / f"{rank}.result", buffer.getvalue())
    except BaseException:
        _write(folder / f"{rank}.error", f"{time.monotonic()}\n{traceback.format_exc()}".encode())
        sys.stdout.flush()
        os._exit(1)  # without destroying groups, which may wait for ranks that never come


def _destroy_groups() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)  # so that the parent never reads half a file


def _wait(ranks: list[BaseProcess], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout + _GRACE / 2  # the stacks are written at `timeout`
    running = list(ranks)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running], max(0, deadline - time.monotonic()))
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            if process.exitcode != 0:
                time.sleep(_GRACE)
                raise RankError(_first_error(ranks, folder))
        if running and time.monotonic() >= deadline:
            hung = [f"rank {rank}:\n{_read(folder / f'{rank}.stack')}" for rank in _alive(ranks)]
            raise TimeoutError(
                f"ranks {_alive(ranks)} of {len(ranks)} still ran after {timeout:g} s\n" + "\n".join(hung)
            )


def _alive(ranks: list[BaseProcess]) -> list[int]:
    return [rank for rank, process in enumerate(ranks) if process.is_alive()]


def _first_error(ranks: list[BaseProcess], folder: Path) -> str:
    """Returns the earliest traceback: the others are mostly ranks whose peer has gone."""
    errors: list[tuple[float, int, str]] = []
    for rank in range(len(ranks)):
        if text := _read(folder / f"{rank}.error"):
            moment, _, trace = text.partition("\n")
            errors.append((float(moment), rank, trace))
    if not errors:
        died = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
        return f"ranks died without a traceback, exit codes {died}"
    _, rank, trace = min(errors)
    return f"rank {rank} of {len(ranks)} failed first:\n{trace}"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _kill(process: BaseProcess) -> None:
    if process.pid is None:
        return
    for kill in (os.killpg, os.kill):  # the group exists only once the rank has run setpgid
        with suppress(ProcessLookupError, PermissionError):
            kill(process.pid, signal.SIGKILL)
    process.join()
