"""Makes trial records and whole homes as a sweep leaves them, through the real folder writer; numbers are plausible and fixed."""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from suite.config.arm import Arm
from suite.config.hashing import derive_seed
from suite.config.space import LearningRateRange
from suite.config.sweep import (
    AttentionChoice,
    BackboneChoice,
    ConfirmConfig,
    EdgeGuard,
    MethodChoice,
    SearchConfig,
    SweepConfig,
)
from suite.config.task import (
    ClassificationTask,
    GeneratedData,
    LabelConfig,
    LanguageModelTask,
    TaskConfig,
)
from suite.config.training import TrainingConfig
from suite.leaderboard.fields import Row
from suite.leaderboard.row import cell_row
from suite.meters.record import MemoryPeak, PhaseRecord
from suite.plan.cell_state import read_states
from suite.plan.definition import read_plan, store_definition
from suite.plan.plan import Plan, PlannedCell
from suite.record.folder import Home
from suite.record.result import (
    EpochRecord,
    FailureRecord,
    ParameterCount,
    Status,
    StepTiming,
    TrialResult,
    ValidityRecord,
)
from suite.record.spec import Phase, TrialSpec
from suite.tracking import open_store, sync

BACKBONE = BackboneChoice(name="tiny-bert")
GOOD = ValidityRecord(
    trainable_as_intended=True,
    output_changed=True,
    output_start_sha256="a",
    output_end_sha256="b",
    loss_fell=True,
    loss_first=1.0,
    loss_last=0.5,
    no_nan=True,
)
"""The checks of a trial that nothing speaks against."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
RANGE = (1e-6, 3e-3)
START_S = 1_700_000_000.0
ATTENTION = {"pretrained": 16_384, "mha": 28_311_552, "sha": 8_847_360, "mhe-mul": 8_875_008}
TRAINABLE = {"full": 4_000_000, "lora": 50_000, "read": 20_000}


PERPLEXITY = "prose"
"""The one task here of which less is better."""


def make_task(name: str = "agreement") -> TaskConfig:
    common: dict[str, Any] = {
        "name": name,
        "description": "a toy",
        "source": "ours",
        "data": GeneratedData(generator=name),
    }
    if name == PERPLEXITY:
        return LanguageModelTask(**common, kind="language-model", inputs=["text"])
    return ClassificationTask(
        **common,
        inputs=["sentence"],
        label=LabelConfig(words=["no", "yes"]),
        text_to_text="toy: {sentence}",
        metrics=["accuracy"],
    )


def make_spec(
    method: str = "lora",
    task: str = "agreement",
    *,
    number: int = 0,
    learning_rate: float | None = None,
    seed: int = 0,
    sweep: str = "demo",
    attention: AttentionChoice | None = None,
    **changes: Any,
) -> TrialSpec:
    """A search trial with seed 0, a confirm trial with any other."""
    return TrialSpec(
        sweep=sweep,
        arm=Arm(
            backbone=BACKBONE,
            attention=attention or AttentionChoice(),
            method=method,
            architecture={"rank": 8} if method == "lora" else {},
        ),
        task=make_task(task),
        training=TrainingConfig(epochs=2, batch_size=8),
        world_size=2,
        phase=Phase.CONFIRM if seed else Phase.SEARCH,
        number=number,
        learning_rate=RATES[number % len(RATES)] if learning_rate is None else learning_rate,
        seed=seed,
        **changes,
    )


def make_result(
    spec: TrialSpec,
    *,
    score: float | None = None,
    status: Status = Status.COMPLETED,
    **changes: Any,
) -> TrialResult:
    """What such a trial would record; the score is highest for the third of `RATES` unless given."""
    jitter = derive_seed(spec.hash, "score") % 1000 / 1e5
    scored = status.has_score
    value = (
        score
        if score is not None
        else 0.9 - 0.05 * abs(math.log10(spec.learning_rate / RATES[2])) + jitter
    )
    value = value if scored else None
    confirm = spec.phase is Phase.CONFIRM
    trainable = TRAINABLE.get(spec.arm.method, 1000)
    fields = {
        "trial": spec.hash,
        "status": status,
        "score": value,
        "scores": {"accuracy": value} if value is not None else {},
        "validation_score": value,
        "test_score": value if confirm else None,
        "best_epoch": 1 if scored else None,
        "epochs": _epochs(spec, value) if value is not None else [],
        "phases": _phases(spec),
        "timing": StepTiming(
            p50_s=0.1, p95_s=0.15, samples_per_s=80.0 + spec.seed, tokens_per_s=2000.0
        ),
        "parameters": ParameterCount(
            total=4_000_000 + trainable,
            trainable=trainable,
            trainable_head=130,
            stored_bytes=4 * trainable,
            attention_parameters=ATTENTION.get(spec.arm.attention.name, 15_335_424),
            kv_bytes_per_token=256,
        ),
        "splits": {"train": 100, "validation": 20, **({"test": 20} if confirm else {})},
        "failure": None
        if scored
        else FailureRecord(type=status.value, message="loss is nan", log_path="rank0.log"),
        "started_at": START_S + spec.number * 100 + spec.seed * 1000,
        "finished_at": START_S + spec.number * 100 + spec.seed * 1000 + 60,
    }
    return TrialResult(**{**fields, **changes})


def _epochs(spec: TrialSpec, score: float) -> list[EpochRecord]:
    return [
        EpochRecord(
            epoch=n,
            step=12 * (n + 1),
            train_loss=0.7 - 0.1 * n,
            validation_score=score - 0.02 * (1 - n),
            validation_scores={"accuracy": score - 0.02 * (1 - n)},
            learning_rate=spec.learning_rate / (n + 1),
            seconds=10.0,
            energy_kwh=1e-5,
        )
        for n in range(2)
    ]


def _phases(spec: TrialSpec) -> dict[str, PhaseRecord]:
    memory = MemoryPeak(
        allocated_max_bytes=10_000_000 + spec.seed,
        allocated_sum_bytes=20_000_000,
        rss_max_bytes=500_000_000,
    )
    common = {"energy_source": "cpu-time-estimate", "memory": memory}
    return {
        "load": PhaseRecord(seconds=2.0, energy_kwh=1e-6, **common),
        "train": PhaseRecord(
            seconds=20.0 + spec.seed, energy_kwh=2e-5 + spec.seed * 1e-6, **common
        ),
        "eval": PhaseRecord(seconds=3.0, energy_kwh=2e-6, **common),
    }


def write_trial(home: Home, spec: TrialSpec, result: TrialResult | None = None) -> TrialSpec:
    """Leave a trial as the driver and rank 0 would; without a result it was only handed out."""
    folder = home.trial(spec)
    folder.write_spec(spec)
    if result is not None:
        folder.write_result(result)
    return spec


def write_cell(
    home: Home,
    method: str = "lora",
    task: str = "agreement",
    *,
    trials: int = 4,
    seeds: Iterable[int] = (1, 2, 3),
    sweep: str = "demo",
) -> list[TrialSpec]:
    """A whole study and its confirm runs at the best learning rate (`RATES[2]` from three trials on)."""
    search = [make_spec(method, task, number=n, sweep=sweep) for n in range(trials)]
    best = max(search, key=lambda spec: make_result(spec).score or 0.0)
    confirm = [
        make_spec(method, task, seed=s, learning_rate=best.learning_rate, sweep=sweep)
        for s in seeds
    ]
    return [write_trial(home, spec, make_result(spec)) for spec in (*search, *confirm)]


def write_definition(
    home: Home,
    methods: Sequence[str],
    tasks: Sequence[str],
    *,
    trials: int = 4,
    seeds: Sequence[int] = (1, 2, 3),
    sweep: str = "demo",
    learning_rates: tuple[float, float] = RANGE,
    extensions: int = 0,
) -> None:
    """The sweep's definition, as a driver stores it; budgets are what they say unless `extensions` are asked for."""
    config = SweepConfig(
        name=sweep,
        backbones=[BACKBONE],
        methods=[MethodChoice(name=m) for m in methods],
        tasks=list(tasks),
        search=SearchConfig(
            trials=trials,
            edge_guard=EdgeGuard(extensions=extensions),
            stop=None,
            per="architecture",
            choose="best",
        ),
        confirm=ConfirmConfig(seeds=list(seeds)),
        training=make_spec().training,
    )
    low, high = learning_rates
    cells = [
        PlannedCell(make_spec(m, t).arm, make_task(t), LearningRateRange(low=low, high=high))
        for m in methods
        for t in tasks
    ]
    store_definition(Plan(config, tuple(cells), world_size=2), home)


def define(home: Home, sweep: str = "demo") -> None:
    """The definition of a sweep that asks for exactly the trials that are there."""
    specs = [spec for folder in home.trials() if (spec := folder.spec()) is not None]
    specs = [spec for spec in specs if spec.sweep == sweep]
    write_definition(
        home,
        sorted({spec.arm.method for spec in specs}),
        sorted({spec.task.name for spec in specs}),
        trials=max(spec.number for spec in specs) + 1,
        seeds=sorted({spec.seed for spec in specs if spec.seed}) or [1],
        sweep=sweep,
    )
    low, high = RANGE
    cells = {}
    for spec in specs:
        cells[spec.cell] = PlannedCell(spec.arm, spec.task, LearningRateRange(low=low, high=high))
    store_definition(replace(read_plan(home, sweep), cells=tuple(cells.values())), home)


def make_home(
    path: Path,
    methods: Sequence[str] = ("full", "lora"),
    tasks: Sequence[str] = ("agreement", "entailment"),
    *,
    trials: int = 4,
    seeds: Sequence[int] = (1, 2, 3),
    sweep: str = "demo",
) -> Home:
    """A home whose sweep has ended well: `len(methods) * len(tasks) * (trials + len(seeds))` trials."""
    home = Home(path)
    write_definition(home, methods, tasks, trials=trials, seeds=seeds, sweep=sweep)
    for method in methods:
        for task in tasks:
            write_cell(home, method, task, trials=trials, seeds=seeds, sweep=sweep)
    return home


def synced(home: Home, empty_db: Path) -> Home:
    """The same home, whose own store holds its results."""
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    return home


def make_store(path: Path) -> Path:
    """An empty database with MLflow's schema, whole in one file: making it takes over a second, copying it nothing."""
    open_store(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def cell_rows(home: Home, sweep: str = "demo") -> list[Row]:
    """A row per planned cell that has a trial, without what compares it with others."""
    states = read_states(read_plan(home, sweep), home).values()
    return [cell_row(state, home="here") for state in states if state.search or state.confirm]
