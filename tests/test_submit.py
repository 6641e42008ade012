"""Sweeps submitted to a Ray cluster: a head of its own with dashboard and token, training replaced by `tests.fake_trainer`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from suite import run_sweep
from suite.cli.app import app
from suite.cli.submit import _variables, cluster_home
from suite.cluster.jobs import FLAGS, HOME, SWEEP, Job, JobClient, Submission, named_in
from suite.cluster.package import EXCLUDES, check_size, files
from suite.errors import ClusterError, ConfigError
from suite.plan.definition import lease_root, live_claim, only_driver
from suite.plan.status import driver
from suite.record.folder import Home
from suite.storage import lease
from suite.storage.lease import acquire, holder
from tests.commands import Suite, suite  # noqa: F401
from tests.fake_trainer import calls
from tests.heads import Head, ray_head
from tests.sweeps import make_roots, toy_sweep

ROOT = Path(__file__).parents[1]
TOKEN = "0123456789abcdef" * 2
FAKED = """
import sys
if any(word.rpartition("/")[2] in ("suite", "run_sweep.py") for word in sys.orig_argv):
    import suite.tune.driver as driver
    driver.run_sweep.__kwdefaults__["trainer"] = "gated:Gated"
"""
"""`sitecustomize.py` of the working folder: the driver that starts there takes another trainer, which its workers find there too."""
GATED = """
from tests.fake_trainer import GatedTrainer as Gated
"""


@dataclass(frozen=True)
class Place:
    """A cluster and what is submitted to it."""

    head: Head
    folder: Path
    home: Home
    data: Path

    def options(self, home: str = "home") -> list[object]:
        return [
            "--address",
            self.head.url,
            "--home",
            self.home.path.parent / home,
            "--data-root",
            self.data,
            "--working-dir",
            self.folder,
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The working folder holds what the cluster has not: the sweep, its task, and what replaces the training."""
    root = tmp_path_factory.mktemp("submit")
    folder = root / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        data = make_roots(root, patch)
        (root / "user" / "tasks").rename(folder / "tasks")
        (folder / "sitecustomize.py").write_text(FAKED)
        (folder / "gated.py").write_text(GATED)
        write_sweep(folder, "toy")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv(
            "RAY_AUTH_MODE", "token"
        )  # else Ray of this process takes the token of this cluster for that of all later ones
        patch.delenv("SUITE_PATH")
        patch.chdir(folder)
        with ray_head(token=TOKEN, PYTHONPATH=str(ROOT)) as head:
            yield Place(head, folder, Home(root / "home"), data)


def write_sweep(folder: Path, name: str, **changes: Any) -> Path:
    waits = {"timeouts": {"setup_s": 200.0, "epoch_s": 600.0}, "failures": {"grace_s": 20.0}}
    config = toy_sweep(
        name=name,
        methods=["full"],
        search={"trials": 2},
        confirm={"seeds": [1]},
        **waits,
        **changes,
    )
    (folder / f"{name}.yaml").write_text(
        yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True))
    )
    return folder / f"{name}.yaml"


def command(place: Place, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "suite", *map(str, arguments)],
        cwd=place.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        ),  # tests in the background of a shell ignore it
    )


@pytest.mark.slow
def test_a_submitted_sweep_is_followed_attached_to_stopped_and_taken_up_again(
    place: Place,
    suite: Suite,  # noqa: F811
) -> None:
    cluster = JobClient(place.head.url)
    code, out, err = suite("submit", "toy.yaml", *place.options(), "--detach")
    assert (code, out) == (0, "") and "job suite-toy-1" in err and "suite stop toy --address" in err
    follower = command(place, "submit", "toy.yaml", *place.options())
    assert follower.stdout is not None
    assert any(text.startswith("[1/3] full on toy, search 0") for text in follower.stdout), (
        cluster.log("suite-toy-1")
    )
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate()
    assert (
        follower.returncode == 130
        and "is running already; following it (job suite-toy-1)" in said
        and "the sweep runs on" in said
    )
    assert cluster.job("suite-toy-1").is_live

    code, _, err = suite("stop", "toy", "--address", place.head.url)
    assert code == 0 and "stopped (suite-toy-1)" in err
    assert "stopped by SIGTERM; nothing that finished is lost" in cluster.log("suite-toy-1")
    assert sum(folder.result() is not None for folder in place.home.trials()) == 1, (
        "it was stopped in between"
    )
    code, _, err = suite("stop", "toy", "--address", place.head.url)
    assert code == 2 and "no such sweep is running" in err and "running: none" in err

    (place.home.path / "go").touch()
    code, out, _ = suite("submit", "toy.yaml", *place.options())
    assert (
        code == 0
        and "taking up sweep toy: 1 of 3 trials are done" in out
        and "[3/3]" in out
        and "score" in out
    )
    finished = [call["trial"] for call in calls(place.home, "finish")]
    assert len(finished) == len(set(finished)) == 3, "every trial ended once"

    code, out, _ = suite("status", "--address", place.head.url, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and [
        (row["job"], row["state"], row["done"], row["total"]) for row in rows
    ] == [
        ("suite-toy-2", "succeeded", 3, 3),
        ("suite-toy-1", "stopped", 1, 3),
    ]
    assert {(row["sweep"], row["home"]) for row in rows} == {("toy", str(place.home.path))}


@pytest.mark.slow
def test_ray_s_own_job_command_runs_the_script_suite_stop_ends_it_and_a_failure_keeps_its_exit_code(
    place: Place,
    suite: Suite,  # noqa: F811
) -> None:
    """Three jobs, because each takes a driver's start: as `ray submit` would run it, one to be stopped, one that cannot run."""
    environment = {
        **place.head.environment,
        "PYTHONPATH": str(ROOT),
        "RAY_API_SERVER_ADDRESS": place.head.url,
    }
    ray = [
        str(Path(sys.executable).parent / "ray"),
        "job",
        "submit",
        "--working-dir",
        str(place.folder),
        "--",
    ]
    home = place.home.path.parent / "second"
    home.mkdir()
    (home / "go").touch()
    script = [
        "python",
        str(ROOT / "suite" / "run_sweep.py"),
        "--",
        "toy.yaml",
        "--home",
        str(home),
        "--data-root",
        str(place.data),
    ]
    done = subprocess.run(
        [*ray, *script], env=environment, cwd=place.folder, capture_output=True, text=True
    )
    assert done.returncode == 0 and "[3/3]" in done.stdout, done.stdout + done.stderr
    assert sum(folder.result() is not None for folder in Home(home).trials()) == 3
    (home / "go").unlink()
    write_sweep(place.folder, "waits")
    script[3] = "waits.yaml"
    patient = [
        "--runtime-env-json",
        json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}),
        "--no-wait",
    ]
    subprocess.run(
        [*ray[:3], *patient, *ray[3:], *script],
        env=environment,
        cwd=place.folder,
        capture_output=True,
        check=True,
    )
    cluster = JobClient(place.head.url)
    (running,) = cluster.live("waits", str(home))
    while "[1/3]" not in cluster.log(running.id):
        assert cluster.job(running.id).is_live, cluster.log(running.id)
        time.sleep(0.5)
    code, _, err = suite("stop", "waits", "--address", place.head.url)
    assert code == 0 and f"stopped ({running.id})" in err
    assert "stopped by SIGTERM; nothing that finished is lost" in cluster.log(running.id)
    failed = command(
        place, "submit", "toy.yaml", *place.options("other"), "--data-root", place.data / "none"
    )
    said, told = failed.communicate()
    assert failed.returncode == 2 and "error: " in said and "failed, exit code 2" in told


@pytest.mark.slow
def test_a_missing_and_a_wrong_token_are_told_apart_and_no_token_is_shown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)
    with pytest.raises(ClusterError, match="wants a token, another one was given") as wrong:
        JobClient(place.head.url)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(place.folder / "no-token"))
    with pytest.raises(ClusterError, match="wants a token, none was given") as missing:
        JobClient(place.head.url)
    assert TOKEN not in str(wrong.value) + str(missing.value) and "f" * 32 not in str(wrong.value)


# ---- without a cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sweep", "home"),
    [
        ("suite run sweeps/small.yaml --address auto --home /shared/runs", "small", "/shared/runs"),
        ("suite run small --address auto", "small", None),
        (
            "python -m suite run --home=/runs --set training.epochs=3 'my sweeps/small.yml'",
            "small",
            "/runs",
        ),
        ("python3 suite/run_sweep.py -- sweeps/small.yaml", "small", None),
        ("bash -c 'cd /x && suite  run small.yaml'", "small", None),
        ("suite run small.yaml --set name=other --set 'search.trials=3'", "other", None),
        ("suite run small.yaml --set=name=first --set 'name=last' --home /runs", "last", "/runs"),
        ("suite run --home /runs small", "small", "/runs"),
        ("suite run --home /runs/ small", "small", "/runs"),
        ("suite run --insecure --set search.trials=3 --home=/runs small", "small", "/runs"),
        ("suite run --data-root x.yaml small", "small", None),
        ("suite run small --home /runs --storage s3://b/p/", "small", "s3://b/p"),
        ("suite run small --home --insecure", "small", None),
        ("python train.py small.yaml", None, None),
    ],
)
def test_the_sweep_of_a_job_of_ones_own_is_read_from_its_command(
    command: str, sweep: str | None, home: str | None
) -> None:
    assert named_in(command) == {
        key: value for key, value in {SWEEP: sweep, HOME: home}.items() if value is not None
    }


def test_the_options_of_a_run_without_a_value_are_known() -> None:
    group: Any = get_command(app)
    command = group.commands["run"]
    options = command.get_params(typer.Context(command, **group.context_settings))
    without = [option for option in options if getattr(option, "is_flag", False)]
    assert sorted(FLAGS) == sorted(name for option in without for name in option.opts)


def test_the_script_finds_a_sweep_of_the_checkout_behind_options_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr("suite.cli.main", lambda words: called.append((Path.cwd(), words)))
    for words in (["sweeps/quickstart.yaml"], ["--set", "a.b=1", "sweeps/quickstart.yaml"]):
        monkeypatch.chdir(tmp_path)
        run_sweep.main(["--", *words])
        assert called.pop() == (ROOT, ["run", *words, "--address", "auto"])
    monkeypatch.chdir(tmp_path)
    run_sweep.main(["--home", "/x", "quickstart"])
    assert called.pop()[0] == tmp_path


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("auto", "expected the cluster's dashboard"),
        ("ray://head:10001", "expected the cluster's dashboard"),
        ("http://user:secret@head:8265", r"--address \*\*\*: expected"),
        ("http://127.0.0.1:1", "nothing answers"),
    ],
)
def test_an_address_that_is_no_cluster_says_what_was_expected(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as raised:
        JobClient(address)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("held_s", [60.0, 0.0])
def test_a_connection_that_breaks_is_made_again_for_as_long_as_it_holds_in_between(
    monkeypatch: pytest.MonkeyPatch, held_s: float
) -> None:
    """A proxy that ends quiet connections must not end the following of a sweep of days."""
    now = [0.0]
    looks = iter([*["RUNNING"] * 100, "SUCCEEDED"])

    class Client(JobClient):
        def __init__(self) -> None:
            self.address = "http://head:8265"

        async def _tail(self, name: str, printed: Any) -> None:
            now[0] += held_s
            raise ConnectionResetError(name)

        def job(self, name: str) -> Job:
            return Job(name, "toy", None, next(looks), None, None, 0, "")

        def log(self, name: str) -> str:
            return "the end"

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr("suite.cluster.jobs.time", clock)
    written: list[str] = []
    if held_s:
        assert Client().follow("suite-toy-1", written.append, attached=False).exit_code == 0
        assert written == ["the end"]
    else:
        with pytest.raises(ClusterError, match="breaks again and again"):
            Client().follow("suite-toy-1", written.append, attached=False)


def test_what_is_wrong_with_a_submission_is_said_before_anything_is_sent(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: Any,
) -> None:
    monkeypatch.delenv("SUITE_HOME", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    elsewhere = ROOT / "sweeps" / "quickstart.yaml"
    there = ["--address", "http://127.0.0.1:1", "--working-dir", folder]
    for arguments, message in (
        (["quickstart", *there], "--home: got none, expected an absolute path"),
        (["quickstart", *there, "--home", "runs"], "--home: got runs, expected an absolute path"),
        (["quickstart", *there, "--storage", "runs"], "--storage: got runs, expected s3://"),
        (
            ["quickstart", *there, "--home", "/runs", "--tracking-uri", "sqlite:///mlflow.db"],
            "--tracking-uri: got sqlite:///mlflow.db, expected a server, or the absolute path",
        ),
        (
            ["quickstart", *there, "--home", "/runs", "--optuna", "sqlite:///optuna.db"],
            "--optuna: got sqlite:///optuna.db, expected a server, or the absolute path",
        ),
        (
            ["quickstart", *there, "--home", "/runs", "--tracking-uri", "htp://mlflow"],
            "tracking store htp://mlflow: MLflow knows no store of this kind",
        ),
        (
            ["quickstart", *there, "--home", "/runs", "--optuna", "foo://bar"],
            "--optuna foo://bar: expected postgresql://",
        ),
        (["quickstart", *there, "--storage", "gs://b/p"], "got 'gs', expected a folder"),
        (["no-such", *there, "--home", "/runs"], "unknown sweep 'no-such'"),
        (
            ["quickstart", *there, "--home", "/runs", "--set", "training.epochs=none"],
            "training.epochs",
        ),
        (
            ["quickstart", *there, "--home", "/runs", "--tasks", ROOT / "tasks"],
            "is not below --working-dir",
        ),
        (["quickstart", "--home", "/runs", "--working-dir", folder], "--address: got none"),
        (
            [elsewhere, *there[:2], "--home", "/runs", "--working-dir", folder / "none"],
            f"--working-dir {folder}/none: no such folder",
        ),
        (["quickstart", "--home", "/runs", "--address", "http://[::1"], "no Ray dashboard"),
        (["quickstart", "--home", "/runs", "--address", "http://head:x"], "no Ray dashboard"),
    ):
        code, out, err = suite("submit", *arguments)
        assert (code, out) == (2, "") and message in err, err
    copy = tmp_path / "mine.yaml"
    copy.write_text(elsewhere.read_text())
    code, _, err = suite("submit", copy, *there, "--home", "/runs")
    assert code == 2 and f"SWEEP {copy}: is not below --working-dir" in err
    monkeypatch.setenv("SUITE_STORAGE", "s3://me:s3cr3t@bucket/sweeps")
    code, _, err = suite("submit", "quickstart", *there)
    assert code == 2 and "holds a password" in err and "s3cr3t" not in err, (
        "a job's command line is for all to read"
    )


def test_a_cluster_that_asks_for_no_token_is_refused_before_it_is_shown_one(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: Any,
) -> None:
    asked: list[tuple[str, str | None]] = []

    class Open(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with HTTPServer(("127.0.0.1", 0), Open) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        code, out, err = suite(
            "submit",
            "quickstart",
            "--address",
            address,
            "--home",
            "/runs",
            "--working-dir",
            tmp_path,
        )
        server.shutdown()
    assert (code, out) == (2, "") and "asks for no token" in err and "--insecure" in err
    assert asked == [("/api/jobs/", None)]


def test_folders_of_tasks_and_plug_ins_are_named_as_the_cluster_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUITE_TASKS", f"{tmp_path}/tasks")
    monkeypatch.setenv("SUITE_PATH", f"{tmp_path}/mine:{tmp_path}/yours")
    found = _variables(tmp_path)
    assert (found["SUITE_TASKS"], found["SUITE_PATH"]) == ("tasks", "mine:yours")
    monkeypatch.setenv("SUITE_TASKS", "/elsewhere/tasks")
    with pytest.raises(
        ConfigError, match="SUITE_TASKS /elsewhere/tasks: is not below --working-dir"
    ):
        _variables(tmp_path)


def test_a_folder_with_forgotten_data_is_refused_and_the_largest_files_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / ".gitignore").write_text("*.bin\n")
    for name, size in (
        ("sweep.yaml", 10),
        ("big.parquet", 3000),
        ("ignored.bin", 9000),
        (".venv/lib.so", 9000),
        ("runs/mlflow.db", 9000),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert {path.name for path in files(tmp_path)} == {".gitignore", "sweep.yaml", "big.parquet"}
    assert check_size(tmp_path) == 6 + 10 + 3000
    with pytest.raises(
        ClusterError,
        match=r"expected at most 0; .*\n +0\.0 MiB +big\.parquet\n +0\.0 MiB +sweep\.yaml",
    ):
        check_size(tmp_path, most_bytes=1000)


def test_links_that_lead_back_are_named_and_others_are_followed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for name in ("a", "b"):
        (top / name).mkdir(parents=True)
    (tmp_path / "x").touch()
    (top / "c").symlink_to(tmp_path / "x")
    (top / "a" / "to_b").symlink_to(top / "b")
    assert files(top) == [top / "c"]
    (top / "b" / "to_a").symlink_to(top / "a")
    with pytest.raises(ClusterError, match=r"top: a/to_b/to_a links to .*/top/a, in which it lies"):
        check_size(top)
    (top / ".rayignore").write_text("to_a\n")
    assert check_size(top) == 5


def test_the_files_that_are_counted_are_those_that_ray_packs(tmp_path: Path) -> None:
    """Ray's walk is private: if it goes or changes, the documentation of `working_dir` says what `files` is to do."""
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    for name, text in {
        ".gitignore": "*.bin\n!keep.bin\ndata/\n/top\nsub/deep/*.txt\n",
        "sub/.rayignore": "*.md\n!b.md\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = "a.bin keep.bin data/x datafile/data top x/top sub/deep/a.txt sub/b.md sub/c.md"
    names += " sub/data/y runs/z x/runs/z a.egg-info/x x/.venv/a"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "dead").symlink_to(tmp_path / "nothing")
    packed: list[Path] = []
    excludes = [_get_excludes(tmp_path, list(EXCLUDES))]
    _dir_travel(tmp_path, excludes, packed.append, include_gitignore=True)
    assert set(files(tmp_path)) == {path for path in packed if path.is_file()}


@pytest.mark.slow
def test_a_driver_on_this_machine_is_stopped_by_the_name_of_its_sweep(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = tmp_path / "home"
    code, _, err = suite("stop", "toy", "--home", home)
    assert code == 2 and "no driver of this sweep is running" in err
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        code, _, err = suite("stop", "toy", "--home", home)
        assert code == 0 and f"stopped (process {holder.pid})" in err
        assert holder.wait(10) == 143
    finally:
        holder.kill()
        holder.wait()


def test_a_driver_with_a_storage_is_stopped_by_its_home_alone(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SUITE_STORAGE", raising=False)
    ended: list[int] = []
    monkeypatch.setattr("suite.cli.stop._end", lambda claim: ended.append(claim.pid))
    home = tmp_path / "home"
    home.mkdir()
    with only_driver(Home(home), "toy", storage=str(tmp_path / "store")):
        code, _, err = suite("stop", "toy", "--home", home)
        assert code == 0 and ended == [os.getpid()], err
    code, _, err = suite("stop", "toy", "--home", home)
    assert code == 2 and "no driver of this sweep is running" in err


def test_who_runs_a_sweep_elsewhere_is_known_in_its_storage(
    finished: Home,
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SUITE_STORAGE", raising=False)
    store = str(tmp_path / "store")
    with only_driver(Home(tmp_path / "elsewhere"), "demo", storage=store):
        out = suite("status", "--home", finished.path)[1]
        assert "sweep demo: done" in out
        out = suite("status", "--home", finished.path, "--storage", store)[1]
        assert f"running, process {os.getpid()}" in out


def test_a_claim_of_before_a_power_cut_is_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    root = lease_root(home, None)
    with monkeypatch.context() as before:
        before.setattr(lease, "_machine", lambda: "earlier-boot:1")
        acquire(root, "toy")
        acquire(tmp_path / "store", "toy")
    assert live_claim(home, "toy", tmp_path / "store") is not None, "of another host of this name"
    assert holder(root, "toy") is not None, "only a takeover is sure"
    assert live_claim(home, "toy", root) is None and driver(home, "toy") is None
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert live_claim(home, "toy", root) is not None


HOLD = """
import signal, sys, time
from pathlib import Path
from suite.record.folder import Home
from suite.plan.definition import only_driver
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with only_driver(Home(Path(sys.argv[1])), "toy"):
    print("held", flush=True)
    time.sleep(600)
"""


class Cluster(JobClient):
    """A cluster of three homes that run a sweep of the same name; it keeps what is submitted."""

    def __init__(self) -> None:
        self.address = "http://head:8265"
        self.stopped: list[str] = []
        self.submitted: list[Submission] = []

    def jobs(self) -> list[Job]:
        homes = ("/shared/alice", "/shared/bob", "s3://b/p")
        return [
            Job(f"suite-toy-{i}", "toy", homes[i], "RUNNING", None, None, None, "")
            for i in range(3)
            if f"suite-toy-{i}" not in self.stopped
        ]

    def stop(self, name: str) -> Job:
        self.stopped.append(name)
        return Job(name, "toy", None, "STOPPED", None, None, None, "")

    def submit(self, wanted: Submission) -> tuple[Job, bool]:
        self.submitted.append(wanted)
        return Job("suite-toy-9", wanted.sweep, wanted.home, "PENDING", None, None, None, ""), True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr("suite.cluster.jobs.JobClient", lambda address: found)
    for name in ("SUITE_HOME", "SUITE_STORAGE", "SUITE_OPTUNA", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_stop_ends_the_sweep_of_the_home_that_is_typed_and_chooses_none_itself(
    cluster: Cluster,
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = ["--address", cluster.address]
    monkeypatch.setenv("SUITE_HOME", "/shared/alice")
    code, _, err = suite("stop", "toy", *there)
    assert (code, cluster.stopped) == (2, []) and "runs in 3 homes" in err
    for named in ("--home /shared/alice", "--home /shared/bob", "--storage s3://b/p"):
        assert f"suite stop toy --address http://head:8265 {named}" in err
    code, _, err = suite("stop", "toy", *there, "--home", "/shared/none")
    assert (code, cluster.stopped) == (2, []) and "toy in /shared/bob" in err
    # The variable alone leaves the home one of this machine.
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.address)
    code, _, err = suite("stop", "toy", "--home", tmp_path)
    assert (code, cluster.stopped) == (2, []) and "no driver of this sweep is running in" in err
    assert f"suite status --home {tmp_path}\n" in err
    monkeypatch.setenv("SUITE_STORAGE", "s3://b/p")
    assert suite("stop", "toy", *there, "--home", "/shared/bob")[0] == 0
    assert suite("stop", "toy", *there, "--home", "/tmp/its-home")[0] == 0
    assert cluster.stopped == ["suite-toy-1", "suite-toy-2"]
    assert suite("stop", "toy")[0] == 0, "one home is left, and the address is known"
    assert cluster.stopped[2:] == ["suite-toy-0"]


def test_each_storage_has_a_home_of_its_own_on_the_head() -> None:
    homes = [cluster_home(None, url) for url in ("s3://b/run1", "s3://b/run2")]
    assert homes[0] != homes[1] and homes[0].parent == Path("/tmp")
    assert cluster_home(Path("/shared/runs"), "s3://b/run1") == Path("/shared/runs")


def test_a_job_gets_the_stores_that_were_named_here_and_no_password(
    cluster: Cluster,
    tmp_path: Path,
    suite: Suite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("suite.cluster.access.require_token", lambda url: None)
    there = ["quickstart", "--address", cluster.address, "--working-dir", tmp_path, "--detach"]
    for url in ("s3://b/p/", "s3://b/p"):
        assert suite("submit", *there, "--storage", url)[0] == 0
    assert cluster.submitted[0] == cluster.submitted[1] and cluster.submitted[0].home == "s3://b/p"
    stores = ["--tracking-uri", "sqlite:////disk/mlflow.db", "--optuna", "journal:///disk/o.log"]
    assert suite("submit", *there, "--home", "/runs", *stores)[0] == 0
    assert cluster.submitted[-1].command.endswith(" ".join(stores))
    monkeypatch.setenv("SUITE_OPTUNA", "postgresql://db/optuna")
    assert suite("submit", *there, "--home", "/runs")[0] == 0
    assert cluster.submitted[-1].command.endswith(" --optuna postgresql://db/optuna")
    monkeypatch.setenv("SUITE_OPTUNA", "postgresql://me:s3cr3t@db/optuna")
    code, _, err = suite("submit", *there, "--home", "/runs")
    assert code == 0 and "only the SUITE_OPTUNA of the head counts" in err
    assert "s3cr3t" not in err and "--optuna" not in cluster.submitted[-1].command
