"""The package reads in one direction: this test parses its imports and fails on an upward or mutual one.

Only the source is read, nothing is imported. A folder that does not exist yet has nothing to check; a new module at the
top of the package needs a row in `RANK` first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "megatron_lowrank"
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / NAME

RANK: dict[str, int] = {
    "compat": 0,
    "disk": 0,
    "messages": 0,
    "platform": 0,
    "config": 1,
    "names": 1,
    "placement": 1,
    "roles": 1,
    "estimate": 1,
    "layers": 2,
    "specs": 3,
    "data": 3,
    "model": 4,
    "checkpoint": 6,
    "convert": 7,
    "train": 8,
}
"""A module imports only from lower ranks, unless `ONLY` names it."""

ONLY: dict[str, set[str]] = {
    "compat": set(),
    "disk": set(),
    "messages": set(),
    "platform": set(),
    "config": {"compat", "messages", "placement", "roles"},
    "names": {"compat", "config", "placement", "roles"},
    "placement": {"compat", "roles"},
    "estimate": {"compat", "config", "names", "placement", "roles"},
    "data": {"compat", "config", "disk", "messages"},
    "testing": {unit for unit, rank in RANK.items() if rank <= RANK["train"]},
}
"""Modules whose imports are named one by one."""

OPTIONAL = {"transformer_engine", "apex", "amp_C", "nvidia", "transformers", "wandb", "flash_attn"}
"""Top-level names that compat.py alone may import."""

MAX_LINES = 400


def _allowed(unit: str) -> set[str]:
    assert unit in RANK or unit in ONLY, f"{NAME}.{unit} has no import rank: give it a row in this test's table"
    return ONLY[unit] if unit in ONLY else {other for other, rank in RANK.items() if rank < RANK[unit]}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _module(path: Path, package: Path) -> tuple[str, ...]:
    """Returns ("config", "lowrank") for config/lowrank.py and ("config",) for config/__init__.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _is_module(parts: tuple[str, ...], package: Path) -> bool:
    return package.joinpath(*parts).is_dir() or package.joinpath(*parts).with_suffix(".py").is_file()


def _imports(path: Path, package: Path) -> Iterator[tuple[str, ...]]:
    """Yields each module of the package that a file imports, anywhere in it, as path below the package.

    `from megatron_lowrank.config import presets` yields ("config", "presets") where that is a module, else ("config",).
    """
    here = (NAME, *path.relative_to(package).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == NAME:
                    yield tuple(alias.name.split(".")[1:])
        elif isinstance(node, ast.ImportFrom):
            source = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                source = (*here[: len(here) - node.level + 1], *source)
            if source and source[0] == NAME:
                for alias in node.names:
                    inner = (*source[1:], alias.name)
                    if inner != ("__version__",):  # the one name that the package's __init__ defines itself
                        yield inner if _is_module(inner, package) else source[1:]


def _wrong_ranks(package: Path) -> list[str]:
    wrong = []
    for path in _files(package):
        unit = _module(path, package)[:1]
        if not unit:  # the package's own __init__ offers public names of all ranks
            continue
        for target in _imports(path, package):
            if not target:
                wrong.append(
                    f"{path.relative_to(package)} imports a name from {NAME} itself: import it where it is defined"
                )
            elif target[0] != unit[0] and target[0] not in _allowed(unit[0]):
                wrong.append(f"{path.relative_to(package)} imports {'.'.join(target)}, which {unit[0]} must not")
        _allowed(unit[0])
    return wrong


def _reading_order(folder: Path) -> list[str] | None:
    """Returns the names after "Reading order:" in the docstring of a folder's `__init__`, or None."""
    init = folder / "__init__.py"
    docstring = (ast.get_docstring(ast.parse(init.read_text())) or "") if init.is_file() else ""
    _, found, after = docstring.partition("Reading order:")
    if not found:
        return None
    block = after.lstrip().split("\n\n")[0]
    return re.findall(r"([A-Za-z_]\w*)(?:\.py\b|/)", block) or re.findall(r"(?:^|[,\n])\s*`*([A-Za-z_]\w*)", block)


def _wrong_siblings(folder: Path, package: Path) -> list[str]:
    below = folder.relative_to(package).parts
    edges: dict[str, set[str]] = {}
    wrong = []
    for path in _files(folder):
        if path == folder / "__init__.py":
            continue
        here = _module(path, package)[len(below)]
        edges.setdefault(here, set())
        for target in _imports(path, package):
            if target == below:
                wrong.append(f"{path.relative_to(package)} imports a name from its own folder's __init__")
            elif target[: len(below)] == below and target[len(below)] != here:
                edges[here].add(target[len(below)])
    order = _reading_order(folder)
    if order is None:
        return wrong + [f"{folder.name}/ imports in a circle: {' -> '.join(circle)}" for circle in _circles(edges)]
    for here in sorted(edges):
        if here not in order:
            wrong.append(f"{folder.name}/{here} is not in the reading order of its __init__")
            continue
        above = order[: order.index(here)]
        wrong += [f"{folder.name}/{here} imports {there}, not listed above it" for there in edges[here] - set(above)]
    return wrong


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    def walk(trail: list[str]) -> list[list[str]]:
        found = []
        for there in sorted(edges.get(trail[-1], ())):
            if there == trail[0]:
                found.append([*trail, there])
            elif there not in trail:
                found += walk([*trail, there])
        return found

    return [circle for start in sorted(edges) for circle in walk([start]) if start == min(circle)]


def _optional_imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        found += [name for name in names if name.split(".")[0] in OPTIONAL]
    return found


def _mentions(path: Path, name: str) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import) and any(alias.name == name for alias in node.names):
            return True
        if name in (getattr(node, "id", None), getattr(node, "attr", None)):
            return True
    return False


FOLDERS = [PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if path.is_dir() and any(path.glob("*.py")))]


def test_modules_import_only_from_lower_ranks() -> None:
    assert not (wrong := _wrong_ranks(PACKAGE)), "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_files_import_only_siblings_listed_above_them(folder: Path) -> None:
    assert not (wrong := _wrong_siblings(folder, PACKAGE)), "\n".join(wrong)


def test_nothing_in_the_package_imports_testing() -> None:
    users = [path for path in _files(PACKAGE) if _module(path, PACKAGE)[:1] != ("testing",)]
    assert not [path for path in users if any(target[:1] == ("testing",) for target in _imports(path, PACKAGE))]


def test_optional_packages_are_imported_in_compat_only() -> None:
    others = [path for path in _files(PACKAGE) if path != PACKAGE / "compat.py"]
    assert not {str(path): found for path in others if (found := _optional_imports(path))}


def test_gpt_model_is_used_in_specs_and_model_only() -> None:
    allowed = {PACKAGE / "specs.py", PACKAGE / "model.py"}
    assert not [path for path in _files(PACKAGE) if path not in allowed and _mentions(path, "GPTModel")]


def test_files_are_short_and_have_a_subject() -> None:
    files = [path for name in (NAME, "tests", "tools", "examples", "benchmarks") for path in _files(ROOT / name)]
    assert not {str(path): lines for path in files if (lines := len(path.read_text().splitlines())) > MAX_LINES}
    assert not [path for path in files if path.name == "utils.py"]


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    package = tmp_path / NAME
    sources = {
        "__init__.py": "from megatron_lowrank.train.loop import run",
        "compat.py": "import importlib",
        "config/__init__.py": "'''Words.\n\nReading order: first.py, second.py\n'''",
        "config/first.py": "def f():\n    from .second import x",
        "config/second.py": "from megatron_lowrank.layers import linear\nimport megatron_lowrank.compat",
        "layers/__init__.py": "",
        "layers/linear.py": "from megatron_lowrank.layers import norm\nimport wandb",
        "layers/norm.py": "from . import linear\nimportlib.import_module('flash_attn.x')",
        "train/loop.py": "from megatron_lowrank import run\nfrom megatron.core.models.gpt import GPTModel",
    }
    for name, source in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    assert _wrong_ranks(package) == [
        "config/second.py imports layers.linear, which config must not",
        f"train/loop.py imports a name from {NAME} itself: import it where it is defined",
    ]
    assert _wrong_siblings(package / "config", package) == ["config/first imports second, not listed above it"]
    assert _wrong_siblings(package / "layers", package) == ["layers/ imports in a circle: linear -> norm -> linear"]
    assert _optional_imports(package / "layers/linear.py") == ["wandb"]
    assert _optional_imports(package / "layers/norm.py") == ["flash_attn.x"]
    assert _mentions(package / "train/loop.py", "GPTModel") and not _mentions(package / "compat.py", "GPTModel")
