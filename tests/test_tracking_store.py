"""The MLflow store: which one is used, made and migrated by one process at a time, and clear words when it cannot be."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from suite.errors import TrackingError
from suite.record.folder import Home
from suite.tracking import leaderboard, open_store, resolve_uri, sync
from suite.tracking.store import sqlite_path
from tests.records import make_home, make_store
from tests.stores import meet


def test_the_uri_is_the_given_one_then_the_environments_then_the_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(Home(Path("runs"))) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    assert resolve_uri(Home(Path("runs"))) == f"sqlite:///{tmp_path}/mine.db"
    assert resolve_uri(Home(Path("runs")), "http://host:5000") == "http://host:5000"


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%b", "a%20b"])
def test_a_database_lies_in_its_home_whatever_the_name_of_the_home(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name / "mlflow.db"
    uri = resolve_uri(Home(path.parent))
    assert sqlite_path(uri) == path and resolve_uri(Home(tmp_path), uri) == uri
    path.parent.mkdir()
    with create_engine(uri, poolclass=NullPool).connect() as connection:
        connection.execute(text("CREATE TABLE made_by_sqlalchemy (x INTEGER)"))
    assert [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*.db")] == [
        f"{name}/mlflow.db"
    ]


def test_nothing_is_written_beside_a_home_whatever_its_name(tmp_path: Path, empty_db: Path) -> None:
    home = make_home(tmp_path / "a?b#c%41", ["lora"], ["agreement"], trials=1, seeds=[1])
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri).written == 2
    assert len(leaderboard(home.tracking_uri)) == 1
    assert [found.name for found in tmp_path.iterdir()] == [home.path.name]


@pytest.mark.parametrize(
    "uri",
    [
        *("mlruns", "file:///tmp/mlruns", "sqlite://", "sqlite:///:memory:"),
        *("sqlite:////tmp/x%00y.db", "sqlite:////tmp/x\0y.db", "sqlite:////tmp/\ud800.db"),
        *("foo://bar", "postgresql+foo://me@host/y"),
    ],
)
def test_stores_that_cannot_work_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="sqlite:///PATH"):
        resolve_uri(Home(tmp_path), uri)


def test_a_word_that_is_no_uri_is_answered_with_the_stores_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"'databricks': expected sqlite:.*postgresql:.*http"):
        resolve_uri(Home(tmp_path), "databricks")


def test_a_folder_in_the_place_of_a_database_is_not_to_be_moved_away(tmp_path: Path) -> None:
    with pytest.raises(
        TrackingError, match=r"is a folder, expected the file.*/mlflow\.db$"
    ) as told:
        resolve_uri(Home(tmp_path), f"sqlite:///{tmp_path}")
    assert "move" not in str(told.value)


def test_a_store_of_a_plug_in_of_mlflow_may_be_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    def away(**_: object) -> None:
        raise ConnectionError

    monkeypatch.setitem(_tracking_store_registry._registry, "plugged", away)
    assert resolve_uri(Home(tmp_path), "plugged://host") == "plugged://host"


def test_an_address_that_is_not_closed_is_refused_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="IPv6 address in brackets") as told:
        resolve_uri(Home(tmp_path), "http://me:hunter2@[::1")
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("postgresql+psycopg://me:hunter2@x:abc/y", "'abc'; expected postgresql://USER@HOST:PORT"),
        ("mssql+pyodbc://me:hunter2@x:abc/y", "'abc'|pyodbc"),
        ("mysql://me:hunter2@x/y", "No module named 'MySQLdb'"),
        ("postgresql+psycopg://me:hunter2@\udcff/y", "can't encode|codec"),
    ],
)
def test_a_server_that_nothing_here_can_reach_is_told_without_its_password(
    uri: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TrackingError, match=said) as told:
        open_store(resolve_uri(Home(tmp_path), uri), create=False)
    assert "hunter2" not in str(told.value)


def test_a_file_that_is_no_database_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("hello " * 100)
    start = time.monotonic()
    with pytest.raises(TrackingError, match=r"mlflow\.db: not a usable sqlite database"):
        open_store(f"sqlite:///{tmp_path}/mlflow.db")
    assert time.monotonic() - start < 60  # MLflow by itself tries for a hundred seconds


def test_a_folder_that_cannot_be_written_is_reported_not_raised(tmp_path: Path) -> None:
    home = make_home(tmp_path, ["lora"], ["agreement"], trials=1, seeds=[1])
    (tmp_path / "file").touch()
    report = sync(home, tracking_uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    assert report.unreachable is not None
    assert "cannot be opened" in report.unreachable


def test_a_database_of_another_mlflow_is_refused_and_left_as_it_is(
    tmp_path: Path, empty_db: Path
) -> None:
    path = Path(shutil.copy(empty_db, tmp_path / "mlflow.db"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'cafe'")
    for create in (False, True):
        with pytest.raises(TrackingError, match=r"schema cafe, expected \w+; use the MLflow"):
            open_store(f"sqlite:///{path}", create=create)


@pytest.mark.slow
def test_a_database_that_was_deleted_is_made_anew_by_the_process_that_had_it_open(
    tmp_path: Path,
) -> None:
    path = make_store(tmp_path / "mlflow.db")
    open_store(f"sqlite:///{path}").experiment("x")
    for part in tmp_path.glob("mlflow.db*"):
        part.unlink()
    assert open_store(f"sqlite:///{path}").experiments() == {}


def test_a_reader_makes_no_tables(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(TrackingError, match="no results yet"):
        open_store(f"sqlite:///{tmp_path}/mlflow.db", create=False)
    assert (tmp_path / "mlflow.db").stat().st_size == 0


@pytest.mark.slow
def test_processes_that_open_a_fresh_database_together_all_succeed(tmp_path: Path) -> None:
    # MLflow by itself would make a folder `a%3Fb` beside it.
    uri = Home(tmp_path / "a?b").tracking_uri
    ended = meet(uri, drivers=4)
    assert ended.returncode == 0, ended.stderr
    assert list(open_store(uri).experiments()) == ["x"]
    assert [found.name for found in tmp_path.iterdir()] == ["a?b"]


HALF = """
import sys
import sqlalchemy
from alembic import command
from mlflow.store.db.utils import _get_alembic_config
from mlflow.store.tracking.dbmodels.initial_models import Base

first, middle = sys.argv[1:]
for uri in (first, middle):
    Base.metadata.create_all(sqlalchemy.create_engine(uri))
command.upgrade(_get_alembic_config(middle), "7ac759974ad8")
"""


@pytest.mark.slow
def test_a_database_whose_tables_were_never_finished_is_kept_aside_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path / "home", ["lora"], ["agreement"], trials=1, seeds=[1])
    uris = [f"sqlite:///{tmp_path}/first.db", home.tracking_uri]
    subprocess.run([sys.executable, "-c", HALF, *uris], check=True, capture_output=True)
    for uri in uris:
        with pytest.raises(TrackingError, match=r"was killed while it made the tables.*suite sync"):
            leaderboard(uri)
        assert sync(home, tracking_uri=uri).unreachable is None
        assert len(leaderboard(uri)) == 1
    assert "kept as mlflow-half-made.db" in caplog.text
    assert (tmp_path / "first-half-made.db").exists()
    assert (home.path / "mlflow-half-made.db").exists()


KILLED = """
import os, signal, sys
import mlflow.store.tracking.sqlalchemy_store
from sqlalchemy import Engine, event
from suite.tracking import open_store

def killed_at(number):
    left = [number]
    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(Engine, "before_cursor_execute", count)

for number in (60, 600):
    child = os.fork()
    if child == 0:
        killed_at(number)
        open_store(sys.argv[1])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, number
    assert not os.path.exists(sys.argv[2]), number
open_store(sys.argv[1]).experiment("x")
"""


@pytest.mark.slow
def test_a_kill_while_the_tables_are_made_leaves_no_half_made_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    subprocess.run([sys.executable, "-c", KILLED, f"sqlite:///{path}", path], check=True)
    assert list(open_store(f"sqlite:///{path}", create=False).experiments()) == ["x"]
    assert not list(tmp_path.glob(".*")), "what the kills left is gone"


@pytest.mark.parametrize("rows", [0, 1])
def test_the_database_of_another_program_is_refused_and_left_as_it_is(
    tmp_path: Path, rows: int
) -> None:
    path = tmp_path / "mine.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE mine (a)")
        connection.executemany("INSERT INTO mine VALUES (?)", [(1,)] * rows)
    before = path.read_bytes()
    with pytest.raises(TrackingError, match="tables of another program"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == before
