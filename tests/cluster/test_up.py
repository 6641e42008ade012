"""A cluster as its user makes it: `ray up` by SSH from a laptop, sweeps sent to it in every way there is, a host that dies, `ray down`.

The tests share one cluster and build on one another, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.cluster.bed import REPOSITORY, Bed
from tests.cluster.launcher import (
    cluster_file,
    job_address,
    share_token,
    start_worker,
    wait_for_hosts,
)
from tests.cluster.processes import PATIENCE, wait_until
from tests.cluster.sweep_check import RANK, assert_equal, assert_nothing_left, results, write_sweep

DEADLINE_S = 600.0
pytestmark = pytest.mark.timeout(3 * DEADLINE_S * PATIENCE)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Laptop, head, two workers that `ray up` starts, and a spare host that does nothing yet."""
    with Bed(tmp_path_factory.mktemp("bed"), ["head", "w1", "w2", "spare"]) as made:
        share_token(made.laptop)
        yield made


@pytest.fixture(scope="module")
def one_host(bed: Bed) -> Path:
    """The same sweep on the laptop alone: what the cluster must come to. Before the cluster starts, because all share two cores."""
    home = bed.shared / "alone"
    bed.laptop.run(
        ["suite", "run", str(write_sweep(bed)), "--home", str(home)], timeout_s=DEADLINE_S
    )
    return home


@pytest.fixture(scope="module")
def cluster(bed: Bed, one_host: Path) -> str:
    """The cluster file, after `ray up` with it."""
    path = str(cluster_file(bed, "head", ["w1", "w2"]))
    bed.laptop.run(["ray", "up", "--yes", "--no-config-cache", path], timeout_s=DEADLINE_S)
    wait_for_hosts(bed.host("head"), [bed.host(name) for name in ("head", "w1", "w2")])
    return path


def arguments(bed: Bed, home: str) -> list[str]:
    return [str(bed.shared / "hosts.yaml"), "--home", str(bed.shared / home)]


def wait_for_sweep(process: Popen[str], log: Path) -> None:
    assert process.wait(DEADLINE_S * PATIENCE) == 0, log.read_text()


def test_the_api_of_the_cluster_needs_the_token(bed: Bed, cluster: str) -> None:
    url = f"{job_address(bed.host('head'))}/api/jobs/"
    ask = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=20).status)"
    assert "HTTP Error 401" in bed.host("spare").run(["python", "-c", ask], check=False).stderr
    listed = bed.host("spare").run(
        ["ray", "job", "list", "--address", job_address(bed.host("head"))], check=False
    )
    assert listed.returncode, "no token, no list"
    assert (
        "[]"
        in bed.laptop.run(["ray", "job", "list", "--address", job_address(bed.host("head"))]).stdout
    )


def test_ray_submit_trains_groups_over_two_hosts_and_comes_to_what_one_host_does(
    bed: Bed, cluster: str, one_host: Path
) -> None:
    log = bed.folder / "submit.log"
    command = [
        "ray",
        "submit",
        cluster,
        f"{REPOSITORY}/suite/run_sweep.py",
        "--",
        *arguments(bed, "submitted"),
    ]
    submitted = bed.laptop.popen(command, log=log)
    w1 = bed.host("w1")
    w2 = bed.host("w2")
    wait_until(
        "a rank on each host",
        lambda: (w1.pids(RANK) and w2.pids(RANK)) or submitted.poll() is not None,
        timeout_s=200,
    )
    assert submitted.poll() is None, log.read_text()
    wait_for_sweep(submitted, log)
    assert_equal(bed.shared / "submitted", one_host, bed)


def test_ray_job_submit_comes_to_the_same(bed: Bed, cluster: str, one_host: Path) -> None:
    log = bed.folder / "job.log"
    job = ["suite", "run", *arguments(bed, "job"), "--address", "auto"]
    submitted = bed.laptop.popen(
        ["ray", "job", "submit", "--address", job_address(bed.host("head")), "--", *job], log=log
    )
    wait_for_sweep(submitted, log)
    assert_equal(bed.shared / "job", one_host, bed)


def test_a_host_that_loses_its_power_costs_no_finished_epoch(
    bed: Bed, cluster: str, one_host: Path
) -> None:
    head, w1, w2, spare = (bed.host(name) for name in ("head", "w1", "w2", "spare"))
    (spare.home / ".ray").mkdir()
    (spare.home / ".ray" / "auth_token").write_bytes(
        (head.home / ".ray" / "auth_token").read_bytes()
    )
    log = bed.folder / "killed.log"
    home = bed.shared / "killed"
    submitted = bed.laptop.popen(
        [
            "ray",
            "submit",
            cluster,
            f"{REPOSITORY}/suite/run_sweep.py",
            "--",
            *arguments(bed, "killed"),
        ],
        log=log,
    )
    wait_until(
        "a committed epoch",
        lambda: list(home.glob("trials/*/checkpoint/epoch-*/COMMIT.json")),
        timeout_s=300,
        every_s=0.005,
    )
    w2.kill()
    before = {trial: folder_time(home, trial) for trial in results(home)}
    start_worker(spare, head)
    wait_for_sweep(submitted, log)
    assert_equal(home, one_host, bed)
    resumed = [result for result in results(home).values() if result.resumed_from_epochs]
    assert resumed, "the cut trial went on from its last epoch"
    assert before == {trial: folder_time(home, trial) for trial in before}, (
        "finished trials were left alone"
    )
    wait_until("all ranks gone", lambda: not (w1.pids(RANK) or spare.pids(RANK)), timeout_s=30)
    groups = head.run(["ray", "list", "placement-groups", "--filter", "state!=REMOVED"])
    assert groups.stdout.strip() == "No resource in the cluster"


def folder_time(home: Path, trial: str) -> int:
    return (home / "trials" / trial / "result.json").stat().st_mtime_ns


def test_ray_down_and_stop_leave_nothing_behind(bed: Bed, cluster: str) -> None:
    bed.laptop.run(["ray", "down", "--yes", cluster], timeout_s=200)
    for name in (
        "w1",
        "spare",
    ):  # `ray down` stops the head; machines of one's own are stopped one by one
        bed.laptop.run(["ssh", name, "bash", "-lc", "'ray stop --force'"])
    bed.host("head").run("ray stop --force")
    assert_nothing_left(bed)
