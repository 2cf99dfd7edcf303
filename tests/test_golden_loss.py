"""The loss curve of the debug preset on a committed text (this project's LICENSE), held as a golden file.

python tests/test_golden_loss.py        writes tests/fixtures/golden_loss.json anew; say in LOG.md why it moved
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  (imported once here and inherited by every rank)
import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "fixtures" / "golden_loss.json"
METHODS = ("cola", "svd", "dense")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallel 2": {"tensor_parallel_size": 2},
    "tensor parallel 4": {"tensor_parallel_size": 4},
    "pipeline 2": {"pipeline_parallel_size": 2},
    "data parallel 2": {"world": 2},
    "data parallel 2, plain optimizer": {"world": 2, "use_distributed_optimizer": False},
}
TOLERANCE = 2e-5
"""Relative, fp32: the order of sums differs between layouts and processors, and twenty updates carry it on."""


def losses(method: str, folder: Path, layout: dict[str, Any]) -> list[float]:
    """Twenty steps of `{method}_debug`."""
    from megatron_lowrank.config import preset
    from megatron_lowrank.data.prepare import PrepareOptions, prepare
    from megatron_lowrank.testing.ranks import run_ranks

    text = folder / "text"
    if not text.with_suffix(".idx").exists():
        (folder / "license.txt").write_bytes((ROOT / "LICENSE").read_bytes())
        prepare(PrepareOptions(input=(str(folder / "license.txt"),), out=str(text)))
    fields = dict(layout)
    run = preset(f"{method}_debug")
    world = fields.pop("world", fields.get("tensor_parallel_size", 1) * fields.get("pipeline_parallel_size", 1))
    run = replace(
        run,
        out=str(folder / "run"),
        parallel=replace(run.parallel, **fields),
        data=replace(run.data, path=(str(text),), split="1,0,0"),
        train=replace(run.train, eval_rows=0),
        checkpoint=replace(run.checkpoint, save=False),
        log=replace(run.log, tensorboard=False, progress="plain", interval=20),
    )
    return run_ranks(world, _train, run)[0]  # type: ignore[no-any-return]


def _train(run: Any) -> list[float]:
    from megatron_lowrank.train import loop
    from megatron_lowrank.train.launch import start_model_parallel

    start_model_parallel(run)
    job = loop.build(run)
    loop.load(job)
    return loop.train(job).losses


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_loss_curve_is_golden(method: str, layout: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[method]
    found = losses(method, tmp_path, LAYOUTS[layout])
    assert len(found) == len(golden) == 20 and golden[-1] < golden[0] - 0.5
    worst = max(abs(a - b) / b for a, b in zip(found, golden, strict=True))
    assert worst < TOLERANCE, f"{worst:.1e}: {found}"


if __name__ == "__main__":
    from megatron_lowrank import compat
    from megatron_lowrank.platform import cpu

    compat.silence_known_notices()
    cpu.install()
    curves = {}
    for name in METHODS:
        with tempfile.TemporaryDirectory() as where:
            curves[name] = losses(name, Path(where), {})
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    sys.exit(0)
