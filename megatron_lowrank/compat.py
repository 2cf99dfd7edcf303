"""The only module that knows about versions of megatron-core and about optional packages.

Two rules keep the rest of the package free of both. Differences between releases of megatron-core are found by looking
at signatures (`accepted_kwargs`), not by comparing version strings, because NGC containers carry patched builds. An
optional package is imported where it is used, through `require`, which says what to install when it is not there.

Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

_INSTALL_HINTS: dict[str, str] = {
    "transformer_engine": (
        "Transformer Engine comes with NVIDIA's NGC PyTorch images; outside of them: "
        "pip install --no-build-isolation 'transformer_engine[pytorch]' (needs nvcc and the cuDNN headers)"
    ),
    "apex": (
        "NVIDIA's apex comes with NGC PyTorch images or is built from github.com/NVIDIA/apex; "
        "do not pip install apex, the package of that name on PyPI is a different project"
    ),
    "nvidia.dali": "pip install nvidia-dali-cuda120 or nvidia-dali-cuda130 (there is no package called nvidia-dali)",
    "transformers": "pip install transformers",
    "wandb": "pip install wandb",
    "flash_attn": "pip install flash-attn --no-build-isolation (needs nvcc), or use an NGC PyTorch image",
}
"""What to do about each optional package that is not there, by import name."""


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


def require(package: str) -> ModuleType:
    """Imports an optional package, or says how to get it.

    Args:
        package: Import name, one of transformer_engine, apex, nvidia.dali, transformers, wandb, flash_attn.

    Returns:
        The imported module. For apex, `apex.optimizers` and `amp_C` are known to import as well.

    Raises:
        ImportError: The package is missing or broken; the message holds the original error and what to install.
        ValueError: The name is not that of a known optional package.
    """
    if package not in _INSTALL_HINTS:
        raise ValueError(f"{package!r} is not an optional package of megatron_lowrank; known: {sorted(_INSTALL_HINTS)}")
    hint = _INSTALL_HINTS[package]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} could not be imported ({error}). {hint}") from error
    except Exception as error:  # a half-installed Transformer Engine raises RuntimeError, a broken driver OSError
        raise ImportError(f"{package} is installed but broken ({type(error).__name__}: {error}). {hint}") from error
    if package == "apex":
        _check_that_apex_is_nvidias(hint)
    return module


def _check_that_apex_is_nvidias(hint: str) -> None:
    # PyPI's apex imports fine, so the name proves nothing: look for the parts that we would use.
    for part in ("apex.optimizers", "amp_C"):
        try:
            importlib.import_module(part)
        except Exception as error:
            raise ImportError(f"an 'apex' is installed, but it has no {part} ({error}). {hint}") from error


def is_available(package: str) -> bool:
    """Says whether `require(package)` would succeed; use it to print a support table, not to switch a feature off."""
    try:
        require(package)
    except ImportError:
        return False
    return True


def accepted_kwargs(function: Callable[..., Any], /, **kwargs: Any) -> dict[str, Any]:
    """Keeps the keyword arguments that a function or class accepts by its signature.

    Pass only arguments that may be dropped without changing the result, such as one that a newer release needs and an
    older one lacks; an argument that decides the result has to be passed directly, so that its absence is an error.

    Args:
        function: What is going to be called; for a class, its constructor counts.
        **kwargs: Candidates.

    Returns:
        The accepted ones; all of them when the signature ends in `**kwargs`.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return {name: value for name, value in kwargs.items() if name in names}


class _DropNotice(logging.Filter):
    """Drops the records of one logger whose message starts with a known text."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for the known notice."""
        return not record.getMessage().startswith(self.start)


KNOWN_NOTICES: tuple[tuple[str, str], ...] = (
    # 0.19 for every GPTModel; specs.py and model.py are the only users, and the move to HybridModel is theirs to make.
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    # Both lanes, once per fork of the RNG tracker: on the CPU platform the "GPU" generator *is* the CPU generator.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
    # 0.16 for every MLP slot that holds neither its own MLP nor a plain class; ours takes the default arguments.
    ("megatron.core.transformer.transformer_layer", "Unknown MLP type"),
    # 0.19, also on synchronous saves, where no asynchronous strategy takes part.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)
"""(logger, start of the message) of what `silence_known_notices` drops; megatron-core prints all of them by logging."""


KNOWN_WARNINGS: tuple[str, ...] = (
    # At import, for every optional package that is not there.
    r".*(Transformer Engine|Apex).*[Ff]alling back",
    r"Apex is not installed",
    # 0.16, in every TransformerConfig; it names a field of CUDA graphs that nobody set.
    r"full scope is deprecated",
    # The optimizer looks at `.grad` of views.
    r"The \.grad attribute of a Tensor that is not a leaf",
    # Names of torch that both lanes still call.
    r"`torch\.distributed\.\w+_tensor` is deprecated",
    r"`load_state_dict` is deprecated",
    r"`save_state_dict` is deprecated",
)
"""Start (regular expression) of each warning that `silence_known_notices` drops."""


def silence_known_notices() -> None:
    """Drops exactly `KNOWN_NOTICES` and `KNOWN_WARNINGS`; everything else that megatron-core says stays visible.

    May be called before megatron-core is imported, and more than once.
    """
    for message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for logger_name, start in KNOWN_NOTICES:
        logger = logging.getLogger(logger_name)
        if not any(isinstance(old, _DropNotice) and old.start == start for old in logger.filters):
            logger.addFilter(_DropNotice(start))
