"""From environment variables to seeded ranks with process groups; the first thing a training script does.

megatron-core must not be imported before `launched` has run: on a CPU it binds functions that the platform layer has
to replace first. This file therefore imports it inside functions only.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, rendezvous  # type: ignore[attr-defined]

from megatron_lowrank import compat
from megatron_lowrank.checkpoint.agree import FAILED, AgreedError, as_agreed
from megatron_lowrank.config import RunConfig
from megatron_lowrank.config.parallel import AUTO
from megatron_lowrank.estimate import resolve_placement
from megatron_lowrank.platform import cpu
from megatron_lowrank.train.failure import LaunchError, speak_through
from megatron_lowrank.train.notices import report_warnings

_MEETING_SECONDS = 600  # to wait for ranks before the config, which holds the user's limit, is known to be good


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the ranks, as torchrun or a Slurm script exports it."""

    rank: int = 0
    """Number of this process."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process on its machine; picks the GPU."""
    one_machine: bool = True
    """Whether all ranks are known to run on this machine."""

    @classmethod
    def from_environment(cls) -> World:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK; a world of one when none of them is set.

        Raises:
            ValueError: a variable is missing or is no number in range.
        """
        if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        size, rank = _integer("WORLD_SIZE"), _integer("RANK")
        if not 0 <= rank < size:
            raise ValueError(f"RANK: found {rank}, allowed: 0 to WORLD_SIZE - 1 = {size - 1}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if size > 1 and not os.environ.get(name):
                raise ValueError(f"{name}: not set, but WORLD_SIZE is {size}; start with torchrun, or export it")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
        return cls(rank=rank, size=size, local_rank=local_rank, one_machine=size in (1, local))


def _integer(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(f"{name}: found {text!r}, allowed: a number; start with torchrun, or export it")
    return int(text)


@contextmanager
def launched(read_config: Callable[[], RunConfig], world: World | None = None) -> Iterator[RunConfig]:
    """Reads and checks the config on every rank, then builds the world; tears it down after the body.

    The ranks agree through the rendezvous store whether all of them could read the config before any process group
    exists, so that a file missing on one machine ends all ranks instead of letting the others wait.

    Args:
        read_config: Returns the run's config, usually from the command line.
        world: This process's place. Default: from the environment.

    Yields:
        The run.

    Raises:
        AgreedError: bad config or launch, the same on every rank.
        LaunchError: the ranks did not meet.
    """
    run: RunConfig | None = None
    error: AgreedError | None = None
    try:
        world = World.from_environment() if world is None else world
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if world.rank else sys.stdout):
            run = read_config()  # prints one --help, not one per rank
        device = choose_device(run, world)
        resolve_placement(run, data_parallel_size=run.check_world(world.size))  # what no memory can help
    except Exception as caught:
        error = as_agreed(caught)
        if world is None:
            raise LaunchError(str(error), error.code) from caught
        if world.size == 1:
            raise error from caught
    seconds = run.parallel.distributed_timeout_seconds if run is not None else _MEETING_SECONDS
    store = _meet(world, error, timedelta(seconds=seconds))
    assert run is not None and world is not None
    speak_through(store)
    report_warnings(world.rank, store)
    prepare_device(run, world, device)
    if run.placement == AUTO:
        run = _with_placement(run, world, device, store)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("world", store), rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", world.local_rank) if device == "cuda" else None,
    )  # fmt: skip
    start_model_parallel(run)
    yield run
    # Only after success: with a broken group each of these would wait for ranks that never come.
    dist.barrier()
    stop_model_parallel()
    dist.destroy_process_group()


def choose_device(run: RunConfig, world: World) -> str:
    """`cpu` or `cuda`, from `train.device` and what this machine has.

    Raises:
        ValueError: the GPU that is asked for is not there, or a CPU run sees GPUs.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = run.train.device
    if wanted == "cpu" and visible:
        raise ValueError(f"train.device: found 'cpu', but {visible} GPU(s) are visible; set CUDA_VISIBLE_DEVICES=")
    if wanted == "cuda" and not visible:
        raise ValueError("train.device: found 'cuda', but no GPU is visible; allowed here: cpu, auto")
    if visible and world.local_rank >= visible:
        raise ValueError(f"LOCAL_RANK: found {world.local_rank}, but {visible} GPU(s) are visible; one rank per GPU")
    return "cuda" if visible else "cpu"


def _with_placement(run: RunConfig, world: World, device: str, store: Any) -> RunConfig:
    """The run with placement `auto` chosen, by the smallest device of all ranks, so that all choose alike."""
    own = torch.cuda.get_device_properties(world.local_rank).total_memory / 2**30 if device == "cuda" else math.inf
    store.set(f"memory/{world.rank}", repr(own))
    least = min(float(store.get(f"memory/{rank}")) for rank in range(world.size))
    try:
        run, choice = resolve_placement(
            run, data_parallel_size=run.check_world(world.size), device_memory_gib=None if math.isinf(least) else least
        )
    except ValueError as error:
        raise as_agreed(error) from error
    if choice is not None and world.rank == 0:
        print("\n".join(choice.reason))
    return run


def prepare_device(run: RunConfig, world: World, device: str) -> None:
    """Settings that have to precede CUDA, the process groups and the import of megatron-core."""
    compat.silence_known_notices()
    if run.parallel.tensor_parallel_size > 1:
        # Orders compute behind communication on a GPU. On a CPU it does nothing, but megatron-core warns without it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu":
        cpu.install()
        torch.set_num_threads(1)  # a rank per core; more threads would only fight
        if world.one_machine and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # does not depend on how the host's name resolves
    else:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        torch.cuda.set_device(world.local_rank)
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Transformer Engine's; where the user has set it to 1, megatron-core refuses its deterministic mode.
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(run.train.deterministic)
    # Filling costs a pass over memory and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = run.train.deterministic
    torch.backends.cudnn.benchmark = False


def start_model_parallel(run: RunConfig) -> None:
    """Builds megatron-core's process groups in an initialised world and seeds every random stream."""
    from megatron.core import parallel_state, tensor_parallel

    parallel = run.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_size,
        distributed_timeout_minutes=parallel.distributed_timeout_seconds / 60,  # a float is as good to timedelta
    )
    seed = run.train.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_model_parallel() -> None:
    """Forgets megatron-core's groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _meet(world: World, error: AgreedError | None, timeout: timedelta) -> Any:
    """Waits in the store for every rank to say whether it can run.

    Raises:
        AgreedError: a rank cannot; its words and its exit code.
        LaunchError: not every rank came.
    """
    if world.size == 1:
        return HashStore()
    try:
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timeout)))
        store.set_timeout(timeout)
        if error is not None:
            store.set(f"error/{world.rank}", json.dumps([str(error), error.code]))
            if store.add("failed", 1) == 1:
                store.set("error", f"{world.rank}")
        if store.add("arrived", 1) == world.size:
            store.set("all_arrived", "yes")
        store.wait(["all_arrived"], timeout)
        failed = store.add("failed", 0)
        if not failed:
            return store
        first = int(store.get("error"))
        message, code = json.loads(store.get(f"error/{first}"))
        if store.add("left", 1) == world.size:
            store.set("all_left", "yes")
        if world.rank == 0:  # rank 0 may be the one that serves the store
            store.wait(["all_left"], timedelta(seconds=30))
    except Exception as lost:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"rank {world.rank} of {world.size} did not meet the others at {place} within "
            f"{timeout.total_seconds():.0f} s: {str(lost).splitlines()[0]}", FAILED
        ) from lost  # fmt: skip
    raise AgreedError(message if failed == world.size else f"rank {first} of {world.size}: {message}", code)
