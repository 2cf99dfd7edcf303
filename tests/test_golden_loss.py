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
SHORT, LONG = 20, 100
STEPS = {"cola": LONG, "svd": SHORT, "dense": SHORT}
"""Steps of the schedule and of the golden curve."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallel 2": {"tensor_parallel_size": 2},
    "pipeline 2": {"pipeline_parallel_size": 2},
    "data parallel 2": {"world": 2},
    "data parallel 2, plain optimizer": {"world": 2, "use_distributed_optimizer": False},
}
LONG_LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "btp_sp, sharded store": {"tensor_parallel_size": 2, "recompute": "latent", "latent_store": "sharded"},
    "btp, one by one": {"tensor_parallel_size": 2, "placement": "btp", "grouping": False},
    "pipeline 2, full": {"pipeline_parallel_size": 2, "recompute": "full"},
    "data parallel 2, latent": {"world": 2, "recompute": "latent"},
}
SHORT_LAYOUTS: dict[str, dict[str, Any]] = {
    "btp_sp": {"tensor_parallel_size": 4},
    "btp_sp, one by one, keep attention": {
        "tensor_parallel_size": 2, "grouping": False, "recompute": "latent_keep_attention"
    },
    "btp": {"tensor_parallel_size": 4, "placement": "btp", "recompute": "latent"},
    "btp, pipeline 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "placement": "btp"},
    "vanilla": {"tensor_parallel_size": 2, "placement": "vanilla"},
    "vanilla, one by one, full": {
        "tensor_parallel_size": 2, "placement": "vanilla", "grouping": False, "recompute": "full"
    },
    "vanilla_replicated": {"tensor_parallel_size": 2, "placement": "vanilla_replicated"},
    "vanilla_replicated, one by one, latent": {
        "tensor_parallel_size": 2, "placement": "vanilla_replicated", "grouping": False, "recompute": "latent"
    },
}  # fmt: skip
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"{method}: {name}": (method, SHORT, fields) for method in ("svd", "dense") for name, fields in LAYOUTS.items()},
    **{f"cola: {name}": ("cola", LONG, fields) for name, fields in LONG_LAYOUTS.items()},
    **{f"cola, begin: {name}": ("cola", SHORT, fields) for name, fields in SHORT_LAYOUTS.items()},
}
"""(method, steps taken of the curve, layout)."""
TOLERANCE = {SHORT: 1e-6, LONG: 5e-6}
"""Relative, fp32, by the steps taken: the order of sums differs between layouts and processors, and every update
carries it on. `pytest -rP` shows what was measured."""


def losses(method: str, folder: Path, layout: dict[str, Any], steps: int) -> list[float]:
    """The first steps of `{method}_debug`, under the schedule of the golden curve."""
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
    train = {name: fields.pop(name) for name in ("recompute", "latent_store") if name in fields}
    run = replace(
        run,
        out=str(folder / "run"),
        parallel=replace(run.parallel, **fields),
        data=replace(run.data, path=(str(text),), split="1,0,0"),
        schedule=replace(run.schedule, decay_steps=STEPS[method]),
        train=replace(run.train, steps=steps, eval_rows=0, **train),
        checkpoint=replace(run.checkpoint, save=False),
        log=replace(run.log, tensorboard=False, progress="plain", interval=20),
    )
    return run_ranks(world, _train, run, timeout=120)[0]  # type: ignore[no-any-return]


def _train(run: Any) -> list[float]:
    from megatron_lowrank.train import loop
    from megatron_lowrank.train.launch import start_model_parallel

    start_model_parallel(run)
    job = loop.build(run)
    loop.load(job)
    return loop.train(job).losses


@pytest.mark.parametrize("case", CASES)
def test_loss_curve_is_golden(case: str, tmp_path: Path) -> None:
    method, steps, layout = CASES[case]
    golden = json.loads(GOLDEN.read_text())[method]
    assert len(golden) == STEPS[method] and golden[SHORT - 1] < golden[0] - 0.5
    found = losses(method, tmp_path, layout, steps)
    assert len(found) == steps
    worst = max(abs(a - b) / b for a, b in zip(found, golden[:steps], strict=True))
    print(f"{steps} steps: {worst:.1e}")
    assert worst < TOLERANCE[steps], f"{worst:.1e}: {found}"


if __name__ == "__main__":
    from megatron_lowrank import compat
    from megatron_lowrank.platform import cpu

    compat.silence_known_notices()
    cpu.install()
    curves = {}
    for name, count in STEPS.items():
        with tempfile.TemporaryDirectory() as where:
            curves[name] = losses(name, Path(where), {}, count)
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    sys.exit(0)
