"""What listens where, who is let in, and where secrets do not go."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from suite.cluster.access import make_token, require_token
from suite.cluster.session import worker_environment
from suite.errors import ConfigError, ResourceError, TrackingError
from suite.record.folder import Home
from suite.record.result import FailureRecord
from suite.redact import has_password, redact, refuse_password
from suite.tracking import open_store
from suite.tune.driver import run_sweep
from tests.commands import Suite, suite
from tests.ports import free_port
from tests.stores import mlflow_server
from tests.sweeps import make_roots, toy_sweep

__all__ = ["suite"]
ROOT = Path(__file__).parents[1]
MARKS = {
    "HF_TOKEN": "hf_MARKEDtokenOFtheHUB",
    "AWS_SECRET_ACCESS_KEY": "MARKED/aws+secret",
    "AWS_ACCESS_KEY_ID": "AKIAMARKEDKEY",
    "MLFLOW_TRACKING_PASSWORD": "MARKED-mlflow-password",
}
DATABASE_PASSWORD = "MARKEDdatabase%40password"


# A whole sweep, watched from outside


@dataclass
class Watched:
    """What a sweep left behind and what its processes looked like while it ran."""

    home: Path
    output: str
    secrets: list[str]
    listening: set[tuple[str, str]] = field(default_factory=set)
    titles: set[str] = field(default_factory=set)


def look(process: psutil.Process, seen: Watched) -> None:
    for child in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            seen.titles.add(" ".join(child.cmdline()))
            seen.listening |= {
                (child.name(), c.laddr.ip)
                for c in child.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A sweep with marked secrets in its environment, on a Ray of its own; its MLflow store refuses connections."""
    folder = tmp_path_factory.mktemp("leaky")
    with pytest.MonkeyPatch.context() as patch:
        data_root = make_roots(folder, patch)
        task_folders = os.environ["SUITE_PATH"]
    uri = f"postgresql+psycopg://suite:{DATABASE_PASSWORD}@127.0.0.1:1/mlflow?sslpassword=MARKEDkey"
    own = {
        "HOME": str(folder),
        "SUITE_PATH": task_folders,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": uri,
    }
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "RAY_", "AWS_", "HF_"))
    }
    command = [sys.executable, "-m", "tests.leaky_sweep", str(folder / "home"), str(data_root)]
    process = psutil.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**outside, **MARKS, **own, "SUITE_MARK": "1"},
    )
    seen = Watched(
        folder / "home",
        "",
        [*MARKS.values(), DATABASE_PASSWORD, "MARKEDdatabase@password", "MARKEDkey"],
    )
    reader = threading.Thread(target=lambda: setattr(seen, "output", process.stdout.read()))
    reader.start()
    while process.poll() is None:
        look(process, seen)
        time.sleep(0.7)
    reader.join()
    assert process.returncode == 0, seen.output
    seen.secrets.append((folder / ".ray" / "auth_token").read_text())
    return seen


@pytest.mark.slow
def test_a_sweep_of_this_machine_listens_on_loopback_alone(watched: Watched) -> None:
    names = {name for name, _ in watched.listening}
    assert {"gcs_server", "raylet"} <= names, "the cluster was seen"
    assert any(name.startswith("ray::Rank") for name in names), "so were the processes that train"
    others = {
        (name, ip)
        for name, ip in watched.listening
        if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }
    assert not others


@pytest.mark.slow
def test_the_sweep_did_fail_in_the_ways_that_show_secrets(watched: Watched) -> None:
    home = Home(watched.home)
    failures = [
        f
        for folder in home.trials()
        for f in [*folder.failures(), getattr(folder.result(), "failure", None)]
        if f is not None
    ]
    assert len(failures) >= 2
    for failure in failures:
        assert "HF_TOKEN=***" in failure.message + failure.traceback
    assert watched.output.count("tracking store postgresql+psycopg://***@127.0.0.1:1/mlflow") >= 2
    assert "holds a password" in watched.output
    assert (watched.home / "mlflow.db").stat().st_size > 0


@pytest.mark.slow
def test_no_secret_is_in_a_file_an_output_or_a_title(watched: Watched) -> None:
    places = {str(path): path.read_bytes() for path in watched.home.rglob("*") if path.is_file()}
    assert any(path.endswith("mlflow.db") for path in places)
    assert any(re.search(r"failure-0\.json$", path) for path in places)
    places |= {
        "output": watched.output.encode(),
        **{f"title {n}": title.encode() for n, title in enumerate(watched.titles)},
    }
    found = {
        (secret, place)
        for secret in watched.secrets
        for place, content in places.items()
        if secret.encode() in content
    }
    assert not found


# Redaction


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@h:5432/db", "postgresql://***@h:5432/db"),
        ("no connection to http://u:p%40q@h/x, sorry", "no connection to http://***@h/x, sorry"),
        ("postgresql://u:p/a@ss@h/db", "postgresql://***@h/db"),
        ("https://token@host/path", "https://***@host/path"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("http://h:5000/?token=abc&x=1", "http://h:5000/?token=***&x=1"),
        ("host=h password=abc user=u", "host=h password=*** user=u"),
        ("aws_secret_access_key=abc", "aws_secret_access_key=***"),
        ("PGPASSWORD=abc MYSQL_PWD=abc psql", "PGPASSWORD=*** MYSQL_PWD=*** psql"),
        ("env: DB_PASS=abc, KAGGLE_KEY=abc", "env: DB_PASS=***, KAGGLE_KEY=***"),
        ("API_TOKENS=abc, DBPASS_PROD=abc", "API_TOKENS=***, DBPASS_PROD=***"),
        ("TOKENIZERS_PARALLELISM=false KEYMAP=de", "TOKENIZERS_PARALLELISM=false KEYMAP=de"),
        ("A_CONNECTION_STRING=abc;AccountKey=d", "A_CONNECTION_STRING=***;AccountKey=***"),
        ("--set key=value, sort_key=score", "--set key=value, sort_key=score"),
        ("as in --set lora.KEY=VALUE", "as in --set lora.KEY=VALUE"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("16 tokens, max_length=128, key 'a' = 3", "16 tokens, max_length=128, key 'a' = 3"),
        ("http://h:5000/path", "http://h:5000/path"),
        ("postgresql://u:it's-secret@h/db", "postgresql://***@h/db"),
        ('postgresql://u:pa"ss@h/db', "postgresql://***@h/db"),
        ('x = "http://u:it\'s@h"', 'x = "http://***@h"'),
        ("got 'http://u:it's@h', sorry", "got 'http://***@h', sorry"),
        ("postgresql:///db?user=u&password=it's", "postgresql:///db?user=u&password=***"),
        ("'http://h/?token=it\"s'; x", "'http://h/?token=***'; x"),
        ('["http://h:1/x","me@x.org"]', '["http://h:1/x","me@x.org"]'),
        ('{"a":"see http://h:1/x","b":"me@x.org"}', '{"a":"see http://h:1/x","b":"me@x.org"}'),
        ('<a href="http://h:1/x">me@x.org</a>', '<a href="http://h:1/x">me@x.org</a>'),
        ("('http://h:1','me@x.org')", "('http://h:1','me@x.org')"),
        ("'http://h:1/x' of me@x.org", "'http://h:1/x' of me@x.org"),
        (
            '{"a":"http://u:it\'s@h:1/x","b":["http://u:p@g","http://f/?token=c"],"c":"s"}',
            '{"a":"http://***@h:1/x","b":["http://***@g","http://f/?token=***"],"c":"s"}',
        ),
        ("postgresql://u:my secret@h/db, sorry", "postgresql://***@h/db, sorry"),
        ("'http://u:a long p@ss@h/x' of me@x.org", "'http://***@h/x' of me@x.org"),
        ("http://h:80, or http://h, says me@x.org", "http://h:80, or http://h, says me@x.org"),
        ("http://[2001:db8::1]:80 of me@x.org", "http://[2001:db8::1]:80 of me@x.org"),
        ('{"a": "at http://h:x", "b": "me@x.org"}', '{"a": "at http://h:x", "b": "me@x.org"}'),
        ("http://h:1/x,http://u:p@g", "http://h:1/x,http://***@g"),
        ("http://h/?password='abc&x=1", "http://h/?password=***&x=1"),
        ('http://h/?token="abc', "http://h/?token=***"),
        ("host=h password='my secret' user=u", "host=h password=*** user=u"),
        ('{"a":"http://f/?token=","b":"s"}', '{"a":"http://f/?token=","b":"s"}'),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redact(text, environment={}) == shown
    assert redact(shown, environment={}) == shown


def test_many_urls_in_one_text_take_no_longer_than_their_letters() -> None:
    urls = [f"http://h:1/{n:05}" for n in range(5000)]
    text = json.dumps([*urls, "me@x.org"], separators=(",", ":"))
    began = time.process_time()
    assert redact(text, environment={}) == text
    # 0.05 s here; 0.9 s where each URL is searched for to the end of the text.
    assert time.process_time() - began < 0.3


def test_what_is_a_secret_is_hidden_wherever_it_stands() -> None:
    own = {
        "HF_TOKEN": "hf_abcdef",
        "TOKENIZERS_PARALLELISM": "parallel",
        "PWD": "/home/me",
        "STORE": "postgresql://u:pass%20word@h/d",
    }
    assert (
        redact("hf_abcdef parallel /home/me 'pass word' pass%20word", environment=own)
        == "*** parallel /home/me '***' ***"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("PGPASSWORD", "MYSQL_PWD", "DB_PASS", "KAGGLE_KEY", "OPENAI_APIKEY", "WANDB_API_KEY"),
        *(
            "AZURE_STORAGE_CONNECTION_STRING",
            "SECRET_KEY_BASE",
            "TOKEN_OF_MINE",
            "AWS_ACCESS_KEY_ID",
        ),
        *("GITHUB_TOKEN2", "SSH_PASSPHRASE", "MY_SECRETS", "my_token"),
        *("API_TOKENS", "GITHUB_TOKENS", "PASSWORDS", "APIKEY_PROD", "DBPASS_PROD", "DBPWD_DEV"),
        *("AUTHTOKEN_DEV", "MYSECRET_VALUE", "CONNECTIONSTRING", "TOKENIZERS_API_KEY"),
    ],
)
def test_variables_that_look_like_secrets_are_hidden(name: str) -> None:
    assert redact("it was marked-marked", environment={name: "marked-marked"}) == "it was ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PWD", "/home/me"), ("OLDPWD", "/home/you"), ("TOKENIZERS_PARALLELISM", "parallel")),
        *(("RAY_AUTH_TOKEN_PATH", "~/.ray/other"), ("TOKEN_LIMIT", "100000"), ("KEYMAP", "german")),
        *(("RAY_TLS_SERVER_KEY", __file__), ("GIT_ASKPASS", "my-askpass"), ("PGPASSFILE", "~/.pg")),
        *(("KEYBOARD_LAYOUT", "german"), ("MAX_NEW_TOKENS", "100000")),
    ],
)
def test_variables_about_secrets_are_shown(name: str, value: str) -> None:
    assert redact(f"it was {value}", environment={name: value}) == f"it was {value}"


def test_parts_of_a_connection_string_are_hidden() -> None:
    own = {"STORE": "host=h password=marked-marked MY_KEY='third secret'"}
    assert redact("FATAL: marked-marked, third secret", environment=own) == "FATAL: ***, ***"


def test_a_failures_record_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    record = FailureRecord(type="E", message="401 for hf_abcdef", traceback="x = 'http://u:p@h'")
    assert (record.message, record.traceback) == ("401 for ***", "x = 'http://***@h'")


def test_a_password_on_the_command_line_is_refused_and_not_repeated(suite: Suite) -> None:
    code, out, err = suite("leaderboard", "--tracking-uri", "postgresql://u:MARKED@h/d")
    assert (code, out) == (2, "")
    assert "--tracking-uri postgresql://***@h/d: holds a password" in err
    assert "MLFLOW_TRACKING_URI" in err
    assert "MARKED" not in err
    refuse_password("http://h:5000", option="x", instead="y")
    with pytest.raises(ConfigError):
        refuse_password("http://h:5000?token=abc", option="x", instead="y")


def test_workers_elsewhere_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MARKS.items():
        monkeypatch.setenv(name, value)
    passed = worker_environment(1)
    assert not set(MARKS) & set(passed)
    monkeypatch.setenv("HF_ENDPOINT", "https://u:MARKED@mirror")
    assert "HF_ENDPOINT" not in worker_environment(1, inherited=True)
    with pytest.raises(ResourceError, match=r"HF_ENDPOINT=https://\*\*\*@mirror: holds a password"):
        worker_environment(1)
    assert has_password("https://u:MARKED@mirror")
    assert has_password("https://u:it's@mirror") and has_password('https://u:a"b@mirror')


LOCAL_CLUSTER = """
import sys
from ray._private import worker
from suite.cluster.session import cluster

with cluster(None, threads=1):
    print(worker._global_node.get_session_dir_path(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
def test_another_user_of_the_machine_reaches_nothing_of_a_local_cluster(open_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    stranger = 54321  # runs programs without an account

    def can(*command: object) -> bool:
        ended = subprocess.run(
            [str(part) for part in command],
            user=stranger,
            group=stranger,
            extra_groups=[],
            capture_output=True,
        )
        return ended.returncode == 0

    environment = {name: os.environ[name] for name in os.environ if not name.startswith("RAY_")}
    environment |= {"HOME": str(open_folder), "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, "-c", LOCAL_CLUSTER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        umask=0,  # the most open one
    )
    assert running.stdin is not None and running.stdout is not None
    try:
        session = Path(running.stdout.readline().strip())
        token = open_folder / ".ray" / "auth_token"
        sockets = list((session / "sockets").iterdir())
        assert sockets and all(path.is_socket() for path in sockets)
        assert len(token.read_text()) == 64 and token.stat().st_mode & 0o777 == 0o600
        assert can("ls", open_folder), "the stranger runs programs, and may enter what is open"
        assert not can("cat", token)
        assert not can("ls", session / "sockets")
        assert not can("ls", session.parent)
        assert not can("cat", session / "logs" / "gcs_server.out")
        for folder in (session, session / "sockets", session.parent, session.parent.parent):
            assert not can("touch", folder / "planted")
        assert not can("touch", token) and not can("rm", "-f", token)
    finally:
        running.stdin.close()
        assert running.wait(timeout=60) == 0
    assert not session.exists()


def test_the_token_file_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as other:
        other.setenv("RAY_AUTH_MODE", "disabled")
        make_token()
        other.setenv("RAY_AUTH_MODE", "token")
        other.setenv("RAY_AUTH_TOKEN", "elsewhere")
        make_token()
    assert not token.exists()
    make_token()
    made = token.read_text()
    assert token.stat().st_mode & 0o777 == 0o600 and token.parent.stat().st_mode & 0o77 == 0
    token.chmod(0o644)  # as Ray makes it
    make_token()
    assert (token.read_text(), token.stat().st_mode & 0o777) == (made, 0o600)


def test_a_mode_that_shows_no_token_is_named_and_not_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("suite.cluster.access.asks_for_token", lambda _address: True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "some-token")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ResourceError, match="RAY_AUTH_MODE is 'disabled' here; unset it"):
        require_token("10.0.0.1:6379")


def test_a_home_of_somebody_else_is_refused_where_everybody_may_write(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    shared = tmp_path / "shared"
    (shared / "home").mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(shared / "home", 12345, -1)
    with pytest.raises(ResourceError, match="belongs to user 12345"):
        run_sweep(toy_sweep(), home=Home(shared / "home"))


# Ray's token


@dataclass(frozen=True)
class Head:
    """A running head of a Ray cluster."""

    address: str
    dashboard: str
    home: Path


def start_head(folder: Path, mode: str, port: int) -> subprocess.Popen[str]:
    (folder / ".ray").mkdir(parents=True)
    (folder / ".ray" / "auth_token").write_text("MARKED" + "0" * 26)
    options = [
        "--port=0",
        f"--dashboard-port={port}",
        "--num-cpus=1",
        "--object-store-memory=80000000",
        "--disable-usage-stats",
        "--block",
    ]
    environment = {**os.environ, "HOME": str(folder), "RAY_AUTH_MODE": mode, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--head",
                "--include-dashboard=true",
                f"--temp-dir={folder}/r",
                *options,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )


def address_of(folder: Path) -> str | None:
    found = re.search(r"ray start --address='([\d.]+:\d+)'", (folder / "log").read_text())
    return found and found[1]


@pytest.fixture(scope="module")
def heads() -> Iterator[dict[str, Head]]:
    """One that asks for a token and one that does not; both of one machine."""
    import shutil
    import tempfile

    base = Path(
        tempfile.mkdtemp(prefix="suite-heads-", dir="/tmp")
    )  # unix sockets want a short path
    ports = {mode: free_port() for mode in ("token", "disabled")}
    started = {mode: start_head(base / mode, mode, port) for mode, port in ports.items()}
    try:
        end = time.monotonic() + 240
        while any(address_of(base / mode) is None for mode in started):
            assert time.monotonic() < end and all(p.poll() is None for p in started.values()), (
                "no head"
            )
            time.sleep(0.2)
        yield {
            mode: Head(str(address_of(base / mode)), f"http://127.0.0.1:{ports[mode]}", base / mode)
            for mode in started
        }
    finally:
        for process in started.values():
            family = [
                psutil.Process(process.pid),
                *psutil.Process(process.pid).children(recursive=True),
            ]
            process.terminate()
            psutil.wait_procs(family[:1], timeout=15)
            for member in family:
                with suppress(psutil.Error):
                    member.kill()
            process.wait()
        shutil.rmtree(base, ignore_errors=True)


ASK = """
import sys
from suite.errors import SuiteError
from suite.cluster.access import require_token
for address in sys.argv[1:]:
    try:
        require_token(address)
        print("in")
    except SuiteError as error:
        print(error)
"""


def ask(home: Path, *addresses: str) -> list[str]:
    """What `require_token` says of each, in a process of its own: Ray keeps its mode and token for the life of one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**own, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *addresses],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_cluster_without_a_token_is_refused_unless_that_is_accepted(
    heads: dict[str, Head], suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_head = heads["disabled"]
    for said in ask(open_head.home, open_head.address, open_head.dashboard):
        assert "asks for no token" in said
        assert "--insecure" in said
    make_roots(tmp_path, monkeypatch)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        json.dumps({"name": "x", "backbones": ["minilm"], "methods": ["full"], "tasks": ["toy"]})
    )
    command = (
        "run",
        sweep,
        "--home",
        tmp_path / "home",
        "--address",
        open_head.address,
        "--data-root",
        tmp_path / "nothing",
    )
    code, _, err = suite(*command)
    assert code == 2
    assert "asks for no token" in err
    code, _, err = suite(*command, "--insecure")
    assert code == 2
    assert "asks for" not in err, "it went on, to find that there are no data"
    assert "looked for" in err


@pytest.mark.slow
def test_a_cluster_with_a_token_lets_in_whoever_has_it(
    heads: dict[str, Head], tmp_path: Path
) -> None:
    head = heads["token"]
    assert ask(head.home, head.address, head.dashboard) == ["in", "in"]
    assert all(
        "asks for a token, and this machine has none" in said
        for said in ask(tmp_path, head.address, head.dashboard)
    )


@pytest.mark.slow
def test_jobs_of_a_cluster_with_a_token_are_closed_to_others(heads: dict[str, Head]) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{heads['token'].dashboard}/api/jobs/", timeout=10)
            break
        except urllib.error.URLError:  # the dashboard comes up after the head
            assert time.monotonic() < end
            time.sleep(0.5)
    assert caught.value.code == 401


def test_no_cluster_is_said_at_once() -> None:
    with pytest.raises(ResourceError, match="no Ray dashboard answers"):
        require_token(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ResourceError, match="runs inside the cluster"):
        require_token("ray://127.0.0.1:10001")


# MLflow's own users


@pytest.mark.slow
def test_an_mlflow_server_with_users_lets_in_those_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_db: Path
) -> None:
    if importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("MLflow's basic-auth needs Flask-WTF: pip install 'mlflow[auth]'")
    own = {
        "MLFLOW_AUTH_ADMIN_PASSWORD": "correct-MARKED-horse",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "0" * 32,
    }
    (tmp_path / "mlflow.db").write_bytes(empty_db.read_bytes())
    with mlflow_server(
        tmp_path, f"sqlite:///{tmp_path}/mlflow.db", "--app-name", "basic-auth", **own
    ) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-MARKED-horse")
        assert open_store(server.uri).experiment("demo")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-MARKED-horse")
        for uri in (server.uri, server.uri.replace("://", "://admin:wrong-MARKED-horse@")):
            with pytest.raises(
                TrackingError, match="does not know this user, or this password"
            ) as caught:
                open_store(uri).ping()
            assert "MARKED" not in str(caught.value)
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
        with pytest.raises(TrackingError, match="MLFLOW_TRACKING_USERNAME"):
            open_store(server.uri).ping()
    log = (tmp_path / "server.log").read_text()
    assert "MARKED" not in log
