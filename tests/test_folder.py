"""Trial folders: what counts as finished, and what is refused rather than taken for absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from suite.errors import ConfigError
from suite.record.folder import Home, TrialFolder
from tests.records import make_result, make_spec


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    spec = make_spec()
    made = Home(tmp_path).trial(spec)
    made.write_spec(spec)
    made.write_result(make_result(spec))
    return made


@pytest.mark.parametrize("name", ["spec.json", "result.json"])
def test_a_record_of_another_version_is_refused_not_taken_for_absent(
    name: str, folder: TrialFolder
) -> None:
    path = folder.path / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"invented_later": 1}))
    with pytest.raises(
        ConfigError, match=rf"{name}: not a record of this version of the suite \(invented_later\)"
    ):
        folder.spec() if name == "spec.json" else folder.result()


def test_a_result_of_a_later_schema_is_refused(folder: TrialFolder) -> None:
    path = folder.path / "result.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"schema_version": 99}))
    with pytest.raises(ConfigError, match="schema_version"):
        folder.result()


@pytest.mark.parametrize("kept", [0, 1, 200])
def test_a_record_that_was_cut_short_is_absent(kept: int, folder: TrialFolder) -> None:
    path = folder.path / "result.json"
    path.write_bytes(path.read_bytes()[:kept])
    assert folder.result() is None and folder.spec() is not None
