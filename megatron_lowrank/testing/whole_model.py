"""One batch through the real model on real ranks: logits, token losses and every gradient, gathered to full tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_lowrank.config import RunConfig
from megatron_lowrank.model import all_parts, build_model, load_full_tensors
from megatron_lowrank.testing.compare import assert_equal
from megatron_lowrank.testing.ranks import initialize, run_ranks


@dataclass
class Outcome:
    """What one batch gave; full tensors."""

    logits: Tensor
    """[B, S, V]"""
    token_losses: Tensor
    """[B, S]"""
    loss: Tensor
    """Mean over the tokens of the mask."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Canonical name -> gradient of `loss`, vocabulary padding stripped."""


def run_whole_model(
    run: RunConfig,
    tensors: dict[str, Tensor] | None,
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    *,
    world_size: int | None = None,
    timeout: float = 120,
) -> Outcome:
    """Forward and backward of one batch (one row per micro-batch) on forked ranks.

    Args:
        run: Its parallel sizes decide the ranks; `train.precision` fp32 with fp64 `tensors` runs in fp64.
        tensors: Canonical name -> full tensor; None: the initial weights.
        tokens: [B, S].
        labels: [B, S].
        loss_mask: [B, S], zero where a position does not count.
        world_size: Ranks; default: one model replica. Rows are dealt out to data-parallel replicas in turn.
        timeout: Seconds.
    """
    p = run.parallel
    size = world_size or p.tensor_parallel_size * p.pipeline_parallel_size
    ranks = run_ranks(size, _on_rank, run, tensors, tokens, labels, loss_mask, timeout=timeout)
    return _merge(ranks, run.model.vocab_size)


def _on_rank(
    run: RunConfig, tensors: dict[str, Tensor] | None, tokens: Tensor, labels: Tensor, loss_mask: Tensor
) -> dict[str, Any]:
    p = run.parallel
    initialize(p.tensor_parallel_size, p.pipeline_parallel_size, p.virtual_pipeline_size)
    chunks = build_model(run)
    if tensors is not None and next(iter(tensors.values())).dtype == torch.float64:
        for chunk in chunks:
            _to_double(chunk, run)
    if tensors is not None:
        load_full_tensors(chunks, tensors)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = [
        DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), chunk)
        for chunk in chunks
    ]
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = range(replica, tokens.shape[0], replicas)
    seen: dict[int, dict[str, Tensor]] = {}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        row = next(iterator)
        logits = chunk(tokens[row : row + 1], torch.arange(tokens.shape[1])[None], None)

        def loss_of(output: Tensor) -> Any:
            # Every rank sees all columns and computes the same loss, so the gather's backward is a slice.
            full = gather_from_tensor_model_parallel_region(output)[..., : run.model.vocab_size]
            losses = torch.logsumexp(full, -1) - full.gather(-1, labels[row : row + 1, :, None]).squeeze(-1)
            seen[row] = {"logits": full.detach()[0].clone(), "token_losses": losses.detach()[0].clone()}
            mask = loss_mask[row : row + 1].to(losses.dtype)
            return (losses * mask).sum(), mask.sum().to(torch.int), {}

        return logits, loss_of

    for chunk in ddp:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(rows) for _ in ddp] if len(ddp) > 1 else iter(rows),
        model=ddp if len(ddp) > 1 else ddp[0], num_microbatches=len(rows), seq_length=tokens.shape[1],
        micro_batch_size=1,
    )  # fmt: skip
    gradients = {
        part.key: (part.axis, part.gradient_block(part.parameter.main_grad).clone())  # type: ignore[attr-defined]
        for part in all_parts(chunks)
    }
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(), "gradients": gradients, "rows": seen,
        "mask": loss_mask,
    }  # fmt: skip


def _to_double(chunk: Any, run: RunConfig) -> None:
    chunk.double()
    for module in chunk.modules():
        if hasattr(module, "config"):
            module.config.pipeline_dtype = module.config.params_dtype = torch.float64
    if hasattr(chunk, "rotary_pos_emb"):
        # Megatron-core takes the angles in the dtype of this plain attribute.
        exponents = torch.arange(0, run.model.head_dim, 2, dtype=torch.float64) / run.model.head_dim
        chunk.rotary_pos_emb.inv_freq = run.model.rotary_base**-exponents


def _merge(ranks: list[dict[str, Any]], vocab_size: int) -> Outcome:
    rows: dict[int, dict[str, Tensor]] = {}
    for rank in ranks:
        rows.update(rank["rows"])
    blocks: dict[str, dict[int, Tensor]] = {}
    axes: dict[str, int | None] = {}
    for rank in ranks:
        for key, (axis, block) in rank["gradients"].items():
            axes[key] = axis
            known = blocks.setdefault(key, {})
            if rank["tp"] in known:  # another replica, or the other copy of a tied embedding
                assert_equal(block, known[rank["tp"]], f"replicas of the gradient of {key}")
            known[rank["tp"]] = block
    gradients: dict[str, Tensor] = {}
    for key, by_rank in blocks.items():
        ordered = [by_rank[rank] for rank in sorted(by_rank)]
        axis = axes[key]
        if axis is None:
            for other in ordered[1:]:
                assert_equal(other, ordered[0], f"tensor-parallel replicas of the gradient of {key}")
            gradients[key] = ordered[0]
        else:
            gradients[key] = torch.cat(ordered, dim=axis)
        if "word_embeddings" in key or "output_layer" in key:
            gradients[key] = gradients[key][:vocab_size]
    order = sorted(rows)
    losses = torch.stack([rows[row]["token_losses"] for row in order])
    mask = ranks[0]["mask"].to(losses.dtype)
    return Outcome(
        logits=torch.stack([rows[row]["logits"] for row in order]),
        token_losses=losses,
        loss=(losses * mask).sum() / mask.sum(),
        gradients=gradients,
    )
