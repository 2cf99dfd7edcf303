"""Cross entropy in fp32 over the true vocabulary, as a sum and a token count."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

LossAndCount = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., V_pad/t] of this tensor-parallel rank -> the same with -inf in the columns of vocabulary padding.

    The number of padding rows depends on the tensor-parallel size; left in the softmax, the loss would too.

    Args:
        logits: Vocabulary-parallel logits.
        vocab_size: True vocabulary V.
    """
    width = logits.shape[-1]
    true_columns = vocab_size - parallel_state.get_tensor_model_parallel_rank() * width
    if true_columns >= width:
        return logits
    columns = torch.arange(width, device=logits.device)
    return logits.masked_fill(columns >= true_columns, float("-inf"))


def token_losses(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Loss of every token, fp32 [B, S], equal on all tensor-parallel ranks.

    Args:
        logits: [B, S, V_pad/t], vocabulary-parallel.
        labels: [B, S].
        vocab_size: True vocabulary V.
    """
    return vocab_parallel_cross_entropy(mask_padding(logits.float(), vocab_size), labels)  # type: ignore[no-any-return]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int) -> LossAndCount:
    """What megatron-core's schedules expect with `calculate_per_token_loss`: (sum, tokens, report).

    The gradient is then that of sum(loss) / sum(tokens) over all micro-batches and ranks, however uneven they are.

    Args:
        logits: [B, S, V_pad/t], vocabulary-parallel.
        labels: [B, S].
        loss_mask: [B, S], 1 where a token counts.
        vocab_size: True vocabulary V.
    """
    losses = token_losses(logits, labels, vocab_size) * loss_mask.float()
    # megatron-core adds int32 counts; a micro-batch holds far fewer than 2^31 tokens.
    tokens = loss_mask.sum().to(torch.int32)
    return losses.sum(), tokens, {"loss_sum": losses.detach().double().sum(), "tokens": tokens.double()}
