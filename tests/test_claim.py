"""Two copies of a home and one store: the second writer is refused, and a home that moved is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from suite.errors import StorageError, TrackingError
from suite.plan.definition import only_driver
from suite.record.folder import Home
from suite.storage.identity import SHARED, home_id, renew, tokens
from suite.storage.mirror import Mirror
from suite.storage.urls import open_storage
from suite.tracking import leaderboard, sync
from suite.tracking.listener import TrackingListener
from tests.commands import Suite, suite
from tests.records import define, make_home, write_cell

__all__ = ["suite"]


@pytest.fixture
def shared(tmp_path: Path, empty_db: Path) -> str:
    """A store that several homes write to."""
    (tmp_path / "server").mkdir()
    shutil.copy(empty_db, tmp_path / "server" / "mlflow.db")
    return f"sqlite:///{tmp_path}/server/mlflow.db"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home", ["lora"], ["agreement"], trials=1, seeds=[1])


def copied(home: Home, name: str) -> Home:
    shutil.copytree(home.path, home.path.parent / name)
    return Home(home.path.parent / name)


def refusal(home: Home, uri: str) -> str:
    report = sync(home, tracking_uri=uri)
    if report.unreachable is None:
        return ""
    assert report.written == report.cells == 0
    return report.unreachable


def test_a_copy_is_refused_and_told_what_to_do(home: Home, shared: str) -> None:
    assert refusal(home, shared) == ""
    copy = copied(home, "copy")
    write_cell(copy, "full", "agreement", trials=1, seeds=[1])
    define(copy)
    told = refusal(copy, shared)
    assert f"a copy of the home {home.path}" in told
    command = f"suite sync --home {copy.path} --tracking-uri {shared}"
    assert f"{command} --new-id" in told and f"{command} --take-over" in told
    assert list(leaderboard(shared).method) == ["lora"], "nothing of the copy is there"
    assert refusal(home, shared) == "", "the home goes on"
    # The driver's own listener says the same and leaves the store alone.
    assert "a copy of the home" in (TrackingListener(copy, shared).bring_up_to_date() or "")


def test_a_copy_that_wrote_first_keeps_the_home_out(home: Home, shared: str) -> None:
    """Where the other folder cannot be seen, the tokens tell: who has not written last is refused."""
    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")
    hidden = home.path.rename(home.path.parent / "on another host")
    assert refusal(copy, shared) == ""
    assert "a copy of the home" in refusal(Home(hidden), shared)


def test_a_home_that_moved_goes_on(home: Home, shared: str, tmp_path: Path) -> None:
    sync(home, tracking_uri=shared)
    moved = Home(home.path.rename(tmp_path / "moved"))
    assert refusal(moved, shared) == ""
    # A link, or another mount of the same folder, is no copy.
    (tmp_path / "link").symlink_to(moved.path)
    assert refusal(Home(tmp_path / "link"), shared) == ""


def test_a_name_or_a_token_that_is_no_text_is_told_or_unknown(
    home: Home, shared: str, tmp_path: Path
) -> None:
    assert refusal(home, shared) == ""
    copy = copied(home, "copy")
    (home.path / "tracking-id").write_bytes(b"\xff\xfe")
    assert refusal(copy, shared) == "", "it is not known as a copy of a home without a name"
    (copy.path / "tracking-writer").write_bytes(b"\xff\xfe")
    assert "writes to" in refusal(copy, shared)
    with pytest.raises(StorageError, match="remove the file, and a new name is made"):
        sync(home, tracking_uri=shared)


def test_a_copy_can_take_over_or_become_a_home_of_its_own(
    home: Home, shared: str, suite: Suite
) -> None:
    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")
    before = home_id(home)
    options = ("--tracking-uri", shared)
    assert suite("sync", "--home", copy.path, *options)[0] == 2
    assert suite("sync", "--home", copy.path, *options, "--take-over")[0] == 0
    assert refusal(copy, shared) == ""
    assert "a copy of the home" in refusal(home, shared)
    assert suite("sync", "--home", home.path, *options, "--new-id")[0] == 0
    assert home_id(home) != before == home_id(copy)
    assert sorted(leaderboard(shared).home) == sorted([home_id(home), before])


def renamed(suite: Suite, home: Home, uri: str) -> tuple[bool, str]:
    """Whether `suite sync --new-id` gives a home another name, and what it prints."""
    before = home_id(home)
    code, out, err = suite("sync", "--home", home.path, "--tracking-uri", uri, "--new-id")
    assert code == 0, err
    return home_id(home) != before, out


def test_a_copy_gets_one_new_name_however_often_it_is_asked_for(
    home: Home, shared: str, suite: Suite, empty_db: Path
) -> None:
    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")
    shutil.copy(empty_db, copy.path)
    aside = copy.path / f"mlflow-{home_id(copy)}.db"
    changed, out = renamed(suite, copy, shared)
    assert changed and aside.exists() and f"{aside}: the home's own MLflow database" in out
    again, out = renamed(suite, copy, shared)
    assert "own MLflow database" not in out
    assert not again and f"{copy.path} has a name of its own ({home_id(copy)})" in out
    assert not renamed(suite, home, shared)[0], "no copy: the store has its runs"
    assert sorted(leaderboard(shared).home) == sorted([home_id(home), home_id(copy)])
    # Somebody copies the copy, and the store holds the second one for the home.
    second = copied(copy, "second")
    sync(second, tracking_uri=shared, take_over=True)
    assert renamed(suite, copy, shared)[0]


def test_a_copy_gets_a_new_name_where_no_store_can_tell(
    home: Home, shared: str, suite: Suite, empty_db: Path
) -> None:
    """On another machine, which does not see the home's folder, or with a database inside."""
    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")
    home.path.rename(home.path.parent / "on another host")
    assert renamed(suite, copy, shared)[0]
    other = copied(copy, "other")
    shutil.copy(empty_db, other.path / "inside.db")
    assert renamed(suite, other, f"sqlite:///{other.path}/inside.db")[0]
    assert not renamed(suite, other, f"sqlite:///{other.path}/inside.db")[0]


def test_a_home_keeps_its_name_while_a_sweep_of_it_runs(home: Home, suite: Suite) -> None:
    before = home_id(home)
    with only_driver(home, "demo"):
        code, _, err = suite("sync", "--home", home.path, "--new-id")
    assert code == 2 and f"process {os.getpid()} runs sweep 'demo'" in err
    assert home_id(home) == before


def test_a_copy_keeps_its_own_database(home: Home, empty_db: Path) -> None:
    shutil.copy(empty_db, home.path)
    sync(home, tracking_uri=home.tracking_uri)
    copy = copied(home, "copy")
    assert refusal(copy, copy.tracking_uri) == ""
    old = home_id(copy)
    renew(copy)
    assert (copy.path / f"mlflow-{old}.db").exists() and not (copy.path / "mlflow.db").exists()


def test_all_hosts_of_a_storage_are_one_home(home: Home, shared: str, tmp_path: Path) -> None:
    storage = open_storage((tmp_path / "storage").as_uri())
    one = Mirror(home, storage)
    one.fetch_home()
    one.push_home()
    one.push_definition("demo")
    sync(home, tracking_uri=shared)
    other = Home(tmp_path / "other host")
    Mirror(other, storage).fetch_home()
    for place in (other, home, other):
        assert refusal(place, shared) == ""
    assert tokens(other) == {SHARED}
    with pytest.raises(StorageError, match="its storage"):
        renew(other)


def test_a_copy_from_before_the_storage_is_refused(home: Home, shared: str, tmp_path: Path) -> None:
    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")
    Mirror(home, open_storage((tmp_path / "storage").as_uri())).fetch_home()
    sync(home, tracking_uri=shared)
    assert "a copy of the home" in refusal(copy, shared)


def test_a_report_of_a_copy_is_not_attached(home: Home, shared: str) -> None:
    from suite.tracking.attach import attach_reports

    sync(home, tracking_uri=shared)
    copy = copied(home, "copy")

    def build(home: Home, sweep: str, folder: Path) -> Path:
        raise AssertionError("asked for a report that nobody may write")

    with pytest.raises(TrackingError, match="a copy of the home"):
        attach_reports(copy, tracking_uri=shared, build=build)
