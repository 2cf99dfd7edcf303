"""Draws what the tensor-parallel ranks exchange in one block: python tools/draw_blocks.py [--out DIR].

One picture per row of the placement table, `block_<placement>.svg`. Each is the table, interpreted: shapes, layouts and
collectives are followed op by op, and a row whose cells do not fit together ends in an error instead of a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron_lowrank.config.cli import fail
from megatron_lowrank.placement import DENSE_PLANS, OPS, PLACEMENTS, Move, Op, Placement
from megatron_lowrank.roles import BLOCKS, ROLE_TABLE, Block, Role, roles_of_block, roles_of_slot

Width = Counter[str]
"""A width as a sum of symbols: q, k and v together are H_q + 2H_kv."""

WIDTHS: dict[Role, tuple[str, str]] = {
    "q": ("H", "H_q"), "k": ("H", "H_kv"), "v": ("H", "H_kv"), "o": ("H_q", "H"),
    "gate": ("H", "F"), "up": ("H", "F"), "down": ("F", "H"),
}  # fmt: skip
"""(in, out) of each role."""
KINDS = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
"""First word of a move -> the collective."""


def text_of(width: Width, suffix: str = "") -> str:
    """`H_q + 2H_kv`, divided by the suffix."""
    terms = [name if n == 1 else f"{n}{' ' * name.islower()}{name}" for name, n in width.items()]
    return (f"({' + '.join(terms)})" if suffix and len(terms) > 1 else " + ".join(terms)) + suffix


@dataclass(frozen=True)
class Layout:
    """What one rank holds of an activation `[S, B, width]`; `partial`: a summand of it."""

    width: Width
    sequence_cut: bool = False
    width_cut: bool = False
    partial: bool = False

    def __str__(self) -> str:
        shape = f"[S{'/t' * self.sequence_cut}, B, {text_of(self.width, '/t' * self.width_cut)}]"
        return shape + " partial sums" * self.partial

    def moved(self, move: Move) -> Layout:
        """After one collective."""
        kind, _, axis = move.partition("_")
        assert kind in KINDS and self.partial == (kind != "gather"), f"{move} of {self}"
        if kind == "reduce":
            return replace(self, partial=False)
        name = "sequence_cut" if axis == "sequence" else "width_cut"
        assert getattr(self, name) == (kind == "gather"), f"{move} of {self}"
        cut: dict[str, Any] = {name: kind == "scatter"}
        return replace(self, partial=False, **cut)

    def times(self, dim: int | None, out: Width) -> Layout:
        """After a weight `[out, in]` that is cut along `dim`."""
        assert not self.partial and self.width_cut == (dim == 1), f"a weight cut along {dim} meets {self}"
        return Layout(out, self.sequence_cut, width_cut=dim == 0, partial=dim == 1)


@dataclass(frozen=True)
class Box:
    """Local work, a weight, or a collective (then with its kind and its payload per token)."""

    look: str
    text: str
    kind: str = ""
    width: Width = field(default_factory=Width)


@dataclass
class Half:
    """Attention or MLP half of a block."""

    at: Layout
    steps: list[Layout | Box] = field(default_factory=list)

    def box(self, text: str, look: str = "work", at: Layout | None = None) -> None:
        """Work or a weight, and the layout behind it. Whole weights that see other tokens than other ranks' add up."""
        summed = ";  gradient summed over the ranks" * (look == "whole" and self.at.sequence_cut)
        self.at = at or self.at
        self.steps += [Box(look, text + summed), self.at]

    def op(self, op: Op, *, carried: str = "", again: str = "") -> None:
        """One op: `carried` travels along forward; `again` says why backward repeats the forward collective."""
        forward, backward = OPS[op]
        width = self.at.width
        moves = [("forward", forward, width + Counter([carried] if carried else []), "")]
        moves += [("backward", forward if again else None, width, f"  ({again})"), ("backward", backward, width, "")]
        for way, move, payload, remark in moves:
            if move:
                kind = KINDS[move.partition("_")[0]]
                prefix = "backward: " * (way == "backward")
                self.steps.append(Box(way, f"{prefix}{kind}  {text_of(payload)}{remark}", kind, payload))
        self.at = self.at.moved(forward) if forward else self.at
        if forward or backward:
            self.steps.append(self.at)

    def weight(self, labels: dict[str, Width], into: Width, dim: int | None, out: Width) -> None:
        """One box for the weights of a group: their labels with the rows of each, and the columns, which they share."""
        columns, cut = text_of(into, "/t" * (dim == 1)), "/t" * (dim == 0)
        shapes = [f"{label} [{text_of(rows, cut)}, {columns}]" for label, rows in labels.items()]
        self.box(";  ".join(shapes), "whole" if dim is None else "cut", self.at.times(dim, out))


def half_of(placement: str, block: Block) -> Half:
    """The table, interpreted for one half."""
    row = PLACEMENTS[placement]
    residual = Layout(Counter("H"), row.residual == "sequence", row.residual == "hidden")
    half = Half(residual, [residual])
    first, last = dict.fromkeys(ROLE_TABLE[role].slot for role in roles_of_block(block))
    _group(half, row, roles_of_slot(first))
    heads = "the n/t heads of this rank" if half.at.width_cut else "all n heads, on every rank"
    inner = replace(half.at, width=Counter([WIDTHS[roles_of_slot(last)[0]][0]]))
    half.box("act(gate) * up" if block == "mlp" else f"attention of {heads}", at=inner)
    _group(half, row, roles_of_slot(last))
    assert half.at == residual, f"{placement}: {half.at} is added to {residual}"
    half.box("+")
    return half


def _group(half: Half, row: Placement, roles: tuple[Role, ...]) -> None:
    kind = ROLE_TABLE[roles[0]].kind
    name = roles[0] if len(roles) == 1 else "".join(role[0] for role in roles)
    out, latent = Counter(WIDTHS[role][1] for role in roles), Counter({"R": len(roles)})
    cells = row.pairs[kind] if row.pairs else None
    online = cells is not None and cells.c1 == "g_norm"
    if kind == "column":
        norm = "x * gain [H/t];  stat = sum of x² here" if online else "RMSNorm, gain [H]"
        half.box(norm, "whole" if row.norm_dim is None else "cut")
    if cells is None:
        dim = DENSE_PLANS[kind].w_dim
        half.op("ag_seq" if dim == 0 else "id", again="again, for dW")
        half.weight({f"W_{name}": out}, half.at.width, dim, out)
        half.op("rs_seq" if dim == 1 else "id")
        return
    half.op(cells.c0)
    half.weight({f"A_{name}": latent}, half.at.width, cells.a_dim, latent)
    half.op(cells.c1, carried="stat" if online else "")
    half.box("z = sum / sqrt(stat/H + eps);  sigma(z)" if online else "sigma(z)")
    half.op(cells.c2)
    alike = {width: ", ".join(f"B_{role}" for role in roles if WIDTHS[role][1] == width) for width in out}
    half.weight({label: Counter([width]) for width, label in alike.items()}, Counter("R"), cells.b_dim, out)
    half.op(cells.c3)


def totals(halves: list[Half], way: str) -> str:
    """Calls of a block in one direction, their payload, and what a ring sends, per token."""
    moves = [step for half in halves for step in half.steps if isinstance(step, Box) and step.look == way]
    payload = sum((move.width for move in moves), Width())
    # A ring does an all-reduce as a reduce-scatter and an all-gather.
    ring = sum((move.width for move in moves if move.kind == "all-reduce"), payload)
    calls = ", ".join(f"{n} {kind}s" for kind, n in sorted(Counter(move.kind for move in moves).items()))
    return f"{way}: {calls};  payload {text_of(payload)};  each rank sends {text_of(ring, ' (t - 1)/t')}"


FORWARD, BACKWARD, LINE = "#c2410c", "#6d28d9", "#475569"
LOOKS = {
    "forward": (FORWARD, FORWARD, "white", 380, 24, 9.5, "collective, payload per token"),
    "backward": ("#f3e8ff", BACKWARD, BACKWARD, 290, 19, 8, "collective of the backward pass"),
    "cut": ("#dbeafe", "#2563eb", "black", 330, 26, 8.5, "weight: a shard per rank"),
    "whole": ("#e5e7eb", "#374151", "black", 330, 26, 8.5, "weight: whole on every rank"),
    "work": ("white", "#94a3b8", "black", 330, 26, 8.5, ""),
}
"""Fill, edge and ink of each box, its width, height and font size, and what the legend says of it."""
COLUMN, TOP, EDGE, FONTS = 490, 112, 24, ["DejaVu Sans", "sans-serif"]


def draw(placement: str, path: Path) -> None:
    """Writes one picture; the same table gives the same bytes. One unit is one CSS pixel, 96 to the inch."""
    halves = [half_of(placement, block) for block in BLOCKS]
    height = TOP + 50 + max(sum(LOOKS[s.look][4] if isinstance(s, Box) else EDGE for s in h.steps) for h in halves)
    with matplotlib.rc_context({"svg.hashsalt": placement, "svg.fonttype": "none", "font.family": FONTS}):
        figure = Figure(figsize=(2 * COLUMN / 96, height / 96))
        axes: Any = figure.add_axes((0, 0, 1, 1), xlim=(0, 2 * COLUMN), ylim=(height, 0))
        axes.axis("off")
        _write(axes, 20, 24, f"{placement}: one block", 12, "black", weight="bold", ha="left")
        for line, (way, ink) in enumerate((("forward", FORWARD), ("backward", BACKWARD))):
            _write(axes, 20, 48 + 19 * line, totals(halves, way), 9, ink, weight="bold", ha="left")
        for column, half in enumerate(halves):
            _write(axes, COLUMN * column + 250, TOP - 12, ("attention half", "MLP half")[column], 10, weight="bold")
            _column(axes, COLUMN * column, half)
        for entry, look in enumerate(look for look in LOOKS if look != "work"):
            _box(axes, 27 + 242 * entry, height - 33, 14, 14, look)
            _write(axes, 42 + 242 * entry, height - 26, LOOKS[look][6], 8, ha="left")
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def _column(axes: Any, left: int, half: Half) -> None:
    x, y = left + 250, TOP
    for step in half.steps:
        if isinstance(step, Layout):
            arrow = {"arrowstyle": "-|>", "color": LINE, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x, y + EDGE), (x, y), arrowprops=arrow)
            _write(axes, x + 10, y + EDGE / 2, str(step), 8, LINE, ha="left")
            y += EDGE
            continue
        _, _, ink, width, height, size, _ = LOOKS[step.look]
        _box(axes, x, y, 28 if step.text == "+" else width, height, step.look)
        _write(axes, x, y + height / 2, step.text, size, ink, weight=700 if step.look == "forward" else 400)
        if step.text == "+":
            axes.plot((x, left + 40, left + 40, x - 14), (TOP + 6, TOP + 6, y + 13, y + 13), color=LINE, lw=1.2)
            _write(axes, left + 30, (TOP + y) / 2, "residual", 8, LINE, rotation=90)
        y += height


def _box(axes: Any, middle: float, top: float, width: float, height: float, look: str) -> None:
    fill, edge = LOOKS[look][:2]
    axes.add_patch(Rectangle((middle - width / 2, top), width, height, facecolor=fill, edgecolor=edge, zorder=2))


def _write(axes: Any, x: float, y: float, text: str, size: float, ink: str = "black", **style: Any) -> None:
    axes.text(x, y, text, fontsize=size, color=ink, va="center", zorder=3, **{"ha": "center", **style})


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        fail(ValueError(message), "draw_blocks")


def main(arguments: list[str]) -> int:
    """Draws every row."""
    parser = _Parser(prog="draw_blocks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR", help="default docs/images")
    out = parser.parse_args(arguments).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for placement in PLACEMENTS:
            draw(placement, out / f"block_{placement}.svg")
    except OSError as error:
        fail(ValueError(f"--out: cannot write {error.filename} ({error.strerror})"), "draw_blocks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
