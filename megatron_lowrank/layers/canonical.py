"""Which block of which canonical tensor a live parameter holds.

Every module of ours answers `canonical_parts()`. Initialisation, checkpoints and conversion all go through these parts,
so a new placement or a fused weight is described once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Part:
    """One canonical tensor as this rank holds it."""

    key: str
    """Canonical name; below a layer's prefix until `model.model_parts` puts the prefix in front."""
    parameter: nn.Parameter
    """The live parameter."""
    axis: int | None
    """Axis of the canonical tensor that is cut into equal blocks over the tensor-parallel ranks; None: replicated."""
    rows: tuple[int, int] | None = None
    """Rows [from, to) of a parameter that stacks several canonical tensors along dim 0; None: the whole parameter."""
    vocabulary: bool = False
    """Whether axis 0 is the vocabulary, whose live rows are padded."""

    @property
    def block(self) -> torch.Tensor:
        """This rank's block, a view of the live parameter's data."""
        data = self.parameter.data
        return data if self.rows is None else data[self.rows[0] : self.rows[1]]

    def gradient_block(self, gradient: torch.Tensor) -> torch.Tensor:
        """The same block of a tensor shaped like the live parameter."""
        return gradient if self.rows is None else gradient[self.rows[0] : self.rows[1]]

    def prefixed(self, prefix: str) -> Part:
        """The part with a prefix before its key."""
        return replace(self, key=prefix + self.key)

    def slice_of(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """This rank's block of a full canonical tensor."""
        return full if self.axis is None else full.chunk(size, dim=self.axis)[rank]


def current_device() -> torch.device:
    """Where parameters are created: the current GPU, or the CPU under the CPU platform layer."""
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


def mark_parameter(parameter: nn.Parameter, axis: int | None, sequence_parallel: bool) -> None:
    """Set the attributes by which megatron-core decides gradient norm, reduction and buffers.

    Args:
        parameter: A parameter without these attributes yet.
        axis: Sharded axis, or None for a replicated parameter.
        sequence_parallel: For a replicated parameter: each rank sees other tokens, so gradients are summed over TP.
    """
    set_tensor_model_parallel_attributes(parameter, axis is not None, -1 if axis is None else axis, 1)
    parameter.sequence_parallel = axis is None and sequence_parallel  # type: ignore[attr-defined]
    parameter.allreduce = True  # type: ignore[attr-defined]


def sharded_parts(
    parts: Iterable[tuple[str, Part]], prefix: str, metadata: dict[str, Any] | None, tp_group: Any
) -> ShardedStateDict:
    """Sharded state of a module from its parts.

    Args:
        parts: (live name below the module, part) pairs; parts of one fused parameter follow each other.
        prefix: Canonical prefix of the layer.
        metadata: megatron-core's sharded-state metadata; `dp_cp_group` is used when present.
        tp_group: Tensor-parallel group.

    Returns:
        Live name -> ShardedTensor (or a factory that splits a fused parameter into its branches).
    """
    dp_group = (metadata or {}).get("dp_cp_group")
    fused: dict[str, list[Part]] = {}
    for name, part in parts:
        fused.setdefault(name, []).append(part)

    def tensor(part: Part, data: torch.Tensor, key: str, replica_id: Any = None) -> ShardedTensor:
        if part.axis is None:
            return make_sharded_tensor_for_checkpoint(
                data, key, replica_id=replica_id, tp_group=tp_group, dp_cp_group=dp_group
            )
        return make_tp_sharded_tensor_for_checkpoint(
            data, key, part.axis, replica_id=replica_id, tp_group=tp_group, dp_cp_group=dp_group
        )

    state: ShardedStateDict = {}
    for name, group in fused.items():
        first = group[0]
        if len(group) == 1 and first.rows is None:
            # The optimizer finds its state by the identity of this very tensor.
            state[name] = tensor(first, first.parameter, prefix + first.key)
            continue
        whole = tensor(first, first.parameter, prefix + first.key)
        state[name] = ShardedTensorFactory(
            whole.key, first.parameter, _split_rows(group, prefix, tensor), _join_rows, whole.replica_id
        )
    return state


def _split_rows(
    parts: list[Part], prefix: str, tensor: Callable[..., ShardedTensor]
) -> Callable[..., list[ShardedTensor]]:
    own_key = prefix + parts[0].key

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None, "fused parameters need the fully reshardable optimizer format"
        # megatron-core calls this again for optimizer states under `<state prefix><first key>`, and after it has
        # renamed the layer prefix: everything around the part's own relative key is kept.
        head = key.removesuffix(parts[0].key)
        assert head != key or key == parts[0].key, f"{key} does not end in {own_key}"
        return [tensor(part, part.gradient_block(data), head + part.key, replica_id) for part in parts]

    return build


def _join_rows(blocks: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(blocks))


def layer_prefix(prefix: str, module_path: str) -> str:
    """`decoder.layers.0.self_attention.linear_qkv.` -> `decoder.layers.0.`."""
    stem = prefix.removesuffix(f"{module_path}.")
    assert stem != prefix, f"{prefix} does not end in {module_path}."
    return stem
