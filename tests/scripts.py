"""What tests of the command line share: the scripts as modules or processes, and a small text for them to read."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def load_tool(name: str) -> Any:
    """The module of `tools/NAME.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs a script: no rank of a surrounding launch, this tree's package."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEGATRON_LOWRANK_DEBUG")
    keep = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def token_files(folder: Path, texts: Iterable[str]) -> str:
    """Prefix of byte-token files with one document per text."""
    from megatron_lowrank.data.prepare import PrepareOptions, prepare

    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(PrepareOptions(input=(str(source),), out=str(folder / "text")))
    return str(folder / "text")
