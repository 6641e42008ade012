"""Hosts that share no disk: refused without a storage; with a bucket behind them, a host's power and its disk may be lost.

The tests share one cluster and build on one another, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from suite.record.folder import Home
from tests.cluster.bed import Bed
from tests.cluster.launcher import start_cluster, start_worker
from tests.cluster.processes import PATIENCE, wait_until
from tests.cluster.sweep_check import (
    TRIALS,
    assert_equal,
    curves,
    leaderboard,
    results,
    write_sweep,
)

pytestmark = pytest.mark.timeout(900 * PATIENCE)
PORT = 5555
URL = "s3://sweeps/hosts"


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Head, two workers and a spare one, each with a disk of its own and the bucket's credentials; the S3 server is the laptop."""
    with Bed(tmp_path_factory.mktemp("bed"), ["head", "w1", "w2", "spare"]) as made:
        for host in made.hosts.values():
            (host.home / ".aws").mkdir()
            (host.home / ".aws" / "credentials").write_text(
                "[default]\naws_access_key_id = bed\naws_secret_access_key = bed\n"
            )
            endpoint = f"http://{made.laptop.address}:{PORT}"
            (host.home / ".aws" / "config").write_text(
                f"[default]\nregion = us-east-1\nendpoint_url = {endpoint}\n"
            )
        server = made.laptop.popen(
            ["moto_server", "-H", "0.0.0.0", "-p", str(PORT)], log=made.folder / "s3.log"
        )
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='sweeps')"
        wait_until(
            "a bucket",
            lambda: made.laptop.run(["python", "-c", make], check=False).returncode == 0,
            timeout_s=120,
        )
        yield made
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def alone(bed: Bed) -> Path:
    """The sweep on one host with one disk: what the others must come to."""
    home = bed.shared / "alone"
    bed.laptop.run(["suite", "run", str(write_sweep(bed)), "--home", str(home)], timeout_s=600)
    return home


@pytest.fixture(scope="module")
def cluster(bed: Bed, alone: Path) -> None:
    start_cluster(bed.host("head"), [bed.host("w1"), bed.host("w2")])


def command(bed: Bed, *more: str) -> list[str]:
    return [
        "suite",
        "run",
        str(bed.shared / "hosts.yaml"),
        "--home",
        str(bed.local / "home"),
        "--address",
        "auto",
        *more,
    ]


def test_a_home_that_not_all_hosts_see_is_refused_and_they_are_named(
    bed: Bed, cluster: None
) -> None:
    refused = bed.host("head").run(command(bed), check=False, timeout_s=300)
    assert refused.returncode == 2
    assert (
        "w1 (" in refused.stderr
        and "w2 (" in refused.stderr
        and "--storage s3://" in refused.stderr
    )
    assert not list(bed.host("head").local.glob("home/trials/*/result.json"))


def test_a_folder_as_storage_must_be_seen_by_all_hosts_too(bed: Bed, cluster: None) -> None:
    refused = bed.host("head").run(
        command(bed, "--storage", f"file://{bed.local}/storage"), check=False, timeout_s=300
    )
    assert refused.returncode == 2 and "not seen by w1 (" in refused.stderr


def test_groups_over_hosts_with_disks_of_their_own_outlive_the_loss_of_one(
    bed: Bed, cluster: None, alone: Path
) -> None:
    head, w1, w2, spare = (bed.host(name) for name in ("head", "w1", "w2", "spare"))
    log = bed.folder / "storage.log"
    list_keys = [
        "python",
        "-c",
        f"from suite.storage.urls import open_storage; print(open_storage({URL!r}).keys())",
    ]
    running = head.popen(command(bed, "--storage", URL), log=log)
    wait_until(
        "a committed epoch",
        lambda: "COMMIT.json" in head.run(list_keys).stdout or running.poll() is not None,
        timeout_s=400,
    )
    w2.kill()
    (spare.home / ".ray").mkdir(exist_ok=True)
    (spare.home / ".ray" / "auth_token").write_bytes(
        (head.home / ".ray" / "auth_token").read_bytes()
    )
    start_worker(spare, head)
    assert running.wait(600 * PATIENCE) == 0, log.read_text()
    home = head.local / "home"
    assert_equal(home, alone, bed)
    assert any(result.resumed_from_epochs for result in results(home).values()), (
        "the cut trial went on from what the bucket had"
    )
    assert not list(w1.local.glob("home/trials/*/checkpoint/*/*")), (
        "what has ended keeps no checkpoint"
    )
    assert "checkpoint" not in head.run(list_keys).stdout
    confirmed = [folder for folder in Home(home).trials() if folder.predictions("test").exists()]
    assert len(confirmed) == 2, "the driver's host has what intervals are made of"


def test_a_machine_that_was_not_there_gets_the_sweep_from_the_bucket(
    bed: Bed, cluster: None, alone: Path
) -> None:
    home = bed.shared / "synced"
    bed.laptop.run(["suite", "sync", "--storage", URL, "--home", str(home)], timeout_s=300)
    assert curves(results(home)) == curves(results(alone)) and len(results(home)) == TRIALS
    assert leaderboard(bed, home) == leaderboard(bed, alone)
    cell = bed.laptop.run(
        ["suite", "export", "lora/entailment", f"{URL}-export", "--home", str(home)],
        check=False,
        timeout_s=300,
    )
    assert cell.returncode == 2 and "best.safetensors" in cell.stderr, "records alone are no model"
    bed.laptop.run(["suite", "sync", "--storage", URL, "--home", str(home), "--all"], timeout_s=300)
    bed.laptop.run(
        ["suite", "export", "lora/entailment", f"{URL}-export", "--home", str(home)], timeout_s=300
    )
    taken = bed.laptop.run(
        ["suite", "export", "lora/entailment", f"{URL}-export", "--home", str(home)],
        check=False,
        timeout_s=300,
    )
    assert taken.returncode == 2 and "not empty" in taken.stderr
