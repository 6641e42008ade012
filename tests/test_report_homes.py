"""The report of a sweep of which several homes have results: nothing is said across homes, and every arm says its home."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

from suite.record.folder import Home
from suite.report import charts, content, tables
from suite.report.answer import answer, verdicts
from suite.report.compose import Form, write
from suite.report.data import Report, read
from suite.report.document import document
from suite.report.page import page
from suite.report.site import write_site
from suite.storage.identity import home_id
from suite.tracking import leaderboard, open_store, sync, to_rows
from suite.tracking.attach import attach_reports
from suite.tracking.exchange import export_results, import_results
from suite.tracking.rows import TAG, runs_with_rows
from tests.commands import Suite, suite
from tests.records import make_home, write_definition
from tests.report_home import SHARES, TASKS, make_report_home

__all__ = ["suite"]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> list[Home]:
    """Two homes that ran a sweep of one name; read only."""
    return [make_report_home(tmp_path_factory.mktemp(name), empty_db) for name in ("a", "b")]


@pytest.fixture(scope="module")
def merged(homes: list[Home], tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A home without trials that got the results of both; read only."""
    found = Home(tmp_path_factory.mktemp("merged"))
    shutil.copy(empty_db, found.path / "mlflow.db")
    for home in homes:
        file = home.path / "results.json"
        export_results(file, tracking_uri=home.tracking_uri)
        import_results(file, tracking_uri=found.tracking_uri)
    return found


@pytest.fixture(scope="module")
def report(merged: Home) -> Report:
    return read(merged.path)


@pytest.fixture(scope="module")
def ids(homes: list[Home]) -> list[str]:
    return sorted(home_id(home) for home in homes)


@pytest.mark.slow
def test_no_sentence_compares_an_arm_with_one_of_another_home(
    report: Report, ids: list[str]
) -> None:
    said = verdicts(report)
    assert [re.findall(r"in home (\w+)", head) for head in said] == [[ids[0]], [ids[1]]]
    for sentence, home in zip(said, ids, strict=True):
        assert set(re.findall(r"@ (\w+)", sentence)) == {home}
        assert len(set(re.findall(r"(\w+) @", sentence))) == 3, "no arm is its own rival"
    for finding in answer(report):
        if " leads " in finding.head:
            assert len(set(re.findall(r"@ (\w+)", f"{finding.head} {finding.rest}"))) == 1


def test_an_arm_of_two_homes_is_there_twice(report: Report, ids: list[str]) -> None:
    labels = {f"{method} @ {home}" for method in SHARES for home in ids}
    assert {arm.label for arm in report.arms.values()} == labels
    assert len(report.cells) == 2 * len(SHARES) * len(TASKS)
    heat = charts.score_heat_map(report)
    assert heat is not None and {row["label"] for row in heat.table.rows} == labels
    keys = [chart.key for chart in content.content(report).figures]
    assert len(keys) == len(set(keys)), "no figure takes the place of the other home's"
    shown = page(report)
    anchors = re.findall(r'<details class="arm" id="([^"]+)"', shown)
    assert len(set(anchors)) == len(labels)
    assert shown.count('<svg class="ci"') == len([r for r in report.shown if r["score_mean"]])


def test_the_table_says_which_home_a_row_is_of(
    report: Report, ids: list[str], tmp_path: Path
) -> None:
    (path,) = [p for p in write(report, tmp_path, Form.CSV) if p.stem.endswith("leaderboard")]
    rows = list(csv.DictReader(path.open()))
    assert {(row["home"], row["label"].partition(" @ ")[2]) for row in rows} == {
        (home, home) for home in ids
    }
    assert "one home" in next(
        column.hint for column in tables.leaderboard_columns(report) if column.head == "rank"
    )


def test_the_index_knows_the_home_whose_ranks_it_compares(
    merged: Home,
    homes: list[Home],
    suite: Suite,
    tmp_path: Path,
    ids: list[str],
) -> None:
    code, _, err = suite("report", "--home", merged.path, "--site", tmp_path)
    assert code == 0, err
    html = (tmp_path / "index.html").read_text()
    assert all(f">{home}</td>" in html for home in ids) and ">home</button>" in html
    assert '["home", "backbone"].every' in html
    alone = write_site([read(homes[0].path)], tmp_path / "alone")[0].read_text()
    assert ">home</button>" not in alone


def test_a_report_of_a_home_shows_imported_rows_beside_its_own(
    tmp_path: Path, empty_db: Path
) -> None:
    found = []
    for name, methods in (("own", ["lora"]), ("away", ["lora", "full"])):
        home = make_home(tmp_path / name, methods, ["agreement"], trials=1, seeds=[1])
        shutil.copy(empty_db, home.path / "mlflow.db")
        sync(home, tracking_uri=home.tracking_uri)
        found.append(home)
    own, away = found
    assert attach_reports(own, own.tracking_uri, _empty_page) == ["demo"]
    export_results(tmp_path / "away.json", tracking_uri=away.tracking_uri)
    import_results(tmp_path / "away.json", tracking_uri=own.tracking_uri)
    write_definition(own, ["lora", "full"], ["agreement"], trials=1, seeds=[1])

    report = read(own.path)
    here = home_id(own)
    there = home_id(away)
    rows = to_rows(leaderboard(own.tracking_uri))
    assert len(report.rows) == len(rows) == 3, "the rows of suite leaderboard"
    labels = {f"lora @ {here}", f"lora @ {there}", f"full @ {there}"}
    assert {arm.label for arm in report.arms.values()} == labels
    (run,) = report.confirm_runs
    assert report.label(run) == f"lora @ {here}", "its trials are those of its own arm"
    (missing,) = report.missing
    assert missing.startswith("1 of 2 planned cells have no ended trial yet: ")
    assert "every trial of this home that ended has a score" in page(report)
    assert attach_reports(own, own.tracking_uri, _empty_page) == ["demo"], "it has other rows now"
    assert attach_reports(own, own.tracking_uri, _empty_page) == []


def test_rows_that_cannot_be_read_are_named_and_their_cells_are_not_called_unstarted(
    homes: list[Home], tmp_path: Path
) -> None:
    own = Home(tmp_path / "own")
    shutil.copytree(homes[0].path, own.path)
    export_results(tmp_path / "away.json", tracking_uri=homes[1].tracking_uri)
    import_results(tmp_path / "away.json", tracking_uri=own.tracking_uri)
    here = home_id(own)
    for run in runs_with_rows(open_store(own.tracking_uri), "demo"):
        if run.tag("suite.home") == here:
            name = run.tags[TAG].split()[0]
            (own.path / "mlartifacts" / run.id / "artifacts" / name).unlink()
    report = read(own.path)
    assert report.homes == [home_id(homes[1])]
    (reason,) = report.unread_rows.values()
    assert reason.startswith(f"sweep demo of home {here}: ")
    assert not report.missing, "nobody knows what of its own plan is missing"
    assert report.trials and not report.confirm_runs, "its trials are not the other home's"
    assert "Rows were left out." in page(report) and "Not finished." not in page(report)
    assert "**Rows were left out:** " in document(report, {})


def _empty_page(home: Home, sweep: str, folder: Path) -> Path:
    path = folder / f"{sweep}.html"
    path.touch()
    return path


def test_one_home_is_not_named(homes: list[Home]) -> None:
    alone = read(homes[0].path)
    assert {arm.label for arm in alone.arms.values()} == {*SHARES}
    assert "in home" not in verdicts(alone)[0]


def test_a_home_without_trials_does_not_say_that_none_failed(report: Report) -> None:
    shown = page(report)
    assert report.trials == [] and "that ended has a score" not in shown
    assert "This home holds no trial of the sweep" in shown
