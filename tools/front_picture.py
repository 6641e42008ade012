"""Draw docs/images/front.png from the results under docs/: `python tools/front_picture.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from suite.tracking import leaderboard, open_store
from suite.tracking.exchange import import_results
from suite.tracking.rows import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "minilm-glue.parquet"
PICTURE = ROOT / "docs" / "images" / "front.png"

# Colour and marker of each method; the colours are Okabe and Ito's, which everybody can tell apart.
STYLES = {
    "full": ("#0072B2", "o"),
    "lora": ("#E69F00", "s"),
    "adapter": ("#009E73", "D"),
    "bitfit": ("#000000", "P"),
    "prompt": ("#56B4E9", "v"),
    "lst": ("#D55E00", "*"),
    "read": ("#CC79A7", "^"),
    "peft:dora": ("#E69F00", "<"),
    "peft:rslora": ("#E69F00", ">"),
    "peft:pissa": ("#E69F00", "h"),
    "peft:vera": ("#999999", "X"),
    "peft:ia3": ("#999999", "p"),
}


def main() -> None:
    table, cells = read_results()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6))
    draw_curves(left, cells)
    draw_costs(right, table)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    # One legend for both: twelve names beside their points would cover each other.
    marks, names = right.get_legend_handles_labels()
    figure.legend(
        marks, names, frameon=False, fontsize=9, loc="lower center", ncols=6, columnspacing=1
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    # without matplotlib's version, so that the same results give the same file
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def read_results() -> tuple[Any, list[Any]]:
    """The leaderboard of SST-2, and its cells in the order of `STYLES`."""
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        import_results(RESULTS, tracking_uri=uri)
        table = leaderboard(uri, task="sst2")
        cells = []
        for cell in read_rows(open_store(uri, create=False)):
            # architectures that lost their method's contest are left out
            if cell.task == "sst2" and cell.chosen is not False:
                cells.append(cell)
    methods = list(STYLES)
    cells.sort(key=lambda cell: methods.index(cell.method))
    return table, cells


def draw_curves(axes: Any, cells: list[Any]) -> None:
    """Draw validation accuracy over the learning rates that were tried."""
    for cell in cells:
        colour, marker = STYLES[cell.method]
        # of two batch sizes at one rate the better one
        best: dict[float, float] = {}
        for rate, score, *_ in cell.curve:
            # a trial that diverged has no score
            if score is not None:
                best[rate] = max(score, best.get(rate, score))
        rates = sorted(best)
        scores = [best[rate] for rate in rates]
        # PEFT's methods are drawn hollow, so that the seven of the papers stand out.
        fill = colour
        if cell.method.startswith("peft:"):
            fill = "white"
        axes.plot(
            rates, scores, color=colour, marker=marker, markerfacecolor=fill, markersize=5, lw=1
        )
    axes.set(
        xscale="log",
        xlabel="learning rate tried",
        ylabel="validation accuracy, %",
        title="Every method has a rate of its own",
    )


def draw_costs(axes: Any, table: Any) -> None:
    """Draw test accuracy with its interval over the energy of a training run."""
    rows = table[table.status == "done"].set_index("method")
    for method, (colour, marker) in STYLES.items():
        row = rows.loc[method]
        fill = colour
        if method.startswith("peft:"):
            fill = "white"
        energy_mwh = row.energy_kwh * 1e6
        # matplotlib refuses negative lengths, which rounding could give
        below = max(row.score_mean - row.ci_low, 0)
        above = max(row.ci_high - row.score_mean, 0)
        axes.errorbar(
            energy_mwh,
            row.score_mean,
            yerr=[[below], [above]],
            color=colour,
            marker=marker,
            markerfacecolor=fill,
            markersize=8,
            capsize=3,
            linestyle="none",
            label=f"{method} ({row['rank']})",
        )
    axes.set(
        xlabel="energy of a training run, mWh (estimate)",
        ylabel="test accuracy, %, 95% interval",
        title="Score, cost and (rank)",
    )


if __name__ == "__main__":
    main()
