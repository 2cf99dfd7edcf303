"""Config -> megatron-core's TransformerConfig and layer specs, for the local backend and Transformer Engine.

The spec is written once; a `Backend` names the class of every leaf. Each layer has its own spec object, because ranks,
dense layers and layouts differ by layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch.nn import functional

from megatron_lowrank import compat
from megatron_lowrank.config import RunConfig
from megatron_lowrank.layers.attention import CausalAttention, LowRankSelfAttention
from megatron_lowrank.layers.factors import Backend, LayerPlan, keep_weight
from megatron_lowrank.layers.layer import LowRankTransformerLayer
from megatron_lowrank.layers.linear import DownGroup, GateUpGroup, OutGroup, QKVGroup
from megatron_lowrank.layers.mlp import LowRankMLP
from megatron_lowrank.layers.norm import RMSNorm
from megatron_lowrank.placement import conversion


def local_backend() -> Backend:
    """Torch's matrix products and attention, our RMSNorm, megatron-core's own dense linears."""
    return Backend(
        factor=None, column_linear=ColumnParallelLinear, row_linear=RowParallelLinear,
        norm=RMSNorm, core_attention=CausalAttention,
    )  # fmt: skip


def transformer_engine_backend() -> Backend:
    """Transformer Engine's leaves (GPU only).

    Raises:
        ImportError: Transformer Engine is absent or half installed.
    """
    compat.require("transformer_engine")
    from megatron.core.extensions import transformer_engine as te

    class TEFactor(te.TELinear):  # type: ignore[misc,name-defined]
        """One factor on this rank's local shape; the placement table issues every collective, TE none."""

        def __init__(self, in_features: int, out_features: int, *, config: TransformerConfig, name: str) -> None:
            super().__init__(
                in_features, out_features, parallel_mode=None, config=config, init_method=keep_weight,
                bias=False, skip_bias_add=False, skip_weight_param_allocation=False, tp_comm_buffer_name=None,
                is_expert=False,
            )  # fmt: skip
            # TE marks every weight as sharded; the group marks it by the placement table.
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                if hasattr(self.weight, attribute):
                    delattr(self.weight, attribute)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, _ = super().forward(x)
            return out  # type: ignore[no-any-return]

    return Backend(
        factor=TEFactor, column_linear=te.TEColumnParallelLinear,
        row_linear=te.TERowParallelLinear, norm=te.TENorm, core_attention=te.TEDotProductAttention,
    )  # fmt: skip


BACKENDS = {"local": local_backend, "transformer_engine": transformer_engine_backend}


_WHOLE_LAYERS: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
}  # fmt: skip


def transformer_config(run: RunConfig) -> TransformerConfig:
    """The TransformerConfig of a run. Initial weights are ours, so its init methods are never used."""
    m, p = run.model, run.parallel
    bf16 = run.train.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    # With two stages the interleaved schedule sends two messages to one peer in a batch, which gloo mispairs.
    batch_p2p = not (p.virtual_pipeline_size and dist.is_initialized() and dist.get_backend() == "gloo")
    return TransformerConfig(
        # shape
        num_layers=m.num_layers, hidden_size=m.hidden_size, ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads, num_query_groups=m.query_groups, kv_channels=m.head_dim,
        normalization="RMSNorm", layernorm_epsilon=m.norm_epsilon, gated_linear_unit=True,
        activation_func=functional.silu, add_bias_linear=False, add_qkv_bias=False,
        hidden_dropout=0.0, attention_dropout=0.0, rotary_interleaved=False,
        # cut
        tensor_model_parallel_size=p.tensor_parallel_size, pipeline_model_parallel_size=p.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_size,
        num_layers_in_first_pipeline_stage=p.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=p.num_layers_in_last_pipeline_stage,
        sequence_parallel=p.sequence_parallel(run.lowrank.method), batch_p2p_comm=batch_p2p,
        # numbers
        params_dtype=dtype, pipeline_dtype=dtype, autocast_dtype=dtype, bf16=bf16,
        # Only the exact token mean over micro-batches and ranks is ever used.
        calculate_per_token_loss=True,
        # Slower embedding kernels and a demand on Transformer Engine; a CPU is deterministic without.
        deterministic_mode=run.train.deterministic and torch.cuda.is_available(),
        # Weights are drawn by `layers.init`.
        init_method=keep_weight, output_layer_init_method=keep_weight, use_cpu_initialization=False,
        perform_initialization=True,
        # Whole layers; what lies between bottlenecks is rebuilt by the layers themselves.
        **(_WHOLE_LAYERS if run.train.recompute == "full" else {}),
        # Kernels that need apex or Transformer Engine.
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip


def layer_spec(run: RunConfig, layer: int, backend: Backend, tp_group: dist.ProcessGroup) -> ModuleSpec:
    """Spec of one decoder layer (global index from 0)."""
    before, here = run.residual(layer - 1 if layer else None), run.residual(layer)
    last = layer == run.model.num_layers - 1
    overlap, recompute = run.parallel.overlap_latent_grad, run.train.recompute
    plan = LayerPlan(
        layer=layer, model=run.model, lowrank=run.lowrank, placement=run.placement, backend=backend, tp_group=tp_group,
        entry=conversion(before, here), exit=conversion(here, run.residual(None)) if last else "id",
        grouping=run.parallel.grouping,
        overlap=dist.get_backend(tp_group) == "nccl" if overlap is None else overlap,
        recompute="none" if recompute == "full" else recompute, latent_store=run.train.latent_store,
    )  # fmt: skip
    params: dict[str, Any] = {"lr_plan": plan}
    attention = ModuleSpec(
        module=LowRankSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, **params},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ModuleSpec(module=QKVGroup, params=params),
            core_attention=backend.core_attention,
            linear_proj=ModuleSpec(module=OutGroup, params=params),
        ),
    )
    mlp = ModuleSpec(
        module=LowRankMLP,
        params=params,
        submodules=MLPSubmodules(
            linear_fc1=ModuleSpec(module=GateUpGroup, params=params),
            linear_fc2=ModuleSpec(module=DownGroup, params=params),
        ),
    )
    return ModuleSpec(
        module=LowRankTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,  # norms belong to the groups behind them
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    run: RunConfig, pp_rank: int, vp_stage: int | None, tp_group: dist.ProcessGroup
) -> TransformerBlockSubmodules:
    """Specs of the layers of one stage and the final norm."""
    backend = BACKENDS[run.model.transformer_impl]()
    stage = run.parallel.stage_layers(run.model.num_layers, pp_rank, vp_stage)
    layers = [layer_spec(run, layer, backend, tp_group) for layer in stage]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ModuleSpec(module=backend.norm))
