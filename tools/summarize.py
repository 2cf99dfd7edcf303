"""Where the results of runs lie and how they compare.

python tools/summarize.py FOLDER        a run's folder, or a folder of runs
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Print one row per run, then where its files are."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(argv) != 1:
        print(f"summarize: error: found {len(argv)} arguments, allowed: one FOLDER", file=sys.stderr)
        return 2
    root = Path(argv[0])
    runs = [path for path in (root, *sorted(root.glob("*"))) if (path / "metrics.jsonl").is_file()]
    if not runs:
        print(f"summarize: error: {root} holds no run (no metrics.jsonl)", file=sys.stderr)
        return 2
    rows = [_row(path) for path in runs]
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    for line in (dict(zip(columns, columns, strict=True)), *rows):
        print("  ".join(line[column].rjust(width) for column, width in zip(columns, widths, strict=True)))
    print(f"\nin {runs[0] if len(runs) == 1 else f'each of {len(runs)} folders of {root}'}:")
    for name, what in _FILES.items():
        if any((path / name).exists() for path in runs):
            print(f"    {name:<18}{what}")
    return 0


_FILES = {
    "loss.png": "training and validation loss beside the unigram entropy of the text",
    "metrics.jsonl": "one line per logged step and evaluation",
    "tensorboard": "tensorboard --logdir shows it",
    "checkpoints": "distributed checkpoints; the same training command resumes from the latest",
    "run_config.json": "every setting, its hash, package versions; --config reads its `config` part",
    "sample.txt": "text sampled from the trained model",
}


def _row(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((path / "run_config.json").read_text())["config"]
    train = [line for line in lines if line["kind"] == "train"]
    valid = [line for line in lines if line["kind"] == "valid"]
    last = train[-1] if train else None
    entropy = next((line["unigram_entropy"] for line in valid if line.get("unigram_entropy") is not None), None)
    return {
        "run": path.name,
        "method": config["lowrank"]["method"],
        "parameters": f"{_parameters(config):,}",
        "steps": str(last["step"]) if last else "-",
        "train loss": _number(last["loss"] if last else None),
        "valid loss": _number(valid[-1]["loss"] if valid else None),
        "unigram entropy": _number(entropy),
        "tokens/s": f"{_median([line['time']['tokens_per_second'] for line in train]):,.0f}" if train else "-",
    }


def _parameters(config: dict[str, Any]) -> int:
    from megatron_lowrank.config import RunConfig
    from megatron_lowrank.estimate import count_parameters

    run = RunConfig.from_dict(config)
    return count_parameters(run.model, run.lowrank).total


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
