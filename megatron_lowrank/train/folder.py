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

from pathlib import Path
from typing import Any

from megatron_lowrank import disk
from megatron_lowrank.compat import versions
from megatron_lowrank.config import RunConfig
from megatron_lowrank.messages import differences, some

RUN_CONFIG = "run_config.json"


def checkpoint_folder(run: RunConfig) -> Path:
    """Where the run's checkpoints go."""
    return Path(run.checkpoint.folder or Path(run.out) / "checkpoints")


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
    record = {
        "config": run.to_dict(), "digest": run.digest(), "architecture": run.architecture(), "versions": versions(),
        **facts,
    }  # fmt: skip
    if path.exists():
        try:
            old = disk.read_json(path)
            config, architecture = old["config"], old["architecture"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"out: {path} is damaged ({error!r}); remove it or choose another --out") from error
        if differ := differences(architecture, record["architecture"]):
            raise ValueError(
                f"out: {folder} holds a run of another architecture ({some(differ, 5, '; ')}); choose another --out"
            )
        changes = differences(_flat(config), _flat(record["config"]))
        changes += differences(
            old.get("versions", {}), record["versions"], "version of {name}: {old} before, {new} now"
        )
    disk.write_json(path, record)
    return changes


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
