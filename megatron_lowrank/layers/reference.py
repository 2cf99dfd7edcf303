"""The naive truth: the whole model on one device, from canonical tensors, in plain torch and any dtype.

Every fast, sharded, fused or recomputed path is compared with these functions, so nothing here is clever: no fused
call, no in-place operation, no hand-written backward. fp64 inputs give fp64 results throughout.

Shape suffixes: B batch, S sequence, H hidden, R rank, F ffn, N heads, D head dimension, V vocabulary.
Matrices are stored as in torch.nn.Linear: A [R, in], B [out, R], W [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_lowrank.config.activations import activation_by_name
from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.names import EMBEDDING, FINAL_NORM, OUTPUT, canonical_parameters, role_key
from megatron_lowrank.roles import Role


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, eq. 4).

    The statistic is taken in at least fp32, and the result is cast back *before* the multiplication by the weight,
    as LLaMA does; the other order rounds differently in bf16.
    """
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype) * weight


def rotary_tables(length: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [S, D] of m * base^(-2i/D) (RoFormer eq. 15), the D/2 angles repeated for the two halves."""
    wide = _wide(like.dtype)
    exponents = torch.arange(0, head_dim, 2, dtype=wide, device=like.device) / head_dim
    positions = torch.arange(length, dtype=wide, device=like.device)
    half = torch.outer(positions, base**-exponents)
    angles_SD = torch.cat((half, half), dim=-1)
    return angles_SD.cos().to(like.dtype), angles_SD.sin().to(like.dtype)


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary embedding in the half-rotation layout: feature i turns together with feature i + D/2 (RoFormer eq. 34)."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


def causal_attention(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017, eq. 1); fewer key/value heads serve several queries.

    Query head i reads key/value head i // (N / N_kv) (grouped-query attention, Ainslie et al. 2023).
    """
    repeats = q_BNSD.shape[1] // k_BNSD.shape[1]
    k_BNSD, v_BNSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BNSD, v_BNSD))
    scores_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2) / math.sqrt(q_BNSD.shape[-1])
    length = q_BNSD.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=q_BNSD.device).triu(1)
    weights = torch.softmax(scores_BNSS.masked_fill(future, float("-inf")).to(_wide(q_BNSD.dtype)), dim=-1)
    return weights.to(v_BNSD.dtype) @ v_BNSD


def low_rank_linear(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y = sigma(x A^T) B^T + bias (CoLA eq. 3; sigma = identity is the plain linear pair)."""
    y = activation_by_name(activation)(x @ a.T) @ b.T
    return y if bias is None else y + bias


def projection(lowrank: LowRankConfig, tensors: Mapping[str, Tensor], layer: int, role: Role, x: Tensor) -> Tensor:
    """One of the seven projections of a layer, low-rank or dense, from canonical tensors."""
    prefix = f"decoder.layers.{layer}."
    if lowrank.is_dense(layer, role):  # type: ignore[arg-type]
        y = x @ tensors[prefix + role_key(role, "dense")].T
        bias = tensors.get(prefix + role_key(role, "dense_bias"))
        return y if bias is None else y + bias
    a, b = tensors[prefix + role_key(role, "a")], tensors[prefix + role_key(role, "b")]
    return low_rank_linear(x, a, b, tensors.get(prefix + role_key(role, "bias")), lowrank.sigma)


def attention_block(
    model: ModelConfig, lowrank: LowRankConfig, tensors: Mapping[str, Tensor], layer: int, x_BSH: Tensor
) -> Tensor:
    """o(attention(rotary(q(x)), rotary(k(x)), v(x))); heads are consecutive blocks of D features."""
    batch, length, _ = x_BSH.shape
    q, k, v = (
        projection(lowrank, tensors, layer, role, x_BSH).view(batch, length, -1, model.head_dim).transpose(1, 2)
        for role in ("q", "k", "v")
    )
    cos, sin = rotary_tables(length, model.head_dim, model.rotary_base, x_BSH)
    context_BNSD = causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    return projection(lowrank, tensors, layer, "o", context_BNSD.transpose(1, 2).reshape(batch, length, -1))


def mlp_block(lowrank: LowRankConfig, tensors: Mapping[str, Tensor], layer: int, x_BSH: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020, eq. 6), or without that SiLU when the latents have theirs.

    The CoLA release drops the MLP's own SiLU by default and keeps it for its two smallest models.
    """
    gate_BSF = projection(lowrank, tensors, layer, "gate", x_BSH)
    up_BSF = projection(lowrank, tensors, layer, "up", x_BSH)
    gate_BSF = silu(gate_BSF) if lowrank.mlp == "keep" else gate_BSF
    return projection(lowrank, tensors, layer, "down", gate_BSF * up_BSF)


def decoder_layer(
    model: ModelConfig, lowrank: LowRankConfig, tensors: Mapping[str, Tensor], layer: int, x_BSH: Tensor
) -> Tensor:
    """Pre-norm decoder layer (LLaMA): x + attention(norm(x)), then x + mlp(norm(x))."""
    prefix = f"decoder.layers.{layer}."
    normed = rms_norm(x_BSH, tensors[prefix + "input_layernorm.weight"], model.norm_epsilon)
    x_BSH = x_BSH + attention_block(model, lowrank, tensors, layer, normed)
    normed = rms_norm(x_BSH, tensors[prefix + "pre_mlp_layernorm.weight"], model.norm_epsilon)
    return x_BSH + mlp_block(lowrank, tensors, layer, normed)


def reference_logits(
    model: ModelConfig, lowrank: LowRankConfig, tensors: Mapping[str, Tensor], input_ids: Tensor
) -> Tensor:
    """Logits [B, S, V] of token ids [B, S].

    Args:
        model: shape of the model.
        lowrank: method, ranks and activations.
        tensors: canonical name -> full tensor, exactly the names of `canonical_parameters`. They may require
            gradients; their dtype is the dtype of the computation.
        input_ids: token ids [B, S], every row starting at position 0.

    Raises:
        ValueError: `tensors` does not hold exactly the parameters of this model, or one has another shape.
    """
    expected = {parameter.name: parameter.shape for parameter in canonical_parameters(model, lowrank)}
    if expected != (found := {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"tensors: found names or shapes unlike the model's, e.g. {', '.join(differing[:5])}")
    x_BSH = tensors[EMBEDDING][input_ids]
    for layer in range(model.num_layers):
        x_BSH = decoder_layer(model, lowrank, tensors, layer, x_BSH)
    x_BSH = rms_norm(x_BSH, tensors[FINAL_NORM], model.norm_epsilon)
    return x_BSH @ tensors[EMBEDDING if model.tie_embeddings else OUTPUT].T


def token_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross entropy [B, S] of each position, in at least fp32: log sum exp(logits) - logits[label]."""
    wide = logits_BSV.to(_wide(logits_BSV.dtype))
    return torch.logsumexp(wide, dim=-1) - wide.gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)


def reference_loss(
    model: ModelConfig,
    lowrank: LowRankConfig,
    tensors: Mapping[str, Tensor],
    input_ids: Tensor,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mean loss, token losses) of a batch; the mean runs over tokens, never over rows.

    Args:
        model: shape of the model.
        lowrank: method, ranks and activations.
        tensors: as in `reference_logits`.
        input_ids: token ids [B, S].
        labels: the token to be predicted at each position [B, S]. None: the ids shifted by one, and then the token
            losses (and the mask) are [B, S - 1].
        loss_mask: weight of each token loss; the mean divides by its sum. None: every token counts once.
    """
    logits = reference_logits(model, lowrank, tensors, input_ids)
    if labels is None:
        logits, labels = logits[:, :-1], input_ids[:, 1:]
    losses = token_losses(logits, labels)
    if loss_mask is None:
        return losses.mean(), losses
    weights = loss_mask.to(losses.dtype)
    return (losses * weights).sum() / weights.sum(), losses


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
