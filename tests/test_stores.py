"""Stores for many users, all real: sqlite, PostgreSQL and an MLflow server on PostgreSQL, written, killed and read."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pandas as pd
import pytest
import yaml
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from optuna.trial import TrialState

from suite import api
from suite.config.training import TrainingConfig
from suite.doctor.finding import Level
from suite.doctor.mlflow import check_store
from suite.errors import TrackingError
from suite.files import write_json
from suite.plan.definition import read_plan, store_definition
from suite.record.folder import CURVE, Home
from suite.record.result import FailureRecord, Status
from suite.storage import databases
from suite.storage.identity import home_id
from suite.tracking import TrackingListener, leaderboard, open_store, resolve_uri, sync
from suite.tracking.encode import BegunTrial, trial_record
from suite.tracking.optuna_mirror import OptunaFollower, mirror_studies, open_storage
from suite.tracking.rows import TAG
from suite.tracking.store import Point
from suite.tune import driver
from tests.ports import free_port
from tests.records import (
    define,
    make_home,
    make_result,
    make_spec,
    synced,
    write_cell,
    write_definition,
    write_trial,
)
from tests.stores import MlflowServer, Postgres, meet, mlflow_server, postgres


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A PostgreSQL server whose database `empty` has MLflow's tables."""
    with postgres() as server:
        open_store(server.database("empty"))
        yield server


@pytest.fixture(scope="module")
def server(database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(
        tmp_path_factory.mktemp("mlflow"), database.database("served", like="empty")
    ) as running:
        yield running


SERVED = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("postgresql", "server")]


@pytest.fixture(params=["sqlite", *SERVED])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with no sweep of the test's name in it."""
    return store_of(request, request.param, tmp_path)


def store_of(request: pytest.FixtureRequest, kind: str, folder: Path) -> str:
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("empty_db"), folder / "mlflow.db")
        return f"sqlite:///{folder}/mlflow.db"
    if kind == "server":
        return str(request.getfixturevalue("server").uri)
    own: Postgres = request.getfixturevalue("database")
    return own.database(f"d{abs(hash(folder))}", like="empty")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A sweep's name of the test's own: the server's database is shared."""
    return f"s{abs(hash(request.node.nodeid)):x}"


def trial_hashes(uri: str, sweep: str) -> Counter[str]:
    """How many complete runs each trial has."""
    store = open_store(uri)
    runs = store.runs([store.experiments()[sweep]], {"suite.kind": "trial"})
    assert not [run for run in runs if run.status == "RUNNING"]
    return Counter(run.tags["suite.trial"] for run in runs if run.ended)


def once(home: Home) -> Counter[str]:
    return Counter(folder.hash for folder in home.trials() if folder.result() is not None)


def rows(uri: str, sweep: str) -> pd.DataFrame:
    return leaderboard(uri, sweep=sweep)


def test_every_store_holds_each_trial_once_and_shows_the_same_leaderboard(
    uri: str, name: str, tmp_path: Path, empty_db: Path
) -> None:
    home = make_home(tmp_path / "runs", trials=3, seeds=(1, 2), sweep=name)
    shutil.copy(empty_db, home.path / "mlflow.db")
    first = sync(home, tracking_uri=uri)
    again = sync(home, tracking_uri=uri)
    verified = sync(home, tracking_uri=uri, verify=True)
    assert [(r.written, r.already, r.unreachable) for r in (first, again, verified)] == [
        (20, 0, None),
        (0, 20, None),
        (0, 20, None),
    ]
    assert trial_hashes(uri, name) == once(home)
    sync(home, tracking_uri=home.tracking_uri)
    pd.testing.assert_frame_equal(rows(uri, name), rows(home.tracking_uri, name))


@pytest.mark.slow
@pytest.mark.parametrize("like", ["template1", "empty"])
def test_the_doctor_finds_a_postgresql_that_this_user_may_not_write(
    database: Postgres, like: str
) -> None:
    """`template1` has no tables, `empty` those of MLflow."""
    name = f"reader_{like}"
    uri = database.database(name, like=like)
    found = check_store(uri)
    assert found.level is Level.OK and found.found.endswith(", can be written")
    assert database.run("SELECT to_regclass('suite_doctor_tried')", name) == [(None,)]
    database.run(f"CREATE ROLE {name} LOGIN PASSWORD '{database.password}'")
    database.run("REVOKE CREATE ON SCHEMA public FROM PUBLIC", name)
    database.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}", name)
    found = check_store(uri.replace("//suite:", f"//{name}:"))
    assert found.level is Level.FAIL and "permission denied" in found.found
    assert "right to write" in found.remedy and database.password not in found.found


def test_two_drivers_write_to_one_store_at_the_same_time(
    uri: str, name: str, tmp_path: Path
) -> None:
    homes = [
        make_home(tmp_path / which, ["lora"], ["agreement"], sweep=f"{name}-{which}")
        for which in ("a", "b")
    ]
    reports: list[Any] = []
    threads = [
        threading.Thread(target=lambda home=home: reports.append(sync(home, tracking_uri=uri)))
        for home in homes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(r.written, r.unreachable) for r in reports] == [(7, None)] * 2
    assert [trial_hashes(uri, f"{name}-{which}") for which in ("a", "b")] == [
        once(home) for home in homes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql", "server"])
def test_a_store_that_is_killed_and_started_again_misses_nothing_and_holds_up_nobody(
    kind: str, request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    uri = store_of(request, kind, tmp_path)
    victim: Postgres | MlflowServer = request.getfixturevalue(
        "database" if kind == "postgresql" else "server"
    )
    home = Home(tmp_path / "runs")
    write_definition(home, ["lora"], ["agreement"], trials=6, sweep=name)
    said: list[str] = []
    listener = TrackingListener(
        home, uri, sweep=name, say=said.append, patience_s=300.0, retry_s=(0.1, 0.5)
    )
    listener.on_start(None, None)
    slowest_s = 0.0
    for number in range(6):
        if number == 2:
            wait_until(lambda: listener.behind == 0)
            victim.kill()
        if number == 4:
            wait_until(lambda: bool(said))  # it was missed
            victim.start()
        spec = write_trial(home, made := make_spec(number=number, sweep=name), make_result(made))
        began = time.thread_time()
        listener.on_trial_end(spec, make_result(spec))
        slowest_s = max(slowest_s, time.thread_time() - began)
    listener.on_end(None)
    assert (listener.behind, len(said)) == (0, 1)
    assert "the sweep goes on" in said[0]
    assert slowest_s < 0.1  # processor time of the sweep's own thread
    assert trial_hashes(uri, name) == once(home)


def wait_until(condition: Any, deadline_s: float = 300.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_database_that_is_away_is_reported_at_once_without_its_password() -> None:
    uri = resolve_uri(
        Home(Path("runs")), f"postgresql://me:marked-secret@127.0.0.1:{free_port()}/suite"
    )
    began = time.monotonic()
    with pytest.raises(TrackingError, match=r"postgresql\+psycopg://\*\*\*@127") as caught:
        open_store(uri)
    assert time.monotonic() - began < 20  # MLflow by itself tries for a hundred seconds
    assert "marked-secret" not in f"{caught.value}"


@pytest.mark.slow
def test_a_wrong_password_is_said_and_not_shown(database: Postgres) -> None:
    with pytest.raises(TrackingError, match="password authentication failed") as caught:
        open_store(database.uri("empty").replace(database.password, "marked-secret"))
    assert "marked-secret" not in f"{caught.value}"


@pytest.mark.slow
def test_drivers_that_meet_at_an_empty_database_make_its_tables_once(database: Postgres) -> None:
    uri = database.database("fresh")
    ended = meet(uri, drivers=2)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(open_store(uri).experiments()) == ["x"]


def test_sqlite_on_a_network_file_system_is_refused_for_writing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_db: Path
) -> None:
    home = synced(
        make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=1, seeds=[1]), empty_db
    )
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="autofs"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4"),
    ]
    monkeypatch.setattr(databases.psutil, "disk_partitions", lambda all: mounts)
    with pytest.raises(
        TrackingError, match=r"mlflow\.db: lies on nfs4.*--tracking-uri sqlite:////local/disk"
    ):
        resolve_uri(home, write=True)
    assert "nfs4" in str(sync(home, tracking_uri=home.tracking_uri).unreachable)
    with pytest.raises(TrackingError, match=r"--optuna sqlite:////local/disk/studies\.db"):
        open_storage(f"sqlite:///{tmp_path}/studies.db")
    assert len(leaderboard(resolve_uri(home))) == 1


@pytest.mark.parametrize("kind", ["sqlite", SERVED[0]])
def test_the_latest_value_of_a_metric_is_that_of_the_highest_step_however_it_came(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = open_store(store_of(request, kind, tmp_path))
    run = store.create_run(store.experiment("metrics"), name="x", start_s=1.0, tags={"a": "b"})
    for step, value in ((2, 0.5), (1, 0.9), (2, 0.5), (3, 0.7)):
        store.log(run.id, metrics=[Point("score", value, 10.0 + step, step)], tags={"a": f"{step}"})
    found = store.client.get_run(run.id).data
    assert (found.metrics, found.tags["a"]) == ({"score": 0.7}, "3")
    assert len(store.client.get_metric_history(run.id, "score")) == 3


def test_texts_that_no_database_holds_do_not_stop_a_sync(
    uri: str, name: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "runs")
    spec = make_spec("lora", sweep=name)
    failure = FailureRecord(
        type="ValueError", message="a\0b \udcff" + "x" * 9000, log_path="rank0.log"
    )
    store = open_store(uri)
    result = make_result(spec, status=Status.FAILED, failure=failure)
    begun = BegunTrial(spec, home.trial(spec).path, home="home", parent="parent", arm="lora")
    record = trial_record(begun, result, [], start_s=result.started_at)
    run = store.write_run(store.experiment(name), record)
    message = store.client.get_run(run.id).data.tags["failure.message"]
    assert (message[:5], message[-4:], len(message)) == (
        "a\N{REPLACEMENT CHARACTER}b ?",
        "x...",
        8000,
    )


def test_a_reader_sees_the_old_rows_until_the_new_file_is_whole(
    uri: str, name: str, tmp_path: Path
) -> None:
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=2, seeds=[1], sweep=name)
    sync(home, tracking_uri=uri)
    before = rows(uri, name)
    store = open_store(uri)
    (run,) = store.runs([store.experiments()[name]], {"suite.kind": "leaderboard"})
    current = run.tags[TAG].split()[0]
    (other,) = {"leaderboard-0.parquet", "leaderboard-1.parquet"} - {current}
    cut = tmp_path / other
    cut.write_bytes(b"PAR1 cut")
    store.add_file(run, cut)  # what a writer leaves that dies before it sets the tag
    pd.testing.assert_frame_equal(rows(uri, name), before)
    spec = make_spec("lora", seed=2, learning_rate=make_spec(number=1).learning_rate, sweep=name)
    write_trial(home, spec, make_result(spec))
    sync(home, tracking_uri=uri)
    (run,) = store.runs([store.experiments()[name]], {"suite.kind": "leaderboard"})
    assert run.tags[TAG].split()[0] == other
    again = sync(home, tracking_uri=uri)
    assert (again.written, again.cells) == (0, 0)
    store.add_file(run, cut)  # damaged after it was written: said, and made again
    with pytest.raises(TrackingError, match="not as it was written"):
        rows(uri, name)


def test_a_lost_file_of_rows_hides_its_own_sweep_alone(
    uri: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(uri)
    for sweep in (name, f"{name}-lost"):
        home = make_home(
            tmp_path / sweep, ["lora"], ["agreement"], trials=1, seeds=[1], sweep=sweep
        )
        sync(home, tracking_uri=uri)
    (run,) = store.runs([store.experiments()[f"{name}-lost"]], {"suite.kind": "leaderboard"})
    get_artifact_repository(run.files, tracking_uri=uri).delete_artifacts(run.tags[TAG].split()[0])
    assert set(leaderboard(uri)["sweep"]) >= {name}
    # A store of this module may hold what another test has damaged.
    (warning,) = [message for message in caplog.messages if f"left out: sweep {name}" in message]
    assert warning.startswith(f"left out: sweep {name}-lost of home {home_id(home)}: ")
    assert "not there, or not as it was written" in warning


def test_small_files_of_trials_are_uploaded_where_the_sweep_asks_for_it(
    uri: str, name: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "runs")
    write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1], sweep=name)
    spec = write_cell(home, "lora", "agreement", trials=1, seeds=[1], sweep=name)[-1]
    folder = home.trial(spec).path
    (folder / "predictions-test.parquet").write_bytes(b"small")
    (folder / "predictions-validation.parquet").write_bytes(bytes(11 * 2**20))
    (folder / "best.safetensors").write_bytes(b"weights")
    sync(home, tracking_uri=uri)
    assert artifacts(uri, name, spec.hash) == ["result.json", "spec.json"]
    path = home.sweep_definition(name)
    write_json(path, {**json.loads(path.read_bytes()), "tracking": {"artifacts": True}})
    report = sync(home, tracking_uri=uri)
    assert (report.written, report.cells) == (0, 1)
    assert artifacts(uri, name, spec.hash) == [
        "predictions-test.parquet",
        "result.json",
        "spec.json",
    ]
    assert sync(home, tracking_uri=uri).cells == 0


def artifacts(uri: str, sweep: str, trial: str) -> list[str]:
    store = open_store(uri)
    (run,) = store.runs([store.experiments()[sweep]], {"suite.trial": trial})
    return sorted(file.path for file in store.client.list_artifacts(run.id))


@pytest.fixture(params=["sqlite", SERVED[0], "journal"])
def studies(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty Optuna storage."""
    if request.param == "postgresql":
        own: Postgres = request.getfixturevalue("database")
        return own.database(f"o{abs(hash(tmp_path))}")
    return f"{request.param}:///{tmp_path}/studies.{request.param}"


def load(url: str) -> dict[str, optuna.Study]:
    """Studies by the names of their cells."""
    storage = open_storage(url)
    return {
        s.study_name.split(" @")[0]: optuna.load_study(study_name=s.study_name, storage=storage)
        for s in optuna.get_all_study_summaries(storage)
    }


def test_studies_are_mirrored_once_with_their_values_states_and_attributes(
    studies: str, tmp_path: Path
) -> None:
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=3)
    write_definition(home, ["lora"], ["agreement"], trials=6)
    failed, pruned, running = (
        make_spec("lora", number=n, learning_rate=1e-5 * n) for n in (3, 4, 5)
    )
    write_trial(home, failed, make_result(failed, status=Status.DIVERGED, epochs=[]))
    curve = make_result(make_spec("lora")).epochs
    lines = "".join(f"{epoch.model_dump_json()}\n" for epoch in curve)
    (home.trial(failed).path / CURVE).write_text(lines)
    write_trial(home, pruned, make_result(pruned, status=Status.PRUNED, validation_score=0.5))
    write_trial(home, running)
    first = mirror_studies(home, studies)
    again = mirror_studies(home, studies)
    assert [(r.written, r.already, r.studies) for r in (first, again)] == [(5, 0, 1), (0, 5, 1)]
    ((cell, study),) = load(studies).items()
    assert cell == f"demo/{running.cell}"
    study.add_trial(study.trials[0])  # as by a driver that was superseded meanwhile
    mirror_studies(home, studies)
    (study,) = load(studies).values()
    assert len(study.trials) == 5, "a trial that runs is not shown"
    states = {t.user_attrs["number"]: t.state for t in study.trials}
    assert states == {
        **dict.fromkeys(range(3), TrialState.COMPLETE),
        3: TrialState.FAIL,
        4: TrialState.PRUNED,
    }
    (lost,) = (t for t in study.trials if t.state is TrialState.FAIL)
    assert lost.intermediate_values == {e.epoch: e.validation_score for e in curve}
    best = make_result(make_spec("lora", number=2))
    assert (study.direction.name, study.best_value, study.best_params) == (
        "MAXIMIZE",
        best.score,
        {"learning_rate": 1e-3},
    )
    assert study.best_trial.intermediate_values == {
        e.epoch: e.validation_score for e in best.epochs
    }
    assert (study.user_attrs["method"], sorted(study.user_attrs["test scores by seed"])) == (
        "lora",
        ["1", "2", "3"],
    )


def test_a_batch_size_that_is_searched_is_a_parameter_of_a_study(
    studies: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "runs")
    training = TrainingConfig(epochs=2, batch_size=32)
    for number, batch_size in enumerate((16, 32, 16)):
        own = training.model_copy(update={"batch_size": batch_size})
        spec = make_spec("lora", number=number).model_copy(update={"training": own})
        write_trial(home, spec, make_result(spec))
    define(home)
    plan = read_plan(home, "demo")
    search = plan.config.search.model_copy(update={"batch_sizes": [16, 32]})
    searched = plan.config.model_copy(update={"search": search, "training": training})
    store_definition(replace(plan, config=searched), home)
    mirror_studies(home, studies)
    (study,) = load(studies).values()
    assert [trial.params["batch_size"] for trial in study.trials] == [16, 32, 16]
    # An earlier version showed the learning rate alone.
    older = study.get_trials()
    storage = open_storage(studies)
    optuna.delete_study(study_name=study.study_name, storage=storage)
    study = optuna.create_study(study_name=study.study_name, storage=storage, direction="maximize")
    for trial in older:
        del trial.params["batch_size"], trial.distributions["batch_size"]
        study.add_trial(trial)
    reports = [mirror_studies(home, studies) for _ in range(2)]
    assert [(report.written, report.already) for report in reports] == [(3, 0), (0, 3)]


def test_a_trial_is_mirrored_when_it_ends_and_is_written_anew_when_it_was_run_again(
    studies: str, tmp_path: Path
) -> None:
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=1, seeds=[1])
    write_definition(home, ["lora"], ["agreement"], trials=2, seeds=[1])
    spec = write_trial(home, make_spec("lora", number=1))
    mirror_studies(home, studies)
    home.trial(spec).write_result(make_result(spec, score=0.7))
    assert mirror_studies(home, studies).written == 1
    (study,) = load(studies).values()
    assert [(t.state, t.value) for t in study.trials if t.user_attrs["number"] == 1] == [
        (TrialState.COMPLETE, 0.7)
    ]
    home.trial(spec).write_result(make_result(spec, score=0.8))
    assert mirror_studies(home, studies).written == 2
    (study,) = load(studies).values()
    assert sorted(t.value for t in study.trials) == sorted(
        [0.8, make_result(make_spec("lora", number=0)).score]
    )


def test_optuna_is_kept_out_of_mlflows_database(tmp_path: Path, empty_db: Path) -> None:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=1, seeds=[1])
    with pytest.raises(TrackingError, match="holds MLflow's tables"):
        mirror_studies(home, f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(TrackingError, match=r"expected postgresql://"):
        mirror_studies(home, "redis://localhost")


@pytest.mark.parametrize("option", ["optuna", "tracking_uri"])
def test_a_store_that_can_be_none_is_refused_before_anything_starts(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "run_sweep", lambda *_, **__: pytest.fail("the sweep began"))
    url = "postgresql+foo://me:hunter2@host/y"
    with pytest.raises(TrackingError, match=r"postgresql\+foo://\*\*\*@host") as told:
        api.run("quickstart", home=tmp_path / "runs", **{option: url})
    assert "hunter2" not in str(told.value)


def test_a_running_sweep_is_mirrored_and_an_optuna_that_is_away_only_said(tmp_path: Path) -> None:
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=1, seeds=[1])
    write_definition(home, ["lora"], ["agreement"], trials=2, seeds=[1])
    said: list[str] = []
    url = f"sqlite:///{tmp_path}/studies.db"
    follower = OptunaFollower(home, url, sweep="demo", say=said.append)
    follower.on_start(None, None)
    spec = write_trial(home, made := make_spec("lora", number=1), make_result(made))
    follower.on_trial_end(spec, make_result(spec))
    follower.on_end(None)
    assert said == []
    assert [len(study.trials) for study in load(url).values()] == [2]
    away = OptunaFollower(
        home,
        f"postgresql://me:marked-secret@127.0.0.1:{free_port()}/x",
        sweep="demo",
        say=said.append,
        patience_s=2.0,
    )
    away.on_start(None, None)
    away.on_end(None)
    assert "run: suite sync" in said[-1] and "marked-secret" not in "".join(said)


STORES = Path(__file__).parents[1] / "deploy" / "stores"


def test_the_stores_to_deploy_listen_on_loopback_are_watched_and_hold_no_secret() -> None:
    services = yaml.safe_load((STORES / "docker-compose.yaml").read_text())["services"]
    assert set(services) == {"postgres", "mlflow", "optuna-dashboard"}
    for service in services.values():
        assert all(
            port.startswith(("127.0.0.1:", "${BIND:-127.0.0.1}:")) for port in service["ports"]
        )
        assert "healthcheck" in service
        secrets = {
            key: value
            for key, value in service["environment"].items()
            if re.search("PASSWORD|SECRET|URI|OPTUNA", key)
        }
        assert secrets and all("${" in value for value in secrets.values())
    example = (STORES / "stores.env.example").read_text()
    assert re.findall(r"^[A-Z_]+=.+$", example, re.MULTILINE) == []
    asked = set(re.findall(r"\$\{([A-Z_]+):\?", (STORES / "docker-compose.yaml").read_text()))
    assert asked == set(re.findall(r"^([A-Z_]+)=$", example, re.MULTILINE))


def test_the_stores_to_deploy_have_the_versions_of_the_suite() -> None:
    locked = dict(
        line.split("==")
        for line in (STORES.parents[1] / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pinned = dict(
        re.findall(r'"([a-z]+)(?:\[\w+\])?==([\d.]+)"', (STORES / "Dockerfile").read_text())
    )
    assert set(pinned) == {"mlflow", "psycopg", "optuna"}
    assert pinned == {name: locked[name] for name in pinned}


def test_a_broken_definition_of_another_sweep_keeps_no_study_from_optuna(
    studies: str, tmp_path: Path
) -> None:
    home = make_home(tmp_path / "runs", ["lora"], ["agreement"], trials=2)
    write_definition(home, ["lora"], ["agreement"], trials=2)
    (home.path / "sweeps" / "broken.json").write_text("{}")
    assert mirror_studies(home, studies, sweep="demo").written == 2
