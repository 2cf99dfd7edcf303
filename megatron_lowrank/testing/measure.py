"""Measuring on a noisy machine: candidates alternate in one process; exact counts beside times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one candidate over the rounds, in seconds."""

    times: tuple[float, ...]
    """One per round."""

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.times)

    @property
    def minimum(self) -> float:
        """Fastest round."""
        return min(self.times)


def alternate(candidates: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, Timing]:
    """Time every candidate once per round, in turn and in alternating order, so that drift of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warmup + rounds):
        order = list(candidates)[:: 1 if number % 2 else -1]
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: Timing(times=tuple(values)) for name, values in times.items()}


def paired_ratio(slow: Timing, fast: Timing) -> float:
    """Median over the rounds of slow/fast, each pair taken in the same round."""
    return statistics.median(a / b for a, b in zip(slow.times, fast.times, strict=True))


_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


def addmm_flops(out: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], **kwargs: Any) -> int:
    """FLOPs of out += a b from the shapes."""
    return 2 * a[0] * a[1] * b[1]


def matmul_flops(step: Callable[[], Any]) -> int:
    """FLOPs of the matrix products that a step really runs (multiply-add = 2); attention kernels are not among them."""
    # Torch's own table leaves out the accumulating form.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in counts.items() if op.__name__.split(".")[0] in _PRODUCTS)


def saved_elements(forward: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Elements that a forward pass keeps for backward, each storage once, parameters left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    del output
    return sum(seen.values())
