"""Trial folders: what counts as finished, and what is refused rather than taken for absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suite.errors import ConfigError
from suite.record.attempts import counted
from suite.record.folder import Home, TrialFolder
from suite.record.result import DAMAGED, FailureRecord, Status, checksum
from tests.records import make_result, make_spec


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    spec = make_spec()
    made = Home(tmp_path).trial(spec)
    made.write_spec(spec)
    made.write_result(make_result(spec))
    return made


def edit(path: Path, *, checked: bool = True, **values: Any) -> None:
    """Change a record as another version would have written it, or by hand."""
    content = {**json.loads(path.read_bytes()), **values}
    if checked and "checksum" in content:
        content["checksum"] = checksum(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["spec.json", "result.json"])
def test_a_record_of_another_version_is_refused_not_taken_for_absent(
    name: str, folder: TrialFolder
) -> None:
    edit(folder.path / name, invented_later=1)
    with pytest.raises(
        ConfigError, match=rf"{name}: not a record of this version of the suite \(invented_later\)"
    ):
        folder.spec() if name == "spec.json" else folder.result()


def test_a_result_of_a_later_schema_is_refused(folder: TrialFolder) -> None:
    edit(folder.path / "result.json", schema_version=99)
    with pytest.raises(ConfigError, match="schema_version"):
        folder.result()


@pytest.mark.parametrize("kept", [0, 1, 200])
def test_a_specification_that_was_cut_short_is_absent(kept: int, folder: TrialFolder) -> None:
    path = folder.path / "spec.json"
    path.write_bytes(path.read_bytes()[:kept])
    assert folder.spec() is None


@pytest.mark.parametrize("kept", [0, 1, 200])
def test_a_result_that_was_cut_short_is_damaged_and_not_absent(
    kept: int, folder: TrialFolder
) -> None:
    path = folder.path / "result.json"
    path.write_bytes(path.read_bytes()[:kept])
    found = folder.result()
    assert found is not None and found.status is Status.FAILED and found.score is None
    assert found.damaged == f"trials/{folder.hash}/result.json is not whole JSON"


def test_a_folder_in_the_place_of_a_record_is_told(folder: TrialFolder) -> None:
    for name in ("result.json", "spec.json"):
        (folder.path / name).unlink()
        (folder.path / name).mkdir()
    found = folder.result()
    assert found is not None and found.status is Status.FAILED
    assert found.damaged == f"trials/{folder.hash}/result.json is a folder, expected a file"
    with pytest.raises(ConfigError, match=r"spec\.json: is a folder"):
        folder.spec()


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"checksum": "x", "score": NaN}', b"\xff"])
def test_a_result_that_json_cannot_hold_is_damaged(data: bytes, folder: TrialFolder) -> None:
    (folder.path / "result.json").write_bytes(data)
    found = folder.result()
    assert found is not None and str(found.damaged).endswith("is not whole JSON")


@pytest.mark.parametrize("data", [b"[" * 200_000, b"\xff", b"[1]", b"{"])
def test_a_proposal_that_cannot_be_read_says_nothing(data: bytes, folder: TrialFolder) -> None:
    (folder.path / "proposal.json").write_bytes(data)
    assert folder.proposal() == {}


def test_a_line_of_the_curve_that_is_no_text_is_passed_over(folder: TrialFolder) -> None:
    kept = make_result(make_spec()).epochs[0]
    lines = (b"\xff\xfe", kept.model_dump_json().encode(), b"[" * 200_000)
    (folder.path / "epochs.jsonl").write_bytes(b"\n".join(lines))
    assert folder.epochs() == [kept]


def test_the_epoch_after_a_line_that_was_cut_off_is_kept(folder: TrialFolder) -> None:
    first = make_result(make_spec()).epochs[0]
    second = first.model_copy(update={"epoch": first.epoch + 1})
    for record in (first, second):
        folder.add_epoch(record)
    curve = folder.path / "epochs.jsonl"
    curve.write_bytes(curve.read_bytes()[:-20])
    folder.add_epoch(second)
    assert folder.epochs() == [first, second]


def test_a_damaged_record_of_an_attempt_counts_as_one(folder: TrialFolder) -> None:
    folder.add_failure(FailureRecord(type="LostError", message="its host was lost"))
    path = folder.path / "failure-0.json"
    path.write_bytes(path.read_bytes()[:20])
    (folder.path / "failure-1.json").mkdir()
    (folder.path / "failure-x.json").write_text("somebody's notes")
    folder.add_failure(FailureRecord(type="LostError", message="and again"))
    found = folder.failures()
    assert [failure.type for failure in found] == [DAMAGED, DAMAGED, "LostError"]
    assert found[0].message == f"{path} is not a whole record of an attempt"
    assert len(counted(folder)) == 3


def test_a_record_of_an_attempt_takes_no_other_ones_place(folder: TrialFolder) -> None:
    for n in range(2):
        folder.add_failure(FailureRecord(type="LostError", message=str(n)))
    (folder.path / "failure-0.json").unlink()
    folder.add_failure(FailureRecord(type="LostError", message="2"))
    assert [failure.message for failure in folder.failures()] == ["1", "2"]


def test_one_changed_digit_shows(folder: TrialFolder) -> None:
    whole = folder.result()
    assert whole is not None and whole.damaged is None
    path = folder.path / "result.json"
    edit(path, checked=False, score=99.0)
    found = folder.result()
    assert found is not None and found.score == 99.0
    assert found.damaged is not None and found.damaged.startswith(
        f"trials/{folder.hash}/result.json"
    )
    # A value of another type is as far from a version of the suite as the digit is.
    edit(path, checked=False, status="compLeted")
    found = folder.result()
    assert found is not None and found.status is Status.FAILED and "checksum" in str(found.damaged)


def test_a_result_from_before_checksums_stays_readable(folder: TrialFolder) -> None:
    path = folder.path / "result.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_text(json.dumps(content))
    found = folder.result()
    assert found is not None and found.damaged is None and found.checksum is None


def test_a_result_that_was_read_equals_the_one_that_was_written(folder: TrialFolder) -> None:
    assert folder.result() == make_result(make_spec())


def test_a_result_keeps_its_checksum_however_often_it_is_written(folder: TrialFolder) -> None:
    first = (folder.path / "result.json").read_bytes()
    found = folder.result()
    assert found is not None
    folder.write_result(found)
    assert (folder.path / "result.json").read_bytes() == first
