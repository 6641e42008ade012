"""A real sweep whose home is mirrored comes to what one without a mirror does, and any other home can go on from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from suite.cli.sync import sync
from suite.cluster.session import cluster
from suite.errors import StorageError
from suite.plan.events import Listener, Outcome
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.urls import open_storage
from suite.tune.driver import run_sweep
from tests.buckets import BUCKET, running
from tests.ports import free_port
from tests.sweeps import make_roots, toy_sweep

ROOT = Path(__file__).parents[1]


def numbers(home: Home) -> dict[str, tuple[Any, ...]]:
    """What every trial came to, without what a clock measured."""
    found = {folder.hash: folder.result() for folder in home.trials()}
    return {
        h: (r.status, r.score, r.test_score, [e.train_loss for e in r.epochs])
        for h, r in found.items()
        if r is not None
    }


@pytest.mark.slow
def test_a_mirrored_sweep_equals_a_plain_one_and_every_home_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data_root = make_roots(tmp_path / "roots", monkeypatch)
    url = f"file://{tmp_path}/storage"
    config = toy_sweep(
        methods=["lora"],
        search={"trials": 1},
        confirm={"seeds": [1]},
        training={"epochs": 2, "batch_size": 8},
        resources={"workers": 1},
        timeouts={"setup_s": 250.0, "epoch_s": 250.0},
    )
    plain, kept, other = (Home(tmp_path / name) for name in ("plain", "kept", "other"))
    with cluster(None, threads=1):
        for home, storage in ((plain, None), (kept, url)):
            assert run_sweep(config, home=home, data_root=data_root, storage=storage).finished == 2
        shutil.rmtree(kept.path)  # the machine is gone
        again = run_sweep(config, home=other, data_root=data_root, storage=url)
    assert again.ok and again.finished == 0, "nothing that was stored is run again"
    assert numbers(other) == numbers(plain) and len(numbers(plain)) == 2
    files = {key.split("/")[2] for key in open_storage(url).keys("trials")}
    assert files == {
        *("spec.json", "proposal.json", "result.json", "epochs.jsonl"),
        *("best.safetensors", "rank0.log"),
        *("predictions-validation.parquet", "predictions-test.parquet"),
    }


class Outage(Listener):
    """Takes the S3 server away when the second trial starts, and brings it back when the sweep has ended."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        self.server = server
        self.started = 0

    def on_trial_start(self, spec: TrialSpec) -> None:
        self.started += 1
        if self.started == 2:
            self.server.stop()

    def on_end(self, outcome: Outcome) -> None:
        self.server.start()


@pytest.mark.slow
def test_a_storage_that_stays_away_pauses_the_sweep_and_costs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # A driver whose beats are late cannot tell whether the sweep is its own while the storage is
    # away, and then tells no listener, the outage among them, of the end. No beat is late here.
    monkeypatch.setattr("suite.storage.lease.BEAT_S", 300.0)
    data_root = make_roots(tmp_path / "roots", monkeypatch)
    url = f"s3://{BUCKET}/away"
    home = Home(tmp_path / "home")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    config = toy_sweep(
        methods=["lora"],
        search={"trials": 3},
        confirm={"seeds": [1]},
        resources={"workers": 1},
        timeouts={"collective_s": 4.0},
    )
    with running(server, monkeypatch), cluster(None, threads=1):
        given: dict[str, Any] = {
            "home": home,
            "data_root": data_root,
            "storage": url,
            "trainer": "tests.fake_trainer:FakeTrainer",
        }
        cut = run_sweep(config, listeners=[Outage(server)], **given)
        assert (
            cut.interrupted
            and "could not be reached" in cut.reason
            and "run the same command again when it is back" in cut.reason
        )
        assert not any(folder.failures() for folder in home.trials())
        # The storage answers again, but on a busy machine not within the two seconds of before.
        patient = config.timeouts.model_copy(update={"collective_s": 120.0})
        whole = run_sweep(config.model_copy(update={"timeouts": patient}), **given)
    assert whole.ok and cut.finished + whole.finished == 4


@pytest.mark.slow
def test_sync_brings_a_stored_home_to_a_machine_that_never_ran_it(tmp_path: Path) -> None:
    from tests.records import make_home

    ran = make_home(tmp_path / "ran")
    shutil.copytree(
        ran.path,
        tmp_path / "storage",
        ignore=shutil.ignore_patterns("*.db", "*.lock", "tracking-id"),
    )
    sync(
        tmp_path / "new",
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        storage=str(tmp_path / "storage"),
    )
    new = Home(tmp_path / "new")
    assert numbers(new) == numbers(ran) and numbers(new)
    name = next(new.path.glob("sweeps/*.json")).stem
    assert [cell.key for cell in status(new, name)] == [cell.key for cell in status(ran, name)]
    with pytest.raises(StorageError, match="holds no sweep"):
        sync(tmp_path / "new", storage=str(tmp_path / "empty"))


def test_a_relative_storage_is_one_place_for_driver_and_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a running cluster have the working folder of `ray start`."""

    def claim(home: Home, sweep: str, *, storage: str, patience_s: float) -> None:
        raise StorageError(storage)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suite.tune.driver.only_driver", claim)
    with pytest.raises(StorageError, match=f"^{tmp_path}/store$"):
        run_sweep(toy_sweep(), home=Home(tmp_path / "home"), storage="store")
