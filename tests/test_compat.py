"""Versions, optional packages and notices."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import logging
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
        ("nvidia.dali", "nvidia-dali-cuda120"),
        ("transformers", "pip install transformers"),
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


def test_a_present_package_is_returned(fake_package: Callable[[str, str], None]) -> None:
    fake_package("transformers", "answer = 42")
    assert compat.require("transformers").answer == 42
    assert compat.is_available("transformers")


def test_only_known_names_may_be_required() -> None:
    with pytest.raises(ValueError, match="'numpy' is not an optional package"):
        compat.require("numpy")


def test_every_hint_has_an_extra_and_every_extra_a_hint() -> None:
    setup = (Path(__file__).parent.parent / "setup.py").read_text()
    extras = re.findall(r'^    "(\w+)": \[', setup, re.M)
    assert set(extras) == {"te", "dali", "hf", "dev"}
    assert list(compat._INSTALL_HINTS) == ["transformer_engine", "nvidia.dali", "transformers"]


def test_versions_are_those_of_the_modules() -> None:
    import torch

    import megatron_lowrank

    found = compat.versions()
    expected = {
        "megatron_lowrank": megatron_lowrank.__version__, "megatron_core": compat.megatron_core_version(),
        "torch": torch.__version__, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy"),
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert all(isinstance(version, str) for version in found.values())


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(compat.importlib.metadata, "version", absent)
    monkeypatch.setattr(compat, "megatron_core_version", lambda: absent("megatron-core"))
    assert set(compat.versions()) == {"megatron_lowrank", "torch", "python"}


def test_known_notices_are_dropped_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    compat.silence_known_notices()
    compat.silence_known_notices()
    for notice in compat.KNOWN_NOTICES:
        logger = logging.getLogger(notice.module)
        assert len([one for one in logger.filters if isinstance(one, compat._DropNotice)]) == 1
        logger.warning(notice.start + " and what follows")
        logger.warning("another message of %s", notice.module)
        logger.warning("mentions: " + notice.start)
    logging.getLogger("megatron.core").warning(compat.KNOWN_NOTICES[0].start)
    dropped = [record for record in caplog.records if record.getMessage().endswith("what follows")]
    assert not dropped and len(caplog.records) == 2 * len(compat.KNOWN_NOTICES) + 1


LANE = ".".join(compat.megatron_core_version().split(".")[:2])


def texts_of(module: str) -> list[str]:
    """String literals in a module's source, adjacent ones joined, the fields of an f-string left out."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    found: list[str] = []
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
    return found


def test_notices_stand_in_the_sources_of_the_lanes_that_print_them() -> None:
    """And in no other's: a notice that is gone is to be forgotten."""
    for notice in compat.KNOWN_NOTICES:
        assert notice.module is not None
        found = any(text.startswith(notice.start) for text in texts_of(notice.module))
        assert found == (LANE in notice.lanes), f"{notice.module} of {LANE}: {notice.start!r} is there: {found}"


def test_warnings_stand_in_the_sources_of_the_lanes_that_print_them() -> None:
    for warning in compat.KNOWN_WARNINGS:
        if warning.module is None or LANE not in warning.lanes:
            continue
        found = any(re.match(warning.start, text) for text in texts_of(warning.module))
        assert found, f"{warning.module} of {LANE} no longer warns {warning.start!r}"


def test_warnings_of_torch_itself_are_printed() -> None:
    import torch

    (warning,) = [one for one in compat.KNOWN_WARNINGS if one.module is None]
    with pytest.warns(UserWarning, match=warning.start):
        _ = torch.ones(1, requires_grad=True).view(1).grad


def test_only_the_old_lane_calls_the_old_loader() -> None:
    """Torch warns in both lanes, so the text alone does not tell which of them prints it."""
    spec = importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.torch")
    assert spec is not None and spec.origin is not None
    (warning,) = [one for one in compat.KNOWN_WARNINGS if "load_state_dict" in one.start]
    assert ("checkpoint.load_state_dict(" in Path(spec.origin).read_text()) == (LANE in warning.lanes)
