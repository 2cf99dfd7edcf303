"""Config + process groups -> the GPTModel chunks of this pipeline stage, with their initial weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import nn

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig
from megatron_lowrank.config.parallel import AUTO
from megatron_lowrank.layers.canonical import Part
from megatron_lowrank.layers.init import initialize, set_part
from megatron_lowrank.names import EMBEDDING, FINAL_NORM, OUTPUT
from megatron_lowrank.specs import block_spec, transformer_config


def build_model(run: RunConfig) -> list[GPTModel]:
    """The model chunks of this rank: one, or `virtual_pipeline_size` of them; initialised, not wrapped for DDP.

    `parallel_state` has to be initialised with the sizes of `run.parallel`.
    """
    if run.placement == AUTO:
        raise ValueError("parallel.placement: found 'auto', allowed in a model: a row; see estimate.resolve_placement")
    compat.silence_known_notices()
    config = transformer_config(run)
    chunks: list[GPTModel] = []
    for vp_stage in range(run.parallel.virtual_pipeline_size or 1):
        stage = vp_stage if run.parallel.virtual_pipeline_size else None
        chunks.append(_build_chunk(run, config, stage))
    tp_rank, tp_size = parallel_state.get_tensor_model_parallel_rank(), run.parallel.tensor_parallel_size
    initialize(all_parts(chunks), run.model, run.lowrank, run.train.seed, tp_rank, tp_size)
    return chunks


def _build_chunk(run: RunConfig, config: Any, vp_stage: int | None) -> GPTModel:
    pp_rank, stages = parallel_state.get_pipeline_model_parallel_rank(), run.parallel.pipeline_parallel_size
    layers = run.parallel.stage_layers(run.model.num_layers, pp_rank, vp_stage)
    spec = block_spec(run, pp_rank, vp_stage, parallel_state.get_tensor_model_parallel_group())
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=run.model.padded_vocab_size(run.parallel.tensor_parallel_size),
        max_sequence_length=run.model.max_position_embeddings,
        pre_process=layers.start == 0,
        post_process=layers.stop == run.model.num_layers,
        parallel_output=True,
        share_embeddings_and_output_weights=run.model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=run.model.rotary_base,
        vp_stage=vp_stage,
    )
    built = [layer.layer_index for layer in model.decoder.layers]
    assert built == list(layers), f"stage {pp_rank} of {stages} built layers {built}, its specs are of {list(layers)}"
    return model


def model_parts(chunk: nn.Module) -> Iterator[Part]:
    """Every part of a GPTModel chunk (not wrapped), with canonical names and global layer indices."""
    model: Any = chunk
    if model.pre_process:
        weight = model.embedding.word_embeddings.weight
        yield Part(key=EMBEDDING, parameter=weight, axis=0, vocabulary=True)
    for layer in model.decoder.layers:
        yield from layer.canonical_parts()
    if model.post_process:
        yield Part(key=FINAL_NORM, parameter=model.decoder.final_layernorm.weight, axis=None)
        tied = model.share_embeddings_and_output_weights
        if not (tied and model.pre_process):
            # With tied embeddings the last stage of a pipeline holds its own copy of the embedding.
            key = EMBEDDING if tied else OUTPUT
            yield Part(key=key, parameter=model.output_layer.weight, axis=0, vocabulary=True)


def all_parts(chunks: Iterable[nn.Module]) -> Iterator[Part]:
    """Parts of all chunks of this rank."""
    for chunk in chunks:
        yield from model_parts(chunk)


def load_full_tensors(chunks: Iterable[nn.Module], tensors: dict[str, torch.Tensor]) -> None:
    """Copy this rank's blocks of full canonical tensors into the model.

    Raises:
        ValueError: a tensor that the model needs is missing, or has another shape.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for part in all_parts(chunks):
        if part.key not in tensors:
            raise ValueError(f"weights: found no tensor {part.key}, which the model needs")
        set_part(part, tensors[part.key], rank, size)


def describe_slots(chunk: nn.Module) -> str:
    """One line per distinct filling of the slots: which layers, and the class in each slot."""
    model: Any = chunk
    rows: dict[str, list[int]] = {}
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        slots = {
            "attention": attention, "linear_qkv": attention.linear_qkv,
            "core_attention": attention.core_attention, "linear_proj": attention.linear_proj, "mlp": mlp,
            "linear_fc1": mlp.linear_fc1, "linear_fc2": mlp.linear_fc2,
        }  # fmt: skip
        text = "\n".join(f"  {slot:<15}{_describe(module)}" for slot, module in slots.items())
        rows.setdefault(text, []).append(layer.layer_index)
    return "\n".join(f"layers {_spans(layers)}:\n{text}" for text, layers in rows.items())


def _describe(module: Any) -> str:
    name = type(module).__name__
    if not hasattr(module, "canonical_parts"):
        return name
    details = [f"norm {type(module.norm).__name__}"] if hasattr(module, "norm") else []
    if module.dense is not None:
        details.append(f"{','.join(module.dense.roles)}: dense {type(module.dense.linear).__name__}")
    if module.up is not None:
        plan = module.plan
        ranks = ", ".join(f"{role} {plan.rank_of(role)}" for role in module.up.roles)
        details.append(f"{plan.placement} {plan.lowrank.sigma}, ranks {ranks}, recompute {plan.recompute}")
    return f"{name} ({'; '.join(details)})"


def _spans(layers: list[int]) -> str:
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
