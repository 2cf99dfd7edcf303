"""Recompute between bottlenecks: what is kept, what is replayed, and that neither changes a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_lowrank.layers.recompute import Segment
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.measure import saved_elements
from megatron_lowrank.testing.ranks import initialize, run_ranks

N, B, H, R = 16, 2, 64, 16
F = 5 * H // 2
HEADS = 4
MODEL = ModelConfig(num_layers=1, hidden_size=H, ffn_hidden_size=F, num_attention_heads=HEADS, vocab_size=128,
                    pad_token_id=None)  # fmt: skip


def _run(recompute: Any, **lowrank: Any) -> RunConfig:
    return RunConfig(model=MODEL, lowrank=LowRankConfig(rank=R, **lowrank),
                     train=TrainConfig(sequence_length=N, micro_batch_size=B, recompute=recompute))  # fmt: skip


def _layer_costs(run: RunConfig) -> Any:
    from megatron_lowrank.testing.layer_costs import layer_costs

    initialize(run.parallel.tensor_parallel_size)
    return layer_costs(run)


def test_published_figures_of_a_layer() -> None:
    """Kept: 2nd + 7nr; replayed: 16ndr + 4n^2 d at F = 2.5 H, where the public reference replays 37ndr."""
    costs = {policy: run_ranks(1, _layer_costs, _run(policy))[0] for policy in
             ("none", "latent", "latent_keep_attention", "full")}  # fmt: skip
    tokens, attention = N * B, 4 * N * N * H * B
    assert costs["latent"].retained == tokens * (2 * H + 7 * R)
    assert costs["latent_keep_attention"].retained == tokens * (3 * H + 7 * R + HEADS)
    assert costs["full"].retained == tokens * H
    replayed = {policy: cost.backward_flops - costs["none"].backward_flops for policy, cost in costs.items()}
    assert replayed["latent"] == tokens * 16 * H * R + attention
    assert replayed["latent_keep_attention"] == tokens * 16 * H * R
    assert replayed["full"] == tokens * 37 * H * R + attention
    assert len({cost.forward_flops for cost in costs.values()}) == 1


@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("mlp", ["keep", "drop"])
def test_saved_tensor_hooks_see_the_same(activation: str, mlp: Any) -> None:
    def hooked(run: RunConfig) -> int:
        from megatron_lowrank.model import build_model

        initialize()
        model: Any = build_model(run)[0]
        angles, x = model.rotary_pos_emb(N), torch.randn(N, B, H, requires_grad=True)
        layer, parameters = model.decoder.layers[0], list(model.parameters())
        return saved_elements(lambda: layer(x, attention_mask=None, rotary_pos_emb=angles)[0], parameters)

    run = _run("latent", latent_activation=activation, mlp_activation=mlp)
    assert run_ranks(1, hooked, run) == [N * B * (2 * H + 7 * R)]


def _gradients(active: bool, hidden: Tensor, weight: Tensor, second: Tensor) -> tuple[int, list[Tensor]]:
    """A segment with a parameter of its own, two consumers, one of which sees a transposed view."""
    calls = []

    def rebuilt(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        return functional.silu(x @ weight), x  # the second output is the input itself

    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, second)]
    weight.grad = None
    segment = Segment(active)
    first, same = segment.run(rebuilt, leaves[0] * 2)
    with segment.not_kept():
        out = (first @ leaves[1]).sum() + (first.T * leaves[1]).square().sum() + (same * same).sum()
    del first, same
    out.backward()
    assert calls == ([False, True] if active else [True])
    return len(calls), [*(leaf.grad for leaf in leaves), weight.grad]  # type: ignore[list-item]


def test_a_segment_runs_twice_and_changes_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, second, weight = (torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    weight.requires_grad_()
    (once, expected), (twice, found) = (_gradients(active, hidden, weight, second) for active in (False, True))
    assert (once, twice) == (1, 2)
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b, "gradient")


def test_outputs_of_a_segment_are_freed() -> None:
    import weakref

    weight = torch.randn(8, 8, requires_grad=True)
    segment = Segment(True)
    (hidden,) = segment.run(lambda x: (x.sigmoid(),), torch.randn(4, 8, requires_grad=True))
    storage = weakref.ref(hidden.untyped_storage())
    with segment.not_kept():
        out = hidden @ weight
    del hidden
    assert storage() is None
    out.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_without_gradients_a_segment_does_nothing() -> None:
    with torch.no_grad():
        segment = Segment(True)
        (out,) = segment.run(lambda x: (x * 2,), torch.ones(2, requires_grad=True))
    assert out.grad_fn is None and not segment._outputs


def test_inputs_without_gradients_leave_it_to_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    segment = Segment(True)
    (out,) = segment.run(lambda x: (x * weight,), torch.ones(2, 3))
    with segment.not_kept():
        out.square().sum().backward()
    assert_equal(weight.grad, torch.full((3,), 4.0), "gradient")  # type: ignore[arg-type]


def test_a_replay_that_lays_its_output_out_otherwise_is_an_error() -> None:
    """A note is about the storage of the first run: read in another one, it would give other numbers."""

    def fickle(x: Tensor) -> tuple[Tensor]:
        y = x * 2
        return (y if torch.is_grad_enabled() else y.t().contiguous().t(),)

    segment, weight = Segment(True), torch.ones(2, 2, requires_grad=True)
    (out,) = segment.run(fickle, torch.arange(4.0).view(2, 2).requires_grad_())
    with segment.not_kept():
        product = out * weight
    with pytest.raises(RuntimeError, match="recompute: a replayed segment gives"):
        product.sum().backward()


def test_an_output_that_needs_no_gradient_is_no_matter() -> None:
    x, frozen = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    segment = Segment(True)
    first, second = segment.run(lambda a, b: (a * 2, b * 2), x, frozen)
    with segment.not_kept():
        (first * second).sum().backward()
    assert_equal(x.grad, torch.full((2,), 12.0), "gradient")  # type: ignore[arg-type]


def test_layers_of_every_kind_replay_what_they_can() -> None:
    """A dense layer keeps everything, a low-rank one beside it keeps bottlenecks; no policy for a dense model."""
    mixed = _run("latent", dense_layers=(0,))
    model = replace(MODEL, num_layers=2)
    with pytest.raises(ValueError, match="train.recompute: found 'latent', allowed with lowrank.method dense"):
        RunConfig(model=model, lowrank=LowRankConfig(method="dense"), train=TrainConfig(recompute="latent"))
    with pytest.raises(ValueError, match="train.recompute: found 'some', allowed: none, latent"):
        TrainConfig(recompute="some")  # type: ignore[arg-type]

    def kept(run: RunConfig) -> list[int]:
        from megatron_lowrank.model import build_model

        initialize()
        model: Any = build_model(run)[0]
        angles, x = model.rotary_pos_emb(N), torch.randn(N, B, H, requires_grad=True)
        parameters = list(model.parameters())
        return [
            saved_elements(lambda layer=layer: layer(x, attention_mask=None, rotary_pos_emb=angles)[0], parameters)  # type: ignore[misc]
            for layer in model.decoder.layers
        ]

    dense, low_rank = run_ranks(1, kept, replace(mixed, model=model))[0]
    assert low_rank == N * B * (2 * H + 7 * R) < dense


@pytest.mark.parametrize("placement", ["vanilla", "vanilla_replicated", "btp", "btp_sp"])
def test_evaluation_keeps_nothing(placement: str) -> None:
    def evaluated(run: RunConfig) -> bool:
        from megatron_lowrank.model import build_model

        initialize(2)
        model: Any = build_model(run)[0]
        tokens = torch.arange(N)[None]
        trained = model(tokens, tokens, None)
        with torch.no_grad():
            evaluated = model(tokens, tokens, None)
        assert_equal(evaluated, trained.detach(), "logits")
        return evaluated.grad_fn is None

    run = replace(_run("latent"), parallel=ParallelConfig(tensor_parallel_size=2, placement=placement))
    assert run_ranks(2, evaluated, run) == [True, True]
