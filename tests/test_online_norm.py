"""RMSNorm over a hidden-sharded residual: exact in both directions, its statistic to the last bit, its bf16 error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowrank.layers.online_norm import (
    OnlineNorm,
    online_norm_down,
    read_statistic,
    write_statistic,
)
from megatron_lowrank.layers.reference import rms_norm
from megatron_lowrank.placement import statistic_columns
from megatron_lowrank.testing.compare import assert_close, assert_equal
from megatron_lowrank.testing.ranks import run_ranks

S, B, H, RANKS = 6, 2, 32, (7, 8, 5)
EPSILON = 1e-5


def _inputs(unbalanced: bool) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, gain = draw(S, B, H), draw(H)
    if unbalanced:
        x[..., 1:4] *= 40  # all of them on the first rank
        x[..., -8:] = 0  # and nothing on the last
    return x, gain, [draw(rank, H) for rank in RANKS], [draw(S, B, rank) for rank in RANKS]


def _online(unbalanced: bool, stacked: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """z and the gradients of this rank's slices."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, gain, weights, grads = _inputs(unbalanced)
    if stacked:
        weights, grads = [torch.cat(weights)], [torch.cat(grads, -1)]
    local = {"x": x.chunk(size, -1)[rank], "gain": gain.chunk(size)[rank]}
    local |= {f"a{i}": w.chunk(size, -1)[rank] for i, w in enumerate(weights)}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in local.items()}
    norm = OnlineNorm(hidden_size=H, epsilon=EPSILON, group=dist.group.WORLD)  # type: ignore[arg-type]
    latents = online_norm_down(norm, leaves["x"], leaves["gain"], [leaves[f"a{i}"] for i in range(len(weights))])
    torch.autograd.backward(latents, grads)
    split = torch.cat(latents, -1).split(RANKS, -1) if stacked else latents
    return [z.detach() for z in split], {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("unbalanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_norm_then_product(ranks: int, unbalanced: bool, stacked: bool) -> None:
    x, gain, weights, grads = _inputs(unbalanced)
    leaves = [tensor.requires_grad_() for tensor in (x, gain, *weights)]
    normed = rms_norm(x, gain, EPSILON)
    expected = [normed @ weight.T for weight in weights]
    torch.autograd.backward(expected, grads)
    found = run_ranks(ranks, _online, unbalanced, stacked)
    for latents, _ in found:
        for z, want in zip(latents, expected, strict=True):
            assert_close(z, want.detach(), "z")
    grad_x, grad_gain, *grad_weights = (leaf.grad for leaf in leaves)
    gathered = {name: torch.cat([part[1][name] for part in found], -1) for name in found[0][1]}
    assert_close(gathered["x"], grad_x, "dx")  # type: ignore[arg-type]
    assert_close(gathered["gain"], grad_gain, "dgain")  # type: ignore[arg-type]
    ours = torch.cat([gathered[name] for name in gathered if name.startswith("a")])
    assert_close(ours, torch.cat(grad_weights), "dA")  # type: ignore[arg-type]


def _published(x: Tensor, gain: Tensor, weight: Tensor, ranks: int, rank: int) -> Tensor:
    """The printed listing: each slice by its own RMS, summed, then scaled by this rank's RMS over the global one."""
    slices = [part.chunk(ranks, -1) for part in (x, gain, weight)]
    local = [(part.square().mean(-1, keepdim=True) + EPSILON).sqrt() for part in slices[0]]
    total = torch.stack([(xi / rms * gi) @ wi.T for xi, gi, wi, rms in zip(*slices, local, strict=True)]).sum(0)
    return total * local[rank] / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def _sliced(x: Tensor, gain: Tensor, weight: Tensor, ranks: int) -> Tensor:
    """Each slice normalised alone, as the default mode of the release does."""
    slices = zip(x.chunk(ranks, -1), gain.chunk(ranks), weight.chunk(ranks, -1), strict=True)
    return torch.stack([rms_norm(xi, gi, EPSILON) @ wi.T for xi, gi, wi in slices]).sum(0)


@pytest.mark.parametrize("unbalanced", [True, False])
def test_the_published_forms_are_other_functions(unbalanced: bool) -> None:
    x, gain, weights, _ = _inputs(unbalanced)
    want = rms_norm(x, gain, EPSILON) @ weights[0].T
    others = [_published(x, gain, weights[0], 4, rank) for rank in range(4)] + [_sliced(x, gain, weights[0], 4)]
    for other in others:
        error = (other - want).norm() / want.norm()
        assert error > (0.3 if unbalanced else 0.02), f"{error:.3f}"
    assert not torch.allclose(others[0], others[3])  # ranks do not even agree


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_the_statistic_survives_bf16_sums_to_the_last_bit(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    exponents = torch.rand(64, ranks, generator=generator) * 18 - 6
    own = 10.0**exponents * (1 + torch.rand(64, ranks, generator=generator))
    columns = statistic_columns(ranks, limbs=True)
    assert columns % 16 == 0 and columns >= 3 * ranks and statistic_columns(ranks, limbs=False) == 1
    buffers = torch.full((ranks, 64, columns), 7.0, dtype=torch.bfloat16)  # what lay there before must not matter
    for rank in range(ranks):
        write_statistic(buffers[rank], own[:, rank], rank)
    for order in (range(ranks), reversed(range(ranks))):
        summed = torch.zeros_like(buffers[0])
        for rank in order:
            summed += buffers[rank]
        want = own[:, 0].clone()
        for rank in range(1, ranks):
            want += own[:, rank]
        assert_equal(read_statistic(summed, ranks, torch.float32), want, "statistic")


def _bf16_errors(channels: int) -> tuple[float, float]:
    """Relative errors of z against fp64: online, and with a synchronised norm in front of the product."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    generator = torch.Generator().manual_seed(channels)
    hidden, width, tokens = 2048, 128, 64
    x = torch.randn(tokens, 1, hidden, generator=generator)
    x[..., :channels] *= 40
    weight = torch.randn(width, hidden, generator=generator) * hidden**-0.5
    gain = 1 + 0.1 * torch.randn(hidden, generator=generator)
    x, weight, gain = x.bfloat16(), weight.bfloat16(), gain.bfloat16()
    exact = rms_norm(x.double(), gain.double(), EPSILON) @ weight.double().T
    xi, wi, gi = x.chunk(size, -1)[rank], weight.chunk(size, -1)[rank], gain.chunk(size)[rank]
    (online,) = online_norm_down(OnlineNorm(hidden_size=hidden, epsilon=EPSILON, group=group), xi, gi, [wi])
    statistic = xi.float().square().sum(-1, keepdim=True)
    dist.all_reduce(statistic)
    normed = (xi.float() * (statistic / hidden + EPSILON).rsqrt()).bfloat16() * gi
    synchronised = normed @ wi.T
    dist.all_reduce(synchronised)
    first, second = ((z.double() - exact).norm() / exact.norm() for z in (online, synchronised))
    return float(first), float(second)


@pytest.mark.parametrize("channels", [0, 8])
def test_bf16_error_is_that_of_a_synchronised_norm(channels: int) -> None:
    online, synchronised = run_ranks(4, _bf16_errors, channels)[0]
    print(f"online {online:.6f}, synchronised {synchronised:.6f}, ratio {online / synchronised:.4f}")
    assert 1e-4 < online < 1.1 * synchronised, f"{online:.5f} online, {synchronised:.5f} synchronised"
