"""Records every collective and every message that a piece of code issues through torch.distributed.

Wire volume is a claim of this package, so tests pin it as whole sequences of `Collective` entries. The counter replaces
the functions of `torch.distributed` and every alias of them that a module of megatron-core, or ours, bound at import
(such as `dist_all_gather_func` in `tensor_parallel/mappings.py` and `layers.py`); a call is recorded once, at the
outermost function, in the order of issue.

    with CollectiveCounter() as counter:
        with counter.phase("forward"):
            output = layer(hidden)
        with counter.phase("backward"):
            output.sum().backward()
    assert counter.sequence("forward") == [("all_gather", 4096)]
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# Function of torch.distributed -> (kind, its argument that holds the full buffer). Names that this torch lacks are
# skipped; newer ones (`all_gather_single`) are what `all_gather_into_tensor` calls.
_WATCHED: dict[str, tuple[str, str]] = {
    "all_reduce": ("all_reduce", "tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output"),
    "_all_gather_base": ("all_gather", "output_tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "_reduce_scatter_base": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "broadcast": ("broadcast", "tensor"),
    "reduce": ("reduce", "tensor"),
    "send": ("send", "tensor"),
    "recv": ("recv", "tensor"),
    "isend": ("send", "tensor"),
    "irecv": ("recv", "tensor"),
}
_IN_C10D_TOO = ("isend", "irecv")  # batch_isend_irecv accepts the functions of distributed_c10d only


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call as this rank saw it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send or recv."""
    elements: int
    """Entries of the full buffer: an all-gather's output, a reduce-scatter's or all-to-all's input, else the tensor."""
    dtype: torch.dtype
    """Type of the entries."""
    group_size: int
    """Ranks in the group."""
    phase: str
    """Name of the `CollectiveCounter.phase` around the call, or the empty string."""


class CollectiveCounter:
    """Context manager that records the collectives of this process; counters may be nested."""

    def __init__(self) -> None:
        self.records: list[Collective] = []
        self._phase = ""
        self._depth = 0
        self._restore: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> CollectiveCounter:
        replaced: dict[int, Any] = {}
        for name, (kind, argument) in _WATCHED.items():
            real = getattr(dist, name, None)
            if real is None or id(real) in replaced:
                continue
            replaced[id(real)] = self._recording(real, kind, argument)
        for namespace in _namespaces_with_aliases():
            for name, value in list(namespace.items()):
                if id(value) in replaced:
                    self._replace(namespace, name, replaced[id(value)])
        for name in _IN_C10D_TOO:
            self._replace(vars(c10d), name, replaced[id(getattr(c10d, name))])
        return self

    def __exit__(self, *exc_info: object) -> None:
        for namespace, name, value in reversed(self._restore):
            namespace[name] = value
        self._restore.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Labels what is recorded inside, usually "forward" or "backward"."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def sequence(self, phase: str | None = None) -> list[tuple[str, int]]:
        """Returns (kind, elements) in the order of issue, of one phase or of all."""
        return [(record.kind, record.elements) for record in self.records if phase in (None, record.phase)]

    def elements(self, kind: str, phase: str | None = None) -> int:
        """Returns the sum of the elements of one kind, in one phase or in all."""
        return sum(elements for found, elements in self.sequence(phase) if found == kind)

    def _replace(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self._restore.append((namespace, name, namespace[name]))
        namespace[name] = value

    def _recording(self, real: Callable[..., Any], kind: str, argument: str) -> Callable[..., Any]:
        signature = inspect.signature(real)
        if argument not in signature.parameters:  # newer torch calls the buffers otherwise, in the same positions
            argument = list(signature.parameters)[1 if argument.startswith("input") else 0]

        @functools.wraps(real)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                bound = signature.bind(*args, **kwargs).arguments
                buffer = bound[argument]
                tensors = [buffer] if isinstance(buffer, torch.Tensor) else list(buffer)
                self.records.append(
                    Collective(
                        kind=kind,
                        elements=sum(tensor.numel() for tensor in tensors),
                        dtype=tensors[0].dtype,
                        group_size=dist.get_world_size(bound.get("group")),
                        phase=self._phase,
                    )
                )
            self._depth += 1
            try:
                return real(*args, **kwargs)
            finally:
                self._depth -= 1

        return recorded


def _namespaces_with_aliases() -> Iterator[dict[str, Any]]:
    yield vars(dist)
    for name, module in list(sys.modules.items()):
        if (
            name.split(".")[0] in ("megatron", "megatron_lowrank")
            and module is not None
            and module.__name__ != __name__
        ):
            yield vars(module)
