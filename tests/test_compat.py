"""Versions, optional packages, signatures and notices."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lowrank import compat


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a package of a given name and source first on the path, whether or not the real one is installed."""

    def make(name: str, source: str) -> None:
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        for module in [known for known in sys.modules if known.split(".")[0] == name.split(".")[0]]:
            monkeypatch.delitem(sys.modules, module)

    return make


def test_version_is_that_of_the_installed_distribution() -> None:
    assert compat.megatron_core_version() == importlib.metadata.version("megatron-core")
    assert compat.megatron_core_version().startswith("0.")


def test_importing_compat_imports_neither_torch_nor_megatron_core_nor_optional_packages() -> None:
    code = (
        "import sys; from megatron_lowrank import compat; "
        "print({'torch', 'megatron', 'transformer_engine', 'apex', 'nvidia', 'transformers', 'wandb', 'flash_attn'}"
        " & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("package", "hint"),
    [
        ("transformer_engine", "NGC"),
        ("apex", "different project"),
        ("nvidia.dali", "nvidia-dali-cuda120"),
        ("transformers", "pip install transformers"),
        ("wandb", "pip install wandb"),
        ("flash_attn", "pip install flash-attn"),
    ],
)
def test_a_missing_package_says_what_to_install(package: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # import then fails, installed or not
    with pytest.raises(ImportError, match=f"{package} could not be imported.*{hint}"):
        compat.require(package)
    assert not compat.is_available(package)


def test_a_half_installed_package_reports_its_own_message(fake_package: Callable[[str, str], None]) -> None:
    fake_package("transformer_engine", "raise RuntimeError('Found empty `transformer-engine` meta package')")
    with pytest.raises(ImportError, match="installed but broken.*RuntimeError: Found empty.*NGC"):
        compat.require("transformer_engine")


def test_the_other_apex_is_recognised(fake_package: Callable[[str, str], None]) -> None:
    fake_package("apex", "")
    with pytest.raises(ImportError, match="has no apex.optimizers.*different project"):
        compat.require("apex")


def test_a_present_package_is_returned(fake_package: Callable[[str, str], None]) -> None:
    fake_package("wandb", "answer = 42")
    assert compat.require("wandb").answer == 42
    assert compat.is_available("wandb")


def test_only_known_names_may_be_required() -> None:
    with pytest.raises(ValueError, match="'numpy' is not an optional package"):
        compat.require("numpy")


def test_accepted_kwargs_follows_the_signature() -> None:
    def old(x: int, /, y: int, *, z: int = 0) -> None: ...

    def open_ended(x: int, **kwargs: int) -> None: ...

    class Constructed:
        def __init__(self, y: int) -> None: ...

    offered: dict[str, Any] = {"x": 1, "y": 2, "z": 3, "name": 4}
    assert compat.accepted_kwargs(old, **offered) == {"y": 2, "z": 3}
    assert compat.accepted_kwargs(open_ended, **offered) == offered
    assert compat.accepted_kwargs(Constructed, **offered) == {"y": 2}


def test_accepted_kwargs_tells_the_generations_of_megatron_core_apart() -> None:
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    kept = compat.accepted_kwargs(apply_swiglu_sharded_factory, tp_group=None, sharded_offsets=())
    expected = {"sharded_offsets"} | (set() if compat.megatron_core_version().startswith("0.16") else {"tp_group"})
    assert set(kept) == expected


def test_known_notices_are_dropped_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    compat.silence_known_notices()
    compat.silence_known_notices()
    for name, start in compat.KNOWN_NOTICES:
        logger = logging.getLogger(name)
        assert len([one for one in logger.filters if isinstance(one, compat._DropNotice)]) == 1
        logger.warning(start + " and what follows")
        logger.warning("another message of %s", name)
        logger.warning("mentions: " + start)
    logging.getLogger("megatron.core").warning(compat.KNOWN_NOTICES[0][1])
    dropped = [record for record in caplog.records if record.getMessage().endswith("what follows")]
    assert not dropped and len(caplog.records) == 2 * len(compat.KNOWN_NOTICES) + 1


def test_notices_still_stand_in_the_sources_of_megatron_core() -> None:
    import megatron.core

    root = Path(megatron.core.__path__[0])
    old = compat.megatron_core_version().startswith("0.16")
    for name, start in compat.KNOWN_NOTICES:
        source = root.joinpath(*name.split(".")[2:]).with_suffix(".py").read_text()
        assert (start in source) or (old and "random" not in name), f"{name} no longer logs {start!r}"
