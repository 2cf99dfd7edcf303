"""The hub: reader -> stream of (canonical name, tensor) -> writer. A new format is one reader or one writer.

A reader offers a `TensorSource`: the configs, the specs of all tensors in canonical order (known from headers), and a
function that reads one of them. A writer takes a `TensorSource`, so it knows every size before it reads a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lowrank.config.lowrank import LowRankConfig
from megatron_lowrank.config.model import ModelConfig
from megatron_lowrank.convert.description import Source
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.tensor_file import TensorSpec
from megatron_lowrank.messages import some
from megatron_lowrank.names import CanonicalParameter, canonical_parameters

Progress = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """A model that can be streamed."""

    model: ModelConfig
    lowrank: LowRankConfig
    specs: tuple[TensorSpec, ...]
    """Canonical name, shape and dtype of every tensor, in canonical order."""
    read: Callable[[str], Tensor]
    """The tensor of a canonical name; each is asked for once, in order."""
    source: Source
    seed: int | None = None
    """Seed of the initial weights, if known."""
    notes: tuple[str, ...] = ()
    """Warnings for the user."""

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def dtype(self) -> str:
        """Common dtype, e.g. `float32`, or `mixed`."""
        dtypes = {str(spec.dtype).removeprefix("torch.") for spec in self.specs}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in order; no reference is kept to what was handed out."""
        for spec in self.specs:
            yield spec.name, self.read(spec.name)


def expected_parameters(model: ModelConfig, lowrank: LowRankConfig) -> dict[str, CanonicalParameter]:
    """Canonical name -> parameter, in canonical order."""
    return {parameter.name: parameter for parameter in canonical_parameters(model, lowrank)}


def check_keys(expected: Iterable[str], found: Iterable[str], why: str, where: str) -> None:
    """Refuse a missing or an unexpected name.

    Args:
        expected: names that the config demands.
        found: names in the files.
        why: what made them expected.
        where: file or folder, for the message.

    Raises:
        ConvertError: MISSING_KEY, EXTRA_KEY.
    """
    wanted, present = list(expected), list(found)
    if missing := sorted(set(wanted).difference(present)):
        what = f"{len(missing)} missing: {some(missing)}; expected from {why}"
        raise ConvertError("MISSING_KEY", f"{what} ({where})")
    if extra := sorted(set(present).difference(wanted)):
        raise ConvertError("EXTRA_KEY", f"{len(extra)} unexpected: {some(extra)}; by {why} ({where})")


def check_shapes(
    parameters: Mapping[str, CanonicalParameter], found: Mapping[str, TensorSpec], labels: Mapping[str, str], where: str
) -> None:
    """Refuse a tensor whose shape or dtype is not the parameter's; a factor with another rank is named as such.

    Args:
        parameters: from `expected_parameters`.
        found: canonical name -> spec, in canonical orientation.
        labels: canonical name -> name in the files.
        where: file or folder, for the message.

    Raises:
        ConvertError: SHAPE, RANK, CORRUPT (no floating-point dtype).
    """
    for name, parameter in parameters.items():
        shape, label = found[name].shape, labels[name]
        if not found[name].dtype.is_floating_point:
            raise ConvertError("CORRUPT", f"tensor {label} has dtype {found[name].dtype}, no floating point ({where})")
        if shape == parameter.shape:
            continue
        rank_axis = {"a": 0, "b": 1}.get(parameter.kind)
        if rank_axis is not None and len(shape) == 2 and shape[1 - rank_axis] == parameter.shape[1 - rank_axis]:
            what = f"factor {parameter.kind.upper()} of {parameter.role} in layer {parameter.layer} has rank "
            what += f"{shape[rank_axis]}, the config gives {parameter.shape[rank_axis]}"
            partner = name.replace("_down_proj", "_up_proj") if parameter.kind == "a" else None
            if partner is not None:
                what += f" and factor B has {found[partner].shape[-1]}"
            raise ConvertError("RANK", f"{what} (tensor {label}, {where})")
        what = f"found {list(shape)}, expected {list(parameter.shape)} from the sizes in the config, out x in"
        raise ConvertError("SHAPE", f"tensor {label}: {what} ({where})")


def finite(source: TensorSource) -> TensorSource:
    """The same stream, which stops at the first tensor with a NaN or an infinity (NONFINITE)."""

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        if not _all_finite(tensor):
            bad = ~torch.isfinite(tensor.float())
            first = tuple(bad.nonzero()[0].tolist())
            what = f"tensor {name} has {int(bad.sum())} NaN or infinite values, the first at {first}"
            raise ConvertError("NONFINITE", f"{what}; --allow-nonfinite goes on")
        return tensor

    return replace(source, read=read)


def cast(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """The same stream in another dtype, rounded once; a finite value that becomes infinite is an error (OVERFLOW)."""

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        rounded = tensor.to(dtype)
        if _all_finite(tensor) and not _all_finite(rounded):
            what = f"largest value {float(tensor.abs().max()):.4g} overflows {dtype}"
            raise ConvertError("OVERFLOW", f"tensor {name}: {what}")
        return rounded

    return replace(source, read=read, specs=tuple(replace(spec, dtype=dtype) for spec in source.specs))


def from_tensors(
    model: ModelConfig,
    lowrank: LowRankConfig,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    source: Source,
    dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
) -> TensorSource:
    """A source from tensors in memory, or from pairs that arrive one by one in canonical order.

    Args:
        model: shape of the model.
        lowrank: method, ranks and activations.
        tensors: a mapping of full tensors, or an iterable of pairs in the order of `canonical_parameters`.
        source: where they come from.
        dtypes: needed with an iterable: the dtype of every tensor, or one per name.

    Raises:
        ValueError: pairs without dtypes.
        ConvertError: MISSING_KEY, EXTRA_KEY, SHAPE, RANK; while streaming also for pairs that differ from the plan.
    """
    parameters = expected_parameters(model, lowrank)
    labels = {name: name for name in parameters}
    if isinstance(tensors, Mapping):
        check_keys(parameters, tensors, "the given configs", "tensors")
        table = tensors
        specs = [TensorSpec(name=n, shape=tuple(table[n].shape), dtype=table[n].dtype) for n in parameters]
        check_shapes(parameters, {spec.name: spec for spec in specs}, labels, "tensors")
        return TensorSource(model=model, lowrank=lowrank, specs=tuple(specs), read=table.__getitem__, source=source)
    if dtypes is None:
        raise ValueError("dtypes: found None, needed when the tensors arrive one by one")
    each = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(parameters, dtypes)
    specs = [TensorSpec(name=n, shape=p.shape, dtype=each[n]) for n, p in parameters.items()]
    return TensorSource(
        model=model, lowrank=lowrank, specs=tuple(specs), read=_in_order(iter(tensors), specs), source=source
    )


def _in_order(pairs: Iterator[tuple[str, Tensor]], specs: Sequence[TensorSpec]) -> Callable[[str], Tensor]:
    by_name = {spec.name: spec for spec in specs}

    def read(name: str) -> Tensor:
        arrived, tensor = next(pairs, ("nothing", None))
        if tensor is None or arrived != name:
            raise ConvertError("MISSING_KEY", f"the stream gave {arrived} where {name} was due")
        spec = by_name[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            what = f"found {list(tensor.shape)} {tensor.dtype}, expected {list(spec.shape)} {spec.dtype}"
            raise ConvertError("SHAPE", f"tensor {name}: {what}")
        return tensor

    return read


def _all_finite(tensor: Tensor) -> bool:
    # In pieces, since a mask and a wider copy of a whole embedding would double the peak memory.
    flat, step = tensor.reshape(-1), 1 << 20
    pieces = (flat[start : start + step] for start in range(0, flat.numel(), step))
    return all(bool(torch.isfinite(piece.float()).all()) for piece in pieces)
