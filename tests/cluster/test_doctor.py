"""`suite doctor` on two real hosts: in order first, then with everything wrong that a host can be by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.bed import Bed, Host
from tests.cluster.launcher import PORT, STORE_BYTES, start_cluster, wait_for_hosts
from tests.test_doctor import fake_package

pytestmark = pytest.mark.timeout(1800)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with Bed(tmp_path_factory.mktemp("bed"), ["head", "w1"]) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(bed: Bed) -> None:
    start_cluster(bed.host("head"), [bed.host("w1")])


def doctor(head: Host, *options: str, env: dict[str, str] | None = None) -> tuple[int, list[Row]]:
    """Exit code and findings of the doctor on the head."""
    command = ["suite", "doctor", "--address", "auto", "--format", "json", *options]
    done: subprocess.CompletedProcess[str] = head.run(command, check=False, timeout_s=600, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def named(rows: list[Row], check: str) -> list[Row]:
    return [row for row in rows if row["check"] == check]


def test_two_hosts_that_agree_are_in_order(bed: Bed, cluster: None) -> None:
    code, rows = doctor(bed.host("head"), "--home", str(bed.shared / "home"))
    assert code == 0, [row for row in rows if row["level"] == "fail"]
    (gloo,), (shared,), (tokens,) = (
        named(rows, "gloo"),
        named(rows, "shared home"),
        named(rows, "tokens"),
    )
    assert "between 2 nodes, over eth0" in gloo["found"]
    assert "on 2 nodes" in shared["found"] and "asks for a token" in tokens["found"]
    assert {row["node"] for row in named(rows, "torch")} == {"all"}, "what both have is one line"
    (dashboard,) = named(rows, "dashboard")
    assert dashboard["level"] == "warn" and "0.0.0.0" in dashboard["found"], (
        "the bed's dashboard is for the laptop, too"
    )
    assert not list(bed.shared.glob("**/.doctor-*")) and not (bed.shared / "home").exists()


def test_hosts_that_disagree_are_named_with_what_to_do(bed: Bed, cluster: None) -> None:
    """Another version of a package, a home that is another disk, a store that is away: the first two on one host alone."""
    head = bed.host("head")
    w1 = bed.host("w1")
    w1.run("ray stop --force", timeout_s=120)
    wait_for_hosts(head, [head])
    other = fake_package(bed.shared / "fake", "optuna", "5.9.9")
    w1.run(
        f"ray start --address={head.address}:{PORT} --num-cpus=1 --object-store-memory={STORE_BYTES}",
        env={"PYTHONPATH": str(other)},
    )
    wait_for_hosts(head, [head, w1])
    code, rows = doctor(
        head, "--home", str(bed.local / "home"), "--tracking-uri", "http://127.0.0.1:9"
    )
    assert code == 1
    bad = {row["check"]: row for row in rows if row["level"] == "fail"}
    assert set(bad) == {"shared home", "versions", "mlflow"}
    assert (
        bad["shared home"]["node"] == w1.address
        and "another folder there" in bad["shared home"]["found"]
    )
    assert (
        "optuna: " in bad["versions"]["found"]
        and f"5.9.9 on {w1.address}" in bad["versions"]["found"]
    )
    assert all(row["remedy"] for row in bad.values())
    # Ray lists the host twice, as gone and as up: it has come back.
    assert {row["level"] for row in named(rows, "cluster")} == {"ok"}


def test_a_host_without_the_clusters_token_is_told_so(bed: Bed, cluster: None) -> None:
    code, rows = doctor(
        bed.host("head"),
        "--home",
        str(bed.shared / "home"),
        env={"RAY_AUTH_TOKEN_PATH": "/nowhere"},
    )
    assert code == 1
    bad = {row["check"]: row for row in rows if row["level"] == "fail"}
    assert (
        set(bad) == {"token file", "cluster"}
        and "auth_token" in bad["cluster"]["found"] + bad["token file"]["remedy"]
    )
