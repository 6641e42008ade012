"""The suite from Python: what it imports, what it refuses, and that its results are those of the commands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import suite as package
from suite.config.sweep_files import load_sweep
from suite.errors import ConfigError, DataError, StorageError, TrackingError, UnknownNameError
from suite.plan.cell_state import read_states
from suite.plan.definition import read_plan
from suite.plan.events import Outcome
from suite.progress import NotebookBoard, _notebook_output
from suite.record.folder import Home
from suite.storage.lease import JOB_VARIABLE
from tests.commands import ROOT, Suite, suite
from tests.records import write_definition

__all__ = ["suite"]
KEYS: dict[str, Any] = {"backbones": ["minilm"], "methods": ["full", "lora"], "tasks": ["sst2"]}


def test_import_suite_imports_nothing_heavy_before_it_is_needed() -> None:
    program = (
        "import sys, suite\n"
        "assert 'pydantic' not in sys.modules\n"
        "assert set(suite.__all__) <= set(dir(suite))\n"
        "suite.Sweep(name='s', backbones=['minilm'], methods=['full'], tasks=['sst2'])\n"
        "heavy = {'torch', 'ray', 'pandas', 'transformers', 'mlflow', 'datasets', 'typer'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'swep'"):
        _ = package.swep  # type: ignore[attr-defined]


def test_a_sweep_of_arguments_is_the_sweep_of_a_file(tmp_path: Path) -> None:
    more: dict[str, Any] = {"training": {"epochs": 3}, "confirm": {"seeds": [1, 2]}}
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"name": "s", **KEYS, **more}))
    made = package.Sweep(name="s", **KEYS, **more)
    assert made.config == load_sweep(path) == package.Sweep.from_yaml(path).config
    changed = package.Sweep.from_yaml(path, {"training.epochs": 7, "methods": ["read"]})
    assert changed.config.training.epochs == 7 and changed.config.methods[0].name == "read"
    with pytest.raises(ConfigError, match=r"^Sweep 's': .*did you mean training"):
        package.Sweep(name="s", **KEYS, trainin={})
    remote = {"name": "x/y", "revision": "0" * 40, "trust_remote_code": True}
    with pytest.raises(ConfigError, match="trust_remote_code cannot be set there"):
        package.Sweep(name="s", **{**KEYS, "backbones": [remote]})


def test_tuples_are_the_lists_that_a_home_stores() -> None:
    def made(values: Any) -> package.Sweep:
        changed = {"name": "bert-base", "config": {"layer_types": values}}
        return package.Sweep(name="s", **{**KEYS, "backbones": [changed]})

    assert made(("a", "b")).config == made(["a", "b"]).config


@pytest.mark.parametrize("key", ["backbones", "methods", "tasks"])
@pytest.mark.parametrize("given", ["sst2", {"name": "sst2"}, None, 3])
def test_one_choice_is_no_list_of_choices(key: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}: Input should be a valid list"):
        package.Sweep(name="s", **{**KEYS, key: given})
    assert package.Sweep(name="s", **{**KEYS, "tasks": iter(["sst2"])}).config.tasks == ["sst2"]


def test_changes_are_the_values_that_python_gives(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"name": "s", **KEYS, "training": {"epochs": 3}}))
    training = {"adam_eps": 1e-6}
    changes = {"training": training, "training.epochs": 7, "confirm.seeds": (1, 2)}
    changed = package.Sweep.from_yaml(path, changes).config
    assert (changed.training.adam_eps, changed.training.epochs) == (1e-6, 7)
    assert changed.confirm.seeds == [1, 2]
    assert training == {"adam_eps": 1e-6}, "the caller's own"
    for text in ("1e-3", "no", "on \U0001f600"):
        assert package.Sweep.from_yaml(path, {"description": text}).config.description == text
    with pytest.raises(ConfigError, match=r"change 'name\.x': name is not a group of keys"):
        package.Sweep.from_yaml(path, {"name.x": 1})
    with pytest.raises(ConfigError, match=r"changes: got .*, expected a mapping"):
        package.Sweep.from_yaml(path, ["training.epochs=2"])  # type: ignore[arg-type]
    for wrong in ({5: 2}, {"training": {1: 2, "epochs": 2}}):
        with pytest.raises(ConfigError, match=r"got the key [15], expected the name of a setting"):
            package.Sweep.from_yaml(path, wrong)  # type: ignore[arg-type]


def test_results_are_those_of_the_commands(finished: Home, suite: Suite, tmp_path: Path) -> None:
    found = package.results(finished.path)
    assert found.sweep == "demo" and found.ok
    told = json.loads(suite("leaderboard", "--home", finished.path, "--format", "json")[1])
    table = found.leaderboard()
    assert list(table["arm"]) == [row["arm"] for row in told]
    assert set(found.leaderboard(method="lora")["method"]) == {"lora"}
    page = found.report(tmp_path / "out.html")
    assert page == tmp_path / "out.html" and "demo" in page.read_text()
    assert found.report(tmp_path / "pages") == tmp_path / "pages" / "demo.html"
    assert "score_mean" in found._repr_html_()
    with pytest.raises(ConfigError, match="give two arms, or none"):
        found.compare("lora")
    with pytest.raises(UnknownNameError, match="unknown sweep 'dem'; did you mean demo"):
        package.results(finished.path, "dem")


def test_results_stay_those_of_their_home_in_another_folder(
    finished: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.path.parent)
    found = package.results(finished.path.name)
    monkeypatch.chdir(tmp_path)
    assert found.home == finished.path.resolve()
    for wrong in (95, 0, math.nan):
        with pytest.raises(ConfigError, match=r"target_frac: got .*, expected a share from 0\.01"):
            found.leaderboard(target_frac=wrong)


def test_an_opened_sweep_is_ok_once_every_cell_has_what_it_wants(
    finished: Home, tmp_path: Path
) -> None:
    write_definition(Home(tmp_path), ["full"], ["agreement"])
    assert not package.Outcome(tmp_path, "demo", "").ok
    assert package.Outcome(finished.path, "demo", "").ok
    with pytest.raises(ConfigError, match="holds no sweep 'other'"):
        _ = package.Outcome(tmp_path, "other", "").ok


def test_lists_of_names_and_sweeps_are_checked_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: dict[str, Any] = {"methods": []}
    for wrong in ({"backbones": "t5-small"}, none, {"attention": {"mha": 1}}):
        with pytest.raises(ConfigError, match=r"profile: \w+: got .*, expected a list of names"):
            package.profile(**wrong)
    with pytest.raises(UnknownNameError, match="architectures: unknown method 'lora'"):
        package.profile(methods=["full"], architectures={"lora": {"rank": 2}})
    with pytest.raises(ConfigError, match="run: got None, expected a Sweep, its file or its name"):
        package.run(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name: 'trial' is what the runs of `suite trial` are"):
        package.Sweep(**{"name": "trial", **KEYS})
    with pytest.raises(ConfigError, match="num_labels: got 0"):
        package.params("minilm", num_labels=0)
    monkeypatch.setenv("SUITE_TASKS", str(tmp_path / "absent"))
    calls: list[Callable[[], Any]] = [
        package.profile,
        lambda: package.params("minilm"),
        lambda: package.trial(backbone="minilm", method="full", task="sst2"),
        lambda: package.run("quickstart", home=tmp_path),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"SUITE_TASKS: .*absent: no such folder"):
            call()


UNGUARDED = """
import suite
suite.trial(backbone="minilm", method="bitfit", task="sentiment", ranks=2, home="home",
            limit={"train": 16}, training={"batch_size": 8})
"""


@pytest.mark.slow
def test_ranks_of_a_script_without_a_guard_are_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("suite.errors.ResourceError") and "__name__ == '__main__'" in last


def test_a_home_in_the_folder_of_a_job_of_rays_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}
    monkeypatch.setenv(JOB_VARIABLE, json.dumps(job))
    with pytest.raises(ConfigError, match="--home runs: lies in the job's own folder"):
        package.run(package.Sweep(name="s", **KEYS), home="runs", progress=False)


@pytest.mark.slow
def test_a_disk_error_in_a_rank_is_that_of_the_command(tmp_path: Path) -> None:
    command = (
        "ulimit -f 160; exec python -m suite trial --backbone minilm --method bitfit --ranks 2"
        " --task sentiment --home home --set limit.train=16 --set training.batch_size=8"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == 1 and "error: File too large" in ended.stderr.splitlines()[-1]


def test_counts_are_those_of_the_command(suite: Suite) -> None:
    printed = suite(
        *("params", "--backbone", "t5-base", "--method", "lora", "--set", "rank=4"),
        *("--format", "json"),
    )[1]
    assert package.params("t5-base", "lora", changes=["rank=4"]) == json.loads(printed)


def test_a_trial_by_hand_takes_its_settings_as_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        package.trial(
            backbone="minilm",
            method="lora",
            task="acceptability",
            learning_rate=-1.0,
            architecture={"rank": 4},
            home=tmp_path,
        )
    assert list(tmp_path.iterdir()) == []


def test_variables_stand_for_what_is_not_given_as_for_the_commands(
    finished: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUITE_HOME", str(finished.path))
    assert package.results().home == finished.path
    assert package.results(home=str(finished.path / ".")).home == finished.path
    monkeypatch.setenv("SUITE_HOME", str(tmp_path / "home"))
    # Nowhere, so that a sweep that does not see the others ends too.
    monkeypatch.setenv("SUITE_DATA_ROOT", str(tmp_path / "nowhere"))
    sweep = package.Sweep(name="s", **KEYS)
    with monkeypatch.context() as with_optuna:
        with_optuna.setenv("SUITE_OPTUNA", "foo://bar")
        with pytest.raises(TrackingError, match="foo://bar"):
            package.run(sweep, progress=False)
    with monkeypatch.context() as with_storage:
        with_storage.setenv("SUITE_STORAGE", "foo://bar")
        with pytest.raises(StorageError, match="storage foo://bar"):
            package.run(sweep, progress=False)
        with pytest.raises(DataError, match=r"looked for .*/nowhere/"):
            package.run(sweep, storage=(tmp_path / "mirror").as_uri(), progress=False)
    with pytest.raises(DataError, match=r"looked for .*/nowhere/"):
        package.trial(backbone="minilm", method="full", task="sst2")


def test_a_notebook_shows_one_output_that_is_replaced(finished: Home) -> None:
    plan = read_plan(finished, "demo")
    states = read_states(plan, finished)
    shown: list[str] = []
    now = [0.0]
    board = NotebookBoard(shown.append, clock=lambda: now[0])
    board.on_start(plan, states)
    assert "sweep demo: " in shown[-1] and "entailment" in shown[-1]
    spec = next(iter(states.values())).trials[0].spec
    board.on_trial_start(spec)
    assert len(shown) == 1, "not more often than can be read"
    now[0] = 1.0
    board.on_trial_end(spec, None)
    assert "given up, its retries are used up" in shown[-1]
    board.on_end(Outcome(0, ()))
    assert "retries are used up" in shown[-1], "what went wrong stays"
    assert _notebook_output() is None, "pytest is no notebook"
