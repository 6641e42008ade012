"""Writes the list of columns in docs/metrics.md from `suite.leaderboard.fields`.

python tools/leaderboard_columns.py
"""

from __future__ import annotations

from pathlib import Path

from suite.leaderboard.fields import FIELDS, Average

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- columns: made by tools/leaderboard_columns.py -->\n"
END = "<!-- end of columns -->\n"
ON_MEAN_ROWS = {
    Average.NOTHING: "-",
    Average.SAME: "the same",
    Average.MEAN: "mean",
    Average.SCORE: "mean of one direction",
    Average.OWN: "its own",
}


def table() -> str:
    """The list as Markdown."""
    lines = ["| column | unit | mean row | what it is |", "| --- | --- | --- | --- |"]
    for about in FIELDS:
        if not about.hidden:
            cells = [f"`{about.name}`", about.unit or "-"]
            cells += [ON_MEAN_ROWS[about.average], about.meaning]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A document with the list as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
