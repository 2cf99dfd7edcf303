"""Losses and gradient norms do not depend on how the model is cut; token means are exact; the schedule's values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.testing.ranks import run_ranks
from megatron_lowrank.train.batch import Batches

LENGTH, STEPS = 32, 10


class TinyRows:
    """Rows drawn by number; the loss masks differ much in how many tokens they leave."""

    sequence_length = LENGTH
    description: dict[str, Any] = {"files": "tiny"}

    def __init__(self, rows: int = 4096, uneven: bool = True) -> None:
        self.rows, self.uneven = rows, uneven

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        text = torch.randint(0, 64, (LENGTH + 1,), generator=generator)
        mask = torch.ones(LENGTH)
        if self.uneven:
            mask[1 + (row * 7) % LENGTH :] = 0
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def small_run(**parallel: Any) -> RunConfig:
    """Four layers, sequence 32, eight rows per step."""
    run = preset("cola_debug")
    return replace(
        run,
        model=replace(run.model, num_layers=4),
        parallel=replace(run.parallel, **parallel),
        train=replace(run.train, sequence_length=LENGTH, micro_batch_size=2, global_batch_size=8, steps=STEPS),
    )


def trained(run: RunConfig, steps: int, evaluate_rows: int = 0) -> dict[str, Any]:
    """In a rank: trains on tiny rows; losses, norms and evaluation of this rank."""
    from megatron.core import parallel_state

    from megatron_lowrank.data.loader import Loader
    from megatron_lowrank.model import build_model
    from megatron_lowrank.train import optimizer as opt
    from megatron_lowrank.train.evaluate import evaluate
    from megatron_lowrank.train.launch import start_model_parallel
    from megatron_lowrank.train.step import train_step

    start_model_parallel(run)
    chunks = opt.wrap_for_ddp(run, build_model(run))
    optimizer = opt.build_optimizer(run, chunks)
    scheduler = opt.build_scheduler(run, optimizer)
    place = {
        "micro_batch_size": run.train.micro_batch_size,
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    loader = Loader(TinyRows(), **place)  # type: ignore[arg-type]
    results, consumed = [], 0
    for _ in range(steps):
        rows = Batches.of(run.train).rows_of(consumed)
        results.append(train_step(run, chunks, optimizer, scheduler, loader.step(rows, len(chunks)), rows))
        consumed += rows
    found: dict[str, Any] = {
        "loss": [r.loss for r in results], "grad_norm": [r.grad_norm for r in results],
        "tokens": [r.tokens for r in results], "rows": [r.rows for r in results],
        "rate": [r.learning_rate for r in results],
    }  # fmt: skip
    if evaluate_rows:
        found["eval"] = evaluate(
            run, chunks, lambda: loader.evaluate(evaluate_rows), loader.evaluation_micro_batches(evaluate_rows)
        )
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same steps on one rank."""
    return run_ranks(1, trained, small_run(), STEPS, 11)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {"use_distributed_optimizer": False}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}),
        (2, {}),
        (2, {"use_distributed_optimizer": False}),
        (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        (4, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "overlap_grad_reduce": True,
             "overlap_param_gather": True}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_cut_changes_nothing(alone: dict[str, Any], world: int, parallel: dict[str, Any]) -> None:
    ranks = run_ranks(world, trained, small_run(**parallel), STEPS, 11)
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"] and len(set(rank["tokens"])) > 1
        torch.testing.assert_close(rank["loss"], alone["loss"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["grad_norm"], alone["grad_norm"], rtol=1e-3, atol=1e-5)
        assert rank["eval"].tokens == alone["eval"].tokens
        torch.testing.assert_close(rank["eval"].loss, alone["eval"].loss, rtol=1e-5, atol=1e-5)
        assert rank["loss"] == ranks[0]["loss"]


def test_losses_are_those_of_a_plain_computation() -> None:
    """First loss, evaluation and gradient norm against sums over rows one by one, without any schedule."""

    def plain() -> tuple[list[float], dict[str, Any]]:
        from megatron_lowrank.model import build_model
        from megatron_lowrank.train.loss import summed_loss

        run = small_run()
        found = trained(run, 1, 11)
        (model,) = build_model(run)
        rows, losses, tokens = TinyRows(), [], []
        positions = torch.arange(LENGTH)[None]
        for row in range(8):
            batch = {name: tensor[None] for name, tensor in rows[row].items()}
            logits = model(batch["tokens"], positions, None)
            total, count, _ = summed_loss(logits, batch["labels"], batch["loss_mask"], run.model.vocab_size)
            reference = torch.nn.functional.cross_entropy(
                logits[0, :, : run.model.vocab_size], batch["labels"][0], reduction="none"
            )
            torch.testing.assert_close(total, (reference * batch["loss_mask"][0]).sum())
            losses.append(total)
            tokens.append(int(count))
        mean = torch.stack(losses).sum() / sum(tokens)
        mean.backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))  # type: ignore[arg-type]
        return [float(mean), float(norm)], found

    (mean, norm), found = run_ranks(1, plain)[0]
    torch.testing.assert_close(found["loss"][0], mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["grad_norm"][0], norm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parallel", [{}, {"use_distributed_optimizer": False}, {"tensor_parallel_size": 2}], ids=str)
def test_bf16_follows_fp32(alone: dict[str, Any], parallel: dict[str, Any]) -> None:
    run = small_run(**parallel)
    run = replace(run, train=replace(run.train, precision="bf16"))
    for rank in run_ranks(2, trained, run, STEPS):
        torch.testing.assert_close(rank["loss"], alone["loss"], rtol=1e-2, atol=2e-2)


def test_ramp_grows_the_batch_and_the_schedule_counts_rows() -> None:
    run = small_run()
    run = replace(
        run,
        train=replace(run.train, batch_ramp=(4, 2, 24), steps=10),
        schedule=replace(run.schedule, decay="linear", warmup_steps=2),
    )
    assert Batches.of(run.train).rows_after(10) == sum([4, 4, 4, 6, 6, 8, 8, 8, 8, 8])
    found = run_ranks(1, trained, run, 10)[0]
    assert found["rows"] == [4, 4, 4, 6, 6, 8, 8, 8, 8, 8]
    peak, low, warm, end = run.optimizer.lr, run.optimizer.lr * run.optimizer.min_lr_ratio, 8, 64
    consumed = [0, 4, 8, 12, 18, 24, 32, 40, 48, 56]
    expected = [
        peak * rows / warm if rows <= warm else low + (peak - low) * (end - rows) / (end - warm) for rows in consumed
    ]
    torch.testing.assert_close(found["rate"], expected)


SCHEDULES: dict[str, list[float]] = {
    # Peak 1, lowest 0.1, two steps of warm-up, ten in all: learning rates of the first and of the eleventh steps.
    "cosine": [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1],
    "linear": [0, 0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1],
    "constant": [0, 0.5, *[1.0] * 9],
    "wsd": [0, 0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1],
}


def test_schedules_hold_their_values() -> None:
    def rates(decay: Any) -> list[float]:
        from megatron_lowrank.train.optimizer import build_scheduler

        class Groups:
            def __init__(self) -> None:
                self.param_groups: list[dict[str, Any]] = [{"params": []}]

        run = small_run()
        run = replace(
            run,
            optimizer=replace(run.optimizer, lr=1.0, min_lr_ratio=0.1),
            schedule=replace(run.schedule, decay=decay, warmup_steps=2, wsd_decay_steps=4),
        )
        optimizer: Any = Groups()
        scheduler, found = build_scheduler(run, optimizer), []
        for _ in range(11):
            found.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step(increment=8)
        return found

    for decay, expected in SCHEDULES.items():
        torch.testing.assert_close(rates(decay), [float(rate) for rate in expected], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="schedule.warmup_steps: found 2, allowed: less than the 1 steps"):
        from megatron_lowrank.train.optimizer import build_scheduler

        run = small_run()
        nothing: Any = None
        build_scheduler(
            replace(run, schedule=replace(run.schedule, decay_steps=1), train=replace(run.train, steps=10)), nothing
        )


def test_batches_keep_what_was_and_plan_what_comes() -> None:
    train = replace(small_run().train, global_batch_size=8, batch_ramp=(4, 2, 24))
    batches = Batches.of(train)
    assert [batches.rows_after(steps) for steps in range(8)] == [0, 4, 8, 12, 18, 24, 32, 40]
    assert batches.resumed(train, 3, 12) == batches
    smaller = batches.resumed(replace(train, global_batch_size=2, batch_ramp=None), 3, 12)
    assert [smaller.rows_after(steps) for steps in range(8)] == [0, 4, 8, 12, 14, 16, 18, 20]
    assert smaller.rows_of(12) == 2 and batches.rows_of(12) == 6
    again = Batches.from_state(json.loads(json.dumps(smaller.state())))
    assert again == smaller
    # Taken back to a step before the change, and changed anew: the former change is gone.
    back = again.resumed(replace(train, global_batch_size=4, batch_ramp=None), 2, 8)
    assert [back.rows_after(steps) for steps in range(5)] == [0, 4, 8, 12, 16]
    # A ramp goes on by rows, also when it is the batch of a later phase.
    grown = smaller.resumed(replace(train, global_batch_size=10, batch_ramp=(4, 2, 24)), 5, 16)
    assert [grown.rows_after(steps) for steps in (3, 5, 6, 7, 8)] == [12, 16, 24, 34, 44]


def test_norms_decay_only_if_asked() -> None:
    def decays(everything: bool) -> list[float]:
        from megatron_lowrank.model import build_model
        from megatron_lowrank.train import optimizer as opt
        from megatron_lowrank.train.launch import start_model_parallel

        run = small_run()
        run = replace(run, optimizer=replace(run.optimizer, decay_norms_and_biases=everything))
        start_model_parallel(run)
        chunks = opt.wrap_for_ddp(run, build_model(run))
        optimizer = opt.build_optimizer(run, chunks)
        opt.build_scheduler(run, optimizer)
        return [group["weight_decay"] for group in optimizer.param_groups if group["params"]]

    assert run_ranks(1, decays, True)[0] == [0.01]
    assert sorted(run_ranks(1, decays, False)[0]) == [0.0, 0.01]
