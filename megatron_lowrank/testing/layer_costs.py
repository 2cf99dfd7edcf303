"""What one decoder layer costs, counted while real ranks run it: collectives, kept elements, replayed FLOPs.

A layer in the middle of a stack is what a stack of two layers costs more than a stack of one, so that conversions at
the ends, and inputs that a neighbour keeps, are counted where they belong.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_lowrank.config import RunConfig
from megatron_lowrank.model import build_model
from megatron_lowrank.testing.collectives import CollectiveCounter
from megatron_lowrank.testing.measure import addmm_flops

Calls = Counter[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Counts of one layer on one rank, of one forward and backward pass."""

    forward: dict[tuple[str, int], int]
    """(kind, elements of the full buffer) -> calls."""
    backward: dict[tuple[str, int], int]
    """The same, replayed ones included."""
    retained: int
    """Elements that live between forward and backward, each storage once, parameters left out."""
    retained_bytes: int
    """Their bytes."""
    forward_flops: int
    """Matrix products and attention, this rank's share."""
    backward_flops: int
    """The same, replayed ones included."""


def layer_costs(run: RunConfig, *, settle: float = 0.02) -> LayerCosts:
    """Costs of a middle layer; call it on every rank, with `testing.ranks.initialize` done and equal roles per layer.

    Args:
        run: One micro-batch of `train.micro_batch_size` rows is run. All layers have to be alike.
        settle: Seconds as in `retained`.
    """
    one, two = (_stack_costs(run, layers, settle) for layers in (1, 2))
    return LayerCosts(
        forward=dict(two["forward"] - one["forward"]), backward=dict(two["backward"] - one["backward"]),
        **{
            name: two[name] - one[name] for name in ("retained", "retained_bytes", "forward_flops", "backward_flops")
        },
    )  # fmt: skip


def _stack_costs(run: RunConfig, layers: int, settle: float) -> dict[str, Any]:
    model: Any = build_model(replace(run, model=replace(run.model, num_layers=layers)))[0]
    model.decoder.final_layernorm = None  # belongs to no layer
    length, batch, size = run.train.sequence_length, run.train.micro_batch_size, run.parallel.tensor_parallel_size
    rows = length // size if model.config.sequence_parallel else length
    angles = model.rotary_pos_emb(length)
    x = torch.randn(rows, batch, run.model.hidden_size, dtype=model.config.params_dtype, requires_grad=True)

    def forward() -> torch.Tensor:
        return model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=angles)  # type: ignore[no-any-return]

    with CollectiveCounter() as counter:
        with counter.phase("forward"):
            out = forward()
        grad = torch.randn_like(out)
        with counter.phase("backward"):
            torch.autograd.backward(out, grad)
    del out
    elements, size_in_bytes = retained(forward, list(model.parameters()), settle)
    counts = {phase: Counter(counter.sequence(phase)) for phase in ("forward", "backward")}
    forward_flops = flops(lambda: forward().detach())
    return {
        **counts, "retained": elements, "retained_bytes": size_in_bytes, "forward_flops": forward_flops,
        "backward_flops": flops(lambda: torch.autograd.backward(forward(), grad)) - forward_flops,
    }  # fmt: skip


def flops(step: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and the attention that a step really runs (multiply-add = 2)."""
    # Torch's own table leaves out the accumulating form, and attention kernels of a CPU.
    aten = torch.ops.aten
    mapping = {
        aten.addmm_: addmm_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    # Torch's tracker hooks the inputs of modules, and fails on one that a segment hands on as it came.
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        step()
    return int(counter.get_total_flops())


def _attention(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    return 4 * math.prod(query) * key[2]  # every query meets every key, whatever the mask


def _attention_backward(grad: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], *a: Any, **k: Any) -> int:
    return 8 * math.prod(query) * key[2]


class _NoModules:
    """Everything is counted under one name."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers, without keeping it alive, every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.seen[reference.cdata] = (reference, storage.nbytes() // x.element_size(), storage.nbytes())
        return result


def retained(
    forward: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor], settle: float = 0.02
) -> tuple[int, int]:
    """(elements, bytes) of what a forward pass allocates and keeps for backward; each storage counts once.

    Whoever keeps it is seen: autograd, a recompute's own storage, a forgotten reference. The output itself counts,
    views of parameters do not.

    Args:
        forward: One forward pass.
        parameters: What is there anyway.
        settle: Seconds that the threads of gloo get to let go of what they reduced; a busy machine needs more.
    """
    known = {StorageWeakRef(parameter.untyped_storage()).cdata for parameter in parameters}  # type: ignore[no-untyped-call]
    gc.collect()
    with _Allocations() as allocations:
        output = forward()
    time.sleep(settle)
    gc.collect()
    alive = [
        (count, size)
        for cdata, (reference, count, size) in allocations.seen.items()
        if cdata not in known and not reference.expired()
    ]
    del output
    return sum(count for count, _ in alive), sum(size for _, size in alive)
