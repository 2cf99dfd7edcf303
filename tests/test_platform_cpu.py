"""The CPU platform: each answer, and unmodified megatron-core training and saving through them on gloo ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_lowrank.compat import megatron_core_version
from megatron_lowrank.platform import cpu
from megatron_lowrank.testing.compare import assert_close, assert_equal
from megatron_lowrank.testing.ranks import initialize, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform refuses beside a GPU")


# The table.


def test_every_named_file_asks_for_its_symbol() -> None:
    import megatron.core

    root = Path(megatron.core.__path__[0])
    lane = ".".join(megatron_core_version().split(".")[:2])
    for symbol in cpu.SYMBOLS:
        for file in symbol.asked_by if lane in symbol.lanes else ():
            assert (root / file).is_file(), f"{symbol.name}: megatron-core {lane} has no {file}"
            assert (symbol.text or symbol.name) in (root / file).read_text(), f"{file} no longer asks for {symbol.name}"


def test_each_name_has_its_own_object_and_a_second_install_changes_nothing() -> None:
    def standing() -> list[Any]:
        found = []
        for symbol in cpu.SYMBOLS:
            value: Any = torch
            for part in symbol.name.split(".")[1:]:
                value = getattr(value, part)
            found.append(value)
        return found

    before = standing()
    assert len({id(value) for value in before}) == len(cpu.SYMBOLS)
    cpu.install()
    assert cpu.is_installed()
    assert all(old is new for old, new in zip(before, standing(), strict=True))


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_refuses_beside_a_gpu_and_after_megatron_core() -> None:
    # A module that poses as megatron-core's: importing the real one here would only cost seconds.
    output = _python("""
import sys, types, torch
from megatron_lowrank.platform import cpu
def refusal():
    try:
        cpu.install()
    except RuntimeError as error:
        print(error, cpu.is_installed())
real, torch.cuda.is_available = torch.cuda.is_available, lambda: True
refusal()
torch.cuda.is_available = real
sys.modules["megatron.core.tensor_parallel.random"] = types.ModuleType("random")
refusal()
""")
    assert "CUDA_VISIBLE_DEVICES= False" in output
    assert "before importing megatron.core: it binds CUDA functions by name False" in output


# The answers.


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_a_cuda_device_means_the_cpu(device: Any) -> None:
    tensors = [torch.zeros(2, device=device), torch.tensor([1], device=device), torch.zeros(2).to(device)]
    tensors += [torch.zeros(2).to(device=device, dtype=torch.float64), torch.zeros(2).cuda(device)]
    tensors += [torch.empty_like(tensors[0], device=device, pin_memory=True), torch.arange(3, device=device)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    # Module.to resolves an index in C++, before any tensor is asked; megatron-core never passes one.
    module = torch.nn.Linear(2, 2).to("cuda" if isinstance(device, int) else device)
    assert module.cuda() is module and module.weight.device.type == "cpu"


def test_other_devices_and_types_stay() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta" and torch.zeros(2).to("meta").device.type == "meta"
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    assert torch.zeros(2).to(torch.zeros(1, dtype=torch.int8)).dtype == torch.int8
    with torch.device("meta"):  # how megatron-core builds a model without memory
        assert torch.zeros(2).device.type == "meta" and torch.nn.Linear(2, 2).weight.device.type == "meta"


def test_type_strings_are_those_of_cuda_also_under_a_mode() -> None:
    class Passing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for dtype, name in ((torch.float32, "Float"), (torch.bfloat16, "BFloat16"), (torch.float16, "Half")):
        tensor = torch.zeros(2, dtype=dtype)
        assert tensor.type() == torch.nn.Parameter(tensor).type() == f"torch.cuda.{name}Tensor"
        assert isinstance(tensor, getattr(torch.cuda, f"{name}Tensor"))
        with Passing():
            assert tensor.type() == f"torch.cuda.{name}Tensor"
    assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(2).type(torch.float64).dtype == torch.float64


def test_streams_and_events_are_contexts_without_work() -> None:
    cuda: Any = torch.cuda
    stream = cuda.Stream(device="cuda")
    with cuda.stream(stream), cuda.Stream():
        event = cuda.current_stream().record_event()
        event.wait(stream)
    stream.wait_stream(cuda.default_stream())
    cuda.Event().record(stream)
    torch.zeros(1).record_stream(stream)
    for call, arguments in (("synchronize", ()), ("empty_cache", ()), ("set_stream", (stream,)), ("set_device", (0,))):
        assert getattr(cuda, call)(*arguments) is None
    assert cuda.nvtx.range_push("name") is None and cuda.nvtx.range_pop() is None
    assert stream.query() and not torch.zeros(1).pin_memory().is_pinned()
    assert not cuda.is_available() and not torch.zeros(1, device="cuda").is_cuda


def test_answers_hold_in_other_threads() -> None:
    devices: list[str] = []
    thread = threading.Thread(target=lambda: devices.append(torch.zeros(1, device="cuda").device.type))
    thread.start()
    thread.join()
    assert devices == ["cpu"]


def test_torch_compile_accepts_the_replacements() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device=torch.cuda.current_device()).to(x.dtype)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert_equal(compiled(torch.zeros(2)), torch.ones(2))


def test_backward_works_in_a_rank_after_compiling_and_backward_in_the_parent() -> None:
    def gradient() -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        torch.compile(lambda x: (x * x).sum(), backend="eager")(x).backward()
        assert x.grad is not None
        return x.grad

    assert_equal(run_ranks(1, gradient)[0], gradient())
    assert_equal(run_ranks(1, gradient)[0], gradient())


def test_rng_tracker_switches_streams() -> None:
    def draw() -> list[torch.Tensor]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        initialize()
        outside = torch.rand(4)
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(4)
        again = torch.rand(4)
        torch.cuda.manual_seed(1)
        return [outside, inside, again, torch.rand(8)]

    outside, inside, again, without_fork = run_ranks(1, draw)[0]
    assert not torch.equal(inside, again)
    assert_equal(torch.cat([outside, again]), without_fork, "default stream around a fork")
    seeded = torch.Generator().manual_seed(1 + 2718)  # the tensor-parallel stream of rank 0
    assert_equal(inside, torch.rand(4, generator=seeded), "tensor-parallel stream")


def test_recompute_without_output_restores_the_input_of_the_next_layer() -> None:
    def gradients() -> list[torch.Tensor]:
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        initialize()
        found = []
        for recompute in (False, True):
            torch.manual_seed(0)
            x, w = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
            if recompute:
                part = CheckpointWithoutOutput(fp8=None)
                y = part.checkpoint(lambda x: torch.nn.functional.dropout(torch.sin(x), 0.5), x)
                out = y @ w
                part.discard_output_and_register_recompute(out)
            else:
                out = torch.nn.functional.dropout(torch.sin(x), 0.5) @ w
            out.sum().backward()
            assert x.grad is not None and w.grad is not None
            found.append(torch.cat([x.grad, w.grad]))
        return found

    # From 0.18 megatron-core compiles a C++ helper at the first use: that takes the compiler half a minute.
    plain, recomputed = run_ranks(1, gradients, timeout=240)[0]
    assert_equal(recomputed, plain)


def test_torch_checkpoint_draws_the_same_dropout_twice() -> None:
    x = torch.rand(64, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert_equal(x.grad != 0, y != 0)


# megatron-core as it is.


@dataclass(frozen=True, kw_only=True)
class Run:
    """One small training run."""

    world: int = 2
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    bf16: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    dropout: float = 0.0
    recompute: bool = False
    steps: int = 3


def _build(run: Run) -> tuple[Any, list[Any], Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    class Norm(torch.nn.RMSNorm):
        """A norm that sequence parallelism accepts: its weight's gradient is summed over tensor-parallel ranks."""

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
            super().__init__(hidden_size, eps=eps)
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    dtype = torch.bfloat16 if run.bf16 else torch.float32
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config: Any = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=run.dropout, attention_dropout=run.dropout,
        tensor_model_parallel_size=run.tp, sequence_parallel=run.tp > 1, pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp, batch_p2p_comm=run.vpp is None,
        use_cpu_initialization=True, params_dtype=dtype, pipeline_dtype=dtype, bf16=run.bf16,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, finalize_model_grads_func=finalize_model_grads,
        **(recompute if run.recompute else {}),
    )  # fmt: skip
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=run.distributed_optimizer, overlap_grad_reduce=run.overlap,
        overlap_param_gather=run.overlap, grad_reduce_in_fp32=True, bucket_size=20000,
    )  # fmt: skip
    chunks: list[Any] = []
    for stage in range(run.vpp or 1):
        place: dict[str, Any] = {"vp_stage": stage} if run.vpp else {}
        if run.vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        layers = [layer] * get_num_layers_to_build(config, **place)
        model: Any = GPTModel(
            config, TransformerBlockSubmodules(layers, layer_norm=Norm), vocab_size=64, max_sequence_length=16,
            position_embedding_type="rope", share_embeddings_and_output_weights=True,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=run.vpp is None, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=run.vpp is None, **place), **place,
        )  # fmt: skip
        model = Float16Module(config, model) if run.bf16 else model
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0))
    if run.overlap:
        single = len(chunks) == 1
        config.no_sync_func = chunks[0].no_sync if single else [chunk.no_sync for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=run.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=run.distributed_optimizer,
            overlap_param_gather=run.overlap,
        ),  # fmt: skip
        chunks,
    )
    return config, chunks, optimizer


def _step(run: Run, chunks: list[Any], optimizer: Any, forward_only: bool = False) -> tuple[float, float]:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    ids = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(0))
    positions, future = torch.arange(16)[None], torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)

    def forward_step(batches: Iterator[torch.Tensor], stage: Any) -> Any:
        batch = next(batches)
        losses = stage(batch[:, :-1], positions, future, labels=batch[:, 1:])
        return losses, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    if not forward_only:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
    batches: Any = [iter([ids] * 4) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches if run.vpp else batches[0],
        model=chunks if run.vpp else chunks[0:1], num_microbatches=4, seq_length=16, micro_batch_size=1,
        forward_only=forward_only,
    )  # fmt: skip
    loss = float(sum(report["loss"] for report in reports) / len(reports)) if reports else float("nan")
    return loss, float("nan") if forward_only else float(optimizer.step()[1])


def _train(run: Run) -> torch.Tensor:
    """Returns the last rank's (loss, grad norm) of each step, then a loss in evaluation mode."""
    initialize(run.tp, run.pp, run.vpp)
    _, chunks, optimizer = _build(run)
    numbers = [_step(run, chunks, optimizer) for _ in range(run.steps)]
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        numbers.append((_step(run, chunks, optimizer, forward_only=True)[0], 0.0))
    return torch.tensor(numbers)


RUNS = {
    "tp2_sp": Run(tp=2),
    "pp2_1f1b": Run(pp=2),
    "pp2_interleaved": Run(pp=2, vpp=2),
    "dp2_distributed_optimizer_overlap": Run(distributed_optimizer=True, overlap=True),
    "tp2_sp_pp2_distributed_optimizer": Run(world=4, tp=2, pp=2, distributed_optimizer=True),
    "tp2_sp_dp2_overlap": Run(world=4, tp=2, overlap=True, distributed_optimizer=True),
    "tp2_sp_recompute": Run(tp=2, recompute=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_parallel_training_matches_one_rank(name: str) -> None:
    run = RUNS[name]
    numbers = run_ranks(run.world, _train, run)[-1]
    assert torch.isfinite(numbers).all() and numbers[-1, 0] < numbers[0, 0]
    if run.pp == 1:  # each pipeline stage draws its own initial weights
        assert_close(numbers, run_ranks(1, _train, Run(world=1))[-1], name)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bf16_trains_under_tensor_and_sequence_parallel(distributed_optimizer: bool) -> None:
    numbers = run_ranks(2, _train, Run(tp=2, bf16=True, distributed_optimizer=distributed_optimizer))[-1]
    reference = run_ranks(1, _train, Run(world=1))[-1]
    assert_close(numbers[0].bfloat16(), reference[0].bfloat16(), "first loss and grad norm")
    assert numbers[-1, 0] < numbers[0, 0]


def test_recompute_repeats_dropout_under_tensor_parallel() -> None:
    plain = run_ranks(2, _train, Run(tp=2, dropout=0.2))[-1]
    recomputed = run_ranks(2, _train, Run(tp=2, dropout=0.2, recompute=True))[-1]
    assert_equal(recomputed, plain, "losses and grad norms")


def _save_then_load(run: Run, folder: str) -> None:
    from megatron.core import dist_checkpointing

    initialize(run.tp, run.pp)
    _, chunks, optimizer = _build(run)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}

    def state(is_loading: bool) -> dict[str, Any]:
        model = chunks[0].module.sharded_state_dict(metadata=dict(metadata))
        return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading, metadata=dict(metadata))}

    _step(run, chunks, optimizer)
    dist_checkpointing.save(state(False), folder)
    saved = {name: value.clone() for name, value in chunks[0].module.state_dict().items() if value is not None}
    _step(run, chunks, optimizer)
    with torch.no_grad():  # the optimizer's fp32 parameters are views of leaves
        loaded = dist_checkpointing.load(state(True), folder, strict="raise_all")
    chunks[0].module.load_state_dict(loaded["model"])
    for name, value in saved.items():
        assert_equal(chunks[0].module.state_dict()[name], value, name)
    assert loaded["optimizer"]


@pytest.mark.parametrize("bf16", [False, True])
def test_saves_and_loads_fully_reshardable(tmp_path: Path, bf16: bool) -> None:
    run = Run(world=4 if bf16 else 2, tp=2, bf16=bf16, distributed_optimizer=True)
    run_ranks(run.world, _save_then_load, run, str(tmp_path))
