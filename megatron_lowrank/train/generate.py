"""Sampling from a model by full forward passes, and loading one for it from any training checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import nn

from megatron_lowrank.checkpoint import load_checkpoint, read_run_config
from megatron_lowrank.config import ParallelConfig, RunConfig
from megatron_lowrank.data.tokenizers import Tokenizer, load_tokenizer
from megatron_lowrank.layers.canonical import current_device
from megatron_lowrank.model import build_model


def single_process(run: RunConfig) -> RunConfig:
    """The same model on one rank, whatever the layout that trained it."""
    return replace(run, parallel=ParallelConfig())


def load_for_sampling(path: str | Path) -> tuple[RunConfig, list[nn.Module]]:
    """Config and model of a checkpoint (or of the latest in a folder), for a world of one.

    Raises:
        OSError: there is no checkpoint.
        ValueError: it is damaged or cannot be read by this version.
    """
    run = single_process(read_run_config(path))
    models: list[nn.Module] = list(build_model(run))
    load_checkpoint(path, run, models, None, None, weights_only=True)
    return run, models


def recorded_tokenizer(run: RunConfig, path: str | None = None) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Args:
        run: From a checkpoint.
        path: Where its file is now, if it has moved.

    Raises:
        ValueError: the file is missing.
    """
    if path is None and run.data.tokenizer_path is not None and not os.path.exists(run.data.tokenizer_path):
        raise ValueError(f"tokenizer: {run.data.tokenizer_path} is not there any more; name it with --tokenizer-path")
    return load_tokenizer(run.data.tokenizer, path or run.data.tokenizer_path, run.data.eod_token)


@torch.no_grad()
def sample(
    chunks: Sequence[nn.Module], run: RunConfig, prompt: Sequence[int], tokens: int, *, temperature: float = 1.0,
    top_k: int | None = None, seed: int = 0, stop: int | None = None,
) -> list[int]:  # fmt: skip
    """Continues a prompt; every tensor-parallel rank returns the same ids.

    There is no cache: each token costs a forward pass over all before it, cut to `max_position_embeddings`.

    Args:
        chunks: The model, whole (pipeline size 1); wrapped for DDP or not.
        run: Its config.
        prompt: Ids, at least one.
        tokens: How many to add.
        temperature: 0 takes the most likely token.
        top_k: Draw among the k most likely only.
        seed: Of the draws.
        stop: Id that ends the text early; it is not returned.

    Returns:
        The new ids.

    Raises:
        ValueError: a number out of range, or a pipeline.
    """
    limit, vocab = run.model.max_position_embeddings, run.model.vocab_size
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise ValueError("sample: found a pipeline, allowed: parallel.pipeline_parallel_size 1")
    if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(f"prompt: found {len(prompt)} ids, allowed: at least one, all of them below {vocab}")
    if len(prompt) > limit:
        raise ValueError(
            f"prompt: found {len(prompt)} tokens, allowed: at most {limit}, model.max_position_embeddings of the run"
        )
    if tokens < 0 or not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ValueError(
            f"sample: found {tokens} tokens, temperature {temperature}, top_k {top_k}; allowed: 0 or more, 0 or more, "
            "1 or more"
        )
    # On the CPU, so that GPUs and tensor-parallel ranks draw alike.
    generator = torch.Generator("cpu").manual_seed(seed)
    ids, added = list(prompt), []
    for _ in range(tokens):
        logits = last_logits(chunks[0], ids[-limit:], run)
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            if top_k is not None and top_k < vocab:
                logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
            chosen = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        if chosen == stop:
            break
        ids.append(chosen)
        added.append(chosen)
    return added


def last_logits(model: Any, ids: Sequence[int], run: RunConfig) -> torch.Tensor:
    """Logits [V] behind the last id, fp32 on the CPU, of the whole vocabulary without padding."""
    t = run.parallel.tensor_parallel_size
    # Sequence parallelism cuts the length into t. What is added on the right is behind every id, so causality hides it.
    padded = -(-len(ids) // t) * t
    tokens = torch.zeros(1, padded, dtype=torch.int64, device=current_device())
    tokens[0, : len(ids)] = torch.tensor(ids)
    logits = model(tokens, torch.arange(padded, device=tokens.device)[None], None)
    last = gather_from_tensor_model_parallel_region(logits[0, len(ids) - 1 :][:1].contiguous())
    return last[0, : run.model.vocab_size].float().cpu()  # type: ignore[no-any-return]
