"""Figures of an attention analysis, as PNG files."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from suite.metrics.attention_maps import MEASURES, MapStatistics

# Sharp enough for a page, and small enough to send.
DPI = 120
TITLES = {
    "padded": "zero-padded, averaged over data",
    "valid": "valid pairs, per input",
    "centred": "valid pairs less uniform attention",
}


def similarity_figure(statistics: MapStatistics, path: Path, *, title: str) -> None:
    """Similarity of every two layers by each measure: of the head mean, and averaged over heads."""
    figure = Figure(figsize=(3.4 * len(MEASURES) + 0.8, 6.6), layout="constrained")
    axes = figure.subplots(2, len(MEASURES), squeeze=False)
    head_means = [statistics.head_mean[measure] for measure in MEASURES]  # (L, L) each
    same_heads = [statistics.by_head[measure].mean(0) for measure in MEASURES]  # (L, L) each
    # One scale for all panels, or their colours could not be compared.
    lowest = min(float(matrix.min()) for matrix in head_means + same_heads)
    for column, measure in enumerate(MEASURES):
        _heat(axes[0, column], head_means[column], title=TITLES[measure], lowest=lowest)
        image = _heat(axes[1, column], same_heads[column], title="", lowest=lowest)
    axes[0, 0].set_ylabel("head mean\nlayer")
    axes[1, 0].set_ylabel("same head, averaged\nlayer")
    figure.colorbar(image, ax=axes, label="cosine", shrink=0.8)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def heads_figure(statistics: MapStatistics, path: Path, *, title: str) -> None:
    """Similarity of every two layers for each head, on valid pairs."""
    maps = statistics.by_head["valid"]  # (H, L, L)
    # Four fit on a page side by side.
    columns = min(len(maps), 4)
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(2.4 * columns + 0.8, 2.4 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place < len(maps):
            image = _heat(axis, maps[place], title=f"head {place}", lowest=float(maps.min()))
        else:
            # The last row may have empty places.
            axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="cosine", shrink=0.8)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def variance_figure(statistics: MapStatistics, path: Path, *, title: str) -> None:
    """Variance of each layer's probabilities, and its sum over this and all later layers."""
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = range(len(statistics.variance))
    for head in statistics.variance.T:
        # Heads in grey behind their mean: single ones are not told apart.
        left.plot(layers, head.tolist(), color="0.8", linewidth=0.8)
    left.plot(
        layers, statistics.variance.mean(1).tolist(), color="C0", marker="o", label="head mean"
    )
    right.plot(
        layers,
        statistics.downstream_sum.tolist(),
        color="C1",
        marker="o",
        label="sum over this and later layers",
    )
    right.plot(
        layers, statistics.downstream_mean.tolist(), color="C2", marker="o", label="their mean"
    )
    for axis, label in ((left, "variance of probabilities"), (right, "downstream variance")):
        axis.set_xlabel("layer")
        axis.set_ylabel(label)
        axis.legend(
            # Above the axes, where no line can run under it.
            frameon=False,
            fontsize="small",
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=2,
        )
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def _heat(axis: Axes, matrix: Tensor, *, title: str, lowest: float):  # type: ignore[no-untyped-def]  # matplotlib's image class is not public
    axis.set_title(title, fontsize="small")
    axis.set_xlabel("layer")
    return axis.imshow(
        # Cosines end at 1. From 0 on, so that figures compare, unless a cosine is negative.
        matrix.tolist(),
        vmin=min(lowest, 0.0),
        vmax=1.0,
        origin="lower",
        cmap="viridis",
    )
