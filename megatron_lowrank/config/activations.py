"""Which activations may sit at the bottleneck: every element-wise function that torch offers, by name."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Activation = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def activation_by_name(name: str) -> Activation:
    """The function behind a name: `identity`, `gelu_tanh`, or any element-wise function of `torch.nn.functional`.

    Raises:
        ValueError: the name is unknown, or the function is not element-wise (it mixes features, is random, or needs
            further arguments).
    """
    import torch
    from torch.nn import functional

    if name == "identity":
        return lambda x: x
    if name == "gelu_tanh":
        return functools.partial(functional.gelu, approximate="tanh")
    function = None
    if name.isidentifier() and not name.startswith("_") and not name.endswith("_"):
        # From torch itself only what is a method of tensors too: a name in a foreign config may call nothing else.
        function = getattr(functional, name, None) or (
            getattr(torch, name, None) if hasattr(torch.Tensor, name) else None
        )
    if not callable(function):
        raise ValueError(f"found {name!r}, no function of torch.nn.functional{_suggestion(name)}")
    if not _is_activation(function):
        raise ValueError(f"found {name!r}, which is not an element-wise activation{_suggestion(name)}")
    return function  # type: ignore[no-any-return]


def _is_activation(function: Callable[..., Any]) -> bool:
    """Whether a function maps every element by itself, the same way each time, and lets a gradient through."""
    import torch

    probe = torch.linspace(-3.0, 3.0, 48).reshape(2, 3, 8).requires_grad_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of functions that are about to be refused
            out = function(probe)
        if not isinstance(out, torch.Tensor) or out.shape != probe.shape or out.dtype != probe.dtype:
            return False
        moved = function(probe.flip(2, 0)[:1, :2])  # other neighbours, another shape
        (gradient,) = torch.autograd.grad(out.sum(), probe)
    except Exception:  # whatever a function without a fitting signature raises, it is no activation
        return False
    # Vector kernels and their tails may differ in the last bit.
    elementwise = torch.allclose(moved, out.flip(2, 0)[:1, :2], atol=1e-6) and torch.equal(out, function(probe))
    # Neither a constant or step (nothing learns below it) nor an identity in disguise.
    curved = bool((gradient != 0).any()) and not torch.equal(out, probe)
    return elementwise and curved and bool(torch.isfinite(out).all() and torch.isfinite(gradient).all())


COMMON = ("identity", "silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid", "softplus", "mish", "leaky_relu", "elu",
          "selu", "hardswish", "softsign", "logsigmoid", "relu6", "celu", "hardtanh")  # fmt: skip


def check_activation(field: str, name: str) -> None:
    """Raise a ValueError that names `field` when `name` is no activation."""
    try:
        activation_by_name(name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, COMMON, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(COMMON)} and the like"
