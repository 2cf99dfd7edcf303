"""Two comparisons, and one tolerance per dtype, so that no test invents its own.

Sharded arithmetic on small integers is exact in floating point: compare it with `assert_equal`. Use `assert_close`
where the order of a sum differs on real numbers.
"""

from __future__ import annotations

import torch

TOLERANCE: dict[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference that `assert_close` accepts, relative to the largest entry of what is expected."""


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Asserts that two tensors hold the same dtype, shape and values to the last bit.

    The zeros of both signs count as equal, because adding a shard of zeros loses the sign; NaN equals nothing.

    Args:
        actual: What the code under test gave.
        expected: What it should have given.
        name: What to call it in the message.
    """
    _assert_comparable(actual, expected, name)
    if torch.equal(actual, expected):
        return
    _fail(actual, expected, f"{name} is not bitwise equal")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Asserts that the largest difference is within `TOLERANCE` of the largest entry of `expected`.

    Relative to the largest entry and not to each one: a rounding error in a sum has the size of its terms, also where
    the sum happens to cancel.

    Args:
        actual: What the code under test gave.
        expected: What it should have given; if it is zero everywhere, so must `actual` be.
        name: What to call it in the message.

    Raises:
        ValueError: The dtype has no tolerance; compare integers with `assert_equal`.
    """
    _assert_comparable(actual, expected, name)
    if actual.dtype not in TOLERANCE:
        raise ValueError(f"{name}: no tolerance for {actual.dtype}, only for {list(TOLERANCE)}; use assert_equal")
    if actual.numel() == 0:
        return
    scale = expected.detach().double().abs().max().item()
    worst = (actual.detach().double() - expected.detach().double()).abs().max().item()
    if not worst <= TOLERANCE[actual.dtype] * scale:  # written so that NaN fails
        ratio = worst / scale if scale else float("inf")
        _fail(
            actual,
            expected,
            f"{name} is not close: {ratio:.3g} of the largest entry, {TOLERANCE[actual.dtype]:g} allowed",
        )


def _assert_comparable(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    for label, tensor in (("actual", actual), ("expected", expected)):
        assert isinstance(tensor, torch.Tensor), f"{name}: {label} is {type(tensor).__name__}, not a tensor"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"


def _fail(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    actual, expected = actual.detach(), expected.detach()
    differs = actual != expected
    count = int(differs.sum().item())
    # The position of the first difference tells a wrong shard (a block) from a wrong sum (everywhere).
    first = tuple(differs.nonzero()[0].tolist())
    distance = (actual.double() - expected.double()).abs()
    raise AssertionError(
        f"{what}; shape {tuple(actual.shape)}, {actual.dtype}; {count} of {actual.numel()} entries differ, "
        f"by at most {distance.max().item():.6g}; first at {first}: {actual[first].item()!r}, "
        f"expected {expected[first].item()!r}; largest expected {expected.double().abs().max().item():.6g}"
    )
