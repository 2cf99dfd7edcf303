"""Activation recompute between two kept tensors (CoLA-M): what a segment gives is not kept but rebuilt in backward.

A segment is a function of kept tensors. Its outputs are computed without a graph, handed to their consumers, and then
forgotten: inside `not_kept()` every consumer that saves one of them saves a note instead. The first consumer to run
backward makes the segment run once more, with a graph, and the gradients of its outputs go on through that graph.

    segment = Segment(active)
    context = segment.run(attend, latent)           # attend: sigma, B_q, B_k, B_v, rotary, attention
    with segment.not_kept():
        partial = product_with_A(context)           # not part of the segment: never run twice

Any consumer will do, because only what autograd saves is exchanged: no tensor's storage is emptied, nothing is
compiled, and no consumer is told. Parameters that the function reads get their gradients in the inner backward pass, so
by `backward()` and not by `torch.autograd.grad`; there is no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Note:
    """What a consumer saves in place of a view of an output."""

    node: Any
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Segment(torch.autograd.Function):
    """The node of a segment; it keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        ctx.function, ctx.rebuilt = function, None
        ctx.save_for_backward(*inputs)
        outputs = _call(function, inputs)
        ctx.layouts = tuple(map(_layout, outputs))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves, outputs = _rebuilt(ctx)
        ctx.rebuilt = None
        pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        return None, *(leaf.grad for leaf in leaves)


def _call(function: Callable[..., Tensors], inputs: Tensors) -> Tensors:
    known = {x.untyped_storage().data_ptr() for x in inputs}
    # An output that is an input, or a view of one, is copied: a note about it would mean the input.
    return tuple(x.clone() if x.untyped_storage().data_ptr() in known else x for x in function(*inputs))


def _layout(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    return tuple(x.shape), x.stride(), int(x.storage_offset()), x.untyped_storage().nbytes()


def _rebuilt(node: Any) -> tuple[Tensors, Tensors]:
    """(inputs as leaves, outputs with a graph) of a segment, from the one second run."""
    if node.rebuilt is None:
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in node.saved_tensors)
        with torch.enable_grad():
            outputs = _call(node.function, leaves)
        # A note speaks of the storage of the first run: a kernel that lays it out otherwise would be read wrongly.
        if (found := tuple(map(_layout, outputs))) != node.layouts:
            raise RuntimeError(f"recompute: a replayed segment gives {found}, its first run gave {node.layouts}")
        node.rebuilt = leaves, outputs
    return node.rebuilt  # type: ignore[no-any-return]


class Segment:
    """One run of a segment; inactive ones, and all of them outside of training, leave everything to autograd."""

    def __init__(self, active: bool) -> None:
        self.active = active and torch.is_grad_enabled()
        self._outputs: Tensors = ()

    def run(self, function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        """function(*inputs), to be consumed inside `not_kept()`.

        Args:
            function: Gives the same when it is called again with equal inputs; every tensor that needs a gradient is
                a parameter or one of its arguments.
            *inputs: What is kept.
        """
        if not self.active or not any(x.requires_grad for x in inputs):
            return function(*inputs)  # autograd would see no way back to the parameters of the function
        self._outputs = _Segment.apply(function, *inputs)  # type: ignore[no-untyped-call]
        return self._outputs

    @contextmanager
    def not_kept(self) -> Iterator[None]:
        """Inside, whoever saves an output of the segment for backward saves how to get it."""
        if not self._outputs:
            yield
            return
        node = self._outputs[0].grad_fn
        outputs = {x.untyped_storage().data_ptr(): number for number, x in enumerate(self._outputs)}
        self._outputs = ()

        def pack(x: torch.Tensor) -> Any:
            number = outputs.get(x.untyped_storage().data_ptr())
            return x if number is None else _Note(node, number, x.shape, x.stride(), int(x.storage_offset()))

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield


def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Note):
        return saved  # type: ignore[no-any-return]
    output = _rebuilt(saved.node)[1][saved.output].detach()
    return output.as_strided(saved.size, saved.stride, saved.offset)
