"""A kill at any moment of a save leaves a checkpoint that can be loaded: the old one or the new one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_steps import small_run, start

from megatron_lowrank.checkpoint import files, latest, load_checkpoint, save_checkpoint, verify_checksums
from megatron_lowrank.testing.ranks import RankError, run_ranks


def save(folder: Path, step: int, content: str = "x", keep: int = 2) -> None:
    """What `save_checkpoint` does with files, with one file in place of megatron-core's."""
    files.prepare(folder, step)
    partial = files.partial_path(folder, step)
    (partial / "__0_0.distcp").write_text(content)
    files.publish(folder, step, {"step": step, "files": files.seal_files(partial, 0)})
    files.retain(folder, step, keep)


def steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint."""
    return list(files.complete_steps(folder))


def test_the_marker_is_megatrons(tmp_path: Path) -> None:
    """Name and content."""
    save(tmp_path, 1000)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1000"
    assert latest(tmp_path) == tmp_path / "iter_0001000"
    assert latest(tmp_path / "nothing") is None


def test_the_newest_complete_ones_are_kept(tmp_path: Path) -> None:
    """And never fewer than one; a run that was taken back removes nothing that is newer."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=0)
    assert steps(tmp_path) == [1, 2, 3]
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [3, 4]
    save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == [2, 3, 4]
    assert latest(tmp_path) == tmp_path / "iter_0000002"
    save(tmp_path, 10_000_000, keep=1)
    assert steps(tmp_path) == [10_000_000]


def test_an_incomplete_folder_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the marker names it, names nothing, or is no number."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "iter_0000002" / "COMPLETE").unlink()
    assert latest(tmp_path) == tmp_path / "iter_0000001"
    assert "iter_0000002 has no file COMPLETE" in caplog.text
    for content in ("7", "release", ""):
        (tmp_path / files.MARKER).write_text(content)
        assert latest(tmp_path) == tmp_path / "iter_0000001"
        assert f"says {content!r}" in caplog.text
    (tmp_path / files.MARKER).unlink()
    assert latest(tmp_path) == tmp_path / "iter_0000001"
    with pytest.raises(ValueError, match="incomplete"):
        files.resolve(tmp_path / "iter_0000002")


def killed_at(moment: int, action: Callable[[], Any]) -> bool:
    """Runs an action in a fork that is killed before its n-th change of the disk; whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return real(*args, **kwargs)

            return call

        for owner, names in ((os, ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")),
                             (Path, ("rename", "replace", "mkdir", "write_text"))):  # fmt: skip
            for name in names:
                setattr(owner, name, counted(getattr(owner, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("step", [2, 1])
def test_a_kill_before_any_change_of_the_disk(step: int, tmp_path: Path) -> None:
    """While a newer checkpoint is saved, and while the only one is replaced."""
    moment = 0
    while True:
        folder = tmp_path / str(moment)
        save(folder, 1, "old")
        killed = killed_at(moment, lambda at=folder: save(at, step, "new", keep=1))  # type: ignore[misc]
        found = latest(folder)
        assert found is not None, f"nothing left after a kill at moment {moment}"
        verify_checksums(found)
        assert (found / "__0_0.distcp").read_text() in ("old", "new")
        save(folder, 3, "next", keep=1)
        assert sorted(path.name for path in folder.iterdir()) == ["iter_0000003", files.MARKER]
        if not killed:
            break
        moment += 1
        shutil.rmtree(folder)
    assert moment > 15, "the moments are counted"


def test_killed_ranks_resume_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """Real ranks that save as fast as they can, killed at a random time, twice."""
    run = small_run(tp=2)
    delay = random.Random(0)

    def ranks(seconds: float) -> None:
        training = start(run)
        if latest(tmp_path) is not None:
            state = load_checkpoint(tmp_path, run, training.chunks, training.optimizer, training.scheduler)
            training.step = state["step"]
        else:
            training.steps(1)

        def save_now() -> None:
            progress = {"step": training.step}
            save_checkpoint(tmp_path, training.step, run, training.chunks, training.optimizer, None, progress)

        save_now()
        # With the processes in which megatron-core writes, as a scheduler does.
        threading.Timer(seconds, os.killpg, (os.getpgid(0), signal.SIGKILL)).start()
        while True:
            training.steps(1)
            save_now()

    before = 0
    for _ in range(2):
        with pytest.raises(RankError):
            run_ranks(2, ranks, 0.2 + delay.random() / 2, timeout=60)
        found = latest(tmp_path)
        assert found is not None
        verify_checksums(found)
        assert int(found.name[5:]) >= before
        before = int(found.name[5:])
