"""What several test files start from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from suite.record.folder import Home
from tests.records import make_store

# pytest-xdist sets it in its processes; commands would then fit what they print to a terminal.
os.environ.pop("COLUMNS", None)
collect_ignore = ["cluster"]  # needs root and minutes; `make test-cluster` names it
LONGEST = (
    "test_tune",
    "test_groups",
    "test_faults",
    "test_submit",
    "test_profile",
    "test_lm_eval_sweep",
    "test_checkpoint",
    "test_security",
    "test_parity",
    "test_pretrain_runs",
    "test_lease",
    "test_storage_sweep",
    "test_docs",
    "test_cli_run",
    "test_doctor",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the processes of xdist end together."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


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
