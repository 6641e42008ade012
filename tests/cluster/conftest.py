"""These tests need hosts to break: `make test-cluster`, as root. Elsewhere all of them are skipped, with the reason."""

from __future__ import annotations

import pytest

from tests.cluster.bed import why_not


@pytest.fixture(scope="session", autouse=True)
def hosts_can_be_made() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
