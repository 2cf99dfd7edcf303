"""Whole runs: resuming equals not stopping, evaluation and records, guards, and reasons to leave."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  (what a run imports late is imported here, once, and inherited by every rank)
import pytest
import torch.utils.tensorboard  # noqa: F401
from scripts import token_files

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.testing.ranks import RankError, run_ranks
from megatron_lowrank.train import loop
from megatron_lowrank.train.guard import Guard

WORDS = ["low", "rank", "pairs", "learn", "a", "language", "from", "plain", "text", "and", "forget", "nothing"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of token files over a small text."""
    words = ([WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(60)] for number in range(80))
    return token_files(tmp_path_factory.mktemp("text"), map(" ".join, words))


def small_run(text: str, out: Path, steps: int = 8, **changes: dict[str, Any]) -> RunConfig:
    """Eight small steps over the text; `changes` are fields by section."""
    run = preset("cola_debug")
    run = replace(
        run,
        out=str(out),
        data=replace(run.data, path=(text,), split="80,20,0"),
        train=replace(run.train, steps=steps, sequence_length=32, global_batch_size=4, eval_interval=3, eval_rows=5),
        log=replace(run.log, progress="plain"),
    )
    return replace(run, **{name: replace(getattr(run, name), **fields) for name, fields in changes.items()})


def whole(run: RunConfig, before: Callable[[Any], None] | None = None) -> Any:
    """In a rank: the body of examples/pretrain.py."""
    from megatron_lowrank.train.launch import start_model_parallel

    start_model_parallel(run)
    job = loop.build(run)
    loop.load(job)
    if before is not None:
        before(job)
    return loop.train(job)


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"tensor_parallel_size": 2}),
        (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ],
    ids=str,
)
def test_resuming_equals_not_stopping(text: str, tmp_path: Path, world: int, parallel: dict[str, Any]) -> None:
    wholly = small_run(text, tmp_path / "whole", parallel=parallel, checkpoint={"save": False})
    once = run_ranks(world, whole, wholly)[0]
    parts = small_run(text, tmp_path / "parts", parallel=parallel, train={"exit_interval": 5})
    first = run_ranks(world, whole, parts)[0]
    assert first.step == 5 and first.stopped == "train.exit_interval"
    # A line behind the checkpoint, and one that a kill has cut short, must not stay.
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as stream:
        stream.write('{"kind": "train", "step": 6, "loss": 1.0}\n{"kind": "tr')
    second = run_ranks(world, whole, parts)[0]
    assert second.step == 8 and second.stopped is None
    assert first.losses + second.losses == once.losses
    assert second.valid_loss == once.valid_loss
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert [line["step"] for line in records(tmp_path / "whole") if line["kind"] == "valid"] == [3, 6, 8]


def test_a_run_leaves_its_records(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    run = small_run(text, out, checkpoint={"save_interval": 3, "keep": 0})
    result = run_ranks(1, whole, run)[0]
    said = capfd.readouterr().out
    assert " iteration        1/       8 | consumed samples:            4 | elapsed time per iteration (ms): " in said
    for part in ("unigram entropy of the whole text: ", "QKVGroup", "dense model of the same shape"):
        assert part in said
    assert sorted(path.name for path in (out / "checkpoints").glob("iter_*")) == [
        "iter_0000003", "iter_0000006", "iter_0000008",
    ]  # fmt: skip
    assert result.checkpoint == out / "checkpoints" / "iter_0000008"
    config = json.loads((out / "run_config.json").read_text())
    assert config["config"]["data"]["tokenizer"] == "byte" and config["versions"]["torch"] and config["data"]["files"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {"tflops_actual", "tflops_dense_equivalent", "memory_kind"} <= lines[0]["time"].keys()
    assert lines[0]["time"]["memory_kind"] == "peak process RSS" and lines[0]["time"]["mfu"] is None
    assert lines[-1]["kind"] == "valid" and lines[-1]["unigram_entropy"] > 2
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {"lm loss", "learning-rate", "grad-norm", "batch-size", "lm loss validation", "iteration-time",
            "throughput", "lm loss vs samples"} <= set(events.Tags()["scalars"])  # fmt: skip
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 9))
    # Again: nothing is left to do, and nothing is lost.
    again = run_ranks(1, whole, run)[0]
    assert again.step == 8 and again.losses == []
    assert "nothing to do" in capfd.readouterr().out
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == lines
    # Another architecture may not enter the folder; another learning rate may, and is told.
    with pytest.raises(RankError, match=r"holds a run of another architecture \(num_layers: 2 before, 4 now"):
        run_ranks(1, whole, replace(run, model=replace(run.model, num_layers=4)))
    run_ranks(1, whole, replace(run, optimizer=replace(run.optimizer, lr=1e-4)))
    assert "optimizer.lr: 0.003 before, 0.0001 now" in capfd.readouterr().out


def test_evaluation_does_not_depend_on_the_cut(text: str, tmp_path: Path) -> None:
    results = []
    for number, (world, parallel) in enumerate(
        [(1, {}), (2, {}), (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2})]
    ):
        run = small_run(
            text, tmp_path / str(number), 2, parallel=parallel, model={"num_layers": 4}, checkpoint={"save": False}
        )
        ranks = run_ranks(world, whole, run)
        assert len({rank.valid_loss for rank in ranks}) == 1
        results.append(ranks[0])
    for result in results[1:]:
        assert result.valid_loss == pytest.approx(results[0].valid_loss, rel=1e-5)
        assert result.losses == pytest.approx(results[0].losses, rel=1e-5)


def test_weights_only_starts_anew(text: str, tmp_path: Path) -> None:
    first = run_ranks(1, whole, small_run(text, tmp_path / "first", 4))[0]
    start = {"load": str(tmp_path / "first" / "checkpoints"), "load_weights_only": True}
    second = run_ranks(1, whole, small_run(text, tmp_path / "second", 4, checkpoint={**start, "save": False}))[0]
    assert second.step == 4 and len(second.losses) == 4
    assert second.losses[0] < first.losses[0]
    assert records(tmp_path / "second")[0]["learning_rate"] == 0


def test_signal_saves_and_the_run_resumes(text: str, tmp_path: Path) -> None:
    def signalled(run: RunConfig) -> Any:
        def arrange(job: Any) -> None:
            real = job.guard.record

            def record(loss: float) -> None:
                real(loss)
                # One rank alone gets it, in the middle of the third step.
                if job.step == 2 and job.loader._rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            job.guard.record = record

        return whole(run, arrange)

    run = small_run(text, tmp_path / "run")
    for rank in run_ranks(2, signalled, run):
        assert rank.step == 3 and rank.stopped == "signal SIGTERM" and rank.checkpoint.name == "iter_0000003"
    assert run_ranks(2, whole, replace(run, checkpoint=replace(run.checkpoint, save=False)))[0].step == 8


def test_clock_and_trigger_stop_a_run(text: str, tmp_path: Path) -> None:
    trigger = tmp_path / "stop"
    run = small_run(text, tmp_path / "clock", train={"exit_duration_minutes": 1e-6}, checkpoint={"save": False})
    assert run_ranks(1, whole, run)[0].stopped == "train.exit_duration_minutes"
    trigger.touch()
    run = small_run(text, tmp_path / "trigger", train={"exit_trigger": str(trigger)})
    first = run_ranks(1, whole, run)[0]
    assert (first.step, first.stopped) == (1, "train.exit_trigger") and not trigger.exists()
    assert first.checkpoint == tmp_path / "trigger" / "checkpoints" / "iter_0000001"


def test_nan_stops_every_rank_before_the_update(text: str, tmp_path: Path) -> None:
    def broken(run: RunConfig) -> tuple[str, int, bool]:
        import torch

        from megatron_lowrank.checkpoint.agree import AgreedError

        jobs: list[Any] = []

        def arrange(job: Any) -> None:
            jobs.append(job)
            real = job.loader.step

            def step(rows: int, copies: int) -> Any:
                if job.step == 4:
                    with torch.no_grad():
                        next(job.chunks[0].parameters()).view(-1)[:4096].fill_(float("nan"))
                return real(rows, copies)

            job.loader.step = step

        try:
            whole(run, arrange)
        except AgreedError as error:
            others = list(jobs[0].chunks[0].parameters())[1:]
            return str(error), error.code, all(bool(torch.isfinite(p).all()) for p in others)
        raise AssertionError("the run went on")

    run = small_run(text, tmp_path / "run", checkpoint={"save_interval": 2})
    for message, code, finite in run_ranks(2, broken, run):
        assert message == (
            f"loss is nan at step 5; its update was not made; last good checkpoint: "
            f"{tmp_path / 'run' / 'checkpoints' / 'iter_0000004'}"
        )
        assert code == 3 and finite


def test_guard_sees_spikes() -> None:
    guard = Guard(2.0)
    for _ in range(20):
        guard.check(1, 3.0, 1.0, None)
        guard.record(3.0)
    guard.check(21, 5.9, 1.0, None)
    copy = Guard(2.0)
    copy.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for watcher in (guard, copy):
        with pytest.raises(Exception, match=r"loss is 6.1 at step 22, more than train.spike_factor 2 times"):
            watcher.check(22, 6.1, 1.0, None)
        with pytest.raises(Exception, match="gradient norm is inf at step 22 .*there is no checkpoint yet"):
            watcher.check(22, 3.0, float("inf"), None)


def test_an_error_of_one_rank_is_everyones(tmp_path: Path) -> None:
    def fails(wrong: int | None) -> tuple[str, int]:
        import torch.distributed as dist

        from megatron_lowrank.checkpoint.agree import AgreedError, agreed

        try:
            with agreed():
                if wrong is None or dist.get_rank() == wrong:
                    raise FileNotFoundError("no such file")
        except AgreedError as error:
            return str(error), error.code
        return "", 0

    assert run_ranks(2, fails, 1) == [("rank 1 of 2: no such file", 2)] * 2
    assert run_ranks(2, fails, None) == [("no such file", 2)] * 2
    assert run_ranks(2, fails, 5) == [("", 0)] * 2


def test_sampling_from_any_layout(text: str, tmp_path: Path) -> None:
    def sampled(path: Path | None, tp: int) -> list[list[int]]:
        from megatron_lowrank.checkpoint import load_checkpoint, read_run_config
        from megatron_lowrank.model import build_model
        from megatron_lowrank.train.generate import sample
        from megatron_lowrank.train.launch import start_model_parallel

        run = read_run_config(path)  # type: ignore[arg-type]
        run = replace(run, parallel=replace(run.parallel, tensor_parallel_size=tp))
        start_model_parallel(run)
        models = build_model(run)
        load_checkpoint(path, run, models, None, None, weights_only=True)  # type: ignore[arg-type]
        options: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3, "top_k": 40}, {"seed": 4}]
        return [sample(models, run, [108, 111, 119], 8, **option) for option in options]

    run = small_run(text, tmp_path / "run", 4, parallel={"tensor_parallel_size": 2})
    path = run_ranks(2, whole, run)[0].checkpoint
    alone = run_ranks(1, sampled, path, 1)[0]
    assert run_ranks(2, sampled, path, 2) == [alone, alone]
    assert [len(ids) for ids in alone] == [8, 8, 8] and alone[1] != alone[2]


def test_a_save_survives_a_signal_to_the_whole_step() -> None:
    """Slurm signals every process of a step, also those that a checkpoint's writer has started."""
    import subprocess
    import sys

    from megatron_lowrank.train.exit import signals_survived

    with signals_survived():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    exposed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    for process in (child, exposed):
        process.send_signal(signal.SIGUSR1)
    assert child.wait() == 0 and exposed.wait() == -signal.SIGUSR1
