"""Draw docs/images/report-*.png and terminal-*.svg from the results under docs/.

    python tools/screenshots.py

The report at the widths of a desk and a phone, in light and dark (Chromium on PATH, and
playwright), and the leaderboard at three widths of a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from suite.leaderboard.file import read_rows
from suite.plan.cell_state import CellStatus
from suite.report.compose import build
from suite.tracking.store import open_store
from suite.tracking.sweep_runs import SweepRuns

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "minilm-glue.parquet"
IMAGES = ROOT / "docs" / "images"
SCREENS = {1440: 900, 390: 844}
"""Width and height of a screen, pixels."""
THEMES = ("light", "dark")
TERMINALS = (80, 100, 160)
"""Characters of a line."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # The page's foot shows this path, and the same results must give the same picture.
        os.chdir(folder)
        home = Path("runs")
        (home / "trials").mkdir(parents=True)
        # With the architectures that lost their method's contest the table would be twice as long.
        chosen = [row for row in read_rows(RESULTS) if row.status != CellStatus.NOT_CHOSEN]
        store = open_store(f"sqlite:///{home.resolve()}/mlflow.db")
        # As in the home that ran the sweep: an import marks its rows as not verifiable.
        runs = SweepRuns(store, home=chosen[0].home, sweep=chosen[0].sweep)
        runs.publish(chosen)
        shoot(build(home))
        for width in TERMINALS:
            (IMAGES / f"terminal-{width}.svg").write_text(terminal(home, width))


def shoot(page: Path) -> None:
    """Take the first screen of a page at every width and in every theme."""
    with sync_playwright() as playwright:
        # The first of them that is there; playwright's own download is not asked for.
        names = ("chromium", "chromium-browser", "google-chrome")
        found = next(filter(None, map(shutil.which, names)), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for width, height in SCREENS.items():
            for theme in THEMES:
                screen = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=theme
                )
                screen.goto(page.resolve().as_uri())
                # The time at which it was written would make every picture a new one.
                screen.evaluate(
                    "document.querySelector('.meta').textContent = 'Written by petl-suite'"
                )
                screen.wait_for_selector(".plot[data-drawn]")
                screen.screenshot(path=str(IMAGES / f"report-{width}-{theme}.png"))
                screen.close()
        browser.close()


def terminal(home: Path, width: int) -> str:
    """The leaderboard of SST-2 as a terminal of this width shows it, as SVG."""
    command = ["leaderboard", "--home", str(home), "--task", "sst2"]
    shown = subprocess.run(  # noqa: S603 - the command above
        [sys.executable, "-m", "suite", *command],
        env={**os.environ, "COLUMNS": str(width), "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # the line that names the other columns
        text=True,
        check=True,
    )
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(Text(f"$ suite {' '.join(command)}"))
        console.print(Text.from_ansi(shown.stdout))
        # rich's own form asks a server for a font.
        form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        return console.export_svg(
            title=f"{width} columns", code_format=form, unique_id=f"terminal-{width}"
        )


if __name__ == "__main__":
    main()
