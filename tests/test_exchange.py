"""Results as a file: what goes out comes back, twice is once, the newer wins, and a bad file changes nothing."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from suite import __version__
from suite.errors import TrackingError
from suite.leaderboard.file import SCHEMA_VERSION, write_rows
from suite.record.folder import Home
from suite.storage.identity import home_id
from suite.tracking import exchange, leaderboard, open_store, sync, to_rows
from suite.tracking.exchange import (
    ImportReport,
    export_results,
    import_results,
    read_results,
)
from suite.tracking.rows import published, read_rows
from suite.tracking.sweep_runs import SweepRuns
from tests.answers import some_right, write_confirmed
from tests.commands import Suite, suite
from tests.records import (
    RATES,
    make_home,
    make_result,
    make_spec,
    synced,
    write_cell,
    write_definition,
    write_trial,
)

__all__ = ["suite"]


def new_home(path: Path, empty_db: Path) -> Home:
    path.mkdir()
    shutil.copy(empty_db, path)
    return Home(path)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A synced home, read only: two methods on two tasks."""
    return synced(make_home(tmp_path_factory.mktemp("cluster"), trials=2, seeds=[1, 2]), empty_db)


@pytest.fixture
def merged(tmp_path: Path, empty_db: Path) -> Home:
    """A home without anything of its own."""
    return new_home(tmp_path / "merged", empty_db)


def rows(home: Home) -> list[dict[str, Any]]:
    """The leaderboard without the column that says of imported rows that they are."""
    found = to_rows(leaderboard(home.tracking_uri))
    return [{key: row[key] for key in row if key != "unverified"} for row in found]


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_an_imported_leaderboard_is_the_exported_one(
    cluster: Home, merged: Home, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"results.{suffix}"
    assert export_results(path, tracking_uri=cluster.tracking_uri) == 4
    assert import_results(path, tracking_uri=merged.tracking_uri) == ImportReport(new=4)
    assert rows(merged) == rows(cluster)
    assert {row["home"] for row in rows(merged)} == {home_id(cluster)}


def test_the_file_says_what_it_is_and_reads_as_rows(cluster: Home, tmp_path: Path) -> None:
    for suffix in ("json", "parquet"):
        export_results(tmp_path / f"results.{suffix}", tracking_uri=cluster.tracking_uri)
    told = json.loads((tmp_path / "results.json").read_text())
    assert (told["format"], told["schema_version"], told["suite_version"]) == (
        "suite-rows",
        SCHEMA_VERSION,
        __version__,
    )
    cells = [(row["arm"], row["task"], row["score_mean"]) for row in rows(cluster)]
    expected = sorted(cell for cell in cells if cell[1] != "mean")
    table = pq.read_table(tmp_path / "results.parquet").to_pylist()
    for lines in (told["rows"], table):
        assert sorted((row["arm"], row["task"], row["score_mean"]) for row in lines) == expected


def test_the_file_has_what_takes_more_than_one_row_to_know(cluster: Home, tmp_path: Path) -> None:
    names = ("selection_trials", "shown_to_learn", "energy_to_target_kwh", "prr")
    names += tuple(f"{name}_missing" for name in ("constant", "energy_to_target", "prr"))
    shown = {}
    for row in rows(cluster):
        shown[row["arm"], row["task"]] = {name: row[name] for name in names}
    export_results(tmp_path / "results.json", tracking_uri=cluster.tracking_uri)
    told = json.loads((tmp_path / "results.json").read_text())["rows"]
    for row in told:
        assert {name: row[name] for name in names} == shown[row["arm"], row["task"]]
        assert row["selection_trials"] == row["search_trials"] == 2
        assert row["energy_to_target_kwh"] is not None or row["energy_to_target_missing"]


def test_an_import_done_twice_changes_nothing(cluster: Home, merged: Home, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)
    import_results(path, tracking_uri=merged.tracking_uri)
    store = open_store(merged.tracking_uri)
    before = store.runs(list(store.experiments().values()), {"suite.home": home_id(cluster)})
    assert import_results(path, tracking_uri=merged.tracking_uri) == ImportReport(already=4)
    assert (
        store.runs(list(store.experiments().values()), {"suite.home": home_id(cluster)}) == before
    )


def test_sweeps_of_two_homes_stand_side_by_side_and_a_sync_leaves_the_other_alone(
    cluster: Home, empty_db: Path, tmp_path: Path
) -> None:
    own = new_home(tmp_path / "own", empty_db)
    make_home(own.path, ["lora"], ["agreement"], trials=2, seeds=[1])
    export_results(tmp_path / "results.json", tracking_uri=cluster.tracking_uri)
    import_results(tmp_path / "results.json", tracking_uri=own.tracking_uri)
    sync(own, tracking_uri=own.tracking_uri, verify=True)
    found = {
        (row["home"], row["method"], row["task"]) for row in rows(own) if row["task"] == "agreement"
    }
    assert found == {
        (home_id(own), "lora", "agreement"),
        *((home_id(cluster), m, "agreement") for m in ("full", "lora")),
    }
    export_results(
        tmp_path / "both.parquet", tracking_uri=own.tracking_uri
    )  # and on to a third place
    homes = {row.home for row in read_results(tmp_path / "both.parquet")}
    assert homes == {home_id(own), home_id(cluster)}


def test_a_later_export_replaces_and_an_earlier_one_does_not(
    merged: Home, empty_db: Path, tmp_path: Path
) -> None:
    source = new_home(tmp_path / "source", empty_db)
    write_definition(source, ["lora"], ["agreement"], trials=3, seeds=[1, 2, 3, 4])
    write_cell(source, "lora", trials=3, seeds=[1])
    sync(source, tracking_uri=source.tracking_uri)
    export_results(tmp_path / "early.json", tracking_uri=source.tracking_uri)
    spec = make_spec("lora", seed=2, learning_rate=RATES[2])
    write_trial(source, spec, make_result(spec, score=0.1))
    sync(source, tracking_uri=source.tracking_uri)
    export_results(tmp_path / "late.json", tracking_uri=source.tracking_uri)
    assert import_results(
        tmp_path / "early.json", tracking_uri=merged.tracking_uri
    ) == ImportReport(new=1)
    assert rows(merged)[0]["seeds"] == 1
    assert import_results(tmp_path / "late.json", tracking_uri=merged.tracking_uri) == ImportReport(
        replaced=1
    )
    assert rows(merged) == rows(source) and rows(merged)[0]["seeds"] == 2
    assert import_results(
        tmp_path / "early.json", tracking_uri=merged.tracking_uri
    ) == ImportReport(older=1)
    assert rows(merged)[0]["seeds"] == 2
    store = open_store(merged.tracking_uri)
    (run,) = store.runs([store.experiment("demo")], {"suite.kind": "cell"})
    assert (
        store.client.get_run(run.id).data.metrics["score_mean"] == rows(merged)[0]["score_mean"]
    ), "MLflow's own pages show the newer"


def test_a_later_export_also_brings_what_hangs_on_other_cells(
    merged: Home, empty_db: Path, tmp_path: Path
) -> None:
    """Ranks are of all arms, and those of a cell that stayed as it was have changed."""
    source = new_home(tmp_path / "source", empty_db)
    tasks = ["agreement", "sst2"]
    write_definition(source, ["full", "lora", "read"], tasks, trials=1)
    rng = np.random.default_rng(0)
    for number, shares in enumerate(({"full": 0.9, "lora": 0.5}, {"read": 0.7})):
        for task in tasks:
            for method, share in shares.items():
                write_confirmed(source, method, some_right(rng, [share] * 3, items=100), task)
        sync(source, tracking_uri=source.tracking_uri)
        path = tmp_path / f"{number}.json"
        export_results(path, tracking_uri=source.tracking_uri)
        report = import_results(path, tracking_uri=merged.tracking_uri)
    assert (report.new + report.replaced, report.already) == (2, 4)
    assert rows(merged) == rows(source)
    assert {row["rank"] for row in rows(merged)} != {None}


def test_files_of_imported_runs_lie_where_the_home_keeps_them(
    cluster: Home, tmp_path: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []

    class Asked(SweepRuns):
        def __init__(self, *args: Any, files: Path | None = None, **options: Any) -> None:
            asked.append(files)
            super().__init__(*args, files=files, **options)

    monkeypatch.setattr(exchange, "SweepRuns", Asked)
    export_results(tmp_path / "rows.json", tracking_uri=cluster.tracking_uri)
    suite("import-results", tmp_path / "rows.json", "--home", tmp_path / "new")
    assert asked == [tmp_path / "new" / "mlartifacts"]


def test_no_import_takes_cells_away(cluster: Home, merged: Home, tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    export_results(whole, tracking_uri=cluster.tracking_uri)
    first, *others = read_results(whole)
    # As of two copies of a home that went on by themselves.
    later = replace(first, ended_at=2 * first.ended_at)
    part = tmp_path / "part.parquet"
    write_rows(part, [later, *others[1:]])
    import_results(whole, tracking_uri=merged.tracking_uri)
    before = rows(merged)
    with pytest.raises(
        TrackingError, match=r"the file has the later state, and lacks 1 of the other's cells"
    ):
        import_results(part, tracking_uri=merged.tracking_uri)
    assert rows(merged) == before


def test_an_earlier_state_with_cells_of_its_own_is_refused(
    cluster: Home, merged: Home, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.parquet"
    export_results(whole, tracking_uri=cluster.tracking_uri)
    first, *others = read_results(whole)
    part = tmp_path / "part.parquet"
    write_rows(part, [replace(first, ended_at=2 * first.ended_at), *others[1:]])
    import_results(part, tracking_uri=merged.tracking_uri)
    with pytest.raises(
        TrackingError, match=r"the store has the later state, and lacks 1 of the other's cells"
    ):
        import_results(whole, tracking_uri=merged.tracking_uri)


def test_an_export_of_fewer_seeds_is_later_than_that_of_all(
    merged: Home, empty_db: Path, tmp_path: Path
) -> None:
    """Whoever drops seeds looks again at the test scores, which an older file must not hide."""
    source = new_home(tmp_path / "source", empty_db)
    files = [tmp_path / "all.json", tmp_path / "fewer.json"]
    for seeds, path in zip(([1, 2, 3], [1, 2]), files, strict=True):
        write_definition(source, ["lora"], ["agreement"], trials=3, seeds=seeds)
        write_cell(source, "lora", trials=3, seeds=seeds)
        sync(source, tracking_uri=source.tracking_uri)
        export_results(path, tracking_uri=source.tracking_uri)
    found = [import_results(path, tracking_uri=merged.tracking_uri) for path in (*files, files[0])]
    assert found == [ImportReport(new=1), ImportReport(replaced=1), ImportReport(older=1)]
    (row,) = rows(merged)
    assert row["seeds"] == 2 and row["test_looks"] > 1


def test_a_database_that_was_rebuilt_does_not_make_its_cells_older(
    merged: Home, empty_db: Path, tmp_path: Path
) -> None:
    source = new_home(tmp_path / "source", empty_db)
    write_definition(source, ["lora"], ["agreement"], trials=3, seeds=[1, 2, 3, 4])
    for seed in (1, 2, 3):  # three revisions
        write_cell(source, "lora", trials=3, seeds=[seed])
        sync(source, tracking_uri=source.tracking_uri)
    export_results(tmp_path / "before.json", tracking_uri=source.tracking_uri)
    import_results(tmp_path / "before.json", tracking_uri=merged.tracking_uri)
    (source.path / "mlflow.db").unlink()
    shutil.copy(empty_db, source.path)
    write_cell(source, "lora", trials=3, seeds=[4])
    sync(source, tracking_uri=source.tracking_uri)
    export_results(tmp_path / "after.json", tracking_uri=source.tracking_uri)
    assert import_results(
        tmp_path / "after.json", tracking_uri=merged.tracking_uri
    ) == ImportReport(replaced=1)
    assert rows(merged)[0]["seeds"] == 4


def test_a_home_that_syncs_after_an_import_of_its_rows_sends_its_trials(
    cluster: Home, merged: Home, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)
    import_results(path, tracking_uri=merged.tracking_uri)
    report = sync(cluster, tracking_uri=merged.tracking_uri)
    assert (report.written, report.cells) == (16, 4)
    found = [row.unverified for row in read_rows(open_store(merged.tracking_uri))]
    assert found == [row.unverified for row in read_rows(open_store(cluster.tracking_uri))]
    assert import_results(path, tracking_uri=merged.tracking_uri) == ImportReport(already=4)
    assert sync(cluster, tracking_uri=merged.tracking_uri).cells == 0


def test_an_interrupted_import_is_completed_by_the_next(
    cluster: Home, merged: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)

    def cut_off(*args: Any, **options: Any) -> None:
        raise TrackingError("cut off")

    monkeypatch.setattr(SweepRuns, "write_cell", cut_off)
    with pytest.raises(TrackingError, match="cut off"):
        import_results(path, tracking_uri=merged.tracking_uri)
    monkeypatch.undo()
    assert import_results(path, tracking_uri=merged.tracking_uri) == ImportReport(already=4)
    assert rows(merged) == rows(cluster)
    store = open_store(merged.tracking_uri)
    assert len(store.runs([store.experiment("demo")], {"suite.kind": "cell"})) == 4


def test_rows_of_another_version_are_replaced_by_an_import(
    cluster: Home, merged: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)
    monkeypatch.setattr("suite.leaderboard.file.SCHEMA_VERSION", "another")
    import_results(path, tracking_uri=merged.tracking_uri)
    monkeypatch.undo()
    whose = f"^sweep demo of home {home_id(cluster)}: "
    with pytest.raises(
        TrackingError, match=rf"{whose}.*schema version another.*import the results"
    ):
        rows(merged)
    import_results(path, tracking_uri=merged.tracking_uri)
    assert rows(merged) == rows(cluster)


def away(store: Any, run: Any) -> Any:
    if run.tag("sweep") == "demo":
        raise store.explain(OSError("timed out"))
    return published(store, run)


def test_rows_of_another_version_hide_no_other_sweep_of_a_store(
    cluster: Home,
    merged: Home,
    empty_db: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    uri = merged.tracking_uri
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)
    monkeypatch.setattr("suite.leaderboard.file.SCHEMA_VERSION", "another")
    import_results(path, tracking_uri=uri)
    monkeypatch.undo()
    with pytest.raises(TrackingError, match="schema version another"):
        leaderboard(uri)
    other = new_home(tmp_path / "other", empty_db)
    make_home(other.path, ["lora"], ["agreement"], trials=1, seeds=[1], sweep="other")
    sync(other, tracking_uri=uri)
    assert set(leaderboard(uri)["sweep"]) == {"other"}
    (warning,) = caplog.messages
    assert warning.startswith(f"left out: sweep demo of home {home_id(cluster)}: ")
    # A store that does not answer is no such file: nobody knows what it holds.
    with monkeypatch.context() as patch:
        patch.setattr("suite.tracking.rows.published", away)
        with pytest.raises(TrackingError, match="timed out"):
            leaderboard(uri)
    # A file for others would lack a sweep, and say so to nobody.
    with pytest.raises(TrackingError, match="schema version another"):
        export_results(path, tracking_uri=uri)


def test_rows_of_another_version_in_a_moved_home_are_not_called_lost(
    empty_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = new_home(tmp_path / "before", empty_db)
    make_home(home.path, ["lora"], ["agreement"], trials=1, seeds=[1])
    monkeypatch.setattr("suite.leaderboard.file.SCHEMA_VERSION", "another")
    sync(home, tracking_uri=home.tracking_uri)
    monkeypatch.undo()
    moved = Home(home.path.rename(tmp_path / "after"))
    with pytest.raises(TrackingError, match="schema version another"):
        leaderboard(moved.tracking_uri)


def test_one_sweep_can_be_taken_out_of_several(
    cluster: Home, merged: Home, empty_db: Path, tmp_path: Path
) -> None:
    both = new_home(tmp_path / "both", empty_db)
    for name in ("demo", "other"):
        make_home(both.path, ["lora"], ["agreement"], trials=1, seeds=[1], sweep=name)
    sync(both, tracking_uri=both.tracking_uri)
    assert export_results(tmp_path / "one.json", tracking_uri=both.tracking_uri, sweep="other") == 1
    assert export_results(tmp_path / "all.json", tracking_uri=both.tracking_uri) == 2
    assert import_results(
        tmp_path / "all.json", tracking_uri=merged.tracking_uri, sweep="demo"
    ) == ImportReport(new=1)
    with pytest.raises(TrackingError, match="unknown sweep 'dem'; did you mean demo"):
        import_results(tmp_path / "all.json", tracking_uri=merged.tracking_uri, sweep="dem")


# ---- bad files -----------------------------------------------------------------------------------------------------------------


def edited(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**content, **changes}


def with_values(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The last row with other values."""
    *rows, last = content["rows"]
    return edited(content, rows=[*rows, {**last, **changes}])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda c: edited(c, schema_version="another"),
            r"schema version another, written by suite .*expected",
        ),
        (lambda c: edited(c, format="other"), "not a file of suite export-results"),
        (lambda c: [1, 2], "not a file of suite export-results"),
        (lambda c: edited(c, rows="none"), "not what suite export-results writes: rows"),
        (lambda c: edited(c, extra=1), "extra"),
        (
            lambda c: edited(c, rows=[*c["rows"], c["rows"][1]]),
            r"rows\[4\]: got demo/.* a second time, after rows\[1\]; expected each cell once",
        ),
        (lambda c: with_values(c, home=""), "got nothing for home"),
        (lambda c: with_values(c, home="a' or '"), "got the home"),
        (lambda c: with_values(c, status="fine"), "got status 'fine'"),
        (lambda c: with_values(c, score_mean="high"), "score_mean"),
        (
            lambda c: with_values(c, conditions="half a pair: \ud800"),
            "got conditions that is no text .surrogates not allowed",
        ),
        (
            lambda c: with_values(c, seed_scores={"1": math.inf, "2": 50.0}),
            "got seed_scores inf, expected a number up to",
        ),
        (lambda c: with_values(c, energy_kwh=1e300), "got energy_kwh 1e\\+300, expected a number"),
        (
            lambda c: with_values(c, total_parameters=10**400),
            "got total_parameters 100000000000, expected a number",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_as_a_whole(
    cluster: Home, merged: Home, tmp_path: Path, edit: Any, says: str
) -> None:
    path = tmp_path / "results.json"
    export_results(path, tracking_uri=cluster.tracking_uri)
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(TrackingError, match=says) as raised:
        import_results(path, tracking_uri=merged.tracking_uri)
    assert str(path) in str(raised.value)
    assert open_store(merged.tracking_uri).experiments() == {}


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_cut_file_is_refused(cluster: Home, merged: Home, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"results.{suffix}"
    export_results(path, tracking_uri=cluster.tracking_uri)
    path.write_bytes(path.read_bytes()[:-40])
    says = r"not (whole JSON.*was it cut|a whole file of rows.*; get it again)"
    with pytest.raises(TrackingError, match=says):
        import_results(path, tracking_uri=merged.tracking_uri)
    assert open_store(merged.tracking_uri).experiments() == {}


def test_other_tables_other_suffixes_and_absent_files_are_refused(
    cluster: Home, merged: Home, tmp_path: Path
) -> None:
    import pandas as pd

    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    write_rows(tmp_path / "empty.parquet", [])
    for name, says in (
        ("other.parquet", "no file of rows; get it again, or export it again"),
        ("empty.parquet", "holds no rows; get it again, or export it again"),
        ("absent.json", "no such file"),
        ("results.csv", r"expected \.json or"),
    ):
        with pytest.raises(TrackingError, match=says):
            import_results(tmp_path / name, tracking_uri=merged.tracking_uri)
    with pytest.raises(TrackingError, match=r"expected \.json or"):
        export_results(tmp_path / "results.csv", tracking_uri=cluster.tracking_uri)


def test_the_commands_say_what_they_did(cluster: Home, suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    assert suite("export-results", path, "--home", cluster.path)[:2] == (
        0,
        f"4 cells written to {path}\n",
    )
    code, out, _ = suite("import-results", path, "--home", tmp_path / "new")
    assert code == 0 and out.startswith(
        f"4 cells in {path}: 4 new, 0 newer than here, 0 here already, 0 older than here"
    )
    code, out, _ = suite("leaderboard", "--home", tmp_path / "new", "--format", "csv")
    assert code == 0 and len(out.splitlines()) == 1 + 6
    code, _, err = suite("import-results", tmp_path / "nothing.json", "--home", tmp_path / "never")
    assert code == 2 and "no such file" in err and not (tmp_path / "never").exists()
