"""What a method prepares from training data: done once, measured, and charged to the search once and to every row in full."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from suite.errors import CheckpointError
from suite.files import write_json
from suite.leaderboard.costs import with_energy_to_target
from suite.leaderboard.fields import Row
from suite.leaderboard.preparation import with_known_gap
from suite.meters import MemoryPeak, PhaseMeter, PhaseRecord
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.result import PreparationRecord, TrialResult
from suite.record.spec import TrialSpec
from suite.train import initial
from suite.train.initial import COST, INCOMPLETE, PREPARED, _once
from tests.ranks import on_ranks
from tests.records import RATES, cell_rows, make_result, make_spec, write_definition, write_trial

ESTIMATE = "cpu-time-estimate"
COST_OF_IT = PhaseRecord(
    seconds=70.0,
    energy_kwh=5e-4,
    energy_source=ESTIMATE,
    memory=MemoryPeak(allocated_max_bytes=90_000_000),
)
TRAIN_KWH = (2.1e-5, 2.2e-5)
"""What `tests.records` gives the train phases of seeds 1 and 2."""


def prepared(spec: TrialSpec, made_by: str, cost: PhaseRecord | None = COST_OF_IT) -> TrialResult:
    """The result of a trial whose arm prepared something; the one that did the work has the phase."""
    reused = spec.hash != made_by
    record = PreparationRecord(key="lst-0", made_by=made_by, reused=reused, cost=cost)
    result = make_result(spec, preparation=record)
    phases = dict(result.phases)
    if not reused and cost is not None:
        phases["prepare"] = cost
    return result.model_copy(update={"phases": phases})


def row_of(home: Home, result_of: Callable[[TrialSpec], TrialResult]) -> Row:
    """The row of three search trials and two confirm runs."""
    write_definition(home, ["lst"], ["agreement"], trials=3, seeds=[1, 2])
    for spec in specs():
        write_trial(home, spec, result_of(spec))
    (row,) = cell_rows(home)
    return row


def specs() -> list[TrialSpec]:
    """Three search trials, of which the last is the best, and two confirm runs."""
    searched = [make_spec("lst", number=n) for n in range(3)]
    return [*searched, *[make_spec("lst", seed=s, learning_rate=RATES[2]) for s in (1, 2)]]


def test_a_search_pays_once_and_a_run_from_scratch_in_full(tmp_path: Path) -> None:
    first = specs()[0].hash
    without = row_of(Home(tmp_path / "a"), make_result)
    row = row_of(Home(tmp_path / "b"), lambda spec: prepared(spec, first))
    assert without.search_energy_kwh is not None and without.search_s is not None
    assert row.search_energy_kwh == pytest.approx(without.search_energy_kwh + 5e-4, abs=1e-12)
    assert row.search_s == pytest.approx(without.search_s + 70.0)
    assert row.energy_kwh == pytest.approx(sum(TRAIN_KWH) / 2 + 5e-4, abs=1e-12)
    assert (row.train_s, row.peak_memory_bytes) == (21.5 + 70.0, 90_000_000)
    assert (row.prepare_energy_kwh, row.prepare_s) == (5e-4, 70.0)
    assert (row.prepare_memory_bytes, row.prepare_missing) == (90_000_000, None)
    assert row.train_memory_bytes == without.peak_memory_bytes == 10_000_002
    assert (without.prepare_energy_kwh, without.prepare_s, without.prepare_missing) == (None,) * 3
    assert [point[1] for point in row.progress[:2]] == pytest.approx([5.1e-4, 5.2e-4])


def test_kept_states_are_paid_for_like_what_a_method_prepares_and_beside_it(tmp_path: Path) -> None:
    first, second = (spec.hash for spec in specs()[:2])
    states = PhaseRecord(
        seconds=30.0,
        energy_kwh=2e-4,
        energy_source=ESTIMATE,
        memory=MemoryPeak(allocated_max_bytes=50_000_000),
    )

    def with_states(spec: TrialSpec) -> TrialResult:
        result = prepared(spec, first)
        reused = spec.hash != second
        kept = PreparationRecord(key="toy-0", made_by=second, reused=reused, cost=states)
        phases = dict(result.phases)
        if not reused:
            phases["states"] = states
        return result.model_copy(update={"frozen_states": kept, "phases": phases})

    without = row_of(Home(tmp_path / "a"), make_result)
    row = row_of(Home(tmp_path / "b"), with_states)
    assert without.search_energy_kwh is not None and without.search_s is not None
    assert row.search_energy_kwh == pytest.approx(without.search_energy_kwh + 7e-4, abs=1e-12)
    assert row.search_s == pytest.approx(without.search_s + 100.0)
    assert row.energy_kwh == pytest.approx(sum(TRAIN_KWH) / 2 + 7e-4, abs=1e-12)
    assert (row.train_s, row.prepare_s) == (21.5 + 100.0, 100.0)
    assert (row.peak_memory_bytes, row.prepare_memory_bytes) == (90_000_000, 90_000_000)
    assert [point[1] for point in row.progress[:2]] == pytest.approx([7.1e-4, 7.2e-4])


def test_a_search_pays_for_what_a_trial_without_a_record_did(tmp_path: Path) -> None:
    elsewhere = make_spec("lst", number=9).hash
    row = row_of(Home(tmp_path), lambda spec: prepared(spec, elsewhere))
    assert row.search_energy_kwh == pytest.approx(3 * 2.3e-5 + 5e-4, abs=1e-12)


def test_a_record_from_before_it_was_measured_leaves_the_energy_open(tmp_path: Path) -> None:
    row = row_of(Home(tmp_path), lambda spec: make_result(spec, schema_version=1))
    assert (row.energy_kwh, row.train_s, row.peak_memory_bytes) == (None, None, None)
    assert row.prepare_missing is not None and "before preparation was" in row.prepare_missing
    assert row.score_mean is not None and row.progress[0][1] is None
    # There it is part of the `load` phase of the trial that did it.
    assert row.search_energy_kwh == pytest.approx(3 * 2.3e-5, abs=1e-12)


@pytest.mark.parametrize(
    ("method", "architecture"), [("lst", {"init": "magnitude"}), ("lora", {"rank": 8})]
)
def test_an_old_record_of_what_prepares_nothing_lacks_nothing(
    method: str, architecture: dict[str, Any], tmp_path: Path
) -> None:
    spec = make_spec(method)
    spec = spec.model_copy(
        update={"arm": spec.arm.model_copy(update={"architecture": architecture})}
    )
    trial = Trial(Home(tmp_path).trial(spec), spec, make_result(spec, schema_version=1))
    assert with_known_gap(trial) is trial


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (
            COST_OF_IT.model_copy(update={"energy_source": "rapl"}),
            "measured by rapl, and training by",
        ),
        (COST_OF_IT.model_copy(update={"energy_kwh": None}), "not measured"),
    ],
)
def test_energy_of_two_sources_is_not_added(cost: PhaseRecord, reason: str, tmp_path: Path) -> None:
    first = specs()[0].hash
    row = row_of(Home(tmp_path), lambda spec: prepared(spec, first, cost))
    assert row.energy_kwh is None and row.train_s == 91.5
    assert row.prepare_missing is not None and reason in row.prepare_missing


def test_validation_is_that_of_the_confirm_runs_and_so_is_the_target(tmp_path: Path) -> None:
    searched = [make_spec("full", number=n) for n in range(3)]
    runs = [make_spec("full", seed=s, learning_rate=RATES[2]) for s in (1, 2)]
    home = Home(tmp_path)
    write_definition(home, ["full"], ["agreement"], trials=3, seeds=[1, 2])
    for spec, score in zip([*searched, *runs], (50.0, 60.0, 90.0, 70.0, 80.0), strict=True):
        # The test score is another number than the validation score.
        write_trial(home, spec, make_result(spec, score=score, validation_score=score - 1.0))
    (row,) = cell_rows(home)
    assert (row.score_mean, row.validation_score, row.search_best) == (75.0, 74.0, 90.0)
    reached = Row(
        **{name: getattr(row, name) for name in ("home", "sweep", "conditions", "task")},
        progress=[[1, 1.0, 71.0], [1, 2.0, 90.0]],
        seed_scores={"1": 90.0},
        method="lora",
    )
    target = 0.95 * 74.0
    (found, _) = with_energy_to_target([reached, row], 0.95)
    assert target < 71.0 and found.energy_to_target_kwh == 1.0


# ---- the work itself ---------------------------------------------------------------------------------------------------------


def _work() -> dict[str, torch.Tensor]:
    torch.ones(400, 400) @ torch.ones(400, 400)
    return {"side": torch.ones(3)}


def _killed() -> dict[str, torch.Tensor]:
    raise KeyboardInterrupt


def _waits_and_works(rank: int, folder: Path) -> list[object]:
    """A kill while the work is done; the work done anew; and done by another trial meanwhile."""
    with pytest.raises(KeyboardInterrupt):
        _once(folder / "killed", _killed, trial="first", meter=PhaseMeter(torch.device("cpu")))
    left = (folder / "killed").exists()
    again = _once(folder / "killed", _work, trial="second", meter=PhaseMeter(torch.device("cpu")))
    cost = again.cost
    assert cost is not None
    found: list[object] = [left, again.made_by, cost.seconds > 0, (cost.energy_kwh or 0) > 0]
    found.append(load_file(folder / "killed" / PREPARED)["side"].tolist())
    found.append(oct((folder / "killed" / PREPARED).stat().st_mode & 0o777))

    locked = Event()

    def other() -> None:
        with FileLock(folder / "shared.lock"):
            locked.set()
            time.sleep(0.3)
            temporary = folder / "temporary"
            temporary.mkdir()
            save_file(_work(), temporary / PREPARED)
            write_json(temporary / COST, again.model_dump(mode="json"))
            temporary.rename(folder / "shared")

    thread = Thread(target=other)
    thread.start()
    locked.wait()
    meter = PhaseMeter(torch.device("cpu"))
    with meter.phase("load"):
        waited = _once(folder / "shared", _killed, trial="third", meter=meter)
    thread.join()
    phases = meter.local()
    found += [waited == again, sorted(phases), phases["load"].seconds > 0.2]

    # The rank that works in a group of several writes its own cost first, and then the group's.
    of_group = again.model_copy(update={"world_size": 2})

    def group() -> None:
        time.sleep(0.3)
        write_json(folder / "shared" / COST, of_group.model_dump(mode="json"))
        (folder / "shared" / INCOMPLETE).unlink()

    (folder / "shared" / INCOMPLETE).touch()
    thread = Thread(target=group)
    thread.start()
    waited = _once(folder / "shared", _killed, trial="fourth", meter=meter)
    thread.join()
    found.append(waited == of_group)
    (folder / "shared" / INCOMPLETE).touch()
    with patch.object(initial, "GROUP_S", 0.1):
        left = _once(folder / "shared", _killed, trial="fifth", meter=meter)
    found += [left == of_group, (folder / "shared" / INCOMPLETE).exists()]
    with patch.object(initial, "dist", SimpleNamespace(get_world_size=lambda: 2)):
        made = _once(folder / "of two", _work, trial="sixth", meter=PhaseMeter(torch.device("cpu")))
    found += [made.world_size, sorted(path.name for path in (folder / "of two").iterdir())]
    return found


def test_a_damaged_preparation_is_removed_so_that_the_next_attempt_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lst-0"
    folder.mkdir()
    (folder / COST).write_text("cut")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(CheckpointError, match=r"lst-0: damaged.*could not be removed"):
            initial.kept_record(folder)
    with pytest.raises(CheckpointError, match=r"lst-0: was damaged.*prepares it again"):
        initial.kept_record(folder)
    assert not folder.exists()
    with pytest.raises(CheckpointError, match="lst-0: was removed meanwhile"):
        initial.kept_record(folder)


def test_who_reads_a_damaged_preparation_leaves_it_where_it_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    (tmp_path / PREPARED).write_text("cut")
    with pytest.raises(CheckpointError, match=f"{PREPARED}: absent or damaged"):
        initial.take_prepared(model, tmp_path)
    (tmp_path / PREPARED).unlink()
    # As an error of the disk is: safetensors would call the file absent.
    (tmp_path / PREPARED).mkdir()
    with pytest.raises(IsADirectoryError):
        initial.take_prepared(model, tmp_path)
    assert (tmp_path / PREPARED).exists()


def test_a_killed_preparation_is_done_anew_and_waiting_for_another_trial_is_loading(
    tmp_path: Path,
) -> None:
    (found,) = on_ranks(_waits_and_works, tmp_path, world_size=1)
    alone = [False, "second", True, True, [1.0] * 3, "0o644", True, ["load"], True]
    assert found == [*alone, True, True, False, 2, [COST, PREPARED]]
