"""A whole run: `build` makes model, optimizer and data, `load` finds where to go on, `train` takes the steps."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lowrank.checkpoint import save_checkpoint
from megatron_lowrank.checkpoint.agree import agreed, on_rank_0
from megatron_lowrank.config import RunConfig
from megatron_lowrank.data.datasets import build_datasets, data_tokenizer
from megatron_lowrank.data.files import unigram_entropy
from megatron_lowrank.data.loader import Loader
from megatron_lowrank.data.tokenizers import Tokenizer, check_vocabulary
from megatron_lowrank.model import build_model
from megatron_lowrank.train.batch import Batches
from megatron_lowrank.train.console import Console
from megatron_lowrank.train.evaluate import EvalResult, evaluate
from megatron_lowrank.train.exit import ExitRequests, signals_survived
from megatron_lowrank.train.failure import INTERRUPTED, restart_from
from megatron_lowrank.train.folder import checkpoint_folder, compare_folder, lock_folders, record_run
from megatron_lowrank.train.guard import Guard
from megatron_lowrank.train.metrics import Metrics
from megatron_lowrank.train.optimizer import build_optimizer, build_scheduler, gathered_parameters, wrap_for_ddp
from megatron_lowrank.train.origin import Origin, find_origin, load_origin
from megatron_lowrank.train.step import StepResult, train_step
from megatron_lowrank.train.summary import describe_run


@dataclass(kw_only=True)
class Job:
    """The live objects of a run on this rank."""

    run: RunConfig
    """Resolved config."""
    chunks: list[DistributedDataParallel]
    """Model chunks, wrapped."""
    optimizer: MegatronOptimizer
    """AdamW."""
    scheduler: OptimizerParamScheduler
    """Learning rate by rows consumed."""
    loader: Loader
    """Training rows of this rank; knows the rows consumed."""
    validation: Loader | None
    """Validation rows, or None."""
    entropy: float | None
    """Unigram entropy of the whole text in nats per token, validation included; None for a blend."""
    guard: Guard
    """Watches the loss."""
    origin: Origin
    """Where the run begins; `load` takes it from there."""
    batches: Batches
    """Rows of each step."""
    facts: dict[str, Any]
    """What the folder records beside the config."""
    locks: list[TextIO]
    """Of the run's folders, on rank 0; held as long as the job lives."""
    step: int = 0
    """Optimizer steps done."""
    checkpoint: Path | None = None
    """Newest checkpoint of this run."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended; equal on every rank."""

    step: int
    """Optimizer steps done."""
    loss: float | None
    """Training loss of the last step of this process."""
    valid_loss: float | None
    """Last validation loss of this process."""
    stopped: str | None
    """Why it ended before the last step, or None."""
    checkpoint: Path | None
    """Newest checkpoint."""
    losses: list[float] = field(repr=False)
    """Training loss of every step of this process."""

    @property
    def exit_code(self) -> int:
        """Of the program."""
        return INTERRUPTED if self.stopped == f"signal {signal.SIGINT.name}" else 0


def build(run: RunConfig) -> Job:
    """Finds where the run begins, opens the data and the run's folder, builds model, optimizer and scheduler.

    Prints what they are.

    Args:
        run: The run; model parallelism is initialised for it.

    Raises:
        AgreedError: data, tokenizer, checkpoint or folder are not usable, or the schedule is impossible.
    """
    say, t = _say, run.train
    locks: list[TextIO] = []
    on_rank_0(lambda: locks.extend(lock_folders(run)), what="the run's folder")
    origin = find_origin(run)
    batches = origin.batches_of(t)
    with agreed():
        _make_cache(run)
        tokenizer = data_tokenizer(run.data)
        run = _resolved(run, tokenizer)
        check_vocabulary(tokenizer, run.model.vocab_size)
        files, cache = run.data.blend(), run.data.cache_path or str(Path(run.out) / "cache")
        datasets = build_datasets(
            run.data, sequence_length=t.sequence_length, vocab_size=run.model.vocab_size, eod=tokenizer.eod,
            train_rows=batches.rows_after(max(t.steps, origin.step)), valid_rows=t.eval_rows, pad=tokenizer.pad,
            cache=cache,
        )  # fmt: skip
        assert datasets.train is not None
        entropy = unigram_entropy(files[0][1], cache) if len(files) == 1 else None
    for advice in run.advice():
        warnings.warn(advice, stacklevel=1)
    facts = {"world_size": dist.get_world_size(), "data": datasets.train.description, "tokenizer": tokenizer.identity()}
    changes = on_rank_0(lambda: compare_folder(run, facts), what="the run's folder")
    for change in changes:
        say(f"changed since the last start in {run.out}: {change}")
    with agreed():
        ExitRequests(t)  # refuses a trigger that cannot be one
        models = _models(run)
    say(describe_run(run, models, datasets, tokenizer))
    chunks = wrap_for_ddp(run, models)
    optimizer = build_optimizer(run, chunks)
    with agreed():
        scheduler = build_scheduler(run, optimizer, batches)
    place = {
        "micro_batch_size": t.micro_batch_size,
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    return Job(
        run=run, chunks=chunks, optimizer=optimizer, scheduler=scheduler,
        loader=Loader(datasets.train, **place, prefetch=True),
        validation=None if datasets.valid is None else Loader(datasets.valid, **place),
        entropy=entropy, guard=Guard(t.spike_factor), origin=origin, batches=batches,
        facts=facts, locks=locks,
    )  # fmt: skip


def load(job: Job) -> None:
    """Takes weights, and when the run resumes everything else, from where `build` has found that it begins.

    Then the run's folder says that it is this run's.

    Raises:
        AgreedError: a checkpoint cannot be read, or belongs to another architecture or other data.
    """
    _load(job)
    restart_from(job.checkpoint)
    on_rank_0(lambda: record_run(job.run, job.facts), what="the run's folder")


def _load(job: Job) -> None:
    run, origin = job.run, job.origin
    if origin.source is None:
        _say("starting from initial weights")
        return
    if origin.own and run.checkpoint.load is not None:
        own = checkpoint_folder(run)
        _say(f"checkpoint.load {run.checkpoint.load} is not used: {own} already holds checkpoints of this run")
    state = load_origin(origin, run, job.chunks, job.optimizer, job.scheduler)
    if origin.weights_only:
        _say(f"starting from the weights of {origin.source}")
        return
    with agreed():
        job.loader.load_state_dict(state["loader"])
        job.guard.load_state_dict(state["guard"])
        job.step = origin.step
    job.checkpoint = origin.source if origin.own else None
    _say(f"resuming from {origin.source} at step {job.step}, {job.loader.consumed_rows} rows consumed")


def train(job: Job) -> RunResult:
    """Takes the steps that are left, with evaluations, checkpoints and reports.

    Raises:
        AgreedError: the loss diverged (exit code 3), or a checkpoint could not be written.
    """
    run, t, rank = job.run, job.run.train, dist.get_rank()
    losses: list[float] = []
    valid: EvalResult | None = None
    stopped: str | None = None
    if job.step > t.steps and rank == 0:
        warnings.warn(
            f"train.steps: found {t.steps}, but {job.step} steps are done already; the checkpoint stays", stacklevel=1
        )
    if job.step >= t.steps:
        _say(f"nothing to do: {job.step} of train.steps {t.steps} are done")
    with agreed():
        console = Console(run, rank, job.step)
        metrics = Metrics(
            run, rank=rank, world_size=dist.get_world_size(), first_step=job.step, entropy=job.entropy, console=console
        )
    try:
        with ExitRequests(t) as exits:
            while job.step < t.steps and stopped is None:
                started = time.perf_counter()
                result = _one_step(job)
                losses.append(result.loss)
                metrics.step(job.step, result, job.loader.consumed_rows, time.perf_counter() - started)
                last = job.step == t.steps
                if job.validation is not None and (last or (t.eval_interval and job.step % t.eval_interval == 0)):
                    valid = _evaluate(job)
                    metrics.evaluation(job.step, valid, job.loader.consumed_rows)
                stopped = None if last else exits.reason(job.step)
                interval = run.checkpoint.save_interval
                if last or stopped is not None or (interval and job.step % interval == 0):
                    _save(job, console.say)
                if stopped is not None:
                    console.say(f"exiting after step {job.step} of {t.steps}: {stopped}")
    finally:
        metrics.close()
    return RunResult(
        step=job.step, loss=losses[-1] if losses else None, valid_loss=None if valid is None else valid.loss,
        stopped=stopped, checkpoint=job.checkpoint, losses=losses,
    )  # fmt: skip


def _one_step(job: Job) -> StepResult:
    rows = job.batches.rows_of(job.loader.consumed_rows)

    def check(loss: float, grad_norm: float) -> None:
        job.guard.check(job.step + 1, loss, grad_norm, job.checkpoint)

    batches = job.loader.step(rows, len(job.chunks))
    result = train_step(job.run, job.chunks, job.optimizer, job.scheduler, batches, rows, check)
    job.guard.record(result.loss)
    job.step += 1
    return result


def _evaluate(job: Job) -> EvalResult:
    validation, rows = job.validation, job.run.train.eval_rows
    assert validation is not None
    count = validation.evaluation_micro_batches(rows)
    return evaluate(job.run, job.chunks, lambda: validation.evaluate(rows), count)


def _save(job: Job, say: Callable[[str], None]) -> None:
    if not job.run.checkpoint.save:
        return
    state = {
        "step": job.step, "loader": job.loader.state_dict(), "guard": job.guard.state_dict(),
        "batches": job.batches.state(),
    }  # fmt: skip
    folder = checkpoint_folder(job.run)
    with gathered_parameters(job.chunks), signals_survived():
        job.checkpoint = save_checkpoint(folder, job.step, job.run, job.chunks, job.optimizer, job.scheduler, state)
    restart_from(job.checkpoint)
    say(f"saved {job.checkpoint}")


def _resolved(run: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The run with the tokenizer named, so that a checkpoint tells how to read its text without the data."""
    path = None if tokenizer.path is None else os.path.abspath(tokenizer.path)
    return replace(run, data=replace(run.data, tokenizer=tokenizer.kind, tokenizer_path=path))  # type: ignore[arg-type]


def _make_cache(run: RunConfig) -> None:
    if run.data.cache_path is not None:
        try:  # row indices are written when the first row is asked for, which is too late to be told of a wrong path
            os.makedirs(run.data.cache_path, exist_ok=True)
        except OSError as error:
            raise ValueError(f"data.cache_path: {error}") from error


def _models(run: RunConfig) -> list[Any]:
    try:
        return build_model(run)
    except ImportError as error:
        raise ValueError(f"model.transformer_impl: found {run.model.transformer_impl!r}, but {error}") from error


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
