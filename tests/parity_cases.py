"""What the parity tests share: layouts, weights that hide nothing, and the naive reference's numbers in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lowrank.config import LowRankConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_lowrank.layers.init import draw
from megatron_lowrank.layers.reference import reference_logits, reference_loss
from megatron_lowrank.names import canonical_parameters
from megatron_lowrank.testing.compare import assert_close
from megatron_lowrank.testing.whole_model import Outcome, run_whole_model

PLACEMENTS = ("vanilla", "vanilla_replicated", "btp", "btp_sp")
LENGTH = 24
MODEL = ModelConfig(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=131,
                    pad_token_id=None)  # fmt: skip

Batch = tuple[Tensor, Tensor, Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """A model in fp64 and what the naive reference says about it."""

    model: ModelConfig
    lowrank: LowRankConfig
    tensors: Tensors
    batch: Batch
    logits: Tensor
    loss: Tensor
    gradients: Tensors


def with_parallel(
    run: RunConfig, tp: int = 1, pp: int = 1, vpp: int | None = None, *, recompute: Any = "none",
    store: Any = "gathered", **parallel: Any,
) -> RunConfig:  # fmt: skip
    """The run at other parallel sizes and options; an odd layer goes to the first stage."""
    first = -(-run.model.num_layers // pp) if pp > 1 and run.model.num_layers % pp else None
    return replace(
        run,
        parallel=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            virtual_pipeline_size=vpp,
            num_layers_in_first_pipeline_stage=first,
            **parallel,
        ),
        train=replace(run.train, recompute=recompute, latent_store=store),
    )


def next_token_batch(ids: Tensor) -> Batch:
    """Tokens, labels and mask whose last position does not count."""
    labels = torch.roll(ids, -1, 1)
    mask = torch.ones(ids.shape)
    mask[:, -1] = 0
    return ids, labels, mask


def telling_weights(model: ModelConfig, lowrank: LowRankConfig) -> Tensors:
    """fp64 weights by which a misplaced gain, a bias that counts twice and an early sigma show."""
    tensors = {}
    for parameter in canonical_parameters(model, lowrank):
        tensor = draw(parameter, 3).double()
        if parameter.kind == "norm":
            tensor *= torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        elif parameter.kind in ("bias", "dense_bias"):  # drawn as zeros
            tensor += torch.linspace(-0.3, 0.5, tensor.numel(), dtype=torch.float64)
        elif parameter.kind == "a":  # bottlenecks at which no sigma is nearly linear
            tensor *= 2
        tensors[parameter.name] = tensor
    return tensors


_KNOWN: dict[str, Reference] = {}


def reference_of(
    model: ModelConfig, lowrank: LowRankConfig, change: Callable[[Tensors], None] | None = None
) -> Reference:
    """The naive reference over four rows with an uneven mask; computed once for each model.

    Args:
        model: Shape.
        lowrank: Method, ranks and activations.
        change: Changes the weights in place.
    """
    key = repr((model, lowrank, change))
    if key not in _KNOWN:
        tensors = telling_weights(model, lowrank)
        if change is not None:
            change(tensors)
        ids = torch.randint(0, model.vocab_size, (4, LENGTH), generator=torch.Generator().manual_seed(5))
        tokens, labels, mask = next_token_batch(ids)
        # The token count by which megatron-core divides travels as fp32: 1e-12 holds only for exact counts.
        mask[0, :7] = 0
        mask[3, 2:] = 0
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        loss, _ = reference_loss(model, lowrank, leaves, tokens, labels, mask)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert set(gradients) == set(tensors)
        logits = reference_logits(model, lowrank, tensors, tokens)
        _KNOWN[key] = Reference(model, lowrank, tensors, (tokens, labels, mask), logits, loss.detach(), gradients)
    return _KNOWN[key]


def run_of(reference: Reference, *sizes: Any, **options: Any) -> RunConfig:
    """The run of a reference's model; sizes and options as in `with_parallel`."""
    run = RunConfig(model=reference.model, lowrank=reference.lowrank, train=TrainConfig(sequence_length=LENGTH))
    return with_parallel(run, *sizes, **options)


def assert_equals_reference(reference: Reference, *sizes: Any, replicas: int = 1, **options: Any) -> Outcome:
    """Logits, loss and every gradient within 1e-12; a wrong reduction, scale or shard shows.

    Args:
        reference: What to expect.
        *sizes: TP, PP, VPP.
        replicas: Data-parallel size; every replica has rows of its own.
        **options: As in `with_parallel`.
    """
    run = run_of(reference, *sizes, **options)
    world = run.parallel.tensor_parallel_size * run.parallel.pipeline_parallel_size * replicas
    outcome = run_whole_model(run, reference.tensors, *reference.batch, world_size=world)
    assert_close(outcome.logits, reference.logits, "logits")
    assert_close(outcome.loss, reference.loss, "loss")
    assert set(outcome.gradients) == set(reference.gradients)
    for name, want in reference.gradients.items():
        assert_close(outcome.gradients[name], want, name)
    return outcome
