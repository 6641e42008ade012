"""Run as a process: a sweep whose trials fail with errors that show their process's secrets, and commands whose stores are away."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from suite.record.folder import Home
from suite.record.result import Status
from suite.record.spec import Phase
from suite.train.report import EpochReport
from tests.fake_trainer import FakeTrainer

SECRETS = (
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_URI",
)


class LeakyTrainer(FakeTrainer):
    """The second trial has a bug and the third dies of its machine, both with messages such as libraries write."""

    def epoch(self) -> EpochReport:
        from suite.train.failure import (  # torch, which a rank that joins need not wait for
            failure_record,
            write_failed,
        )

        error = ConnectionError(
            " and ".join(f"{name}={os.environ[name]}" for name in SECRETS), os.environ["HF_TOKEN"]
        )
        if self.spec.phase is Phase.SEARCH and self.spec.number == 1:
            if self.rank == 0:
                write_failed(self.folder, Status.FAILED, failure_record(error), started_at=0.0)
            raise RuntimeError("failed: a bug")
        if self.spec.phase is Phase.SEARCH and self.spec.number == 2:
            raise error
        return super().epoch()


def run(home: Home, data_root: Path) -> None:
    from suite.tracking.listener import TrackingListener
    from suite.tracking.store import resolve_uri
    from suite.tune.driver import run_sweep
    from tests.sweeps import toy_sweep

    config = toy_sweep(
        methods=["lora"],
        search={"trials": 4, "startup_trials": 3},
        confirm={"seeds": [1]},
        failures={"retries": 0},
        timeouts={"setup_s": 300.0, "epoch_s": 120.0},
    )
    tracking = TrackingListener(home, resolve_uri(home), sweep=config.name, patience_s=1.0)
    run_sweep(
        config,
        home=home,
        data_root=data_root,
        listeners=[tracking],
        trainer="tests.leaky_sweep:LeakyTrainer",
    )


def command(*arguments: str) -> None:
    from suite.cli.app import main

    try:
        main(arguments)
    except SystemExit as ended:
        print(f"exit code {ended.code}", flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    run(Home(place), Path(sys.argv[2]))
    for words in (["leaderboard"], ["sync"], ["status", "--format", "json"]):
        command(*words, "--home", str(place))
    own = os.environ.pop("MLFLOW_TRACKING_URI")
    command("sync", "--home", str(place))  # into a database that can be read afterwards
    command("leaderboard", "--home", str(place), "--tracking-uri", own)
