"""The pictures of docs/parallelism.md are the placement table: regenerated, searched, and shown."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT

from megatron_lowrank.placement import DENSE_PLANS, OPS, PLACEMENTS

IMAGES, DOC = ROOT / "docs/images", ROOT / "docs/parallelism.md"
KINDS = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
GROUPS = {"column": 2, "row": 2}
"""Groups of each kind in a block: q k v and gate up; o and down."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("draw_blocks")


def _texts(svg: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def _drawn_with(svg: str) -> str:
    return str(re.findall(r"<dc:title>(Matplotlib [^<]*)</dc:title>", svg)[0])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_committed_pictures_are_the_table(placement: str, tool: Any, tmp_path: Path) -> None:
    name = f"block_{placement}.svg"
    tool.draw(placement, tmp_path / name)
    drawn, committed = (tmp_path / name).read_text(), (IMAGES / name).read_text()
    assert _texts(drawn) == _texts(committed), f"{name} is out of date: python tools/draw_blocks.py"
    # Another matplotlib may place the same words a little differently.
    if _drawn_with(drawn) == _drawn_with(committed):
        assert drawn == committed, f"{name} is out of date: python tools/draw_blocks.py"


def _collectives(placement: str) -> Counter[tuple[str, str]]:
    """(way, kind) -> calls of a block, counted from the cells alone."""
    pairs, found = PLACEMENTS[placement].pairs, Counter[tuple[str, str]]()
    for kind, groups in GROUPS.items():
        if pairs is None:
            column = DENSE_PLANS[kind].w_dim == 0  # type: ignore[index]
            ops = ["ag_seq" if column else "rs_seq"]
            found["backward", "all-gather"] += groups * column  # the stock linear gathers its input again
        else:
            cells = pairs[kind]  # type: ignore[index]
            ops = [cells.c0, cells.c1, cells.c2, cells.c3]
        for op in ops:
            for way, move in zip(("forward", "backward"), OPS[op], strict=True):  # type: ignore[index]
                if move is not None:
                    found[way, KINDS[move.partition("_")[0]]] += groups
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_collective_of_the_table_is_named(placement: str) -> None:
    texts, found = _texts((IMAGES / f"block_{placement}.svg").read_text()), Counter[tuple[str, str]]()
    for text in texts:
        if match := re.fullmatch(r"(backward: )?(all-gather|reduce-scatter|all-reduce)  .*", text):
            found["backward" if match[1] else "forward", match[2]] += 1
    assert found == _collectives(placement)
    for way in ("forward", "backward"):
        (title,) = (text for text in texts if text.startswith(f"{way}: ") and "payload" in text)
        calls = {kind: count for (its, kind), count in found.items() if its == way}
        assert title.startswith(f"{way}: " + ", ".join(f"{calls[kind]} {kind}s" for kind in sorted(calls)) + ";")


TOTALS = {
    "dense": ("4H", "6H"),
    "vanilla": ("(4H + 2H_q + 2H_kv + 3F)", "(4H + 2H_q + 2H_kv + 3F)"),
    "vanilla_replicated": ("(2H_q + 4H_kv + 4H + 4F)", "(4H + 2H_q + 2F)"),
    "btp": ("(14R + 4 stat)", "14R"),
    "btp_sp": ("7R", "7R"),
}
"""What a rank sends, as derived in the document."""


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_totals_are_those_of_the_document(placement: str) -> None:
    texts = _texts((IMAGES / f"block_{placement}.svg").read_text())
    for way, total in zip(("forward", "backward"), TOTALS[placement], strict=True):
        assert any(text.startswith(f"{way}: ") and text.endswith(f"sends {total} (t - 1)/t") for text in texts)


def test_the_document_shows_every_picture() -> None:
    shown = re.findall(r"\]\((images/[^)]+)\)", DOC.read_text())
    assert shown == [f"images/block_{placement}.svg" for placement in PLACEMENTS]
    assert {path.name for path in IMAGES.glob("block_*")} == {Path(image).name for image in shown}


def test_a_row_that_does_not_fit_together_is_not_drawn(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PLACEMENTS["btp"]
    assert row.pairs is not None
    for wrong in ({"c1": "id"}, {"c1": "rs_hid"}, {"a_dim": 0}, {"b_dim": 1}, {"b_dim": None}):
        cells = {**row.pairs, "row": replace(row.pairs["row"], **wrong)}  # type: ignore[arg-type]
        monkeypatch.setitem(PLACEMENTS, "btp", replace(row, pairs=cells))
        with pytest.raises(AssertionError):
            tool.half_of("btp", "attn")


def test_a_mistake_is_one_line(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (["--out", str(tmp_path / "file")], ["--in", "x"], ["--out"]):
        with pytest.raises(SystemExit) as ended:
            tool.main(arguments)
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("draw_blocks: error: ") and error.count("\n") == 1
