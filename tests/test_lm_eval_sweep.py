"""The key `lm_eval` of a sweep: confirmed runs are measured after the last trial, once, and a failure there undoes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from suite.cluster.session import cluster
from suite.config.lm_eval import LmEvalConfig, parse_requests
from suite.config.sweep import SweepConfig
from suite.errors import ConfigError, IncompatibleError, StorageError
from suite.evaluation.harness import settings_of
from suite.evaluation.library import Library
from suite.plan.resources import Layout
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.lm_eval import (
    FILE,
    Evaluation,
    Settings,
    TaskScores,
    add_evaluation,
    read_record,
)
from suite.record.spec import Phase
from suite.storage.mirror import Mirror
from suite.storage.workspace import Workspace
from suite.tune import measure
from suite.tune.driver import run_sweep
from suite.tune.group import RunSettings
from tests.commands import Suite, suite
from tests.lm_tasks import by_name, keep_caches, write_lm_tasks, write_suite_task
from tests.records import make_result, make_spec
from tests.tiny import tiny_choice

__all__ = ["suite"]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A data root for the task `first`, and a folder of lm-eval tasks; workers keep their caches there too."""
    folder = tmp_path_factory.mktemp("roots")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "caches"))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        keep_caches(folder / "caches", patch)
        data = write_suite_task(folder, patch)
        yield data, write_lm_tasks(folder / "user" / "lm", count=6)


def sweep(tasks: Path, **changes: Any) -> SweepConfig:
    lm_eval = {"tasks": ["first_choose"], "include_path": str(tasks), **changes.pop("lm_eval", {})}
    values = {
        "name": "asked",
        "backbones": [tiny_choice("llama")],
        "methods": [{"name": "full", "learning_rate": {"low": 5e-3, "high": 2e-2}}],
        "tasks": ["first"],
        "architectures": "first",
        "decoder_objective": "text",
        "search": {"trials": 1, "startup_trials": 1, "stop": None, "edge_guard": {"extensions": 0}},
        "confirm": {"seeds": [1]},
        "training": {"epochs": 1, "batch_size": 32, "max_length": 64},
        "limit": {"train": 32},
        "resources": {"workers": 1},
        "lm_eval": lm_eval,
    }
    return SweepConfig.model_validate(values | changes)


def measured(home: Home) -> dict[str, set[str]]:
    """Names of evaluations by the phase of the trial, or `before`."""
    found: dict[str, set[str]] = {}
    for folder in home.trials():
        spec = folder.spec()
        assert spec is not None
        found.setdefault(spec.phase.value, set()).update(by_name(read_record(folder.path)))
    for path in (home.path / "lm-eval").glob(f"*/{FILE}"):
        found.setdefault("before", set()).update(by_name(read_record(path.parent)))
    return found


class HangingRay:
    """As much of Ray as the measuring asks for; no task of it ever ends."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cancelled: list[Any] = []

    def remote(self, *args: Any, **options: Any) -> Any:
        # Of the function with its options, then of each task.
        return object() if args else lambda function: self

    def options(self, **_: Any) -> HangingRay:
        return self

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.now_s += timeout
        assert self.now_s < 1000, "it waits for ever"
        return [], references

    def cancel(self, reference: Any, *, force: bool) -> None:
        assert force
        self.cancelled.append(reference)


def measured_twice(folder: Path) -> tuple[dict[str, str], list[str]]:
    """What could not be measured of two confirmed runs, with 50 s for a task; and their folders."""
    config = sweep(write_lm_tasks(folder / "lm", count=6))
    home = Home(folder / "runs")
    specs = [make_spec("full", seed=seed) for seed in (1, 2)]
    trials = [Trial(home.trial(spec), spec, make_result(spec)) for spec in specs]
    plan: Any = SimpleNamespace(config=config)
    states: Any = {"cell": SimpleNamespace(confirmed=trials)}
    timeouts = config.timeouts.model_copy(update={"epoch_s": 50.0})
    settings = RunSettings(Workspace(home), Layout(1, 1.0, 0.0, 1), timeouts)
    failed = measure.measure_confirmed(plan, states, settings)
    return failed, [str(trial.folder.path) for trial in trials]


def test_a_measurement_that_hangs_ends_at_the_deadline_of_all_tasks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HangingRay()
    monkeypatch.setattr(measure, "ray", hanging)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: hanging.now_s))
    failed, folders = measured_twice(tmp_path)
    assert hanging.now_s == 2 * 50.0, "two models of one task each"
    assert len(hanging.cancelled) == 2
    assert failed == dict.fromkeys(folders, "no answer within 50 s a task (timeouts.epoch_s)")


class AnsweringRay(HangingRay):
    """Every task of it has ended, and measured all."""

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Any, timeout: float) -> dict[str, str]:
        return {}


def test_a_storage_that_is_away_leaves_what_was_measured_to_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Mirror, path: Path) -> None:
        raise StorageError("s3://bucket: no answer")

    monkeypatch.setattr(measure, "ray", AnsweringRay())
    monkeypatch.setattr(Mirror, "fetch_file", away)
    failed, folders = measured_twice(tmp_path)
    assert failed == dict.fromkeys(folders, "s3://bucket: no answer")


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, False),
        ({"max_length": 64, "dtype": "fp32"}, False),
        ({"max_length": 32}, True),
        ({"dtype": "bf16"}, True),
    ],
)
def test_what_was_measured_counts_under_the_settings_that_the_sweep_gives(
    tmp_path: Path, changes: dict[str, Any], left: bool
) -> None:
    folder = write_lm_tasks(tmp_path / "lm", count=6)
    config = LmEvalConfig(tasks=["first_choose"], include_path=str(folder))
    (request,) = parse_requests(config.tasks)
    library = Library(folder)
    settings = settings_of(request, config, library, positions=64, device="cpu")
    total = TaskScores(scores={}, samples=6)
    ended = {"device": "cpu", "batch_size": "8", "seconds": 1.0, "finished_at": 1.0}
    add_evaluation(tmp_path, Evaluation(settings=settings, total=total, **ended))
    wanted = config.model_copy(update=changes)
    assert measure._has_all(tmp_path, wanted, library) != left


def test_every_setting_of_an_evaluation_is_asked_for(tmp_path: Path) -> None:
    """One that is not would leave old numbers standing after a change of the sweep."""
    folder = write_lm_tasks(tmp_path / "lm", count=6)
    config = LmEvalConfig(
        tasks=["first_choose"], include_path=str(folder), dtype="fp32", max_length=64
    )
    (request,) = parse_requests(config.tasks)
    assert measure._asked(request, config, Library(folder)).keys() == Settings.model_fields.keys()


@pytest.mark.slow
def test_a_sweep_measures_what_it_confirmed_and_takes_up_what_is_left(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    data, tasks = roots
    home = Home(tmp_path / "runs")
    with cluster(None, threads=1):
        outcome = run_sweep(sweep(tasks), home=home, data_root=data)
        assert outcome.ok and outcome.finished == 2 and outcome.not_measured == {}
        assert measured(home) == {Phase.SEARCH.value: set(), Phase.CONFIRM.value: {"first_choose"}}

        starts = sweep(tasks, lm_eval={"tasks": ["first_choose"], "before": True})
        assert run_sweep(starts, home=home, data_root=data).ok
        assert measured(home)["before"] == {"first_choose"}

        more = sweep(tasks, lm_eval={"tasks": ["first_choose", "first_write"], "before": True})
        outcome = run_sweep(more, home=home, data_root=data)
        assert outcome.ok and outcome.finished == 0
        both = {"first_choose", "first_write"}
        assert measured(home) == {
            Phase.SEARCH.value: set(),
            Phase.CONFIRM.value: both,
            "before": both,
        }

        times = {path: path.stat().st_mtime_ns for path in home.path.rglob(FILE)}
        assert run_sweep(more, home=home, data_root=data).ok
        assert {path: path.stat().st_mtime_ns for path in home.path.rglob(FILE)} == times

        (confirmed,) = [folder for folder in home.trials() if (folder.path / FILE).exists()]
        (confirmed.path / FILE).unlink()
        confirmed.best.write_bytes(b"not tensors")
        outcome = run_sweep(more, home=home, data_root=data)
        assert outcome.ok, "the trials are as they were"
        assert list(outcome.not_measured) == [str(confirmed.path)]
        assert "not the trained tensors of this trial" in outcome.not_measured[str(confirmed.path)]


def test_a_sweep_cannot_take_code_from_a_folder_of_lm_eval_tasks(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    data, _ = roots
    tasks = write_lm_tasks(tmp_path / "lm", count=6)
    mark = tmp_path / "ran"
    template = f"doc_to_text: '{{{{ cycler.__init__.__globals__.os.mkdir(\"{mark}\") }}}}' #"
    for path in tasks.glob("*.yaml"):
        path.write_text(path.read_text().replace("doc_to_text: ", template))
    with pytest.raises(ConfigError, match=r"a sweep file cannot allow; .*SUITE_PATH=/"):
        run_sweep(sweep(tasks), home=Home(tmp_path / "runs"), data_root=data)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"lm_eval": {"include_path": "nowhere"}},
            ConfigError,
            "include_path nowhere: no such folder",
        ),
        (
            {"lm_eval": {"tasks": ["first_choose:x"]}},
            ValidationError,
            "expected NAME or NAME:SHOTS",
        ),
        (
            {"decoder_objective": "head"},
            IncompatibleError,
            "run the sweep with decoder_objective: text",
        ),
        ({"backbones": [tiny_choice("bert")]}, IncompatibleError, "is an encoder"),
    ],
)
def test_what_lm_eval_would_refuse_is_found_before_a_worker_starts(
    changes: dict[str, Any],
    error: type[Exception],
    said: str,
    roots: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    data, tasks = roots
    home = Home(tmp_path / "runs")
    with pytest.raises(error, match=said):
        run_sweep(sweep(tasks, **changes), home=home, data_root=data)
    assert not list(home.trials())


def test_a_dry_run_refuses_what_cannot_write(
    roots: tuple[Path, Path], tmp_path: Path, suite: Suite
) -> None:
    path = tmp_path / "asked.yaml"
    config = sweep(roots[1], backbones=[tiny_choice("bert")])
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    code, _, err = suite("run", path, "--dry-run", "--home", tmp_path / "runs")
    assert code == 2 and "is an encoder" in err


def test_the_sweep_is_stored_with_its_key(roots: tuple[Path, Path]) -> None:
    config = sweep(roots[1], lm_eval={"limit": 3})
    assert SweepConfig.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config
