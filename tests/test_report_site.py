"""The site over several sweeps: what it writes, what it links, and that its choices filter; imported results are there too."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from suite.record.folder import Home
from suite.report.data import Report, read
from suite.report.site import write_site
from suite.tracking import sync
from suite.tracking.exchange import export_results, import_results
from tests.commands import Suite, suite
from tests.records import make_home
from tests.report_home import ATTACK, SECRET, make_report_home

__all__ = ["suite"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A sweep of its own with ranks, and the results of another home, imported; read only."""
    away = make_home(tmp_path_factory.mktemp("away"), trials=2, seeds=[1, 2], sweep="index")
    shutil.copy(empty_db, away.path / "mlflow.db")
    sync(away, tracking_uri=away.tracking_uri)
    file = away.path / "results.json"
    export_results(file, tracking_uri=away.tracking_uri)
    own = make_report_home(tmp_path_factory.mktemp("home"), empty_db)
    import_results(file, tracking_uri=own.tracking_uri)
    return own


@pytest.fixture(scope="module")
def site(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    imported = read(home.path, "index")
    rows = [{**row, "backbone": "minilm"} for row in imported.rows]
    reports = [read(home.path, "demo"), replace(imported, rows=rows)]
    return write_site(reports, tmp_path_factory.mktemp("site"))[0]


def test_the_command_writes_the_index_and_a_page_for_each_sweep(
    home: Home, suite: Suite, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    code, out, err = suite("report", "--home", home.path, "--sweep", "index", "--site", site)
    assert code == 0, err
    # A sweep that is called `index` has a page, and the site still has its index.
    assert out.splitlines() == [str(site / "index.html"), str(site / "sweeps" / "index.html")]
    assert "1 sweep</h1>" in (site / "index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    code, _, err = suite("report", "--home", home.path, "--site", tmp_path, "--format", "md")
    assert code == 2 and "--site: writes pages into its own folder" in err


def test_every_row_is_there_and_every_link_leads_somewhere(home: Home, site: Path) -> None:
    html = site.read_text()
    shown = sum(len(read(home.path, name).shown) for name in ("demo", "index"))
    assert html.count("<tr data-task=") == shown
    links = set(re.findall(r'href="(sweeps/[^"]+)"', html))
    assert {link.partition("#")[0] for link in links} == {"sweeps/demo.html", "sweeps/index.html"}
    for link in links:
        page, _, anchor = link.partition("#")
        text = (site.parent / page).read_text()
        assert not anchor or f'id="{anchor}"' in text


def test_what_others_wrote_is_text_on_the_index(home: Home, tmp_path: Path) -> None:
    report: Report = read(home.path, "index")
    rows = [{**row, "method": ATTACK, "backbone": ATTACK} for row in report.rows]
    html = write_site([replace(report, rows=rows)], tmp_path)[0].read_text()
    assert "&lt;script&gt;document.title" in html
    assert "<script>document.title" not in html and "<img" not in html and SECRET not in html


@pytest.mark.slow
def test_a_reader_finds_the_best_below_a_bound(home: Home, site: Path) -> None:
    browsers = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH")
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(site.as_uri())
        best = page.locator("#best li")
        # Two tasks and their mean in each of two sweeps.
        assert best.count() == 6
        page.locator("[data-column=sweep]").select_option(label="demo")
        page.locator("select[data-task]").select_option("agreement")
        first = best.first.text_content()
        assert best.count() == 1 and "demo, agreement: full" in first and "lora" in first
        assert page.locator("#board tbody tr:visible").count() == 4
        page.locator("#bound").fill("9 MiB")
        assert page.locator("#board tbody tr:visible").count() == 0 and best.count() == 0
        page.locator("#bound").fill("0.1 GiB")
        assert best.count() == 1
        page.locator("[data-column=sweep]").select_option("")
        page.locator("[data-column=family]").select_option(label="bert")
        assert best.count() == 1 and "index, agreement" in best.first.text_content()
        # No preset has this name, so nothing is known of its family.
        page.locator("[data-column=family]").select_option(label="not known")
        assert best.count() == 1 and "demo, agreement" in best.first.text_content()
        browser.close()
    assert problems == []
