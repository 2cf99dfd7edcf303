"""Where a run begins: with another batch than before, with more steps, or with the weights of an imported model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  (imported once here and inherited by every rank)
import pytest
import torch
from scripts import token_files

from megatron_lowrank.checkpoint.agree import AgreedError
from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.testing.ranks import run_ranks
from megatron_lowrank.train import loop

FIXTURE = Path(__file__).parent / "fixtures" / "cola_tiny"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of token files over a small text."""
    texts = (f"line {number} of a small text, " * 9 for number in range(40))
    return token_files(tmp_path_factory.mktemp("text"), texts)


def small_run(text: str, out: Path, steps: int = 6, batch: int = 8, **changes: dict[str, Any]) -> RunConfig:
    """Six steps of eight rows; two steps of warm-up, then linear to a tenth at the last step."""
    run = preset("cola_debug")
    run = replace(
        run,
        out=str(out),
        data=replace(run.data, path=(text,), split="100,0,0"),
        schedule=replace(run.schedule, decay="linear", warmup_steps=2),
        train=replace(run.train, steps=steps, sequence_length=32, global_batch_size=batch, eval_rows=0),
        log=replace(run.log, progress="plain", tensorboard=False),
    )
    return replace(run, **{name: replace(getattr(run, name), **fields) for name, fields in changes.items()})


def whole(run: RunConfig) -> Any:
    """In a rank: the body of examples/pretrain.py; also what it raises, if that is agreed on."""
    from megatron_lowrank.train.launch import start_model_parallel

    start_model_parallel(run)
    try:
        job = loop.build(run)
        loop.load(job)
        return loop.train(job)
    except AgreedError as error:
        return str(error), error.code


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def linear(run: RunConfig, rows: list[int], warm: int, end: int) -> list[float]:
    """Learning rates behind these rows."""
    peak, low = run.optimizer.lr, run.optimizer.lr * run.optimizer.min_lr_ratio
    return [peak * n / warm if n <= warm else low + (peak - low) * (end - n) / (end - warm) for n in rows]


@pytest.mark.parametrize(
    ("batch", "ramp", "sizes"),
    [(4, None, [4, 4, 4]), (16, None, [16, 16, 16]), (12, (8, 4, 40), [8, 8, 12])],
    ids=["smaller", "larger", "ramp"],
)
def test_resuming_with_another_batch(text: str, tmp_path: Path, batch: int, ramp: Any, sizes: list[int]) -> None:
    """Three steps of eight rows, three of another batch: the rows and the schedule go on from those consumed."""
    before = small_run(text, tmp_path / "run", train={"exit_interval": 3})
    assert run_ranks(1, whole, before)[0].step == 3
    after = small_run(text, tmp_path / "run", batch=batch, train={"batch_ramp": ramp})
    result = run_ranks(1, whole, after)[0]
    assert result.step == 6 and len(result.losses) == 3
    found = records(tmp_path / "run")
    consumed = [8, 16, 24, 24 + sizes[0], 24 + sum(sizes[:2]), 24 + sum(sizes)]
    assert [line["global_batch_size"] for line in found] == [8, 8, 8, *sizes]
    assert [line["consumed_rows"] for line in found] == consumed
    # The warm-up's rows are those that it took; the decay ends behind the rows that are still to come.
    rates = linear(after, [0, 8, 16], 16, 48)[:3] + linear(after, [24, *consumed[3:5]], 16, consumed[5])
    assert [line["learning_rate"] for line in found] == pytest.approx(rates)
    if ramp is None:
        return
    # And a second interruption changes nothing.
    again = small_run(text, tmp_path / "again", train={"exit_interval": 3})
    run_ranks(1, whole, again)
    cut = replace(after, out=again.out, train=replace(after.train, exit_interval=5))
    assert run_ranks(1, whole, cut)[0].step == 5
    run_ranks(1, whole, replace(after, out=again.out))
    assert records(tmp_path / "again") == found


def test_extending_a_run(text: str, tmp_path: Path) -> None:
    """More steps, past the rows that the first run had opened, on the schedule of the longer run."""
    run_ranks(1, whole, small_run(text, tmp_path / "run"))
    longer = small_run(text, tmp_path / "run", steps=9, batch=4)
    assert run_ranks(1, whole, longer)[0].step == 9
    found = records(tmp_path / "run")
    assert [line["consumed_rows"] for line in found][-4:] == [48, 52, 56, 60]
    assert [line["learning_rate"] for line in found][-3:] == pytest.approx(linear(longer, [48, 52, 56], 16, 60))
    # Less than what is done: nothing to do, and no error.
    assert run_ranks(1, whole, small_run(text, tmp_path / "run", steps=4))[0].losses == []


def test_a_checkpoint_without_a_position(text: str, tmp_path: Path) -> None:
    run_ranks(1, whole, small_run(text, tmp_path / "run", steps=1))
    path = tmp_path / "run" / "checkpoints" / "iter_0000001" / "train_state.json"
    state = json.loads(path.read_text())
    del state["train_state"]["batches"]
    path.write_text(json.dumps(state))
    message, code = run_ranks(1, whole, small_run(text, tmp_path / "run"))[0]
    assert "does not tell where its run was (KeyError('batches')); allowed:" in message and code == 2


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The fixture as canonical folder, and its two sequences as token files."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from megatron_lowrank.convert.cli import main
    from megatron_lowrank.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("imported")
    assert main(["import-hf", str(FIXTURE), str(folder / "canonical")]) == 0
    expected = load_file(FIXTURE / "expected.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(128)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["t0"])
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = [json.dumps({"text": " ".join(f"t{n}" for n in row.tolist())}) for row in expected["input_ids"]]
    (folder / "in.jsonl").write_text("\n".join(lines))
    prepare(PrepareOptions(
        input=(str(folder / "in.jsonl"),), out=str(folder / "text"), tokenizer="hf",
        tokenizer_path=str(folder / "tokenizer.json"), eod_token="t0",
    ))  # fmt: skip
    return {"folder": folder / "canonical", "text": str(folder / "text"), "loss": float(expected["loss"])}


def tiny_run(imported: dict[str, Any], out: Path, **changes: dict[str, Any]) -> RunConfig:
    """Two steps from the imported model over its two sequences, 47 predictions each."""
    from megatron_lowrank.convert import open_canonical

    source = open_canonical(imported["folder"])
    run = small_run(
        imported["text"], out, 2, 2, data={"rows": "document"}, train={"sequence_length": 47, "micro_batch_size": 1}
    )
    load = {"load": str(imported["folder"]), "load_weights_only": True, "save": False}
    run = replace(
        run, model=source.model, lowrank=source.lowrank, checkpoint=replace(run.checkpoint, **load),
        schedule=replace(run.schedule, warmup_steps=0),
    )  # fmt: skip
    return replace(run, **{name: replace(getattr(run, name), **fields) for name, fields in changes.items()})


def test_training_goes_on_from_an_imported_model(imported: dict[str, Any], tmp_path: Path) -> None:
    """The first loss is the one that the public implementation computed; the second step is the same in each layout."""
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {"use_distributed_optimizer": False}), (2, {}), (3, {"pipeline_parallel_size": 3}),
    ]  # fmt: skip
    losses = []
    for number, (world, parallel) in enumerate(layouts):
        result = run_ranks(world, whole, tiny_run(imported, tmp_path / str(number), parallel=parallel))[0]
        assert result.losses[0] == pytest.approx(imported["loss"], abs=1e-5)
        assert result.losses[1] < result.losses[0] - 0.01, "main parameters are those of the folder, too"
        losses.append(result.losses)
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


def test_a_canonical_folder_is_read_across_tensor_parallel_ranks(imported: dict[str, Any]) -> None:
    def weights(run: RunConfig) -> dict[str, tuple[int | None, torch.Tensor]]:
        from megatron_lowrank.model import build_model, model_parts
        from megatron_lowrank.train.launch import start_model_parallel
        from megatron_lowrank.train.origin import load_canonical_weights

        start_model_parallel(run)
        models = build_model(run)
        load_canonical_weights(imported["folder"], run, models)
        return {part.key: (part.axis, part.block.clone()) for part in model_parts(models[0])}

    from megatron_lowrank.convert import load_canonical

    run = tiny_run(imported, Path("nowhere"))
    run = replace(run, train=replace(run.train, sequence_length=32))
    full = load_canonical(imported["folder"])
    for placement in ("vanilla", "btp", "btp_sp"):
        cut = replace(run, parallel=replace(run.parallel, tensor_parallel_size=2, placement=placement))
        first, second = run_ranks(2, weights, cut)
        for key, (axis, block) in first.items():
            whole = block if axis is None else torch.cat([block, second[key][1]], axis)
            assert torch.equal(whole[: full[key].shape[0]], full[key]), key


def test_a_canonical_folder_that_does_not_fit(imported: dict[str, Any], tmp_path: Path) -> None:
    """Another architecture, another use, damage: one error on every rank, with code 2."""
    import shutil

    run = tiny_run(imported, tmp_path / "run")
    damaged = tmp_path / "damaged"
    shutil.copytree(imported["folder"], damaged)
    file = next(damaged.glob("model-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    wrong = {
        "has another architecture: norm_epsilon: checkpoint 1e-06, run 1e-05; mlp_activation: checkpoint drop, run ": (
            replace(run, model=replace(run.model, norm_epsilon=1e-5),
                    lowrank=replace(run.lowrank, mlp_activation="keep"))
        ),
        "is a canonical folder, which holds weights alone; allowed: with checkpoint.load_weights_only": (
            replace(run, checkpoint=replace(run.checkpoint, load_weights_only=False))
        ),
        "sha256": replace(run, checkpoint=replace(run.checkpoint, load=str(damaged))),
    }  # fmt: skip
    for number, (message, changed) in enumerate(wrong.items()):
        first, second = run_ranks(2, whole, replace(changed, out=str(tmp_path / str(number))))
        assert first == second
        assert message in first[0] and first[1] == 2, first
