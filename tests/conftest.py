"""Setup of every test: the CPU platform before megatron-core is imported, one thread, markers."""

from __future__ import annotations

import pytest
import torch

from megatron_lowrank import compat
from megatron_lowrank.platform import cpu

torch.set_num_threads(1)  # ranks are forked from here and outnumber the cores
compat.silence_known_notices()
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    cpu.install()


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds; deselect with -m 'not slow'")
    config.addinivalue_line("markers", "extended: further combinations of what is tested anyway; run with -m extended")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with a reason, what needs a GPU that is not there."""
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device is visible"))
