"""What `suite doctor` finds on one machine; hosts that disagree are in tests/cluster/test_doctor.py."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import ray
import torch
from optuna.study import StudyDirection

from suite.cluster import access
from suite.cluster.session import cluster
from suite.doctor import join, machine
from suite.doctor.cluster import _size, check_cluster, check_versions, judge_clock
from suite.doctor.finding import Finding, Level, fail, merge_nodes, ok, run_checks
from suite.doctor.install import amdsmi, packages, sessions, socket_paths, token_file
from suite.doctor.join import Node
from suite.doctor.machine import energy, gpus, machine_checks, shared_memory
from suite.doctor.mlflow import check_store
from suite.doctor.optuna import check_optuna
from suite.doctor.places import home_writable, left_as_found, storage
from suite.files import nearest
from suite.plan.gpus import Gpus
from suite.plan.partitioning import container_limit
from suite.tracking.optuna_mirror import open_storage
from tests.commands import Suite, suite
from tests.control_groups import control_group
from tests.test_meters_energy import NOT_SUPPORTED, FakeNvml

__all__ = ["suite"]
ROOT = Path(__file__).parents[1]
MIB = 2**20


def gpu(**answers: object) -> FakeNvml:
    """A board with all that the doctor asks for."""
    given = {
        "CudaComputeCapability": (8, 0),
        "UUID": "GPU-0123456789",
        "ComputeRunningProcesses": [],
    } | answers
    api = FakeNvml(**given)
    api.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000
    return api


def fake_package(folder: Path, name: str, version: str) -> Path:
    """A folder for PYTHONPATH whose metadata say that another version is installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


# findings


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run() -> None:
    def broken() -> Finding:
        raise RuntimeError("no such sensor")

    first, second = run_checks([("broken", broken), ("whole", lambda: ok("whole", found="fine"))])
    assert first.level is Level.FAIL and "RuntimeError: no such sensor" in first.found
    assert second == ok("whole", found="fine")


def test_what_all_nodes_have_in_common_is_one_line() -> None:
    found = [
        ok("memory", found="8 GiB", node="a"),
        ok("memory", found="8 GiB", node="b"),
        fail("disk", found="full", node="b"),
    ]
    assert merge_nodes(found, 2) == [
        ok("memory", found="8 GiB", node="all"),
        fail("disk", found="full", node="b"),
    ]


# GPUs and energy


@pytest.mark.parametrize(
    ("built_for", "said"), [(None, "processors only"), ("99.0", "too old for torch's CUDA 99.0")]
)
def test_a_gpu_that_this_torch_cannot_use_is_a_failure(
    built_for: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    (found,) = gpus(gpu())
    assert found.level is Level.FAIL and said in found.found and "torch" in found.remedy


def test_a_gpu_and_its_torch_are_in_order_and_bfloat16_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "local_gpus", Gpus)
    assert [f.level for f in gpus(gpu())] == [Level.OK, Level.OK]
    assert [(f.check, f.level) for f in gpus(gpu(CudaComputeCapability=(7, 5)))] == [
        ("gpus", Level.OK),
        ("bf16", Level.WARN),
    ]


def test_gpus_that_torch_cannot_start_are_a_failure_unless_they_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "local_gpus", lambda: Gpus(problem="Error 802"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = gpus(gpu())
    assert found.level is Level.FAIL and "torch cannot use them: Error 802" in found.found
    assert "fabric manager" in found.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = gpus(gpu())
    assert found.level is Level.OK and "hidden" in found.found


def test_nccl_is_tried_between_the_nodes_that_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Node("a", "a", "10.0.0.1", 0)
    one = Node("b", "b", "10.0.0.2", 1)
    eight = [Node(name, name, "10.0.0.9", 8) for name in "cd"]
    monkeypatch.setattr(join, "_join", lambda nodes, backend: (backend, [n.id for n in nodes]))
    assert join.check_join([head, *eight]) == [("gloo", ["a", "c", "d"]), ("nccl", ["c", "d"])]
    assert join.check_join([head, eight[0]]) == [("gloo", ["a", "c"]), ("nccl", ["c", "c"])]
    assert join.check_join([head, one]) == [("gloo", ["a", "b"])], "no two ranks on one GPU"
    assert join.check_join([eight[0]]) == [("gloo", ["c", "c"]), ("nccl", ["c", "c"])]


def test_ranks_of_one_node_see_the_gpus_of_both() -> None:
    first, second = [Node(name, name, "10.0.0.9", 8) for name in "cd"]
    places = [(7001, ("3",)), (7002, ("5",)), (7003, ("0",))]
    found = join.meetings([first, first, second], places, "10.0.0.9", "nccl")
    assert [(m.rank, m.port, m.gpus, m.device) for m in found] == [
        (0, 7001, ("3", "5"), "cuda:0"),
        (1, 7001, ("3", "5"), "cuda:1"),
        (2, 7001, ("0",), "cuda:0"),
    ]
    (cpu, _, _) = join.meetings([first, first, second], places, "10.0.0.9", "gloo")
    assert cpu.device == "cpu" and cpu.gpus == ()


def test_a_machine_without_gpus_is_in_order_and_trains_over_gloo() -> None:
    (found,) = gpus(gpu(Count=pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)))
    assert found.level is Level.OK and "gloo" in found.found


def test_a_driver_that_answers_with_an_error_is_a_failure() -> None:
    (found,) = gpus(gpu(Count=pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    assert found.level is Level.FAIL and "trials would train on the processor" in found.found
    assert "driver" in found.remedy


@pytest.mark.parametrize(
    ("answers", "level", "said", "remedy"),
    [
        ({}, Level.OK, "energy counter", ""),
        ({"TotalEnergyConsumption": NOT_SUPPORTED}, Level.WARN, "sampled", "since Volta"),
        ({"MigMode": (1, 1)}, Level.WARN, "MIG is on", "nvidia-smi -mig 0"),
        ({"VirtualizationMode": 2}, Level.WARN, "virtual GPU", "whole board"),
        ({"ComputeRunningProcesses": ["theirs"]}, Level.WARN, "1 processes compute there", "free"),
        (
            {"TotalEnergyConsumption": NOT_SUPPORTED, "PowerUsage": NOT_SUPPORTED},
            Level.WARN,
            "energy stays null",
            "nothing to do",
        ),
    ],
)
def test_what_spoils_the_energy_of_a_gpu_is_named(
    answers: dict[str, object], level: Level, said: str, remedy: str
) -> None:
    (found,) = energy(gpu(**answers))
    assert found.level is level and said in found.found and remedy in found.remedy


def test_rapl_that_can_be_read_is_found_and_its_absence_is_a_warning(tmp_path: Path) -> None:
    api = gpu(Count=0)
    (without,) = energy(api, tmp_path)
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in {"name": "package-0", "energy_uj": "5", "max_energy_range_uj": "100"}.items():
        (zone / name).write_text(text)
    (found,) = energy(api, tmp_path)
    assert (without.level, found.level) == (Level.WARN, Level.OK)
    assert "4 W per core" in without.found and "RAPL" in found.found


def test_a_gpu_that_is_hidden_meters_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = energy(gpu(), tmp_path)
    assert found.level is Level.WARN and "4 W per core" in found.found


@pytest.mark.parametrize(("boards", "level"), [(0, Level.WARN), (1, Level.WARN), (2, Level.FAIL)])
def test_the_shared_memory_of_dockers_default_is_too_little_for_two_gpus_alone(
    boards: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(free=64 * MIB))
    found = shared_memory(gpu(Count=boards))
    assert found.level is level and "--shm-size" in found.remedy


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    control_group(tmp_path, limit="max", used=100 * MIB, pages=0)
    assert container_limit(tmp_path) is None
    control_group(tmp_path, limit=512 * MIB, used=100 * MIB, pages=0)
    assert container_limit(tmp_path) == (512 * MIB, 100 * MIB)


def test_pages_of_files_are_free_memory_of_a_container(tmp_path: Path) -> None:
    control_group(tmp_path, limit=512 * MIB, used=500 * MIB, pages=380 * MIB)
    assert container_limit(tmp_path) == (512 * MIB, 120 * MIB)


# the installation


def test_every_requirement_is_met_here() -> None:
    assert [f.level for f in packages()] == [Level.OK]


def test_a_package_of_another_version_fails_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_package(tmp_path, "optuna", "3.0.0"))
    assert [(f.level, f.found) for f in packages()] == [
        (Level.FAIL, "optuna is 3.0.0, expected >=5.0")
    ]


def test_amdsmi_without_its_library_is_named_and_ray_is_not_started(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amdsmi").mkdir()
    (tmp_path / "amdsmi" / "__init__.py").write_text("raise KeyError('libamd_smi.so')\n")
    assert amdsmi().level is Level.OK
    # The doctor looks for the package here, and imports it in processes of its own.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.chdir(tmp_path)
    code, out, err = suite("doctor", "--home", tmp_path / "home", "--format", "json")
    rows = {row["check"]: row for row in json.loads(out)}
    assert code == 1, err
    assert rows["amdsmi"]["level"] == "fail" and "uninstall amdsmi" in rows["amdsmi"]["remedy"]
    assert rows["ray"]["level"] == "fail" and "libamd_smi.so" in rows["ray"]["found"]
    assert (
        "cluster" not in rows and rows["home"]["level"] == "ok" and not (tmp_path / "home").exists()
    )


def test_a_token_that_others_can_read_or_that_is_missing_is_found_and_never_shown(
    tmp_path: Path,
) -> None:
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    local = {"HOME": str(tmp_path)}
    asked = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    assert token_file(local).level is Level.OK
    assert token_file(asked).level is Level.FAIL and "get-auth-token" in token_file(asked).remedy
    path.write_text("s3cr3t-token")
    path.chmod(0o644)
    assert (token_file(local).level, token_file(asked).level) == (Level.WARN, Level.FAIL)
    path.chmod(0o600)
    assert token_file(asked).level is Level.OK
    inline = token_file(local | {"RAY_AUTH_TOKEN": "s3cr3t-token"})
    assert inline.level is Level.WARN
    assert "s3cr3t" not in repr([inline, token_file(asked)])


def test_sessions_of_clusters_that_have_ended_are_counted(tmp_path: Path) -> None:
    assert sessions({"RAY_TMPDIR": str(tmp_path)}).level is Level.OK
    folder = tmp_path / "ray" / "session_2026-01-01_00-00-00_000000_1"
    folder.mkdir(parents=True)
    (folder / "log").write_bytes(b"x" * MIB)
    # Ray takes RAY_TMPDIR before TMPDIR.
    for names in ({"TMPDIR": str(tmp_path)}, {"RAY_TMPDIR": str(tmp_path), "TMPDIR": "/none"}):
        found = sessions(names)
        assert found.level is Level.WARN and "1 left over with 1 MiB" in found.found


def test_a_long_temporary_folder_leaves_no_room_for_the_sockets_of_a_ray_start() -> None:
    assert socket_paths({}).level is Level.OK
    found = socket_paths({"TMPDIR": "/scratch/" + "x" * 60})
    assert found.level is Level.WARN and "RAY_TMPDIR" in found.remedy
    assert "local sweeps use /tmp" in found.found
    # The Ray of a node that answers has its sockets.
    assert "socket paths" not in dict(machine_checks(Path()))


# places and stores


def test_a_home_is_tried_as_trials_write_it_and_nothing_stays(tmp_path: Path) -> None:
    assert home_writable(tmp_path / "new" / "home").level is Level.OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    found = home_writable(tmp_path / "file" / "home")
    assert found.level is Level.FAIL and "--home" in found.remedy


def test_a_home_that_two_nodes_try_at_once_goes_and_one_that_is_used_meanwhile_stays(
    tmp_path: Path,
) -> None:
    home = tmp_path / "new" / "home"
    with left_as_found(home):
        home.mkdir(parents=True)
        of_another_node = home / ".doctor-other"
        of_another_node.touch()
        assert home_writable(home).level is Level.OK
        of_another_node.unlink()
        assert home.exists(), "the node that was second did not make it"
    assert list(tmp_path.iterdir()) == []
    with left_as_found(home):
        home.mkdir(parents=True)
        (home / "sweep").touch()
    assert (home / "sweep").exists()


def test_a_home_below_a_folder_that_this_user_may_not_enter_is_a_finding(locked: Path) -> None:
    with left_as_found(locked / "new" / "home"):
        assert nearest(locked / "new" / "home") == locked


def test_a_storage_that_answers_is_in_order_and_one_that_cannot_be_a_storage_fails(
    tmp_path: Path,
) -> None:
    assert storage(f"file://{tmp_path}/there").level is Level.OK
    found = storage("ftp://example.org/x")
    assert found.level is Level.FAIL and "expected a folder, file:// or s3://" in found.found


def test_the_doctor_takes_a_relative_storage_from_here_and_leaves_no_folder(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def of_storage(address: str | None, home: Path, url: str, *stores: str | None) -> list[Finding]:
        asked.append(url)
        return [storage(url)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suite.cli.doctor.findings", of_storage)
    code, _, _ = suite("doctor", "--storage", "a/store", "--home", "home")
    assert (code, asked) == (0, [f"{tmp_path}/a/store"]) and not list(tmp_path.iterdir())


def test_a_storage_whose_disk_is_full_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = storage(str(tmp_path))
    assert found.level is Level.FAIL and "No space left on device" in found.found


def test_a_tracking_store_is_looked_at_and_not_touched(tmp_path: Path, empty_db: Path) -> None:
    absent = check_store(f"sqlite:///{tmp_path}/none.db")
    assert absent.level is Level.OK and list(tmp_path.iterdir()) == []
    path = Path(shutil.copy(empty_db, tmp_path))
    before = path.read_bytes()
    assert check_store(f"sqlite:///{path}").level is Level.OK
    assert path.read_bytes() == before
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at as one")
    assert check_store(f"sqlite:///{tmp_path}/text.db").level is Level.FAIL


def test_a_store_of_another_mlflow_fails_with_what_to_do(tmp_path: Path, empty_db: Path) -> None:
    path = Path(shutil.copy(empty_db, tmp_path))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'cafe'")
    connection.close()
    found = check_store(f"sqlite:///{path}")
    assert (
        found.level is Level.FAIL and "schema cafe" in found.found and "suite sync" in found.remedy
    )


@pytest.mark.parametrize(
    "uri", ["http://me:s3cr3t@127.0.0.1:9", "postgresql+psycopg://me:s3cr3t@127.0.0.1:9/mlflow"]
)
def test_a_server_that_is_away_fails_without_its_password(uri: str) -> None:
    found = check_store(uri)
    assert (
        found.level is Level.FAIL and "127.0.0.1:9" in found.found and "s3cr3t" not in repr(found)
    )


class OnlyForUsers(BaseHTTPRequestHandler):
    """As much of an MLflow server with users as the doctor asks for."""

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Basic bWU6czNjcjN0"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(metadata.version("mlflow").encode() if known else b"You are not authent")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_server_with_users_tells_its_version_to_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("suite.doctor.mlflow.open_store", lambda uri, **_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), OnlyForUsers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        refused = check_store(uri)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t")
        found = check_store(uri)
        server.shutdown()
    assert refused.level is Level.FAIL and "does not say its version" in refused.found
    assert found.level is Level.OK and metadata.version("mlflow") in found.found


# Optuna's storage


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_an_optuna_storage_is_looked_at_and_not_touched(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "optuna.db"
    absent = check_optuna(f"{kind}:///{path}")
    assert (
        absent.level is Level.OK and "none yet" in absent.found and list(tmp_path.iterdir()) == []
    )
    open_storage(f"{kind}:///{path}").create_new_study([StudyDirection.MAXIMIZE], "one")
    before = path.read_bytes()
    found = check_optuna(f"{kind}:///{path}")
    assert found.level is Level.OK and "can be written" in found.found
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["optuna.db"]


def test_an_empty_database_for_optuna_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "optuna.db").touch()
    found = check_optuna(f"sqlite:///{tmp_path}/optuna.db")
    assert found.level is Level.OK and "the first run makes its tables" in found.found
    with sqlite3.connect(tmp_path / "optuna.db") as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "UPDATE alembic_version SET version_num = 'v2.6.0.a'",
            "schema v2.6.0.a, this Optuna writes",
        ),
        (
            "CREATE TRIGGER no BEFORE INSERT ON studies BEGIN SELECT RAISE(ABORT, 'read only'); END",
            "cannot be written: .*read only",
        ),
        ("CREATE TABLE experiments (id INTEGER)", "holds MLflow's tables"),
    ],
)
def test_an_optuna_storage_that_cannot_serve_says_why(
    statement: str, said: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    open_storage(url)
    with sqlite3.connect(tmp_path / "optuna.db") as connection:
        connection.execute(statement)
    connection.close()
    found = check_optuna(url)
    assert found.level is Level.FAIL and re.search(said, found.found) and found.remedy


@pytest.mark.parametrize(
    ("statements", "level", "said"),
    [
        ((), Level.OK, ", empty: the first run makes its tables"),
        (
            ("CREATE TABLE mine (id INTEGER)",),
            Level.OK,
            "no table of Optuna, 1 of something else: the first run makes its tables",
        ),
        (
            ("CREATE TABLE studies (study_id INTEGER)",),
            Level.FAIL,
            "Optuna's tables are incomplete: no alembic_version, study_directions",
        ),
        (
            ("made", "DELETE FROM version_info"),
            Level.OK,
            "the schema of this Optuna, can be written",
        ),
        (
            ("made", "DELETE FROM alembic_version"),
            Level.FAIL,
            "schema unknown, this Optuna writes v",
        ),
        (("made", "DROP TABLE alembic_version"), Level.FAIL, "incomplete: no alembic_version"),
    ],
)
def test_whatever_a_database_for_optuna_holds_the_doctor_leaves_it_so(
    statements: tuple[str, ...], level: Level, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "optuna.db"
    path.touch()
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            open_storage(f"sqlite:///{path}") if statement == "made" else connection.execute(
                statement
            )
    before = path.read_bytes()
    found = check_optuna(f"sqlite:///{path}")
    assert (found.level, said in found.found) == (level, True), found.found
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["optuna.db"]


@pytest.mark.parametrize(
    ("check", "kind"),
    [(check_optuna, "sqlite"), (check_optuna, "journal"), (check_store, "sqlite")],
)
def test_a_folder_that_takes_no_file_of_a_store_is_found(
    check: Callable[[str], Finding], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    found = check(f"{kind}:///{tmp_path}/file/new/store.db")
    assert found.level is Level.FAIL and f"{tmp_path}/file is a file" in found.found
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path and allowed(path, mode)
    )  # root may write anywhere
    found = check(f"{kind}:///{tmp_path}/new/store.db")
    assert found.level is Level.FAIL and f"{tmp_path} cannot be written" in found.found


def test_a_postgresql_for_optuna_that_is_away_fails_without_its_password() -> None:
    found = check_optuna("postgresql://me:s3cr3t@127.0.0.1:9/optuna")
    assert found.level is Level.FAIL and "127.0.0.1" in found.found and "s3cr3t" not in repr(found)


# the cluster


@pytest.mark.parametrize(
    ("trip_s", "offset_s", "level"),
    [
        (0.01, 0.3, Level.OK),
        (0.01, -2.0, Level.WARN),
        (4.0, 2.5, Level.OK),
        (0.01, 3600.0, Level.FAIL),
    ],
)
def test_a_clock_is_wrong_only_by_what_the_round_trip_cannot_explain(
    trip_s: float, offset_s: float, level: Level
) -> None:
    assert judge_clock(trip_s, offset_s).level is level


def test_a_node_that_came_back_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    for address, alive in (("10.0.0.2", False), ("10.0.0.3", False), ("10.0.0.2", True)):
        nodes.append({"Alive": alive, "NodeManagerAddress": address})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    size, gone = _size(local=False)
    assert size.found.startswith("1 node, 8 CPU")
    assert gone.found == "nodes that have gone: 10.0.0.3"
    del nodes[1]
    assert len(_size(local=False)) == 1


def test_versions_that_differ_are_named_with_their_nodes() -> None:
    same = {"torch": "2.13.0", "ray": "2.60.0"}
    (found,) = check_versions({"a": same, "b": same})
    assert found.level is Level.OK
    (found,) = check_versions({"a": same, "b": same | {"torch": "2.12.0"}, "c": same})
    assert found.level is Level.FAIL and found.found == "torch: 2.13.0 on a, c; 2.12.0 on b"


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with cluster(None, threads=1):
            yield


@pytest.mark.slow
def test_a_good_cluster_is_in_order_and_nothing_of_the_doctor_stays(
    local_cluster: None, tmp_path: Path
) -> None:
    found = check_cluster(None, home=tmp_path / "home")
    bad = [f for f in found if f.level is Level.FAIL]
    assert not bad
    said = {f.check: f.found for f in found}
    assert {"cluster", "versions", "clocks", "shared home", "gloo", "tokens", "dashboard"} <= set(
        said
    )
    assert "16 MiB summed" in said["gloo"] and "asks for a token" in said["tokens"]
    assert not (tmp_path / "home").exists()
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_a_cluster_that_is_not_there_is_a_failure_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "ANSWER_S", 0.5)
    (found,) = check_cluster("127.0.0.1:9", home=tmp_path)
    assert (found.check, found.level) == ("cluster", Level.FAIL)
    assert "127.0.0.1:9" in found.found


def test_a_home_that_takes_no_token_is_a_finding_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (found,) = check_cluster(None, home=tmp_path / "home")
    assert (found.check, found.level) == ("cluster", Level.FAIL)
    assert f"{tmp_path}/file" in found.found and "a HOME and a /tmp" in found.remedy


def test_a_local_ray_that_does_not_start_is_not_looked_for_on_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: object) -> None:
        raise RuntimeError("no raylet")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", broken)
    monkeypatch.setenv("HOME", str(tmp_path))
    (found,) = check_cluster(None, home=tmp_path / "home")
    assert found.level is Level.FAIL and "a local Ray did not start: no raylet" in found.found
    assert "--address" not in found.found and "head" not in found.remedy
