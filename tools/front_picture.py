"""Draws docs/images/front.png from the results committed under notebooks/: `python tools/front_picture.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from suite.tracking import leaderboard, open_store
from suite.tracking.exchange import import_results
from suite.tracking.query import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "notebooks" / "minilm-glue-small.parquet"
PICTURE = ROOT / "docs" / "images" / "front.png"
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#000000",
)  # Okabe and Ito's, told apart by everybody
LOOKS = dict(
    zip(
        ("full", "lora", "adapter", "read", "prompt", "lst", "bitfit"),
        zip(COLOURS, "osD^v*P", strict=True),
        strict=True,
    )
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        import_results(RESULTS, tracking_uri=uri)
        table = leaderboard(uri, task="sst2")
        cells = [
            cell
            for cell, _ in read_rows(open_store(uri, create=False))
            if cell.task == "sst2" and cell.chosen is not False
        ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    for cell in sorted(cells, key=lambda cell: list(LOOKS).index(cell.method)):
        colour, marker = LOOKS[cell.method]
        points = sorted((rate, score) for rate, score, _ in cell.curve if score is not None)
        left.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            color=colour,
            marker=marker,
            label=cell.method,
        )
    left.set(
        xscale="log",
        xlabel="learning rate tried",
        ylabel="validation accuracy, %",
        title="Every method has a rate of its own",
    )
    left.legend(frameon=False, fontsize=9, loc="lower left", ncols=2)
    for row in table[table.status == "done"].itertuples():
        colour, marker = LOOKS[row.method]
        bars = [[max(row.score_mean - row.ci_low, 0)], [max(row.ci_high - row.score_mean, 0)]]
        right.errorbar(
            row.energy_kwh * 1e6,
            row.score_mean,
            yerr=bars,
            color=colour,
            marker=marker,
            markersize=8,
            capsize=3,
        )
        right.annotate(
            f"{row.method} ({row.rank})",
            (row.energy_kwh * 1e6, row.score_mean),
            xytext=(7, 5),
            textcoords="offset points",
        )
    right.set(
        xlabel="energy of a training run, mWh (estimate)",
        ylabel="test accuracy, %, 95% interval",
        title="Score, cost, rank",
    )
    right.margins(x=0.12)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
