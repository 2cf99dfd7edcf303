"""The run's folder: its resolved config and versions, and whether this run may go on in it.

out/
    run_config.json       config, digest, versions, data, tokenizer of the newest start
    metrics.jsonl         losses and rates
    loss.png              their picture
    tensorboard/          events
    checkpoints/          unless checkpoint.folder says otherwise
    cache/                row indices, unless data.cache_path says otherwise
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_lowrank import __version__, compat
from megatron_lowrank.config import RunConfig

RUN_CONFIG = "run_config.json"
_PACKAGES = ("numpy", "tokenizers", "sentencepiece", "safetensors", "tensorboard", "transformer_engine")


def checkpoint_folder(run: RunConfig) -> Path:
    """Where the run's checkpoints go."""
    return Path(run.checkpoint.folder or Path(run.out) / "checkpoints")


def versions() -> dict[str, str]:
    """Versions that may change a result; of packages, those that are installed."""
    found = {
        "megatron_lowrank": __version__, "megatron_core": compat.megatron_core_version(), "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def open_folder(run: RunConfig, facts: dict[str, Any]) -> list[str]:
    """Makes the folder and writes run_config.json, after a look at the one that is there; for rank 0.

    Args:
        run: The resolved run.
        facts: What else to record: world size, data, tokenizer.

    Returns:
        What differs from the run that used the folder last, one line each.

    Raises:
        ValueError: that run had another architecture, or the folder's config is damaged.
        OSError: the folder cannot be written.
    """
    folder = Path(run.out)
    folder.mkdir(parents=True, exist_ok=True)
    path, changes = folder / RUN_CONFIG, []
    if path.exists():
        try:
            old = json.loads(path.read_text())
            config, architecture = old["config"], old["architecture"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"out: {path} is damaged ({error!r}); remove it or choose another --out") from error
        differ = _differences(architecture, json.loads(json.dumps(run.architecture())))
        if differ:
            raise ValueError(
                f"out: {folder} holds a run of another architecture ({'; '.join(differ[:5])}"
                f"{f'; and {len(differ) - 5} more' if len(differ) > 5 else ''}); choose another --out"
            )
        changes = _differences(_flat(config), _flat(run.to_dict()))
        changes += [f"version of {line}" for line in _differences(old.get("versions", {}), versions())]
    record = {
        "config": run.to_dict(), "digest": run.digest(), "architecture": run.architecture(), "versions": versions(),
        **facts,
    }  # fmt: skip
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)
    return changes


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name)} before, {new.get(name)} now" for name in names]
