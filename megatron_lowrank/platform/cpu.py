"""Answers megatron-core's CUDA calls on a CPU, so that the real thing runs on gloo without a GPU.

`install()` replaces the attributes of torch that `SYMBOLS` lists, and no attribute of megatron-core. The table is the
whole of it: a CUDA call that is not listed (memory statistics, CUDA graphs, memory pools) still fails or answers as
torch without a GPU does, `torch.cuda.is_available()` stays False and `Tensor.is_cuda` stays False.

**Why attributes and not a TorchFunctionMode.** A mode that rewrites `device="cuda"` sees *every* torch call and every
tensor attribute, in the thread that entered it only. Measured on one core, torch 2.13, fp32 tensors of 16 entries:

    call                          bare     with a mode    with this module
    a + b                       1.4 us          2.8 us              1.4 us
    a.shape                     0.1 us          1.4 us              0.1 us
    a.to(torch.float64)         2.6 us          6.0 us              2.9 us
    torch.empty(16, device=)    1.4 us          3.0 us              1.8 us

Replaced factories cost something where they are called and nothing elsewhere, and hold in every thread and forked
child. What is lost is `device="cuda"` in functions that are not listed, which then fails by itself.

**The random generator.** On this platform the CUDA generator *is* the CPU generator. megatron-core sets a CUDA state
through `torch.cuda._lazy_call`, which without CUDA queues the call for ever: unless it is answered, the RNG tracker
never switches streams, without an error. Tensor-parallel ranks then draw equal numbers where theirs must differ, and
the default stream goes on from the seed that was added last.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")
_real_current_device = torch.cuda.current_device


def _here(device: Any) -> Any:
    """Maps a CUDA device, given as string, index or `torch.device`, to the CPU; anything else stays."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if isinstance(device, int) else device  # a bare index means a CUDA device


class NoStream:
    """Stands for a CUDA stream: work on a CPU is done when the call returns, so there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes whatever a stream or event takes."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Returns at once."""

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Returns the event, which has already happened."""
        return NoEvent() if event is None else event

    def query(self) -> bool:
        """Says that all work is done."""
        return True


class NoEvent(NoStream):
    """Stands for a CUDA event. It measures no time: `elapsed_time` does not exist, so asking is an error."""

    record = wait = NoStream._nothing


class _TheGenerator:
    """Stands for `torch.cuda.default_generators`: whatever the index, the CPU's generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


Make = Callable[[Any], Any]
"""From what torch has under a name to what stands there afterwards. Each call makes a new object, because
torch._dynamo refuses one function under two torch names ("Duplicate torch object")."""


def _returns(value: Callable[[], Any]) -> Make:
    return lambda real: functools.wraps(real)(lambda *args, **kwargs: value())


def _is(value: Any) -> Make:
    return lambda real: value


def _identity(real: Any) -> Any:
    return functools.wraps(real)(lambda self, *args, **kwargs: self)


def _factory(real: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if "pin_memory" in kwargs:  # pages are pinned for a device; there is none
            del kwargs["pin_memory"]
        return real(*args, **kwargs)

    return functools.wraps(real)(create)


def _tensor_to(real: Any) -> Any:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and type(args[0]) is not torch.dtype:
            args = (_here(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        moved: torch.Tensor = real(self, *args, **kwargs)
        return moved

    return functools.wraps(real)(to)


def _tensor_type(real: Any) -> Any:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            wanted = args[0] if args else kwargs.pop("dtype", None)
            wanted = wanted.replace("torch.cuda.", "torch.") if isinstance(wanted, str) else wanted
            return real(self, wanted, *args[1:], **kwargs)
        name: str = real(self)
        # Idempotent: under somebody's TorchFunctionMode `real` finds this very function and answers for it.
        if self.device.type != "cpu" or name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    return functools.wraps(real)(type_)


def _get_state(real: Any) -> Any:
    return functools.wraps(real)(lambda device="cuda": torch.get_rng_state())


def _set_state(real: Any) -> Any:
    return functools.wraps(real)(lambda new_state, device="cuda": torch.set_rng_state(new_state))


def _seed(real: Any) -> Any:
    # Not torch.manual_seed: that one queues a seed for CUDA at each call.
    return functools.wraps(real)(lambda seed: (torch.default_generator.manual_seed(int(seed)), None)[1])


def _call_now(real: Any) -> Any:
    return functools.wraps(real)(lambda callable, **kwargs: callable())


@dataclass(frozen=True)
class Symbol:
    """One attribute of torch that the platform answers for."""

    name: str
    """Dotted name below `torch`."""
    answer: str
    """What stands there after `install()`, in words."""
    make: Make
    """Builds the answer from what was there."""
    asked_by: tuple[str, ...] = ()
    """Files below megatron/core that ask for it on each lane in `lanes`; empty when only a relative of it is asked."""
    text: str = ""
    """What stands in those files when it is not `name` itself, as for a method."""
    lanes: tuple[str, ...] = ("0.16", "0.19")
    """Generations of megatron-core in which the files in `asked_by` ask."""


_CHECKPOINT, _PIPELINE, _OPTIMIZER = "dist_checkpointing", "pipeline_parallel", "optimizer"
_BUFFER = "distributed/param_and_grad_buffer.py"
_RANDOM = "tensor_parallel/random.py"
_NOTHING = _returns(lambda: None)
_MOVED = "the same on the CPU when device names a CUDA device; pin_memory is dropped"
_RELATIVES = "full arange linspace rand randn randint randperm eye as_tensor asarray zeros_like ones_like full_like"

# fmt: off
SYMBOLS: tuple[Symbol, ...] = (
    # Where am I.
    Symbol("torch.cuda.current_device", "torch.device('cpu')", _returns(lambda: _CPU),
           ("tensor_parallel/layers.py", "tensor_parallel/mappings.py", _BUFFER, f"{_PIPELINE}/p2p_communication.py")),
    Symbol("torch.cuda.set_device", "nothing happens", _NOTHING, (f"{_CHECKPOINT}/strategies/async_utils.py",)),
    # Order of work: everything is done when its call returns.
    Symbol("torch.cuda.synchronize", "returns at once", _NOTHING,
           (f"{_CHECKPOINT}/strategies/filesystem_async.py", f"{_PIPELINE}/p2p_communication.py", "timers.py")),
    Symbol("torch.cuda.empty_cache", "nothing happens", _NOTHING, ("distributed/distributed_data_parallel.py",)),
    Symbol("torch.cuda.Stream", "a context manager whose waits return at once", _is(NoStream),
           ("distributed/distributed_data_parallel.py", f"{_PIPELINE}/utils.py")),
    Symbol("torch.cuda.Event", "an event that has happened", _is(NoEvent),
           ("models/common/model_chunk_schedule_plan.py",)),
    Symbol("torch.cuda.stream", "an empty context", _returns(NoStream), (_BUFFER,)),
    Symbol("torch.cuda.current_stream", "a stream without work", _returns(NoStream),
           (f"{_PIPELINE}/combined_1f1b.py",)),
    Symbol("torch.cuda.default_stream", "a stream without work", _returns(NoStream), ("transformer/cuda_graphs.py",)),
    Symbol("torch.cuda.set_stream", "nothing happens", _NOTHING, ("transformer/cuda_graphs.py",)),
    Symbol("torch.cuda.is_current_stream_capturing", "False", _returns(lambda: False),
           ("transformer/moe/token_dispatcher.py",), lanes=("0.19",)),
    Symbol("torch.cuda.nvtx.range_push", "nothing happens", _NOTHING, ("utils.py",)),
    Symbol("torch.cuda.nvtx.range_pop", "nothing happens", _NOTHING, ("utils.py",)),
    # The random generator is the CPU's.
    Symbol("torch.cuda.get_rng_state", "state of the CPU generator", _get_state, (_RANDOM, "rerun_state_machine.py")),
    Symbol("torch.cuda.random.get_rng_state", "state of the CPU generator", _get_state, (_RANDOM,)),
    Symbol("torch.cuda.set_rng_state", "sets the CPU generator", _set_state, ("rerun_state_machine.py",)),
    Symbol("torch.cuda.random.set_rng_state", "sets the CPU generator", _set_state),
    Symbol("torch.cuda.manual_seed", "seeds the CPU generator", _seed, (_RANDOM,)),
    Symbol("torch.cuda.default_generators", "the CPU generator at every index", _is(_TheGenerator()), (_RANDOM,)),
    Symbol("torch.cuda._lazy_call", "calls now instead of queueing until CUDA starts", _call_now, (_RANDOM,),
           text="_lazy_call(cb)"),
    # Types, by object and by name.
    Symbol("torch.cuda.FloatTensor", "torch.FloatTensor", _is(torch.FloatTensor), ("transformer/module.py",)),
    Symbol("torch.cuda.HalfTensor", "torch.HalfTensor", _is(torch.HalfTensor), ("transformer/module.py",)),
    Symbol("torch.cuda.BFloat16Tensor", "torch.BFloat16Tensor", _is(torch.BFloat16Tensor), ("transformer/module.py",)),
    Symbol("torch.Tensor.type", "without argument 'torch.cuda.*Tensor' for a CPU tensor", _tensor_type,
           (f"{_OPTIMIZER}/optimizer.py", f"{_OPTIMIZER}/distrib_optimizer.py", f"{_OPTIMIZER}/clip_grads.py"),
           text=".type() "),
    # Moving and making tensors.
    Symbol("torch.Tensor.cuda", "the tensor itself", _identity,
           ("tensor_parallel/data.py", "models/common/language_module/language_module.py"), text=".cuda()"),
    Symbol("torch.nn.Module.cuda", "the module itself", _identity),
    Symbol("torch.Tensor.to", "to('cuda') stays on the CPU", _tensor_to,
           (f"{_OPTIMIZER}/cpu_offloading/hybrid_optimizer.py",), text='.to("cuda")'),
    Symbol("torch.Tensor.record_stream", "nothing happens", _NOTHING, (f"{_PIPELINE}/utils.py",),
           text=".record_stream("),
    Symbol("torch.Tensor.pin_memory", "the tensor itself", _identity, (_BUFFER,), text=".pin_memory()"),
    Symbol("torch.tensor", _MOVED, _factory, (f"{_OPTIMIZER}/clip_grads.py", f"{_OPTIMIZER}/optimizer.py")),
    Symbol("torch.zeros", _MOVED, _factory, (f"{_PIPELINE}/schedules.py", f"{_OPTIMIZER}/clip_grads.py")),
    Symbol("torch.ones", _MOVED, _factory, ("transformer/utils.py",)),
    Symbol("torch.empty", _MOVED, _factory, (f"{_CHECKPOINT}/exchange_utils.py",)),
    Symbol("torch.empty_like", _MOVED, _factory, (f"{_CHECKPOINT}/exchange_utils.py",)),
    *(Symbol(f"torch.{name}", _MOVED, _factory) for name in _RELATIVES.split()),
)
# fmt: on
"""Everything that `install()` replaces."""


def is_installed() -> bool:
    """Says whether `install()` has run in this process or in the one that it was forked from."""
    return torch.cuda.current_device is not _real_current_device


def install() -> None:
    """Makes torch answer megatron-core's CUDA calls on the CPU, in this process and in the ones forked from it.

    Call it before megatron-core is imported, which binds some of the symbols. A second call does nothing.

    Raises:
        RuntimeError: A CUDA device is visible, or megatron-core has been imported already.
    """
    if is_installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"the CPU platform answers in place of CUDA, but {torch.cuda.device_count()} CUDA device(s) are visible; "
            "run on them, or hide them with CUDA_VISIBLE_DEVICES="
        )
    if "megatron.core.tensor_parallel.random" in sys.modules:
        raise RuntimeError("install the CPU platform before importing megatron.core: it binds CUDA functions by name")
    # Start autograd while it finds no device. In a CUDA build of torch, the first backward after torch._dynamo was
    # loaded starts device threads, GPU or not, and backward then fails in every process forked later.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    # `with torch.device(...)` keeps a lazily built list of torch's own factories; it must not hold the replacements.
    torch.utils._device._device_constructors()
    for symbol in SYMBOLS:
        owner, _, attribute = symbol.name.rpartition(".")
        holder: Any = functools.reduce(getattr, owner.split(".")[1:], torch)
        setattr(holder, attribute, symbol.make(getattr(holder, attribute, None)))
