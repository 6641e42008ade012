"""The training loop: a warm trial equals a cold one bit for bit, a resumed one equals an uninterrupted one, and how trials end."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from suite.config.arm import Arm
from suite.config.sweep import LimitConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.data.prepare import Prepared, prepare
from suite.errors import CheckpointError
from suite.files import sha256
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.result import Status, TrialResult, ValidityRecord
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train import epoch
from suite.train.epoch import StepClock
from suite.train.loop import Trainer, TrialEndedError
from suite.train.lr_schedule import lr_multiplier
from suite.train.process_group import free_port
from suite.train.restore import restore
from tests.ranks import in_processes
from tests.tiny import tiny_choice

TRAINING = TrainingConfig(epochs=3, batch_size=16, eval_batch_size=16, patience=None, max_length=64)


def make_spec(
    learning_rate: float = 1e-2,
    *,
    method: str = "lora",
    phase: Phase = Phase.SEARCH,
    **changes: Any,
) -> TrialSpec:
    values: dict[str, Any] = {
        "sweep": "test",
        "arm": Arm(
            backbone=tiny_choice("bert", dropout=0.1),
            method=method,
            architecture=full_architecture(method, {}),
        ),
        "task": load_task("entailment"),
        "training": TRAINING,
        "limit": LimitConfig(train=64, validation=20, test=20),
        "phase": phase,
        "learning_rate": learning_rate,
        "seed": 0 if phase is Phase.SEARCH else 1,
    }
    return TrialSpec(**(values | changes))


def run(trainer: Trainer, spec: TrialSpec) -> TrialResult:
    trainer.start(spec)
    while not trainer.epoch().done:
        pass
    return trainer.finish()


def with_one_infinite_gradient(trainer: Trainer, spec: TrialSpec, *, at: int = 2) -> TrialResult:
    """A trial of which the gradient of one weight is infinite in this backward pass, from 1."""
    trainer.start(spec)
    model = next(iter(trainer._runs.values())).warm.engine.module
    factors = iter([1.0] * (at - 1) + [math.inf])
    weight = next(p for p in model.parameters() if p.requires_grad)
    handle = weight.register_hook(lambda gradient: gradient * next(factors, 1.0))
    while not trainer.epoch().done:
        pass
    handle.remove()
    return trainer.finish()


def curve(result: TrialResult) -> list[tuple[float, float]]:
    return [(epoch.train_loss, epoch.validation_score) for epoch in result.epochs]


def modes(folder: Path) -> list[str]:
    """The rights that files below a folder have."""
    return sorted({oct(p.stat().st_mode & 0o777) for p in folder.rglob("*") if p.is_file()})


def everything(_number: int, folder: Path) -> str:
    """All runs in one process, as they share a process group; what they gave, as JSON."""
    home = Home(folder / "home")
    # The usual one: files that are opened for a line more follow it.
    os.umask(0o022)
    found: dict[str, Any] = {"home": str(home.path)}
    trainer = Trainer(Workspace(home), master_port=free_port())
    cold = run(trainer, make_spec())
    run(trainer, make_spec(3e-2))
    home.trial(make_spec()).path.rename(folder / "cold")
    warm = run(trainer, make_spec())
    found["warm"] = [curve(cold), curve(warm)]
    found["validity"] = [r.validity.model_dump() for r in (cold, warm)]
    level = run(trainer, make_spec(1e-12))
    found["nothing learnt"] = level.validity.problems()
    to_the_end = TRAINING.model_copy(update={"keep": "last"})
    last = run(trainer, make_spec(1e-12, training=to_the_end))
    found["kept epochs"] = [level.best_epoch, last.best_epoch]
    short = make_spec(training=TRAINING.model_copy(update={"epochs": 1, "epoch_steps": 10}))
    once = run(trainer, short)
    found["one epoch"] = [r.model_dump() for r in (once.validity, *home.trial(short).epochs())]
    found["no checkpoint"] = [once.checkpoint_bytes, once.missing["checkpoint_bytes"]]
    found["no test"] = [cold.test_score, home.trial(make_spec()).predictions("test").exists()]

    other = make_spec(phase=Phase.CONFIRM)
    full = run(trainer, other)
    found["confirm"] = full.model_dump(mode="json")
    table = pq.read_table(home.trial(other).predictions("test")).to_pydict()
    found["items"] = [
        len(table["index"]),
        100.0 * sum(a == b for a, b in zip(table["gold"], table["prediction"], strict=True)) / 20,
    ]
    found["kept"] = sorted(p.name for p in home.trial(other).path.iterdir())
    found["modes"] = modes(home.trial(other).path)
    found["best"] = sha256(home.trial(other).best)

    home.trial(other).path.rename(folder / "whole")
    trainer.start(other)
    trainer.epoch()
    found["modes of a checkpoint"] = modes(home.trial(other).checkpoint)
    run(
        trainer, make_spec(4e-2, method="bitfit")
    )  # another arm takes the engine's place: only the committed epoch is left
    found["done before"] = trainer.start(other)
    while not trainer.epoch().done:
        pass
    resumed = trainer.finish()
    found["resumed"] = [
        curve(full),
        curve(resumed),
        full.test_score,
        resumed.test_score,
        resumed.resumed_from_epochs,
    ]

    damaged = make_spec(phase=Phase.CONFIRM, seed=2)
    trainer.start(damaged)
    while not trainer.epoch().done:
        pass
    best = home.trial(damaged).best
    best.write_bytes(best.read_bytes()[:-1] + bytes([best.read_bytes()[-1] ^ 1]))
    next(iter(trainer._runs.values())).progress.best_epoch = 0  # so that it must be read
    try:
        trainer.finish()
    except CheckpointError as error:
        found["damaged"] = [
            str(error),
            home.trial(damaged).checkpoint.exists(),
            run(trainer, damaged).resumed_from_epochs,
        ]

    found["validity resumed"] = [full.validity.model_dump(), resumed.validity.model_dump()]
    found["diverged"] = run(trainer, make_spec(1e37, method="full")).model_dump(mode="json")
    found["skipped"] = with_one_infinite_gradient(trainer, make_spec(method="full")).status
    # At stage 0 nothing is skipped, and no loss comes after the last of four steps.
    alone = TRAINING.model_copy(update={"zero_stage": 0, "epochs": 1})
    at_last = with_one_infinite_gradient(trainer, make_spec(training=alone), at=4)
    found["not skipped"] = [at_last.status, at_last.score]
    try:
        trainer.start(make_spec(training=TRAINING.model_copy(update={"batch_size": 65})))
    except TrialEndedError as error:
        found["failed"] = [
            str(error),
            home.trial(make_spec(training=TRAINING.model_copy(update={"batch_size": 65})))
            .result()
            .status,
        ]
    late = make_spec(phase=Phase.CONFIRM, seed=5)
    trainer.start(late)
    left = home.trial(late).path / ".best.safetensors.killed"
    left.touch()
    trainer.epoch()
    kept = home.trial(late).checkpoint.is_dir()
    evaluate = Trainer._evaluate
    Trainer._evaluate = no_memory  # type: ignore[method-assign]
    with suppress(TrialEndedError):
        trainer.epoch()
    Trainer._evaluate = evaluate  # type: ignore[method-assign]
    ended = home.trial(late)
    found["late"] = [kept, ended.result().status, ended.checkpoint.exists(), left.exists()]
    rewritten = make_spec(phase=Phase.CONFIRM, seed=6)
    trainer.start(rewritten)
    # As a weight leaves it that a forward pass has written to; no later trial takes up this engine.
    next(iter(trainer._runs.values())).warm.engine.frozen_fingerprint = "another"
    with suppress(TrialEndedError):
        while not trainer.epoch().done:
            pass
        trainer.finish()
    found["rewritten"] = home.trial(rewritten).result().failure.message
    trainer.close()
    found["engines left"] = [str(p) for p in (home.path / ".tune").rglob("step-0")]
    return json.dumps(found)


def no_memory(*_given: Any, **_named: Any) -> Any:
    raise MemoryError("in the second epoch")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (written,) = in_processes(everything, tmp_path_factory.mktemp("loop"))
    read: dict[str, Any] = json.loads(written)
    return read


def test_a_warm_trial_equals_a_cold_one_bit_for_bit(found: dict[str, Any]) -> None:
    cold, warm = found["warm"]
    assert cold == warm
    assert len(cold) == TRAINING.epochs


def test_a_resumed_trial_equals_an_uninterrupted_one_bit_for_bit(found: dict[str, Any]) -> None:
    whole, resumed, whole_test, resumed_test, resumed_from = found["resumed"]
    assert found["done before"] == 1
    assert resumed == whole
    assert resumed_test == whole_test
    assert resumed_from == [1]


def test_best_weights_that_are_not_those_that_were_kept_are_not_tested(
    found: dict[str, Any],
) -> None:
    said, kept, resumed_from = found["damaged"]
    assert "best.safetensors: not the weights of epoch" in said
    assert not kept and resumed_from == [], "it is trained anew"


def test_a_trial_checks_itself_and_a_warm_or_resumed_one_finds_the_same(
    found: dict[str, Any],
) -> None:
    cold, warm = found["validity"]
    assert cold == warm
    assert found["validity resumed"][0] == found["validity resumed"][1]
    for record in (cold, *found["validity resumed"]):
        assert ValidityRecord(**record).problems() == []
        assert (
            record["trainable_as_intended"]
            and record["output_changed"]
            and record["loss_fell"]
            and record["no_nan"]
        )
    assert cold["output_end_sha256"] != found["validity resumed"][0]["output_end_sha256"]


def test_what_is_compared_is_the_first_epochs_loss_and_the_lowest_later_one(
    found: dict[str, Any],
) -> None:
    first, *later = [loss for loss, _ in found["warm"][0]]
    assert [found["validity"][0][key] for key in ("loss_first", "loss_last")] == [first, min(later)]


def test_of_a_single_epoch_its_halves_are_compared(found: dict[str, Any]) -> None:
    validity, epoch = found["one epoch"]
    assert (validity["loss_first"] + validity["loss_last"]) / 2 == pytest.approx(
        epoch["train_loss"], abs=1e-6
    )
    assert validity["loss_fell"] == (validity["loss_last"] < validity["loss_first"])
    assert found["no checkpoint"] == [None, "the attempt that ended the trial wrote no checkpoint"]


def test_a_trial_that_trained_nothing_says_so(found: dict[str, Any]) -> None:
    assert "training did not change the output" in found["nothing learnt"]


def test_of_equal_epochs_the_first_is_kept_unless_the_last_is_asked_for(
    found: dict[str, Any],
) -> None:
    assert found["kept epochs"] == [1, 3]
    with pytest.raises(ValueError, match="set patience: null"):
        TrainingConfig(keep="last")
    # A trial that does not ask for it is the same one as before there was the choice.
    assert "keep" not in TRAINING.model_dump()


def test_a_restored_trial_predicts_what_its_file_says(found: dict[str, Any]) -> None:
    home = Home(Path(found["home"]))
    spec = make_spec(phase=Phase.CONFIRM)
    restored = restore(home.trial(spec), home)
    data = prepare(
        spec.task, restored.objective, limit=spec.limit, data_root=None, cache=home.cache
    ).split("test", confirm=True)
    table = pq.read_table(home.trial(spec).predictions("test")).to_pydict()
    batch = restored.objective.collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        assert (
            restored.objective.predict(restored.model, batch, synced=False) == table["prediction"]
        )


def test_the_search_phase_writes_nothing_about_test_data(found: dict[str, Any]) -> None:
    assert found["no test"] == [None, False]


def test_a_search_trial_cannot_read_test_data(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="confirm"):
        Prepared(tmp_path, {"test": 1}, "", None).split("test", confirm=False)


def test_a_result_holds_what_tables_need(found: dict[str, Any]) -> None:
    result = found["confirm"]
    assert result["status"] == Status.COMPLETED
    assert result["weights_sha256"] == found["best"]
    assert result["score"] == result["test_score"] == pytest.approx(found["items"][1])
    assert found["items"][0] == result["splits"]["test"] == 20
    assert set(result["phases"]) == {"load", "train", "eval", "test", "checkpoint"}
    assert result["phases"]["train"]["energy_kwh"] > 0
    assert result["phases"]["train"]["memory"]["allocated_max_bytes"] > 0
    assert result["parameters"]["trainable_head"] == 2 * 32 + 2
    assert (
        result["parameters"]["attention_parameters"] == 2 * 4 * 32 * 32
    )  # weights of two layers' q, k, v and output maps
    assert result["parameters"]["kv_bytes_per_token"] is None  # an encoder caches nothing
    assert sum(epoch["energy_kwh"] for epoch in result["epochs"]) == pytest.approx(
        result["phases"]["train"]["energy_kwh"], rel=0.05
    )


def test_nothing_is_left_of_checkpoints_and_engines(found: dict[str, Any]) -> None:
    assert found["kept"] == [
        "best.safetensors",
        "epochs.jsonl",
        "predictions-test.parquet",
        "predictions-validation.parquet",
        "rank0.log",
        "result.json",
        "spec.json",
    ]
    assert found["engines left"] == []


def test_whoever_may_enter_a_trials_folder_may_read_all_its_files(found: dict[str, Any]) -> None:
    assert found["modes"] == ["0o644"]
    assert found["modes of a checkpoint"] == ["0o644"]


def test_a_loss_that_is_not_finite_ends_the_trial_as_diverged(found: dict[str, Any]) -> None:
    assert found["diverged"]["status"] == Status.DIVERGED
    assert found["diverged"]["score"] is None
    assert "NaN" in found["diverged"]["missing"]["score"]


def test_a_gradient_that_is_not_finite_ends_the_trial_as_diverged(found: dict[str, Any]) -> None:
    assert found["skipped"] == Status.DIVERGED
    assert found["not skipped"] == [Status.DIVERGED, None]


def test_a_trials_own_error_is_recorded_as_failed(found: dict[str, Any]) -> None:
    message, status = found["failed"]
    assert "only 64 training rows" in message
    assert status == Status.FAILED


def test_training_that_changes_frozen_weights_has_no_score(found: dict[str, Any]) -> None:
    assert found["rewritten"].startswith("training of method lora changed frozen weights")


def test_a_trial_that_fails_after_an_epoch_leaves_no_checkpoint_and_no_temporary_file(
    found: dict[str, Any],
) -> None:
    assert found["late"] == [True, Status.OOM, False, False]


def test_a_step_is_timed_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepClock, "MOST_PENDING", 2)
    now = 0.0
    monkeypatch.setattr(epoch.time, "perf_counter", lambda: now)
    clock = StepClock("cpu")
    for seconds, scored in ((5.0, False), (1.0, True), (2.0, True), (7.0, False), (3.0, True)):
        now += seconds
        clock.end_step(scored=scored)
    assert clock.seconds() == [1.0, 2.0, 3.0]
    assert clock.seconds() == [], "each step once"


def test_the_only_step_of_a_trial_trains() -> None:
    assert lr_multiplier(TRAINING.model_copy(update={"warmup_frac": 0.1}), 0, 1) == 1.0


def test_the_schedule_is_hugging_faces() -> None:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, make in (
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ):
        training = TRAINING.model_copy(update={"schedule": name, "warmup_frac": 0.1})
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = make(optimizer, math.ceil(0.1 * 37), 37)
        for step in range(37):
            assert lr_multiplier(training, step, 37) == pytest.approx(
                schedule.get_last_lr()[0], abs=1e-12
            )
            optimizer.step()
            schedule.step()
