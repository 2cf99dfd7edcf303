"""`loss.png`: the losses of metrics.jsonl as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_losses(lines: list[dict[str, Any]], entropy: float | None, title: str, path: Path) -> None:
    """Draws training and validation loss over steps, and the unigram entropy as a line to be beaten.

    Args:
        lines: Of metrics.jsonl.
        entropy: Entropy of the whole text's token frequencies in nats, if known.
        title: Name of the run.
        path: File to write, through a temporary name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    axes = figure.add_subplot()
    for kind, style, label in (("train", "-", "training"), ("valid", "o-", "validation")):
        points = [(line["step"], line["loss"]) for line in lines if line["kind"] == kind]
        if points:
            steps, losses = zip(*points, strict=True)
            dense = kind == "train" and len(points) > 1
            axes.plot(steps, losses, style if dense or kind == "valid" else ".", label=label, linewidth=1, markersize=3)
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", linewidth=1, color="gray", label="unigram entropy (no context)")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
