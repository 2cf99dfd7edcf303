"""The only module that knows about versions of megatron-core and about optional packages.

Two rules keep the rest of the package free of both. Differences between releases of megatron-core are found by looking
at signatures, not by comparing version strings, because NGC containers carry patched builds. An optional package is
imported where it is used, through `require`, which says what to install when it is not there.

Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import platform
import warnings
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from megatron_lowrank import __version__

_INSTALL_HINTS: dict[str, str] = {
    "transformer_engine": (
        "Transformer Engine comes with NVIDIA's NGC PyTorch images; outside of them: "
        "pip install --no-build-isolation 'transformer_engine[pytorch]' (needs nvcc and the cuDNN headers)"
    ),
    "nvidia.dali": "pip install nvidia-dali-cuda120 or nvidia-dali-cuda130 (there is no package called nvidia-dali)",
    "transformers": "pip install transformers",
}
"""What to do about each optional package that is not there, by import name; setup.py has an extra for each."""
_RECORDED = ("numpy", "tokenizers", "sentencepiece", "safetensors", "tensorboard", "transformer_engine")


@functools.cache
def megatron_core_version() -> str:
    """Returns the version of the installed megatron-core, as in "0.16.1".

    Raises:
        ImportError: megatron-core is not installed.
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pass
    # A Megatron-LM checkout on the path has no distribution metadata, but carries its version in a module.
    try:
        return str(importlib.import_module("megatron.core.package_info").__version__)
    except ImportError as error:
        raise ImportError("megatron-core is not installed: pip install 'megatron-core>=0.16,<0.20'") from error


def versions() -> dict[str, str]:
    """Versions that may change a result, of what is installed. Imports torch, and nothing else."""
    import torch

    found = {"megatron_lowrank": __version__}
    with suppress(ImportError):
        found["megatron_core"] = megatron_core_version()
    # Not from the distribution's metadata, which leave out the CUDA version.
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in _RECORDED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def require(package: str) -> ModuleType:
    """Imports an optional package, or says how to get it.

    Args:
        package: Import name, one of transformer_engine, nvidia.dali, transformers.

    Raises:
        ImportError: The package is missing or broken; the message holds the original error and what to install.
        ValueError: The name is not that of a known optional package.
    """
    if package not in _INSTALL_HINTS:
        raise ValueError(f"{package!r} is not an optional package of megatron_lowrank; known: {sorted(_INSTALL_HINTS)}")
    hint = _INSTALL_HINTS[package]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} could not be imported ({error}). {hint}") from error
    except Exception as error:  # a half-installed Transformer Engine raises RuntimeError, a broken driver OSError
        raise ImportError(f"{package} is installed but broken ({type(error).__name__}: {error}). {hint}") from error


def is_available(package: str) -> bool:
    """Says whether `require(package)` would succeed; use it to print a support table, not to switch a feature off."""
    try:
        require(package)
    except ImportError:
        return False
    return True


class _DropNotice(logging.Filter):
    """Drops the records of one logger whose message starts with a known text."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for the known notice."""
        return not record.getMessage().startswith(self.start)


@dataclass(frozen=True, kw_only=True)
class Known:
    """A message that says nothing about a run, and who prints it."""

    start: str
    """How it begins; a regular expression for a warning."""
    module: str | None
    """Whose source holds the text; for a notice also the logger. None: torch's C++ code."""
    lanes: tuple[Literal["0.16", "0.19"], ...] = ("0.16", "0.19")
    """Releases of megatron-core, of those that CI runs, under which it is printed."""


KNOWN_NOTICES: tuple[Known, ...] = (
    # For every GPTModel; specs.py and model.py are the only users, and the move to HybridModel is theirs to make.
    Known(start="GPTModel IS DEPRECATED", module="megatron.core.models.gpt.gpt_model", lanes=("0.19",)),
    # Once per fork of the RNG tracker: on the CPU platform the "GPU" generator *is* the CPU generator.
    Known(start="CPU RNG state changed within GPU RNG context", module="megatron.core.tensor_parallel.random"),
    # For every MLP slot that holds neither its own MLP nor a plain class; ours takes the default arguments.
    Known(start="Unknown MLP type", module="megatron.core.transformer.transformer_layer", lanes=("0.16",)),
    # DDP computes the layout itself, as older releases always did.
    Known(
        start="DistributedDataParallel: full_param_layout not provided",
        module="megatron.core.distributed.distributed_data_parallel", lanes=("0.19",),
    ),
    # Also on synchronous saves, where no asynchronous strategy takes part.
    Known(
        start="MCore's async save is deprecated", module="megatron.core.dist_checkpointing.strategies.torch",
        lanes=("0.19",),
    ),
)  # fmt: skip
"""What `silence_known_notices` drops of what megatron-core prints by logging."""

KNOWN_WARNINGS: tuple[Known, ...] = (
    # At import, for every optional package that is not there.
    Known(start=r".*(Transformer Engine|Apex).*[Ff]alling back", module="megatron.core.optimizer"),
    # For a model class that nothing here uses.
    Known(
        start=r"MimoModelConfig is experimental", module="megatron.core.models.mimo.config.base_configs",
        lanes=("0.19",),
    ),
    # In every TransformerConfig; it names a field of CUDA graphs that nobody set.
    Known(start=r"full scope is deprecated", module="megatron.core.transformer.transformer_config"),
    # The distributed optimizer looks at `.grad` of fp32 views.
    Known(start=r"The \.grad attribute of a Tensor that is not a leaf", module=None),
    # Names of torch that megatron-core still calls.
    Known(start=r"`torch\.distributed\.\w+_tensor` is deprecated", module="torch.distributed.distributed_c10d"),
    Known(
        start=r"`load_state_dict` is deprecated", module="torch.distributed.checkpoint.state_dict_loader",
        lanes=("0.16",),
    ),
)  # fmt: skip
"""What `silence_known_notices` drops of what Python's `warnings` show."""


def silence_known_notices() -> None:
    """Drops exactly `KNOWN_NOTICES` and `KNOWN_WARNINGS`; everything else that megatron-core says stays visible.

    May be called before megatron-core is imported, and more than once.
    """
    for warning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=warning.start)
    for notice in KNOWN_NOTICES:
        logger = logging.getLogger(notice.module)
        if not any(isinstance(old, _DropNotice) and old.start == notice.start for old in logger.filters):
            logger.addFilter(_DropNotice(notice.start))
