"""What several test files start from."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from suite.record.folder import Home
from tests.records import make_home, make_store, synced

# pytest-xdist sets it in its processes; commands would then fit what they print to a terminal.
os.environ.pop("COLUMNS", None)
collect_ignore = ["cluster"]  # needs root and minutes; `make test-cluster` names it
LONGEST = (
    "test_groups",
    "test_frozen_states",
    "test_tune",
    "test_profile",
    "test_attention",
    "test_methods",
    "test_checkpoint",
    "test_parity",
    "test_cli_run",
    "test_docs",
    "test_faults",
    "test_submit",
    "test_partitioning",
    "test_lanes",
    "test_pretrain_runs",
    "test_security",
    "test_lm_eval_cli",
    "test_stores",
    "test_report",
    "test_report_browser",
    "test_storage_sweep",
    "test_tracking",
    "test_one_state",
    "test_midway",
    "test_export",
    "test_lease",
    "test_tracking_store",
    "test_whole_weights",
    "test_head",
    "test_reseed",
    "test_startup",
    "test_lm_eval",
    "test_unwritable_home",
    "test_work",
    "test_untrusted",
    "test_families",
    "test_tasks",
)
"""By the seconds of all their tests, the slow ones too; those beyond these take less than 40."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the processes of xdist end together."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections: each would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def empty_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its schema and nothing in it, to be copied: making one takes seconds."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # That of the whole run: its processes share one.
        folder = folder.parent
    path = folder / "empty" / "mlflow.db"
    with FileLock(folder / "empty.lock"):
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            made = make_store(path.parent / "made.db")
            made.rename(path)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this process may not enter; root may enter any other one."""
    folder = tmp_path / "locked"
    folder.mkdir()
    look, may = os.stat, os.access

    def refused(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and folder in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and may(path, mode))
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A synced home, read only: two methods on two tasks, all done."""
    return synced(make_home(tmp_path_factory.mktemp("finished")), empty_db)
