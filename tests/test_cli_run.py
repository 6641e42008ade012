"""The command line that trains: trials by hand, sweeps, and what a user's own folder adds to them."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import yaml
from rich.console import Console

from suite.backbones import loading
from suite.cli import run
from suite.cli.estimate import estimate
from suite.cli.work import arm_work
from suite.config.names import DEFAULT_HOME
from suite.config.sweep import SweepConfig
from suite.config.sweep_files import load_sweep
from suite.errors import ConfigError, IncompatibleError, SuiteError, UnknownNameError
from suite.meters.record import PhaseRecord
from suite.plan.cell_state import read_states
from suite.plan.events import Outcome
from suite.plan.plan import make_plan
from suite.plan.status import TrialFailure
from suite.progress import Board
from suite.record.folder import Home
from suite.record.result import FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.train.by_hand import build_spec, train_by_hand
from tests.cluster.processes import wait_until
from tests.commands import Suite, shell, suite
from tests.records import make_home

__all__ = ["suite"]
ROOT = Path(__file__).parents[1]
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
TINY_SET = [
    text for key, value in TINY.items() for text in ("--set", f"backbone.config.{key}={value}")
]


# Trials by hand


def test_a_trial_by_hand_searches_and_with_test_confirms() -> None:
    assert build_spec("minilm", "lora", "acceptability").phase is Phase.SEARCH
    assert build_spec("minilm", "lora", "acceptability", test=True).phase is Phase.CONFIRM
    assert (
        build_spec("minilm", "lora", "acceptability", overrides=["phase=confirm"]).phase
        is Phase.CONFIRM
    )


def test_set_reaches_every_part_of_a_trial() -> None:
    items = [
        "learning_rate=2e-3",
        "seed=4",
        "training.epochs=2",
        "limit.train=32",
        "rank=4",
        "architecture.alpha=8",
    ]
    spec = build_spec(
        "minilm", "lora", "acceptability", overrides=[*items, "backbone.revision=abc"], ranks=2
    )
    assert (
        spec.learning_rate,
        spec.seed,
        spec.training.epochs,
        spec.limit.train,
        spec.world_size,
    ) == (0.002, 4, 2, 32, 2)
    assert (
        spec.arm.architecture["rank"],
        spec.arm.architecture["alpha"],
        spec.arm.backbone.revision,
    ) == (4, 8.0, "abc")
    assert spec.arm.architecture["targets"] == ["q", "v"], "what is not set is filled in"


@pytest.mark.parametrize(
    ("overrides", "ranks", "error", "said"),
    [
        (["learning_rat=1"], 1, UnknownNameError, "did you mean learning_rate"),
        (["learning_rate=0"], 1, ConfigError, "learning_rate"),
        (["training.epoch=1"], 1, ConfigError, "did you mean epochs"),
        (["phase=test"], 1, UnknownNameError, "known: confirm, search"),
        (["training.batch_size=15"], 2, IncompatibleError, "got 15, expected a multiple of 2"),
        (["training.batch_size=11"], 4, IncompatibleError, "set training.batch_size=12, or change"),
    ],
)
def test_a_faulty_trial_is_refused_before_it_starts(
    overrides: list[str], ranks: int, error: type[SuiteError], said: str
) -> None:
    with pytest.raises(error, match=said):
        build_spec("minilm", "lora", "acceptability", overrides=overrides, ranks=ranks)


def test_data_that_fill_no_batch_are_a_mistake_and_no_result(tmp_path: Path) -> None:
    spec = build_spec("minilm", "lora", "acceptability", overrides=["limit.train=2"])
    with pytest.raises(IncompatibleError, match=r"^task acceptability: .* only 2 training"):
        train_by_hand(spec, Home(tmp_path))
    assert not list(Home(tmp_path).trials())


@pytest.mark.slow
def test_trial_trains_and_prints_nothing_but_the_record_on_stdout(tmp_path: Path) -> None:
    small = [
        "--set",
        "training.epochs=1",
        "--set",
        "training.batch_size=16",
        "--set",
        "limit.train=32",
        "--set",
        "limit.validation=16",
    ]
    command = [
        "trial",
        "--backbone",
        "bert-base",
        "--method",
        "bitfit",
        "--task",
        "acceptability",
        *TINY_SET,
        *small,
        "--home",
        tmp_path / "h",
    ]
    done = shell(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["status"] == "completed"
    assert record["score"] == record["validation_score"]
    assert record["test_score"] is None, "test data are not read without --test"
    assert record["scores"]["accuracy"] == record["score"]
    stored = tmp_path / "h" / "trials" / record["trial"] / "result.json"
    assert json.loads(stored.read_text()) == record


# Sweeps


def test_a_dry_run_of_the_quickstart_tells_its_size_and_starts_nothing(
    suite: Suite, tmp_path: Path
) -> None:
    config = load_sweep(ROOT / "sweeps" / "quickstart.yaml")
    code, out, _ = suite(
        "run", "quickstart", "--dry-run", "--home", tmp_path / "h", "--format", "json"
    )
    told = json.loads(out)
    assert code == 0
    assert {cell["method"] for cell in told["cells"]} == {
        "full",
        "lora",
        "prompt",
        "adapter",
        "bitfit",
        "lst",
        "read",
    }
    assert len(told["cells"]) == told["cost"]["cells"] == 7
    assert told["cost"]["trials_left"] == 7 * (config.search.trials + len(config.confirm.seeds))
    assert {(cell["task"], cell["steps_at_most"]) for cell in told["cells"]} == {
        ("sentiment", 768 // 16)
    }
    assert told["cost"]["mean_trial_s"] is None, "no trial ran here, so no time is guessed"
    laid_out = told["cost"]["partitioning"]
    assert (laid_out["zero_stage"], laid_out["frozen_weights"]) == (3, "resident")
    assert "states take at most" in laid_out["why"]
    assert "training.zero_stage: 0 takes less time" in laid_out["why"]
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(
    ("option", "store"),
    [
        ("--tracking-uri", "foo://bar"),
        ("--optuna", "foo://bar"),
        ("--storage", "foo://bar"),
        ("--storage", "/proc/version/bar"),
        ("--storage", "s3:/bucket/bar"),
    ],
)
def test_a_dry_run_refuses_a_store_that_the_run_refuses(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, store: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", "quickstart", "--home", tmp_path / "h", option, store]
    told = [suite(*command, *more) for more in (["--dry-run"], [])]
    assert told[0] == told[1] and told[0][:2] == (2, "") and store in told[0][2]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_needs_no_network_and_says_what_it_could_not_check(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    # Another test of this process may have been told so already.
    loading._say_once.cache_clear()
    sweep = tmp_path / "far.yaml"
    sweep.write_text("name: far\nbackbones: [t5-base]\nmethods: [read]\ntasks: [sst2]\n")
    code, out, _ = suite("run", sweep, "--dry-run", "--home", tmp_path / "h")
    assert code == 0 and "t5-base" in out
    assert caplog.text.count("not checked: the tokenizer of t5-base") == 1
    code, _, err = suite("run", sweep, "--home", tmp_path / "h")
    assert code == 2 and "cannot be reached" in err and not (tmp_path / "h" / "trials").exists()


def test_a_printed_command_leaves_out_the_usual_home_only_where_no_variable_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = run.Asked(
        "quickstart", Path("q"), DEFAULT_HOME, None, None, None, (), None, None, (), False, None
    )
    monkeypatch.delenv("SUITE_HOME", raising=False)
    assert asked.command == "suite run quickstart"
    monkeypatch.setenv("SUITE_HOME", "/shared/runs")
    assert asked.command == "suite run quickstart --home runs"
    assert asked.sync_command == "suite sync --home runs"


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_before_the_first_trial_says_how_to_go_on(
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    expected: int,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    # Where this test runs under `nohup`, SIGHUP would stay ignored.
    before = signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr("suite.tune.driver.run_sweep", interrupted)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/secret.db")
    code, _, err = suite(
        "run", "quickstart", "--home", tmp_path / "my home", "--set", "search.trials=2"
    )
    assert signal.signal(number, before) == signal.SIG_DFL
    assert code == expected
    assert f"suite run quickstart --home '{tmp_path}/my home' --set search.trials=2" in err
    assert "secret" not in err, "what the environment holds is not printed"


def two_cells_of_a_pretrain_run_given_up() -> Any:
    failure = TrialFailure("f0", "gave up", "RankDied", "its process is gone", "rank0.log")
    return (SimpleNamespace(done=0, failures=(failure,)),) * 2


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (
            Outcome(3, (), failed=("a/b",)),
            1,
            "cells without a result: 1; causes and logs: suite status --home h --sweep quickstart",
        ),
        (
            Outcome(1, (), interrupted=True, reason="stopped by Ctrl-C"),
            130,
            "Go on with: suite run quickstart --home h",
        ),
        (
            Outcome(1, (), interrupted=True, reason="less than 256 MiB left"),
            1,
            "less than 256 MiB left; nothing that finished is lost. "
            "When that is mended, go on with: suite run quickstart --home h\n",
        ),
        (
            Outcome(
                0, two_cells_of_a_pretrain_run_given_up(), interrupted=True, reason="3 failed alike"
            ),
            1,
            "go on with: suite run quickstart --home h --retry-given-up",
        ),
        (Outcome(4, ()), 0, "suite compare --all-pairs --home h --sweep quickstart"),
        (
            Outcome(0, two_cells_of_a_pretrain_run_given_up(), failed=("a/b", "c/d")),
            1,
            "trials given up: 1; once",
        ),
    ],
    ids=["failed", "ctrl-c", "disk", "breaker", "done", "given up"],
)
def test_the_exit_code_says_how_a_sweep_ended(
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suite.tune.driver.run_sweep", lambda *_, **__: outcome)
    ended, out, err = suite("run", "quickstart", "--home", "h")
    assert (ended, out) == (code, "")
    assert said in err


def test_the_hint_for_a_report_names_the_store_that_has_the_rows(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suite.tune.driver.run_sweep", lambda *_, **__: Outcome(4, ()))
    store = f"sqlite:///{tmp_path}/elsewhere.db"
    _, _, err = suite("run", "quickstart", "--home", "h", "--tracking-uri", store)
    assert f"suite report --home h --sweep quickstart --tracking-uri {store}" in err


def test_a_sweep_without_tracking_ends_in_a_line_that_says_so_and_in_code_1(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, listeners: Sequence[Any], **__: object) -> Outcome:
        _, follower = listeners
        follower.on_start(None, {})
        wait_until("an attempt has failed", lambda: follower._problem, timeout_s=120)
        follower.patience_s = 0.1
        follower.on_end(None)
        return Outcome(4, ())

    monkeypatch.setattr("suite.tune.driver.run_sweep", ended)
    store = tmp_path / "mlflow.db"
    store.write_text("no database " * 100)
    home = make_home(tmp_path / "h", ["lora"], ["agreement"], trials=1, seeds=[1]).path
    options = ["--home", home, "--tracking-uri", f"sqlite:///{store}"]
    code, _, err = suite("run", "quickstart", *options)
    last = err.splitlines()[-1]
    assert code == 1
    assert "MLflow has nothing of this sweep" in last and "not a usable sqlite database" in last
    assert f"suite sync --home {home} --tracking-uri sqlite:///{store}" in last


def test_a_sweep_is_found_by_path_and_by_name() -> None:
    assert run.find_sweep("quickstart") == run.find_sweep(str(ROOT / "sweeps" / "quickstart.yaml"))
    with pytest.raises(UnknownNameError, match="did you mean"):
        run.find_sweep(str(ROOT / "sweeps" / "quickstat.yaml"))


SWEEP = {
    "name": "tiny",
    "backbones": [{"name": "bert-base", "config": TINY}],
    "methods": ["bitfit"],
    "tasks": ["acceptability"],
    "architectures": "first",
    "search": {"trials": 1, "startup_trials": 1, "edge_guard": {"extensions": 0}},
    "confirm": {"seeds": [1]},
    "limit": {"train": 32, "validation": 16, "test": 16},
    "training": {"epochs": 1, "batch_size": 16},
}


def sweep_of(**changes: Any) -> SweepConfig:
    return SweepConfig.model_validate({**SWEEP, **changes})


def result_of(spec: TrialSpec, status: Status = Status.COMPLETED) -> TrialResult:
    failed = FailureRecord(type="Diverged", message="loss is nan at step 3", log_path="rank0.log")
    return TrialResult(
        trial=spec.hash,
        status=status,
        score=75.0 if status.has_score else None,
        phases={
            "train": PhaseRecord(seconds=1.0, energy_kwh=0.001),
            "eval": PhaseRecord(seconds=1.0),
        },
        failure=None if status.has_score else failed,
        started_at=100.0,
        finished_at=104.2,
    )


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
def test_the_board_counts_trials_energy_and_time_left(tmp_path: Path, terminal: bool) -> None:
    plan = make_plan(sweep_of(methods=["bitfit", "lora"]), where="tiny.yaml")
    states = read_states(plan, Home(tmp_path))
    clock = Clock()
    out = io.StringIO()
    shown = Board(
        Console(file=out, force_terminal=terminal, width=200, height=40, color_system=None), clock
    )
    shown.on_start(plan, states)
    assert (shown.done, shown.left, shown.eta_s()) == (0, 4, None)

    def finish(index: int, status: Status) -> None:
        cell = plan.cells[index]
        clock.now = clock.now + 10
        spec = plan.search_spec(cell, 0, 0.01)
        folder = Home(tmp_path).trial(spec)
        result = result_of(spec, status)
        folder.write_spec(spec)
        shown.on_trial_start(spec)
        folder.write_result(result)
        states.update(read_states(plan, Home(tmp_path)))
        shown.on_trial_end(spec, result)

    finish(0, Status.COMPLETED)
    assert (shown.done, shown.left, shown.eta_s()) == (1, 3, 30.0)
    line = "[1/4] bitfit on acceptability, search 0 at 0.01: validation score 75.0, 4.2 s; 3 left, about 30.0 s"
    assert (line in out.getvalue()) is not terminal, "a terminal has the table instead of lines"
    finish(1, Status.DIVERGED)
    assert (
        "lora on acceptability, search 0 at 0.01: diverged after 4.2 s: Diverged: loss is nan at step 3 (log: rank0.log)"
        in out.getvalue()
    )
    out.truncate(0)
    shown.console.print(shown)
    picture = out.getvalue()
    assert "sweep tiny: 2 of 4 trials done, 20.0 s so far, energy 2.00 Wh" in picture
    assert "bitfit" in picture and "1/2" in picture and "75.0" in picture


def test_trials_side_by_side_share_the_time_that_is_shown_and_foretold(tmp_path: Path) -> None:
    home = Home(tmp_path)
    plan = make_plan(sweep_of(search={"trials": 4}), where="tiny.yaml")
    out = io.StringIO()
    shown = Board(Console(file=out, width=200))
    shown.on_start(plan, read_states(plan, home))
    for number in range(2):
        spec = plan.search_spec(plan.cells[0], number, 0.01 * (number + 1))
        result = result_of(spec).model_copy(update={"lanes": 2})
        home.trial(spec).write_spec(spec)
        home.trial(spec).write_result(result)
        shown.on_trial_end(spec, result)
    assert "validation score 75.0, 4.2 s as one of 2 side by side" in out.getvalue()
    cost = estimate(
        plan, arm_work(plan, where="tiny.yaml"), states=read_states(plan, home), layout=None
    )
    assert cost["mean_trial_s"] == pytest.approx(2.1)


def test_the_night_between_two_attempts_is_not_shown_as_time_that_a_trial_took(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)
    plan = make_plan(sweep_of(), where="tiny.yaml")
    out = io.StringIO()
    shown = Board(Console(file=out, width=200))
    shown.on_start(plan, read_states(plan, home))
    spec = plan.search_spec(plan.cells[0], 0, 0.01)
    night = {"finished_at": 100.0 + 12 * 3600, "resumed_from_epochs": [1], "lanes": 2}
    result = result_of(spec).model_copy(update=night)
    home.trial(spec).write_spec(spec)
    home.trial(spec).write_result(result)
    shown.on_trial_end(spec, result)
    assert "validation score 75.0, 4.0 s as one of 2 side by side" in out.getvalue()
    cost = estimate(
        plan, arm_work(plan, where="tiny.yaml"), states=read_states(plan, home), layout=None
    )
    assert cost["mean_trial_s"] == pytest.approx(2.0)


def test_a_board_larger_than_the_terminal_shows_the_cells_at_work(tmp_path: Path) -> None:
    plan = make_plan(sweep_of(methods=["bitfit", "lora", "full", "adapter"]), where="tiny.yaml")
    shown = Board(
        Console(file=io.StringIO(), force_terminal=True, width=120, height=8, color_system=None)
    )
    shown.on_start(plan, read_states(plan, Home(tmp_path)))
    shown.on_trial_start(plan.search_spec(plan.cells[3], 0, 0.01))
    with shown.console.capture() as captured:
        shown.console.print(shown)
    picture = captured.get()
    assert "adapter" in picture
    assert "2 more cells" in picture


@pytest.mark.slow
def test_one_command_runs_a_sweep_and_the_others_read_it(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, with real workers: run, run again, leaderboard, status, sync."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SWEEP))
    first = shell("run", "tiny.yaml", "--format", "json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (row,) = json.loads(first.stdout)
    assert (row["method"], row["task"], row["seeds"], row["status"]) == (
        "bitfit",
        "acceptability",
        1,
        "done",
    )
    assert "suite compare --all-pairs --sweep tiny" in first.stderr
    assert "[2/2] bitfit on acceptability, seed 1" in first.stderr
    results = {
        p: p.stat().st_mtime_ns for p in (tmp_path / "runs" / "trials").glob("*/result.json")
    }
    assert len(results) == 2

    monkeypatch.chdir(tmp_path)
    code, out, _ = suite("run", "tiny.yaml", "--format", "json")
    assert (code, json.loads(out)) == (0, [row])
    assert {p: p.stat().st_mtime_ns for p in results} == results, "nothing that finished runs again"
    (cell,) = json.loads(suite("status", "--format", "json")[1])
    assert (
        cell["search_done"],
        cell["confirm_done"],
        cell["running"],
        cell["left"],
        cell["failures"],
    ) == (1, 1, 0, 0, [])
    assert suite("sync")[1].startswith("0 trials written, 2 others ended before")
    assert f"{row['score_mean']:.1f}" in suite("leaderboard")[1]
