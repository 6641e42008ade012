"""What several test files start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.record.folder import Home
from tests.records import make_store

collect_ignore = ["cluster"]  # needs root and minutes; `make test-cluster` names it


@pytest.fixture(scope="session")
def empty_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its schema and nothing in it, to be copied: making one takes seconds."""
    return make_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")
