"""The run's folder: one run at a time, writable from the start, and metrics of any content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lowrank.config import RunConfig, preset
from megatron_lowrank.testing.ranks import run_ranks


def run_in(out: Path, folder: Path | None = None) -> RunConfig:
    run = replace(preset("cola_debug"), out=str(out))
    return replace(run, checkpoint=replace(run.checkpoint, folder=None if folder is None else str(folder)))


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    from megatron_lowrank.train.folder import lock_folders

    locks = lock_folders(run_in(tmp_path / "a"))
    assert len(locks) == 2
    with pytest.raises(ValueError, match=r"^out: another run is at work in \S+ \(process \d+ on "):
        lock_folders(run_in(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"^checkpoint.folder: another run is at work in "):
        lock_folders(run_in(tmp_path / "b", tmp_path / "a" / "checkpoints"))
    for lock in locks:
        lock.close()
    assert len(lock_folders(run_in(tmp_path / "a"))) == 2
    assert len(lock_folders(run_in(tmp_path / "c", tmp_path / "c"))) == 1


def test_a_file_system_without_locks_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lowrank.train import folder

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="out: .* cannot be locked"):
        assert folder.lock_folders(run_in(tmp_path)) == []


def test_an_unwritable_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    from megatron_lowrank.train.folder import lock_folders

    (tmp_path / "checkpoints").write_text("")
    for folder in (None, tmp_path / "checkpoints" / "below", Path("/proc/x")):
        with pytest.raises(ValueError, match=r"^checkpoint.folder: cannot write into "):
            lock_folders(run_in(tmp_path, folder))


def test_metrics_of_any_content_are_read(tmp_path: Path) -> None:
    def read() -> None:
        from megatron_lowrank.train.metrics import _keep_until, read_metrics

        good = {"kind": "train", "step": 3, "loss": 1.5}
        lines = [b"null", b"5", b"[]", b"{}", b"[" * 99_999, b"\xff\xfe", b'{"kind": "train", "step": true, "loss": 1}',
                 b'{"kind": "train", "step": 1}', json.dumps(good).encode()]  # fmt: skip
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        assert read_metrics(tmp_path) == [good]
        _keep_until(tmp_path, 5)
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == good
        for _ in range(2):
            _keep_until(tmp_path, 0)
            (tmp_path / "metrics.jsonl").write_text("x")
        assert (tmp_path / "metrics.previous.2.jsonl").read_text() == "x"

    run_ranks(1, read)


def test_a_plot_that_fails_is_a_warning(tmp_path: Path) -> None:
    def draw() -> list[str]:
        import warnings

        from megatron_lowrank.train.console import Console
        from megatron_lowrank.train.metrics import Metrics

        run = run_in(tmp_path)
        (tmp_path / "loss.png").mkdir()
        (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
        console = Console(run, 0, 1)
        metrics = Metrics(run, rank=0, world_size=1, first_step=1, entropy=None, console=console)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metrics.close()
        return [str(warning.message) for warning in caught]

    (said,) = run_ranks(1, draw)[0]
    assert said.startswith("loss.png is not complete: IsADirectoryError")


def test_a_lost_rank_is_told_in_clean_words() -> None:
    from megatron_lowrank.train import failure

    gloo = RuntimeError("[gloo/pair.cc:544] Connection closed by peer [127.0.0.1]:1. Did a rank crash? Memory] x")
    said = failure._describe(gloo, 1)
    assert "which was killed or hung (connection closed by peer); there is no checkpoint yet" in said
    failure.restart_from("here/iter_0000002")
    assert "; restart from the last checkpoint, here/iter_0000002 (" in failure._describe(gloo, 1)
    failure.restart_from(None)


def test_a_trigger_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    from megatron_lowrank.train.exit import ExitRequests

    with pytest.raises(ValueError, match=r"^train.exit_trigger: "):
        ExitRequests(replace(preset("cola_debug").train, exit_trigger=str(tmp_path)))


def test_comparing_leaves_the_config_of_the_last_run(tmp_path: Path) -> None:
    from megatron_lowrank.train.folder import compare_folder, record_run

    run = run_in(tmp_path)
    record_run(run, {})
    before = (tmp_path / "run_config.json").read_bytes()
    changed = replace(run, train=replace(run.train, steps=run.train.steps + 1))
    assert any("train.steps" in change for change in compare_folder(changed, {}))
    assert (tmp_path / "run_config.json").read_bytes() == before
