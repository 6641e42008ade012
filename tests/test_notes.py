"""MLflow's own pages: descriptions of sweeps, cells and trials, and the report as a file of the sweep."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from suite.cli.attach import attach
from suite.record.folder import Home
from suite.record.result import Status
from suite.report import compose
from suite.tracking import open_store, sync
from suite.tracking.attach import attach_reports
from suite.tracking.notes import NOTE
from suite.tracking.store import Store, StoredRun
from tests.commands import Suite, suite  # noqa: F401
from tests.records import (
    make_home,
    make_result,
    make_spec,
    write_cell,
    write_definition,
    write_trial,
)


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    home = make_home(tmp_path / "runs", tasks=["agreement"], trials=2, seeds=(1, 2))
    shutil.copy(empty_db, home.path / "mlflow.db")
    sync(home, tracking_uri=home.tracking_uri)
    return home


def runs(home: Home, kind: str) -> tuple[Store, list[StoredRun]]:
    store = open_store(home.tracking_uri)
    return store, store.runs([store.experiments()["demo"]], {"suite.kind": kind})


def artifact(home: Home) -> str:
    store, (run,) = runs(home, "report")
    return Path(store.client.download_artifacts(run.id, "demo.html")).read_text()


def build(home: Home, sweep: str, folder: Path) -> Path:
    path = folder / f"{sweep}.html"
    path.write_text(f"{sweep}: {len(list(home.trials()))} trials")
    return path


def test_sweeps_cells_and_trials_say_what_they_are(home: Home) -> None:
    store, cells = runs(home, "cell")
    note = store.client.get_experiment_by_name("demo").tags[NOTE]
    assert "sweep **demo**" in note and "docs/metrics.md" in note
    assert all(
        f"`{run.tags['method']}` on `{run.tags['backbone']}`" in run.tags[NOTE] for run in cells
    )
    trials = runs(home, "trial")[1]
    assert {run.tags[NOTE].split(":")[0] for run in trials} == {
        "Tried on validation data",
        "Confirms the learning rate found, on test data",
    }
    assert len({run.tags[NOTE] for run in trials}) == len(trials), (
        "each names its learning rate and seed"
    )


def test_every_filter_that_a_page_names_finds_runs_and_those_of_names_find_cells_too(
    home: Home,
) -> None:
    spec = make_spec("lora", number=7)
    write_trial(home, spec, make_result(spec, status=Status.DIVERGED))
    sync(home, tracking_uri=home.tracking_uri)
    store, _ = runs(home, "cell")
    experiment = store.experiment("demo")
    page = (Path(__file__).parents[1] / "docs" / "stores.md").read_text()
    named = re.findall(r"^\|.*\| `([a-z]+\..*)` \|$", page, re.MULTILINE)
    note = store.client.get_experiment(experiment).tags[NOTE]
    noted = re.findall(r"`([a-z]+\.[^`]*=[^`]*)`", note)
    assert len(named) == len(noted) == 5
    for query in {*named, *noted}:
        query = query.replace("sst2", "agreement")
        assert store.client.search_runs([experiment], query), query
        if "method" in query:
            cells = f"tags.suite.kind = 'cell' and {query}"
            assert len(store.client.search_runs([experiment], cells)) == 1


def test_what_somebody_wrote_in_mlflow_stays(home: Home) -> None:
    store, cells = runs(home, "cell")
    for run in cells:
        store.client.set_tag(run.id, NOTE, "mine")
    store.client.set_experiment_tag(store.experiments()["demo"], NOTE, "ours")
    write_trial(home, spec := make_spec("lora", "agreement", number=7), make_result(spec))
    assert sync(home, tracking_uri=home.tracking_uri).cells == 1
    assert [run.tags[NOTE] for run in runs(home, "cell")[1]] == ["mine"] * len(cells)
    assert store.client.get_experiment_by_name("demo").tags[NOTE] == "ours"


def test_the_report_is_attached_once_and_replaced_when_results_change(home: Home) -> None:
    built: list[str] = []

    def counted(home: Home, sweep: str, folder: Path) -> Path:
        built.append(sweep)
        return build(home, sweep, folder)

    assert attach_reports(home, home.tracking_uri, counted) == ["demo"]
    first = artifact(home)
    assert attach_reports(home, home.tracking_uri, counted) == [] and built == ["demo"], (
        "nothing changed: not even built"
    )
    write_trial(home, spec := make_spec("lora", "agreement", number=7), make_result(spec))
    sync(home, tracking_uri=home.tracking_uri)
    assert attach_reports(home, home.tracking_uri, counted) == ["demo"]
    assert artifact(home) != first and "demo: " in artifact(home)
    assert len(runs(home, "report")[1]) == 1


def test_whether_a_sweep_has_ended_is_for_the_caller_to_say(home: Home) -> None:
    assert attach_reports(home, home.tracking_uri, build, unless={"demo"}) == []
    assert runs(home, "report")[1] == []
    write_trial(home, make_spec("lora", "agreement", number=8))  # given up: never gets a result
    sync(home, tracking_uri=home.tracking_uri)
    assert attach_reports(home, home.tracking_uri, build) == ["demo"]


def test_sync_leaves_sweeps_with_trials_left_or_a_driver_without_a_report(
    tmp_path: Path,
    empty_db: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = Home(tmp_path)
    shutil.copy(empty_db, home.path / "mlflow.db")
    write_definition(home, ["bitfit", "full"], ["agreement"], trials=1, seeds=[1])
    write_cell(home, "bitfit", "agreement", trials=1, seeds=[1])
    assert "the report of" not in suite("sync", "--home", home.path)[2], (
        "the cell of full has no trial, so MLflow knows nothing of it"
    )
    write_cell(home, "full", "agreement", trials=1, seeds=[1])
    home.sweep_definition("demo").with_suffix(".driver").write_text('{"pid": 1}')
    with FileLock(home.sweep_definition("demo").with_suffix(".lock")):
        assert "the report of" not in suite("sync", "--home", home.path)[2]
    assert "the report of demo is an artifact" in suite("sync", "--home", home.path)[2]


def test_a_report_that_fails_in_whatever_way_is_said_and_ends_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> Path:
        raise KeyError("postgresql://me:hunter2-hunter2@db/x\nis gone")

    monkeypatch.setattr(compose, "build", broken)
    attach(home, None)
    said = capsys.readouterr().err
    assert (
        said.startswith("no report in MLflow: KeyError: ")
        and said.count("\n") == 1
        and "hunter2" not in said
    )
    monkeypatch.undo()
    attach(home, "nonsense://x", "demo")
    assert capsys.readouterr().err.startswith("no report in MLflow: TrackingError: ")
    attach(home, None, "demo")
    assert "the report of demo is an artifact" in capsys.readouterr().err


def test_a_report_changes_nothing_for_the_leaderboard_and_the_next_sync(home: Home) -> None:
    from suite.tracking import leaderboard

    before = leaderboard(home.tracking_uri)
    attach_reports(home, home.tracking_uri, build)
    assert leaderboard(home.tracking_uri).equals(before)
    assert sync(home, tracking_uri=home.tracking_uri).cells == 0
