"""Where the results of runs lie and how they compare.

python tools/summarize.py FOLDER        a run's folder, or a folder of runs
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Print one row per run, then where its files are; what is damaged is left out with one warning per run."""
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    if options := [argument for argument in argv if argument.startswith("-")]:
        return _fail(f"found the option {options[0]}, allowed: one FOLDER and no option but --help")
    if len(argv) != 1:
        return _fail(f"found {len(argv)} arguments, allowed: one FOLDER")
    root = Path(argv[0])
    runs = [path for path in (root, *sorted(root.glob("*"))) if os.path.isfile(path / "metrics.jsonl")]
    if not runs:
        return _fail(f"{root} holds no run (no metrics.jsonl)")
    found = {path: row for path in runs if (row := _row(path)) is not None}
    if not found:
        return _fail(f"{root} holds no run that can be read")
    rows = list(found.values())
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    for line in (dict(zip(columns, columns, strict=True)), *rows):
        print("  ".join(line[column].rjust(width) for column, width in zip(columns, widths, strict=True)))
    print(f"\nin {next(iter(found)) if len(found) == 1 else f'each of {len(found)} folders of {root}'}:")
    for name, what in _FILES.items():
        if any(os.path.exists(path / name) for path in found):
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


def _row(path: Path) -> dict[str, str] | None:
    """A run in words; None, after a warning, when its files cannot be read."""
    try:
        lines, skipped = _lines(path / "metrics.jsonl")
        config = json.loads((path / "run_config.json").read_bytes())["config"]
        method, parameters = str(config["lowrank"]["method"]), _parameters(config)
    except OSError as error:
        _warn(f"left out the run {path}: cannot read {error.filename} ({error.strerror})")
        return None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        _warn(f"left out the run {path}: run_config.json is damaged ({repr(error)[:100]})")
        return None
    if skipped:
        _warn(f"{path / 'metrics.jsonl'}: left out {skipped} damaged line{'s' if skipped > 1 else ''}")
    train = [line for line in lines if line["kind"] == "train"]
    valid = [line for line in lines if line["kind"] == "valid"]
    entropy = next((line["unigram_entropy"] for line in valid if _is_number(line.get("unigram_entropy"))), None)
    times = [line["time"] for line in train if isinstance(line.get("time"), dict)]
    rates = [time["tokens_per_second"] for time in times if _is_number(time.get("tokens_per_second"))]
    return {
        "run": path.name or str(path),
        "method": method,
        "parameters": f"{parameters:,}",
        "steps": str(train[-1]["step"]) if train else "-",
        "train loss": _number(train[-1]["loss"] if train else None),
        "valid loss": _number(valid[-1]["loss"] if valid else None),
        "unigram entropy": _number(entropy),
        "tokens/s": f"{_median(rates):,.0f}" if rates else "-",
    }


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are records of a step or an evaluation, and the number of the others (cut short by a kill)."""
    kept, skipped = [], 0
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if (
            isinstance(line, dict)
            and line.get("kind")
            and _is_number(line.get("step"))
            and _is_number(line.get("loss"))
        ):
            kept.append(line)
        else:
            skipped += 1
    return kept, skipped


def _parameters(config: dict[str, Any]) -> int:
    from megatron_lowrank.config import RunConfig
    from megatron_lowrank.estimate import count_parameters

    run = RunConfig.from_dict(config)
    return count_parameters(run.model, run.lowrank).total


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _warn(message: str) -> None:
    print(f"summarize: warning: {' '.join(message.split())}", file=sys.stderr)


def _fail(message: str) -> int:
    print(f"summarize: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
