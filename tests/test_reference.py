"""The naive reference against the public implementation's stored outputs, and its parts against still simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lowrank.config import LowRankConfig, ModelConfig
from megatron_lowrank.convert import open_cola
from megatron_lowrank.convert.cola_layout import reference_key
from megatron_lowrank.convert.hub import TensorSource
from megatron_lowrank.layers import reference
from megatron_lowrank.names import canonical_parameters

FIXTURES = Path(__file__).parent / "fixtures"


class Fixture:
    """A stored model, its expected outputs, and how far ours are from them."""

    def __init__(self, name: str) -> None:
        self.source: TensorSource = open_cola(FIXTURES / name)
        self.model, self.lowrank = self.source.model, self.source.lowrank
        self.tensors = {key: tensor.requires_grad_() for key, tensor in self.source.stream()}
        self.expected = load_file(FIXTURES / name / "expected.safetensors")

    def check_outputs(self, model: ModelConfig | None = None) -> Tensor:
        """Compare logits, token losses and loss within the fixture's stated tolerance; returns the loss."""
        model, ids = model or self.model, self.expected["input_ids"]
        logits = reference.reference_logits(model, self.lowrank, self.tensors, ids)
        loss, losses = reference.reference_loss(model, self.lowrank, self.tensors, ids)
        torch.testing.assert_close(logits, self.expected["logits"], atol=2e-4, rtol=0)
        torch.testing.assert_close(losses, self.expected["token_losses"], atol=2e-4, rtol=0)
        torch.testing.assert_close(loss, self.expected["loss"], atol=1e-5, rtol=0)
        return loss

    def swap_gate_and_up(self) -> None:
        """Exchange the two, as a wrong import would."""
        self.tensors = {
            name.replace(".gate.", ".?.").replace(".up.", ".gate.").replace(".?.", ".up."): tensor
            for name, tensor in self.tensors.items()
        }


@pytest.mark.parametrize("name", ["cola_tiny", "cola_tiny_both_sigma", "colam_tiny"])
def test_outputs_of_the_public_implementation(name: str) -> None:
    Fixture(name).check_outputs()


@pytest.mark.parametrize("name", ["cola_tiny", "cola_tiny_both_sigma"])
def test_every_gradient_of_the_public_implementation(name: str) -> None:
    fixture = Fixture(name)
    grads = torch.autograd.grad(fixture.check_outputs(), list(fixture.tensors.values()))
    parameters = {p.name: p for p in canonical_parameters(fixture.model, fixture.lowrank)}
    assert len(parameters) == sum(key.startswith("grad.") for key in fixture.expected)
    for key, grad in zip(fixture.tensors, grads, strict=True):
        theirs, transposed = reference_key(parameters[key], "cola", fixture.model.num_layers)
        expected = fixture.expected[f"grad.{theirs}"]
        expected = expected.T if transposed else expected
        assert expected.shape == grad.shape, key
        assert float((grad - expected).abs().max()) <= 3e-4 * float(expected.abs().max()), key


@pytest.mark.parametrize("name", ["cola_tiny", "cola_tiny_both_sigma"])
def test_a_wrong_norm_epsilon_is_seen(name: str) -> None:
    fixture = Fixture(name)
    with pytest.raises(AssertionError):
        fixture.check_outputs(replace(fixture.model, norm_epsilon=1e-5))


def test_exchanged_gate_and_up_are_seen_where_the_mlp_keeps_its_activation() -> None:
    kept, dropped = Fixture("cola_tiny_both_sigma"), Fixture("cola_tiny")
    kept.swap_gate_and_up()
    dropped.swap_gate_and_up()
    with pytest.raises(AssertionError):
        kept.check_outputs()
    dropped.check_outputs()


def test_fp64_agrees_with_fp32_to_fp32_precision() -> None:
    fixture = Fixture("cola_tiny")
    wide = {name: tensor.detach().double() for name, tensor in fixture.tensors.items()}
    logits = reference.reference_logits(fixture.model, fixture.lowrank, wide, fixture.expected["input_ids"])
    assert logits.dtype == torch.float64
    # The fixture's README states 1.1e-5 for its own distance.
    torch.testing.assert_close(logits.float(), fixture.expected["logits"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("activation", ["silu", "gelu", "identity", "relu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width_in", "rank", "width_out"), [(7, 3, 5), (16, 8, 4)])
def test_low_rank_pair_equals_a_sum_over_indices(
    activation: str, with_bias: bool, width_in: int, rank: int, width_out: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, width_in), (rank, width_in), (width_out, rank), (width_out,))
    x, a, b, bias = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    dy = torch.randn(2, 3, width_out, generator=generator, dtype=torch.float64)
    y = reference.low_rank_linear(x, a, b, bias if with_bias else None, activation)
    inputs = [x, a, b, *([bias] if with_bias else [])]
    found = torch.autograd.grad(y, inputs, dy)

    z = torch.einsum("sbi,ri->sbr", x.detach(), a.detach())
    sigma: Callable[[Tensor], Tensor] = {
        "silu": lambda z: z / (1 + torch.exp(-z)), "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
        "identity": lambda z: z, "relu": lambda z: z.clamp(min=0),
    }[activation]  # fmt: skip
    slope: Callable[[Tensor], Tensor] = {
        "silu": lambda z: (s := torch.sigmoid(z)) * (1 + z * (1 - s)),
        "gelu": lambda z: 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5,
        "identity": torch.ones_like, "relu": lambda z: (z > 0).double(),
    }[activation]  # fmt: skip
    h = sigma(z)
    expected_y = torch.einsum("sbr,or->sbo", h, b.detach()) + (bias.detach() if with_bias else 0)
    dz = torch.einsum("sbo,or->sbr", dy, b.detach()) * slope(z)
    expected = [
        torch.einsum("sbr,ri->sbi", dz, a.detach()), torch.einsum("sbr,sbi->ri", dz, x.detach()),
        torch.einsum("sbo,sbr->or", dy, h), dy.sum((0, 1)),
    ]  # fmt: skip
    torch.testing.assert_close(y, expected_y, atol=1e-12, rtol=0)
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_equals_torchs_own(groups: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 9, 6, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, groups, 9, 6, generator=generator, dtype=torch.float64) for _ in "kv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference.causal_attention(q, k, v), expected, atol=1e-12, rtol=0)


def test_rotation_turns_feature_pairs_half_a_head_apart() -> None:
    x = torch.randn(1, 1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cos, sin = reference.rotary_tables(5, 4, 100.0, x)
    turned = reference.rotate(x, cos, sin)
    for position in range(5):
        for pair, frequency in ((0, 1.0), (1, 0.1)):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            turn = torch.polar(torch.ones_like(angle), angle)
            expected = torch.complex(x[0, 0, position, pair], x[0, 0, position, pair + 2]) * turn
            found = torch.complex(turned[0, 0, position, pair], turned[0, 0, position, pair + 2])
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_norm_is_cast_back_before_the_weight() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    weight = (torch.rand(64, generator=torch.Generator().manual_seed(5)) + 0.5).bfloat16()
    normed = x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), normed.bfloat16() * weight)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mlp", ["keep", "drop"])
def test_dense_roles_biases_and_unequal_ranks(tied: bool, mlp: Literal["keep", "drop"]) -> None:
    """A pair with identity activation equals the dense model whose matrices are B A."""
    model = ModelConfig(num_layers=2, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, num_query_groups=2,
                        vocab_size=19, tie_embeddings=tied, attention_bias=True, mlp_bias=True)  # fmt: skip
    pairs = LowRankConfig(method="svd", rank=6, rank_overrides={"v": 3, "1.up": 9}, dense_roles=("k",),
                          mlp_activation=mlp)  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    parameters = list(canonical_parameters(model, pairs))
    tensors = {p.name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters}
    folded = {name: tensor for name, tensor in tensors.items() if "_proj." not in name or name.endswith("k.weight")}
    for name, a in tensors.items():
        if "_down_proj" in name:
            folded[name.replace("_down_proj", "")] = tensors[name.replace("_down_proj", "_up_proj")] @ a
        if "_up_proj" in name and name.endswith("bias"):
            folded[name.replace("_up_proj", "")] = a
    folded |= {name: tensor for name, tensor in tensors.items() if name.endswith("linear_qkv.k.bias")}
    dense = replace(pairs, method="dense")
    ids = torch.randint(0, 19, (2, 7), generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 1, 1]])
    loss, losses = reference.reference_loss(model, pairs, tensors, ids, loss_mask=mask)
    other, _ = reference.reference_loss(model, dense, folded, ids[:, :-1], ids[:, 1:], mask)
    torch.testing.assert_close(loss, other, atol=0, rtol=1e-12)
    torch.testing.assert_close(loss, losses[mask.bool()].mean(), atol=0, rtol=1e-12)


def test_foreign_tensors_are_refused() -> None:
    fixture = Fixture("cola_tiny")
    del fixture.tensors["output_layer.weight"]
    with pytest.raises(ValueError, match=r"output_layer\.weight"):
        fixture.check_outputs()
