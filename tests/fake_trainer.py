"""A trainer without training: the interface of `suite.train.loop.Trainer`, for tests of what surrounds it.

The score of a learning rate is a parabola on the log scale. Faults are asked for by files in the home:
`fault-<what>` holds the hash of a trial, or "any", is removed when it strikes unless `fault-<what>-again` lies beside it, and strikes on
rank 1.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.files import write_json
from suite.record.attempts import LanesUnevenError, PreemptedError
from suite.record.folder import Home
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.report import EpochReport

BEST_LEARNING_RATE = 3e-4


def score_of(spec: TrialSpec, epoch: int) -> float:
    return (
        90.0
        - 5.0 * math.log10(spec.learning_rate / BEST_LEARNING_RATE) ** 2
        + 0.1 * spec.seed
        + epoch
    )


def all_calls(home: Home) -> list[dict[str, Any]]:
    """What the ranks were asked for, in order."""
    path = home.path / "calls.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def calls(home: Home, call: str = "start") -> list[dict[str, Any]]:
    """The calls of one name to rank 0."""
    return [c for c in all_calls(home) if c["call"] == call and c["rank"] == 0]


class FakeTrainer:
    """Commits an epoch by a file, as the real one does by a checkpoint; `calls.jsonl` in the home tells what ran in which process."""

    seconds_per_epoch = 0.0

    def __init__(
        self,
        workspace: Workspace,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        master_addr: str,
        master_port: int,
        device: str,
    ) -> None:
        assert (
            0 <= rank < world_size
            and master_port > 0
            and device == "cpu"
            and 0 <= local_rank <= rank
        )
        self.workspace = workspace
        self.rank = rank
        self.leaving = False

    def start_lanes(self, specs: Sequence[TrialSpec]) -> int:
        self.lanes = {spec.hash: spec for spec in specs}
        self.epochs = {spec.hash: self.start(spec) for spec in specs}
        if len(set(self.epochs.values())) > 1:
            raise LanesUnevenError(f"lanes have done {sorted(self.epochs.values())} epochs")
        return self.done

    def epoch_of_lanes(self) -> dict[str, EpochReport]:
        reports = {}
        for trial, spec in self.lanes.items():
            self._turn_to(spec)
            self.done = self.epochs[trial]
            reports[trial] = self.epoch()
            self.epochs[trial] = self.done
        return reports

    def finish_lane(self, trial: str, *, pruned: bool = False) -> TrialResult:
        self._turn_to(self.lanes.pop(trial))
        self.done = self.epochs[trial]
        return self.finish(pruned=pruned)

    def _turn_to(self, spec: TrialSpec) -> None:
        self.spec, self.folder = spec, self.workspace.home.trial(spec)

    def start(self, spec: TrialSpec) -> int:
        self._turn_to(spec)
        self.done = self._committed()
        if self.rank == 0:
            self.folder.write_spec(spec)
        self._note("start", epoch=self.done)
        for fault in ("kill", "network", "memory"):
            self._strike(f"{fault}-start")
        return self.done

    def epoch(self) -> EpochReport:
        if self.spec.learning_rate > 0.5:
            return EpochReport(None, True)
        self.done += 1
        time.sleep(self.seconds_per_epoch)
        if self.leaving:
            raise PreemptedError("left, as asked")
        for fault in ("kill", "stop", "hang", "disk", "fsync", "removed", "bug"):
            if self.done > 1:
                self._strike(fault)
        if self.rank == 0:
            write_json(self.folder.checkpoint / "epoch.json", self.done)
        record = EpochRecord(
            epoch=self.done,
            step=self.done,
            train_loss=1.0,
            validation_score=score_of(self.spec, self.done),
            validation_scores={},
            learning_rate=self.spec.learning_rate,
            seconds=0.0,
        )
        if self.rank == 0:
            with (self.folder.path / "epochs.jsonl").open("a") as file:
                file.write(record.model_dump_json() + "\n")
        self.record = record
        return EpochReport(record, self.done >= self.spec.training.epochs)

    def finish(self, *, pruned: bool = False) -> TrialResult:
        if self.spec.learning_rate > 0.5:
            status = Status.DIVERGED
        elif pruned:
            status = Status.PRUNED
        else:
            status = Status.COMPLETED
        best = score_of(self.spec, self.done) if status is not Status.DIVERGED else None
        score = None if pruned else best
        confirm = self.spec.phase is Phase.CONFIRM
        result = TrialResult(
            trial=self.spec.hash,
            status=status,
            score=score,
            validation_score=best,
            test_score=score if confirm else None,
            started_at=0.0,
            finished_at=1.0,
        )
        if self.rank == 0:
            if self.spec.phase is Phase.PRETRAIN:
                self.folder.weights.touch()  # a sweep looks whether they are there
            self.folder.write_result(result)
        self._note("finish", epoch=self.done)
        return result

    def leave(self) -> None:
        self.leaving = True

    def baseline_bytes(self) -> int:
        path = self.workspace.home.path / "baseline"
        return int(path.read_text()) if path.exists() else 1_000_000

    def close(self) -> None:
        pass

    def _committed(self) -> int:
        path = self.folder.checkpoint / "epoch.json"
        return int(json.loads(path.read_text())) if path.exists() else 0

    def _note(self, call: str, *, epoch: int) -> None:
        about = {
            "call": call,
            "trial": self.spec.hash,
            "rank": self.rank,
            "pid": os.getpid(),
            "epoch": epoch,
            "at": time.time(),
        }
        line = json.dumps(about)
        with (self.workspace.home.path / "calls.jsonl").open("a") as file:
            file.write(line + "\n")

    def _strike(self, fault: str) -> None:
        path = Path(self.workspace.home.path / f"fault-{fault}")
        if self.rank != 1 or not path.exists() or path.read_text() not in (self.spec.hash, "any"):
            return
        if not path.with_name(f"{path.name}-again").exists():
            path.unlink()
        if fault.startswith("kill"):
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "hang":
            sleep_through_everything()
        elif fault.startswith("network"):
            raise ConnectionResetError(104, f"connection {os.getpid()} reset by peer")
        elif fault.startswith("memory"):
            take_all_memory(self.workspace.home.path / "cgroup")
        elif fault == "disk":
            raise OSError(28, "No space left on device")
        elif fault == "fsync":
            os.fsync = refuse_to_sync
            write_json(self.folder.checkpoint / "epoch.json", self.done)
        elif fault == "removed":
            shutil.rmtree(self.folder.path)
            (self.folder.path / "epochs.jsonl").open("a")
        elif fault == "bug":
            failure = FailureRecord(type="ValueError", message="a bug of the trial's own")
            self.folder.write_result(
                TrialResult(
                    trial=self.spec.hash,
                    status=Status.FAILED,
                    score=None,
                    failure=failure,
                    started_at=0.0,
                    finished_at=1.0,
                )
            )
            raise RuntimeError("failed: ValueError")


def refuse_to_sync(handle: int) -> None:
    """The lowest call of Python's that a disk with a bad sector fails."""
    raise OSError(5, "Input/output error")


class LateTrainer(FakeTrainer):
    """Takes as long to begin as an import of DeepSpeed; `joining` in the home tells that it does."""

    def __init__(self, workspace: Workspace, **place: Any) -> None:
        super().__init__(workspace, **place)
        (workspace.home.path / "joining").touch()
        time.sleep(5.0)


class SlowTrainer(FakeTrainer):
    """Long enough to be killed in the middle."""

    seconds_per_epoch = 0.1


class GatedTrainer(FakeTrainer):
    """Ends the first trial of a study, and waits for the file `go` in the home before it trains another one."""

    def epoch(self) -> EpochReport:
        while (
            self.spec.phase is Phase.SEARCH
            and self.spec.number > 0
            and not self.leaving
            and not (self.workspace.home.path / "go").exists()
        ):
            time.sleep(0.1)
        return super().epoch()


def sleep_through_everything() -> None:
    """Its name is looked for in stacks."""
    time.sleep(600)


def take_all_memory(cgroup: Path) -> None:
    """Be killed by the kernel, in the control group that the file names."""
    Path(cgroup.read_text(), "tasks").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(bytearray(b"x") * 2**24)
