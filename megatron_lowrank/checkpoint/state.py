"""Sharded state of model, optimizer and random generators, and its way back into live objects."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn

from megatron_lowrank.checkpoint import optimizer as adam
from megatron_lowrank.checkpoint.optimizer import Sharded
from megatron_lowrank.checkpoint.read import RNG_KEY
from megatron_lowrank.layers.init import seed_of


def unwrap(chunk: nn.Module) -> Any:
    """The GPTModel inside of megatron-core's wrappers."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    return model


def _metadata() -> dict[str, Any]:
    return {
        # One key per layer: ranks and dense layers differ, and a stacked tensor could not hold that.
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(chunks: Sequence[nn.Module]) -> list[dict[str, Sharded]]:
    """Sharded weights of each chunk: live name -> tensor under its canonical key."""
    return [
        {
            name: value
            for name, value in unwrap(chunk).sharded_state_dict(metadata=_metadata()).items()
            if not name.endswith("_extra_state")  # FP8 scaling of Transformer Engine, which no config switches on
        }
        for chunk in chunks
    ]


def _weights(model: list[dict[str, Sharded]]) -> list[Sharded]:
    return [weight for chunk in model for weight in chunk.values()]


def save_state(path: Path, chunks: Sequence[nn.Module], optimizer: Any | None) -> None:
    """Writes model, optimizer and random state into an existing, empty folder. Collective."""
    model = model_state(chunks)
    state: dict[str, Any] = {"model": dict(enumerate(model)), "rng": _rng_object(_rng_state())}
    if optimizer is not None:
        with torch.no_grad():
            adam.give_state(optimizer)
            state["optimizer"] = adam.saved_state(optimizer, adam.pieces(optimizer, _weights(model)))
    with _hidden_main_module():
        dist_checkpointing.save(state, str(path))


@contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Keeps the entry script from being run again.

    megatron-core's writer spawns a process for a queue, and Python starts a spawned process by importing the entry
    script: without a guard that would train a second time, with one it costs the import of everything, on every rank.
    The process, which stays for the next save, runs `orphan.py` instead: it then ends with this one, even with SIGKILL.
    """
    main: Any = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        main.__spec__ = None
        main.__file__ = str(Path(__file__).with_name("orphan.py"))
        yield
    finally:
        del main.__file__, main.__spec__
        for name, value in hidden.items():
            setattr(main, name, value)


@torch.no_grad()
def load_state(
    path: Path, chunks: Sequence[nn.Module], optimizer: Any | None, *, adam_step: int, restore_rng: bool
) -> None:
    """Reads what `save_state` wrote into live objects. Collective.

    Args:
        path: A checkpoint whose keys and shapes have been checked.
        chunks: The model's chunks on this rank, wrapped or not.
        optimizer: None for the weights alone.
        adam_step: Updates that Adam had made.
        restore_rng: Whether the random state is wanted; the layout has to be the same.
    """
    model = model_state(chunks)
    template: dict[str, Any] = {"model": dict(enumerate(model))}
    if restore_rng:
        template["rng"] = _rng_object(None)
    if optimizer is not None:
        adam.give_state(optimizer)
        # Looked up before the load, which takes the live parameters out of the sharded state.
        held = adam.pieces(optimizer, _weights(model))
        template["optimizer"] = adam.template(held)
    # Keys were compared before; the check of the access pattern raises on rank 0 only, and save has made it.
    loaded = dist_checkpointing.load(template, str(path), validate_access_integrity=False)
    for number, chunk in enumerate(chunks):
        weights, live = loaded["model"][number], dict(unwrap(chunk).named_parameters())
        assert weights.keys() == live.keys(), f"{weights.keys() ^ live.keys()} are not in both, state and model"
        for name, parameter in live.items():
            parameter.copy_(weights[name])
    if optimizer is not None:
        adam.load(held, loaded["optimizer"])
        adam.set_adam_step(optimizer, adam_step)
    if restore_rng:
        _set_rng_state(loaded["rng"])


def reset_main_parameters(optimizer: Any) -> None:
    """Makes the optimizer's fp32 parameters equal to the model's, after weights were loaded alone."""
    optimizer.reload_model_params()


def _rng_object(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject(RNG_KEY, state, (dist.get_world_size(),), (dist.get_rank(),))


def _rng_state() -> dict[str, Any]:
    """State of every generator of this rank, as tensors and plain values."""
    name, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def reseed(seed: int, step: int) -> None:
    """Seeds every generator from the run's seed and the step, for a layout that has no stored random state."""
    derived = seed_of(seed, f"resume|{step}") % 2**31
    random.seed(derived)
    numpy.random.seed(derived)
    torch.manual_seed(derived)
    tensor_parallel.model_parallel_cuda_manual_seed(derived)
