"""Tokens and FLOPs per second, model FLOPs utilisation, and peak memory, each under a name that says what it counts.

*Actual* FLOPs are those of the model as configured, low-rank pairs and all, with causal attention and without any
recomputation; MFU is their rate over the peak of the device. The *dense-equivalent* rate counts what the dense model of
the same shape would have cost; it is never called MFU.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from megatron_lowrank.config import RunConfig
from megatron_lowrank.estimate import dense_equivalent, flops_per_step
from megatron_lowrank.layers.canonical import current_device

PEAK_TFLOPS: dict[str, float] = {
    "NVIDIA B200": 2250.0,
    "NVIDIA GH200 120GB": 989.4, "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 NVL": 835.5, "NVIDIA H100 PCIe": 756.5,
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0, "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0, "NVIDIA GeForce RTX 4090": 165.2,
}  # fmt: skip
"""Name that the driver gives a device -> dense bf16 TFLOP/s of the vendor's data sheet. Variants of one chip differ, so
a name counts only as a whole."""


def known_peak(device: str, precision: str) -> float | None:
    """Peak TFLOP/s of a device in a precision, or None.

    fp32 has none here: how fast it may be depends on whether torch is allowed TF32, which is off unless somebody has
    switched it on.
    """
    return PEAK_TFLOPS.get(device) if precision == "bf16" else None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one step."""

    tokens_per_second: float
    """Tokens of all ranks, padding included."""
    tflops_actual: float
    """TFLOP/s per device, the model as configured."""
    tflops_dense_equivalent: float
    """TFLOP/s per device that the dense model would have needed for the same tokens per second."""
    mfu: float | None
    """tflops_actual over the device's peak; None where the peak is unknown."""


@dataclass(frozen=True)
class Throughput:
    """Turns rows and seconds into rates."""

    run: RunConfig
    """The run."""
    world_size: int
    """Devices that share the work."""

    @cached_property
    def _row_flops(self) -> tuple[int, int]:
        model, lowrank, length = self.run.model, self.run.lowrank, self.run.train.sequence_length
        actual, dense = (
            flops_per_step(model, method, sequence_length=length, rows=1, attention="causal")
            for method in (lowrank, dense_equivalent(lowrank))
        )
        return actual, dense

    @cached_property
    def peak_tflops(self) -> float | None:
        """Peak of one device: the config's, else in bf16 by the GPU's name; None if neither is known."""
        if self.run.log.peak_tflops is not None:
            return self.run.log.peak_tflops
        if not torch.cuda.is_available():
            return None
        return known_peak(torch.cuda.get_device_name(), self.run.train.precision)

    def rates(self, rows: int, seconds: float) -> Rates:
        """Rates of a step over `rows` rows that took `seconds`."""
        seconds = max(seconds, 1e-9)
        actual, dense = (flops * rows / seconds / self.world_size / 1e12 for flops in self._row_flops)
        return Rates(
            tokens_per_second=rows * self.run.train.sequence_length / seconds,
            tflops_actual=actual, tflops_dense_equivalent=dense,
            mfu=None if self.peak_tflops is None else actual / self.peak_tflops,
        )  # fmt: skip


def peak_memory() -> tuple[str, int]:
    """(what is counted, largest number of bytes over all ranks); a collective.

    On a GPU it is what torch's allocator held at most; on a CPU the peak resident size of the whole process, code and
    libraries included.
    """
    if torch.cuda.is_available():
        kind, size = "peak GPU memory allocated", torch.cuda.max_memory_allocated()
    else:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        kind = "peak process RSS"
    largest = torch.tensor(size, dtype=torch.int64, device=current_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return kind, int(largest)
