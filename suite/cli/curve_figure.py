"""Learning-rate curves as a PNG file, one panel per cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from suite.tracking.summary import CellSummary

DPI = 120
COLUMNS = 4


def curves_figure(cells: Sequence[CellSummary], path: Path) -> None:
    """Validation score over learning rate: the chosen one ringed, the searched range shaded, trials without a score as crosses."""
    width = min(len(cells), COLUMNS)
    height = -(-len(cells) // width)
    figure = Figure(figsize=(3.2 * width + 0.4, 2.6 * height + 0.3), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    names = titles(cells)
    for place, axis in enumerate(axes.flat):
        if place < len(cells):
            _panel(axis, cells[place], names[place])
        else:
            axis.set_axis_off()
    figure.savefig(path, dpi=DPI)


def titles(cells: Sequence[CellSummary]) -> list[str]:
    """A name for each cell: attention, method and task, and what tells its architecture from the others' of the same name."""
    same: dict[str, list[CellSummary]] = {}
    for cell in cells:
        same.setdefault(f"{cell.attention}/{cell.method}/{cell.task}", []).append(cell)
    named = {}
    for name, group in same.items():
        for cell in group:
            own = [f"{k}={v}" for k, v in cell.architecture.items() if any(other.architecture.get(k) != v for other in group)]
            named[id(cell)] = " ".join([name, *own])
    return [named[id(cell)] + (" (edge)" if cell.edge else "") for cell in cells]


def _panel(axis: Axes, cell: CellSummary, title: str) -> None:
    scored = sorted((rate, score) for rate, score, _ in cell.curve if score is not None)
    failed = [rate for rate, score, _ in cell.curve if score is None]
    axis.set_title(title, fontsize="small")
    axis.set_xscale("log")
    axis.set_xlabel("learning rate", fontsize="small")
    axis.set_ylabel("validation score", fontsize="small")
    if cell.learning_rate_low is not None and cell.learning_rate_high is not None:
        axis.axvspan(cell.learning_rate_low, cell.learning_rate_high, color="0.94")
    axis.plot([rate for rate, _ in scored], [score for _, score in scored], color="C0", marker="o", markersize=3, linewidth=1)
    axis.plot(
        [r for r, _ in scored if r == cell.learning_rate],
        [s for r, s in scored if r == cell.learning_rate],
        "o",
        ms=9,
        mfc="none",
        mec="C3",
    )
    axis.plot(failed, [0.03] * len(failed), "x", color="C3", transform=axis.get_xaxis_transform())
    axis.tick_params(labelsize="x-small")
