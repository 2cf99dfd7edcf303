"""Adam's state under canonical names: fp32 main parameter, two moments, and the step as one number.

The form is one with and without megatron-core's distributed optimizer, which may be switched between save and load.
Hyperparameters are not part of it: they come from the run's config and the scheduler.

megatron-core's own `sharded_state_dict` is not used, for three reasons that were observed on 0.16 and 0.19:

- With several buckets (tied embeddings over a pipeline, overlapped reduction), `fully_reshardable` packs a buffer
  without the padding between buckets, and cuts parameters out of it at offsets that count that padding. Whenever a
  bucket needs padding, which small factors and biases make the rule, it writes the neighbour's numbers; only where the
  last one reaches over the end does it warn.
- With torch's own Adam, which keeps its step as a tensor per parameter, a fresh optimizer has no template, the copy
  fails on the step, and the load lets all parameters share one tensor, which each of them then advances.
- fp32, bf16 and the distributed optimizer each write another form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_lowrank.checkpoint.read import OPTIMIZER_PREFIX, OPTIMIZER_STATES

Sharded: TypeAlias = "ShardedTensor | ShardedTensorFactory"
MOMENTS = OPTIMIZER_STATES[1:]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter's optimizer state."""

    sharded: Sharded
    """The parameter's weight in the model's sharded state."""
    live: dict[str, torch.Tensor]
    """param, exp_avg, exp_avg_sq; empty where the distributed optimizer keeps all of it on other ranks."""
    span: slice | None = None
    """Elements of the flattened parameter in `live` (distributed optimizer); None: all, in the parameter's shape."""


def adam_step(optimizer: Any) -> int:
    """Updates that Adam has made, the same for all parameters; 0 before the first."""
    steps: set[int] = set()
    for one in _optimizers(optimizer):
        for group, parameter in _inner_parameters(one):
            source = one.optimizer.state[parameter] if _is_torch_adam(one) else group
            steps.add(int(source.get("step", 0)))
    assert len(steps) <= 1, f"parameters have made different numbers of updates: {steps}"
    return steps.pop() if steps else 0


def set_adam_step(optimizer: Any, step: int) -> None:
    """Gives every parameter its own step counter (torch's Adam), or every group (fused Adams)."""
    for one in _optimizers(optimizer):
        for group, parameter in _inner_parameters(one):
            if not _is_torch_adam(one):
                group["step"] = step
                continue
            on_device = group.get("capturable") or group.get("fused")
            device = parameter.device if on_device else torch.device("cpu")
            one.optimizer.state[parameter]["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)


def give_state(optimizer: Any) -> None:
    """Makes the moments that Adam makes at its first update, as zeros and with step 0, where there are none."""
    step = adam_step(optimizer)
    for one in _optimizers(optimizer):
        for _, parameter in _inner_parameters(one):
            state = one.optimizer.state[parameter]
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    set_adam_step(optimizer, step)


def pieces(optimizer: Any, weights: Iterable[Sharded]) -> list[Piece]:
    """The state of every parameter of a model on this rank, in the order of the weights.

    Args:
        optimizer: megatron-core's, with its state made by `give_state`.
        weights: Sharded weights of all chunks, with the live parameters in them.
    """
    weights = list(weights)
    found: dict[int, Piece] = {}
    for one in _optimizers(optimizer):
        held = _shards(one) if isinstance(one, DistributedOptimizer) else _wholes(one, weights)
        by_id = {id(weight.data): weight for weight in weights}
        for key, (span, live) in held.items():
            found[key] = Piece(sharded=by_id[key], live=live, span=span)
    assert len(found) == len(weights), f"{len(weights)} weights, {len(found)} of them are optimized"
    return [found[id(weight.data)] for weight in weights]


Held = dict[int, tuple[slice | None, dict[str, torch.Tensor]]]


def _shards(optimizer: Any) -> Held:
    held: Held = {id(p): (slice(0, 0), {}) for buffer in optimizer.buffers for p in buffer.param_index_map}
    for bucket in (b for ranges in optimizer.gbuf_ranges for buckets in ranges.values() for b in buckets):
        for parameter, ranges in bucket["param_map"].items():
            group, order = optimizer.model_param_group_index_map[parameter]
            main = optimizer.optimizer.param_groups[group]["params"][order]
            held[id(parameter)] = (slice(ranges["param"].start, ranges["param"].end), _states(optimizer, main))
    return held


def _wholes(optimizer: Any, weights: list[Sharded]) -> Held:
    own = {id(parameter) for _, parameter in _inner_parameters(optimizer)}
    held: Held = {}
    for weight in weights:
        # megatron-core hangs the fp32 copy of a bf16 parameter on it; an fp32 parameter is its own.
        main = getattr(weight.data, "main_param", weight.data)
        if id(main) in own:
            held[id(weight.data)] = (None, _states(optimizer, main))
    return held


def _states(optimizer: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = optimizer.optimizer.state[main]
    return {"param": main, **{name: moments[name] for name in MOMENTS}}


def saved_state(optimizer: Any, held: list[Piece]) -> list[dict[str, Sharded]]:
    """Sharded state of each piece, complete on every data-parallel rank. Collective over them.

    Args:
        optimizer: megatron-core's.
        held: From `pieces`.
    """
    full: dict[int, dict[str, torch.Tensor]] = {}
    for one in _optimizers(optimizer):
        if isinstance(one, DistributedOptimizer):
            full |= _gathered(one, {id(piece.sharded.data): piece for piece in held})
    return [_sharded(piece.sharded, full.get(id(piece.sharded.data), piece.live)) for piece in held]


def template(held: list[Piece]) -> list[dict[str, Sharded]]:
    """Sharded state of each piece to load into."""
    return [_sharded(piece.sharded, piece.live if piece.span is None else _empty(piece.sharded)) for piece in held]


def load(held: list[Piece], loaded: list[dict[str, torch.Tensor]]) -> None:
    """Copies loaded, complete tensors into what this rank holds of them."""
    for piece, state in zip(held, loaded, strict=True):
        for name, tensor in piece.live.items():
            tensor.copy_(state[name] if piece.span is None else state[name].flatten()[piece.span])


def _gathered(optimizer: Any, held: dict[int, Piece]) -> dict[int, dict[str, torch.Tensor]]:
    """Complete states of all parameters, on the CPU, bucket by bucket."""
    group = optimizer.data_parallel_group
    full: dict[int, dict[str, torch.Tensor]] = {}
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (range_maps,) = ranges.values()  # a buffer holds one dtype
        for bucket, maps in zip(buffer.buckets, range_maps, strict=True):
            numel, device = bucket.grad_data.numel(), bucket.grad_data.device
            for name in OPTIMIZER_STATES:
                local = torch.zeros(numel // group.size(), dtype=torch.float32, device=device)
                for parameter, spans in maps["param_map"].items():
                    local[spans["gbuf_local"].start : spans["gbuf_local"].end] = held[id(parameter)].live[name]
                parts = [torch.empty_like(local) for _ in range(group.size())]
                dist.all_gather(parts, local, group=group)
                whole = torch.cat(parts).cpu()
                for parameter in bucket.params_list:
                    start, end, _ = buffer.param_index_map[parameter]
                    # Both offsets count padding: the bucket's place in its buffer, and the parameter's.
                    block = whole[start - bucket.offset : end - bucket.offset]
                    full.setdefault(id(parameter), {})[name] = block.view(parameter.shape)
    return full


def _empty(sharded: Sharded) -> dict[str, torch.Tensor]:
    shape = sharded.data.shape
    return {name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name in OPTIMIZER_STATES}


def _sharded(weight: Sharded, tensors: dict[str, torch.Tensor]) -> dict[str, Sharded]:
    state: dict[str, Sharded] = {}
    for name, tensor in tensors.items():
        key, data = f"{OPTIMIZER_PREFIX}{name}.{weight.key}", tensor.detach()
        if isinstance(weight, ShardedTensorFactory):
            state[name] = replace(weight, key=key, data=data)
        else:
            state[name] = replace(weight, key=key, data=data, dtype=data.dtype)
    return state


def _optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if not getattr(one, "is_stub_optimizer", False)]


def _inner_parameters(optimizer: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))
