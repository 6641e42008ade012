"""The pretrain stage through real Ray: on two gloo ranks with the real trainer, and whole sweeps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from suite.config.sweep import SweepConfig
from suite.files import sha256
from suite.plan.definition import lease_root
from suite.plan.events import Listener
from suite.plan.plan import make_plan
from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.lease import acquire
from suite.storage.workspace import Workspace
from suite.tune.driver import run_sweep
from suite.tune.group import Group, GroupFailureError, RunSettings
from tests.fake_trainer import calls
from tests.sweeps import finish, toy_cluster
from tests.tiny import tiny_choice

FAKE = "tests.fake_trainer:FakeTrainer"
STAGE: dict[str, Any] = {
    "corpus": "entailment",
    "steps": 12,
    "checkpoint_every_steps": 4,
    "batch_size": 4,
    "eval_batch_size": 4,
    "max_length": 32,
    "learning_rate": 1e-3,
    "limit": 60,
    "validation_limit": 20,
}


@pytest.fixture(scope="module", autouse=True)
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with toy_cluster(tmp_path_factory.mktemp("roots")) as roots:
        yield roots


def sweep(**changes: Any) -> SweepConfig:
    """Cells on one pretrained checkpoint, one search trial and one seed each; dropout is on."""
    values: dict[str, Any] = {
        "name": "stage",
        "backbones": [tiny_choice("bert", dropout=0.1)],
        "attention": ["mhe-mul"],
        "methods": ["full", "lora"],
        "tasks": ["toy"],
        "pretrain": STAGE | changes.pop("pretrain", {}),
        "architectures": "first",
        "search": {"trials": 1, "edge_guard": {"extensions": 0}},
        "confirm": {"seeds": [1]},
        "training": {"epochs": 2, "batch_size": 8, "max_length": 32},
        "resources": {"workers": 2},
        "timeouts": {"setup_s": 120.0, "epoch_s": 60.0},
    }
    return SweepConfig.model_validate(values | changes)


class Recorder(Listener):
    """What ended, in order; kills rank 1 of the first pretrain run once its first checkpoint is committed, if asked to."""

    def __init__(self, home: Home | None = None) -> None:
        self.kill_in, self.ended, self.retried = home, list[TrialSpec](), list[FailureRecord]()

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        if self.kill_in is not None and spec.phase is Phase.PRETRAIN:
            os.kill(_pid(self.kill_in, spec, rank=1), signal.SIGKILL)
            self.kill_in = None

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.retried.append(failure)

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self.ended.append(spec)


def _pid(home: Home, spec: TrialSpec, *, rank: int) -> int:
    return int(home.trial(spec).log(rank).read_text().rpartition("pid ")[2].split()[0])


def started(home: Home) -> list[str]:
    return [call["trial"] for call in calls(home)]


# ---- the driver, with a trainer that does not train ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_pretrains_once_and_a_second_one_of_the_home_not_at_all(
    home: Home, data_root: Path
) -> None:
    recorder = Recorder()
    config = sweep(attention=["mhe-mul", "pretrained"])
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and outcome.finished == 9
    (run,) = make_plan(config, where="stage").pretrains
    assert recorder.ended[0] == run and Phase.PRETRAIN not in {
        spec.phase for spec in recorder.ended[1:]
    }
    assert {spec.arm.pretrain for spec in recorder.ended[1:]} == {run.hash, None}
    more = run_sweep(
        sweep(name="other", methods=["bitfit"]), home=home, data_root=data_root, trainer=FAKE
    )
    assert more.ok and more.finished == 2 and started(home).count(run.hash) == 1


@pytest.mark.slow
def test_a_sweep_waits_for_a_checkpoint_that_another_one_is_training(
    home: Home, data_root: Path
) -> None:
    config = sweep(methods=["lora"])
    other = make_plan(config.model_copy(update={"name": "other"}), where="other")
    lease = acquire(lease_root(home, None), "other")
    elsewhere = TrialQueue(other, home, slots=1, fence=lease.fence)
    run = elsewhere.next()
    assert run is not None and run.phase is Phase.PRETRAIN

    def finish_it() -> None:
        finish(home, run, 3.0)
        elsewhere.ended(run)

    timer = threading.Timer(8.0, finish_it)
    timer.start()
    assert run_sweep(config, home=home, data_root=data_root, trainer=FAKE).finished == 2
    assert not timer.is_alive() and run.hash not in started(home)
    lease.release()


@pytest.mark.slow
def test_a_pretrain_run_that_fails_by_itself_costs_its_cells_and_no_trial(
    home: Home, data_root: Path
) -> None:
    (home.path / "fault-bug").write_text("any")
    outcome = run_sweep(sweep(), home=home, data_root=data_root, trainer=FAKE)
    assert (
        not outcome.ok
        and not outcome.interrupted
        and outcome.finished == 1
        and len(outcome.failed) == 2
    )
    (run,) = make_plan(sweep(), where="stage").pretrains
    assert started(home) == [run.hash] and not list(home.trials())
    assert [f.message for cell in status(home, "stage") for f in cell.failures] == [
        "a bug of the trial's own"
    ] * 2


# ---- the real trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_from_pretraining_to_tested_cells_survives_a_killed_rank_bit_for_bit(
    home: Home, data_root: Path, tmp_path: Path
) -> None:
    recorder = Recorder(home)
    config = sweep(methods=["lora"])
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder])
    assert (
        outcome.ok
        and len(recorder.retried) == 1
        and recorder.retried[0].type in ("RankDied", "DistBackendError", "RuntimeError")
    )
    plan = make_plan(config, where="stage")
    (run,) = plan.pretrains
    folder = home.trial(run)
    result = folder.result()
    assert (
        result is not None
        and result.status is Status.COMPLETED
        and result.resumed_from_epochs
        and result.test_score is None
    )
    assert (
        [(e.epoch, e.step) for e in result.epochs]
        == [(1, 4), (2, 8), (3, 12)]
        == [(e.epoch, e.step) for e in folder.epochs()]
    )
    assert result.score == result.epochs[-1].validation_score < result.epochs[0].validation_score, (
        "the last weights count"
    )
    assert result.weights_sha256 == sha256(folder.weights) and not folder.checkpoint.exists()
    assert (
        sha256(uninterrupted(run, Home(tmp_path / "whole"), data_root).weights)
        == result.weights_sha256
    )

    for spec in recorder.ended[1:]:
        trial = home.trial(spec).result()
        assert trial is not None and trial.pretrain is not None
        assert (trial.pretrain.checkpoint, trial.pretrain.steps, trial.pretrain.loss) == (
            run.hash,
            12,
            result.score,
        )
        assert (
            trial.pretrain.train_s == result.phases["train"].seconds
            and trial.pretrain.energy_kwh == result.phases["train"].energy_kwh
        )
    assert recorder.ended[-1].phase is Phase.CONFIRM
    trained = load_file(home.trial(recorder.ended[-1]).best)
    assert (
        not {name.replace(".base_layer", "") for name in trained} & load_file(folder.weights).keys()
    ), "what was pretrained is frozen"


def uninterrupted(run: TrialSpec, home: Home, data_root: Path) -> Any:
    """The same run on two ranks of its own, in one go."""
    settings = RunSettings(
        Workspace(home, data_root), Layout(workers=2, cpus=1.0, gpus=0.0, slots=1), sweep().timeouts
    )
    group = Group(settings, None)
    try:
        group.start([run])
        while not group.epoch()[run.hash].done:
            pass
        group.finish(run.hash)
    except GroupFailureError as failure:
        pytest.fail(failure.record.traceback)
    finally:
        group.close()
    return home.trial(run)
