"""The law of lanes: a trial comes out bit for bit as if it had trained alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from suite.config.arm import Arm
from suite.config.sweep import LimitConfig
from suite.config.training import TrainingConfig
from suite.petl.arm import full_architecture
from suite.record.attempts import LanesApartError, LanesUnevenError, PreemptedError
from suite.record.folder import Home
from suite.record.result import Status, TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train import midway
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from tests.ranks import asked_for, in_processes
from tests.test_loop import TRAINING, make_spec
from tests.tiny import tiny_choice

RATES = (3e-3, 3e-2)
DIVERGES = 1e30
Case = tuple[str, str]
"""Method and family."""
FIRST: Case = ("read", "bert")
CASES = (FIRST, ("lst", "t5"), ("lst", "llama"))
Numbers = dict[Case, tuple[list[dict[str, Any]], list[TrialResult]]]
"""Per case, what trials gave alone, and their results side by side."""
ARCHITECTURES: dict[str, dict[str, Any]] = {"read": {"hidden": 8}, "lst": {"reduction": 2}}


def spec_of(method: str, family: str, rate: float, **training: Any) -> TrialSpec:
    arm = Arm(
        backbone=tiny_choice(family, dropout=0.1),
        method=method,
        architecture=full_architecture(method, ARCHITECTURES[method]),
    )
    settings = TRAINING.model_copy(update={"epochs": 2, **training})
    limit = LimitConfig(train=32, validation=8, test=8)
    return make_spec(rate, arm=arm, limit=limit, training=TrainingConfig(**settings.model_dump()))


def trainer_in(folder: Path, rank: int = 0, ranks: int = 1) -> Trainer:
    """One of one or two ranks."""
    port = free_port() if ranks == 1 else met_port(folder.with_name(f"{folder.name}-port"), rank)
    workspace = Workspace(Home(folder))
    return Trainer(workspace, rank=rank, world_size=ranks, local_rank=rank, master_port=port)


def met_port(path: Path, rank: int) -> int:
    """A port that rank 0 finds free now and leaves in `path`, from where rank 1 takes it.

    One chosen minutes before it is used may be somebody else's by then.
    """
    if rank == 0:
        port = free_port()
        beside = path.with_name(f"{path.name}-new")
        beside.write_text(str(port))
        beside.rename(path)
        return port
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, "rank 0 left no port"
        time.sleep(0.01)
    port = int(path.read_text())
    path.unlink()
    return port


def alone(trainer: Trainer, spec: TrialSpec) -> TrialResult:
    trainer.start(spec)
    while not trainer.epoch().done:
        pass
    return trainer.finish()


def together(trainer: Trainer, specs: Sequence[TrialSpec]) -> list[TrialResult]:
    """Lanes, of which each ends when it is done."""
    trainer.start_lanes(specs)
    results: dict[str, TrialResult] = {}
    while len(results) < len(specs):
        for trial, report in trainer.epoch_of_lanes().items():
            if report.done:
                results[trial] = trainer.finish_lane(trial)
    return [results[spec.hash] for spec in specs]


def numbers(result: TrialResult) -> dict[str, Any]:
    """What must not depend on who trains beside a trial."""
    curve = [(e.train_loss, e.validation_score, e.validation_scores) for e in result.epochs]
    validity = result.validity
    return {
        "status": result.status,
        "curve": curve,
        "score": result.score,
        "end": None if validity is None else validity.output_end_sha256,
        "frozen": result.frozen_sha256,
    }


def solo_and_lanes(rank: int, folder: Path, cases: Sequence[Case], ranks: int) -> Numbers:
    found = {}
    for i, (method, family) in enumerate(cases):
        specs = [spec_of(method, family, rate, micro_batch_size=4) for rate in RATES]
        specs.append(spec_of(method, family, DIVERGES, micro_batch_size=4))
        first = trainer_in(folder / f"alone-{i}", rank, ranks)
        expected = [numbers(alone(first, spec)) for spec in specs]
        first.close()
        second = trainer_in(folder / f"lanes-{i}", rank, ranks)
        results = together(second, specs)
        second.close()
        found[method, family] = expected, results
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    folder = tmp_path_factory.mktemp("lanes")
    # The other tests look at the first one.
    cases = list(dict.fromkeys([FIRST, *asked_for(request, "case")]))
    numbers_of: Numbers = in_processes(solo_and_lanes, folder, cases, 2, count=2)[0]
    return numbers_of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_lanes_equal_trials_alone_on_two_ranks(case: Case, found: Numbers) -> None:
    expected, results = found[case]
    assert [numbers(result) for result in results] == expected
    assert {result.lanes for result in results} == {3}
    if case[0] == "lst":
        # The first lane prepares what all of them start from.
        assert ["prepare" in result.phases for result in results] == [True, False, False]
        assert [result.preparation.reused for result in results] == [False, True, True]


@pytest.mark.slow  # the cases of the test above, of which one diverges
def test_a_lane_that_diverges_ends_alone(found: Numbers) -> None:
    ends = [tuple(result.status for result in results) for _, results in found.values()]
    assert (Status.COMPLETED, Status.COMPLETED, Status.DIVERGED) in ends, ends


@pytest.mark.slow
def test_a_lane_records_its_share_and_says_what_is_not_known(found: Numbers) -> None:
    _, results = found[FIRST]
    train = results[0].phases["train"]
    assert train.seconds > 0
    assert train.memory.allocated_max_bytes is None
    assert results[0].timing.p50_s is None
    assert "one of 3 lanes" in results[0].missing["timing"]


def cut_and_taken_up(_number: int, folder: Path) -> dict[str, Any]:
    """Lanes that are told to leave in the middle of an epoch, and go on side by side."""
    midway.MOST_STEPS = 1
    specs = [spec_of("read", "bert", rate) for rate in RATES]
    trainer = trainer_in(folder / "alone")
    expected = [numbers(alone(trainer, spec)) for spec in specs]
    trainer.close()

    trainer = trainer_in(folder / "lanes")
    trainer.start_lanes(specs)
    trainer.epoch_of_lanes()
    steps = 0
    engine = next(iter(trainer._runs.values())).warm.engine
    micro_step = engine.micro_step

    def counted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 1:
            trainer.leave()
        return micro_step(*args)

    engine.micro_step = counted  # type: ignore[method-assign]
    with pytest.raises(PreemptedError):
        trainer.epoch_of_lanes()
    trainer.close()

    trainer = trainer_in(folder / "lanes")
    resumed = [numbers(result) for result in together(trainer, specs)]
    trainer.close()
    return {"expected": expected, "resumed": resumed}


def test_lanes_that_are_cut_go_on_side_by_side(tmp_path: Path) -> None:
    (given,) = in_processes(cut_and_taken_up, tmp_path)
    assert given["resumed"] == given["expected"]


def one_ahead(_number: int, folder: Path) -> tuple[str, list[int]]:
    """What is said of lanes that are not level, and where each then goes on alone."""
    first, second = (spec_of("read", "bert", rate) for rate in RATES)
    trainer = trainer_in(folder)
    trainer.start(first)
    trainer.epoch()
    with pytest.raises(LanesUnevenError) as refusal:
        trainer.start_lanes([first, second])
    epochs = [trainer.start(first), trainer.start(second)]
    trainer.close()
    return str(refusal.value), epochs


def test_the_peak_of_a_trial_alone_counts_no_lanes_that_trained_before(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    try:
        for rate in (1e-3, 2e-3):  # The first one also builds the engine.
            before = alone(trainer, spec_of("read", "bert", rate))
        together(trainer, [spec_of("read", "bert", rate) for rate in (3e-3, 4e-3, 5e-3, 6e-3)])
        after = alone(trainer, spec_of("read", "bert", 7e-3))
    finally:
        trainer.close()
    peaks = [result.phases["train"].memory.allocated_max_bytes for result in (before, after)]
    assert peaks[0] is not None and peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_a_trial_does_not_train_beside_one_that_is_further(tmp_path: Path) -> None:
    ((said, epochs),) = in_processes(one_ahead, tmp_path)
    assert "[(0, 0), (1, 0)]" in said
    assert epochs == [1, 0], "nothing was lost by the refusal"


def failing_lane(_number: int, folder: Path) -> dict[str, Any]:
    """A lane whose checkpoint cannot be written."""
    specs = [spec_of("read", "bert", rate) for rate in RATES]
    trainer = trainer_in(folder)
    trainer.start_lanes(specs)
    broken = trainer._runs[specs[1].hash]

    def fail(*_args: Any) -> float:
        raise ValueError("of this lane alone")

    broken.warm.engine.set_learning_rate = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(LanesApartError, match="of this lane alone"):
        trainer.epoch_of_lanes()
    home = Home(folder)
    return {spec.hash: home.trial(spec).result() for spec in specs}


def test_an_error_of_one_lane_ends_no_trial(tmp_path: Path) -> None:
    (results,) = in_processes(failing_lane, tmp_path)
    assert set(results.values()) == {None}
