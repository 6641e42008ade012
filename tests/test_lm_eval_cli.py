"""`suite lm-eval` as a user meets it, on a model that the suite has trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from suite.config.arm import Arm
from suite.config.reference import Reference
from suite.config.space import LearningRateRange
from suite.config.sweep import (
    AttentionChoice,
    ConfirmConfig,
    EdgeGuard,
    MethodChoice,
    SearchConfig,
    SweepConfig,
)
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.petl.arm import full_architecture
from suite.plan.definition import store_definition
from suite.plan.plan import Plan, PlannedCell
from suite.record.folder import Home
from suite.record.lm_eval import FILE, read_record
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.tracking import leaderboard
from suite.tracking.store import open_store
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from tests.commands import Suite, suite
from tests.lm_tasks import by_name, keep_caches, write_lm_tasks, write_suite_task
from tests.ranks import in_processes
from tests.sweeps import finish
from tests.tiny import tiny_choice

__all__ = ["suite"]
LEARNS = "test_fine_tuning_through_the_suite_raises_the_scores_of_lm_eval"
TRAINING = TrainingConfig(
    epochs=12, patience=None, batch_size=8, eval_batch_size=32, max_length=64, threads_per_worker=1
)


def specs(method: str, **changes: Any) -> list[TrialSpec]:
    """One search trial and two seeds, of a llama that is to write its answer."""
    arm = Arm(
        backbone=tiny_choice("llama"),
        attention=AttentionChoice(),
        method=method,
        architecture=full_architecture(method, {}),
    )
    given = {
        "sweep": "letters",
        "arm": arm,
        "task": load_task("first"),
        "training": TRAINING,
        "learning_rate": 3e-3,  # at 1e-2 one seed in eight stays at chance where products are in bf16
    }
    base = TrialSpec(**{**given, "decoder_objective": "text", **changes})
    return [
        base,
        *(base.model_copy(update={"phase": Phase.CONFIRM, "seed": seed}) for seed in (1, 2)),
    ]


def define(home: Home, search: TrialSpec) -> None:
    """Store the sweep that asks for the trials of `specs`."""
    config = SweepConfig(
        name=search.sweep,
        backbones=[search.arm.backbone],
        methods=[MethodChoice(name=search.arm.method)],
        tasks=[search.task.name],
        search=SearchConfig(trials=1, edge_guard=EdgeGuard(extensions=0), stop=None),
        confirm=ConfirmConfig(seeds=[1, 2]),
        training=search.training,
        decoder_objective=search.decoder_objective,
        reference=[
            Reference(
                evaluation="untrained", scores={"first_choose/limit-1/acc": 0.25}, source="a paper"
            )
        ],
    )
    span = LearningRateRange(low=1e-3, high=1e-1)
    cell = PlannedCell(search.arm, search.task, span)
    store_definition(Plan(config, (cell,), world_size=1), home)


def train_all(rank: int, home: Path, data: Path, wanted: list[str]) -> None:
    """In a process of its own, as a process group is made once."""
    trainer = Trainer(Workspace(Home(home), data), master_port=free_port())
    for text in wanted:
        trainer.start(TrialSpec.model_validate_json(text))
        while not trainer.epoch().done:
            pass
        assert trainer.finish().score is not None
    trainer.close()


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, empty_db: Path
) -> Any:
    """A home with two seeds of a fine-tuned llama and records of a classifying one, and a folder of lm-eval tasks.

    Only the slow test wants it well trained; the others want a trial that has ended.
    """
    folder = tmp_path_factory.mktemp("trained")
    training = TRAINING
    if not any(LEARNS in item.keywords for item in request.session.items):
        training = TRAINING.model_copy(update={"epochs": 1})
    with pytest.MonkeyPatch.context() as patch:
        data = write_suite_task(folder, patch)
        home = Home(folder / "runs")
        home.path.mkdir()
        shutil.copy(empty_db, home.path / "mlflow.db")
        search, *confirm = specs("full", training=training)
        for spec in (search, *specs("bitfit", decoder_objective="head", sweep="heads")):
            home.trial(spec).write_spec(spec)
            finish(home, spec, 50.0)
        for spec in confirm:
            home.trial(spec).write_spec(spec)
        define(home, search)
        in_processes(train_all, home.path, data, [spec.model_dump_json() for spec in confirm])
    return home, write_lm_tasks(folder / "lm")


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_caches(tmp_path_factory.getbasetemp() / "caches", monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def ask(suite: Suite, trained: Any, *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    home, tasks = trained
    common = ("--include-path", tasks, "--home", home.path, "--device", "cpu", "--format", "json")
    code, out, err = suite("lm-eval", "--tasks", "first_choose,first_write", *common, *arguments)
    return code, json.loads(out) if out else [], err


@pytest.mark.slow
def test_fine_tuning_through_the_suite_raises_the_scores_of_lm_eval(
    suite: Suite, trained: Any
) -> None:
    code, rows, err = ask(suite, trained, "--sweep", "letters", "--before")
    assert code == 0, err
    values = {(row["method"], row["lm_eval_task"]): row["value"] for row in rows}
    for task, chance in (("first_choose", 0.5), ("first_write", 0.0)):
        assert values["untrained", task] <= chance + 0.1
        assert values["full", task] >= 0.9
    assert {row["seeds"] for row in rows} == {2}
    assert {row["metric"] for row in rows} == {"acc", "exact_match.plain"}

    home, _ = trained
    confirmed = [spec for spec in specs_of(home, "letters") if spec.phase is Phase.CONFIRM]
    records = [read_record(home.trial(spec).path) for spec in confirmed]
    assert all(set(by_name(record)) == {"first_choose", "first_write"} for record in records)
    assert not any(
        (home.trial(spec).path / FILE).exists()
        for spec in specs_of(home, "letters")
        if spec.phase is Phase.SEARCH
    )
    check_tracking(home, values, seeds=len(records))


def specs_of(home: Home, sweep: str) -> list[TrialSpec]:
    return [
        spec
        for folder in home.trials()
        if (spec := folder.spec()) is not None and spec.sweep == sweep
    ]


def check_tracking(home: Home, values: dict[tuple[str, str], float], *, seeds: int) -> None:
    """The leaderboard, the cell's run and each trial's run hold the numbers."""
    row = leaderboard(tracking_uri=home.tracking_uri, sweep="letters").iloc[0]
    shown = json.loads(row["lm_eval"])
    assert shown["first_choose"]["acc"]["mean"] == values["full", "first_choose"]
    assert shown["first_choose"]["acc"]["seeds"] == seeds
    store = open_store(home.tracking_uri)
    experiment = store.experiments()["letters"]
    (cell,) = store.runs([experiment], {"suite.kind": "cell"})
    runs = [
        store.client.get_run(run.id)
        for run in store.runs([experiment], {"suite.kind": "trial", "phase": "confirm"})
    ]
    per_seed = [run.data.metrics["lm_eval.first_choose.acc"] for run in runs]
    assert len(per_seed) == seeds
    assert sum(per_seed) / seeds == pytest.approx(values["full", "first_choose"])
    assert (
        store.client.get_run(cell.id).data.metrics["lm_eval.first_write.exact_match.plain"]
        == values["full", "first_write"]
    )


@pytest.mark.slow
def test_a_cell_by_name_is_measured_once(suite: Suite, trained: Any) -> None:
    first = ask(suite, trained, "llama3-8b/pretrained/full/first", "--limit", "3")
    again = ask(suite, trained, "letters:full", "--limit", "3")
    assert first[0] == again[0] == 0
    assert first[1] == again[1]
    assert {row["lm_eval_task"] for row in first[1]} == {
        "first_choose/limit-3",
        "first_write/limit-3",
    }
    assert "2 of 2: " in first[2]
    assert " of " not in again[2], "nothing was left to do"


def test_what_a_cell_started_from_stands_beside_the_papers_number(
    suite: Suite, trained: Any
) -> None:
    code, rows, err = ask(suite, trained, "letters:full", "--before", "--limit", "1")
    assert code == 0, err
    printed = {(row["method"], row["metric"]): row["reference_score"] for row in rows}
    assert printed["untrained", "acc"] == 0.25
    assert printed["full", "acc"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--sweep", "heads"),
            "trained on first with a classification head of its own; run the sweep with decoder_objective: text",
        ),
        (("--sweep", "letter"), "unknown sweep 'letter'; did you mean letters?"),
        ((), "got no model, expected one of CELL, DIR, --sweep NAME and --backbone B"),
        (("./exportd",), "./exportd: no such folder"),
        (("letters:full", "--backbone", "gpt2"), "got CELL or DIR and --backbone"),
        (("--backbone", "minilm"), "backbone minilm is an encoder"),
        (("--backbone", "gpt2", "--device", "cuda:99"), "--device cuda:99: "),
        (("letters:full", "--attention", "pretrained"), "--attention changes a --backbone alone"),
        (("--sweep", "letters", "--set", "attention.options.kv_heads=1"), "--set changes a"),
        (("--sweep", "letters", "--backbone", "gpt2"), "leave one of the two out"),
        (("--sweep", "letters", "."), "leave one of the two out"),
        (("--backbone", "gpt2", "--before"), "--backbone is untrained already"),
        ((".", "--before"), "exported model does not know what its run started from"),
        (("--sweep", "letters", "--batch-size", "many"), "batch_size"),
        (("--sweep", "letters", "--tasks", "first_choose:x"), "expected NAME or NAME:SHOTS"),
        (
            ("--sweep", "letters", "--tasks", "first_choose,first_choose:3"),
            "tasks are not distinct",
        ),
    ],
)
def test_what_cannot_be_asked_is_said(
    suite: Suite, trained: Any, arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = ask(suite, trained, *arguments)
    assert code == 2
    assert said in err


def test_an_untrained_backbone_is_measured_from_the_command_line(
    suite: Suite, trained: Any
) -> None:
    shape = {
        key: value
        for key, value in (tiny_choice("llama").config or {}).items()
        if key != "attention_dropout"
    }
    given = {
        **{f"backbone.config.{key}": value for key, value in shape.items()},
        "attention.options.kv_heads": 1,
    }
    sets = [text for key, value in given.items() for text in ("--set", f"{key}={value}")]
    code, rows, err = ask(
        suite,
        trained,
        "--backbone",
        "llama3-8b",
        "--attention",
        "gqa",
        *sets,
        "--tasks",
        "first_choose:1",
    )
    assert code == 0, err
    (row,) = rows
    assert (row["method"], row["attention"], row["lm_eval_task"], row["seeds"]) == (
        "untrained",
        "gqa",
        "first_choose:1",
        1,
    )


def test_a_run_that_cannot_be_restored_is_reported_and_the_others_are_measured(
    suite: Suite, trained: Any
) -> None:
    home, _ = trained
    spec = next(
        spec for spec in specs_of(home, "letters") if spec.phase is Phase.CONFIRM and spec.seed == 1
    )
    best = home.trial(spec).best
    kept = best.read_bytes()
    best.write_bytes(kept[: len(kept) // 2])
    try:
        code, rows, err = ask(suite, trained, "letters:full", "--limit", "2")
    finally:
        best.write_bytes(kept)
    assert code == 1
    assert f"not measured: {home.trial(spec).path}" in err
    assert {row["seeds"] for row in rows} == {1}
    code, rows, _ = ask(suite, trained, "letters:full", "--limit", "2")
    assert code == 0
    assert {row["seeds"] for row in rows} == {2}


@pytest.mark.slow
def test_an_exported_model_is_measured_as_its_run_was(
    suite: Suite, trained: Any, tmp_path: Path
) -> None:
    home, _ = trained
    code, _, err = suite(
        "export", "letters:full", tmp_path / "out", "--home", home.path, "--seed", 1
    )
    assert code == 0, err
    # Its runs too, unless a test before this one has measured them.
    code, _, err = ask(suite, trained, "letters:full")
    assert code == 0, err
    code, rows, err = ask(suite, trained, tmp_path / "out")
    assert code == 0, err
    spec = next(
        spec for spec in specs_of(home, "letters") if spec.phase is Phase.CONFIRM and spec.seed == 1
    )
    record = by_name(read_record(home.trial(spec).path))
    for row in rows:
        assert row["value"] == record[row["lm_eval_task"]].total.scores[row["metric"]].value
