"""The training loop of one trial on one rank.

It knows nothing of Ray, Optuna or MLflow, and names no method or task.

trainer = Trainer(workspace, rank=0, world_size=1, ...)
trainer.start(spec)
while not trainer.epoch().done:
    pass
result = trainer.finish()
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from suite.config.task_base import SplitName
from suite.data.objective import Batch
from suite.errors import CheckpointError
from suite.files import remove_leavings, sha256, write_atomic
from suite.meters import PhaseMeter, baseline_bytes, name_devices_by_attempt
from suite.petl._frozen import GivenPass
from suite.record.attempts import LanesApartError, LanesUnevenError
from suite.record.folder import TrialFolder
from suite.record.result import EpochRecord, Status, TrialResult, ValidityRecord
from suite.record.spec import Phase, TrialSpec
from suite.redact import redact
from suite.storage.mirror import Mirror, digest
from suite.storage.workspace import Workspace
from suite.train.batches import TrainBatches
from suite.train.checkpoint import Checkpoints, write_tensors
from suite.train.engine_config import micro_batching
from suite.train.epoch import EpochStart, train_epoch
from suite.train.evaluate import Evaluation, evaluate, weights_at_hand
from suite.train.failure import failure_record, is_infrastructure, status_of, write_failed
from suite.train.lanes import LanesMeter
from suite.train.midway import Midway
from suite.train.probe import probe
from suite.train.process_group import (
    all_agree,
    close_process_group,
    gather_objects,
    init_process_group,
)
from suite.train.record import build_result
from suite.train.report import EpochReport
from suite.train.running_trial import RunningTrial, TrialProgress
from suite.train.validity import validity_of
from suite.train.warm import Warm, build_warm


class TrialEndedError(RuntimeError):
    """The trial ended without a score by its own doing; `result.json` says how."""


class Trainer:
    """One rank of a group: joins the process group once, then trains trial after trial.

    Args:
        workspace: Where trial folders, data and caches are.
        rank, world_size, local_rank: Place in the group.
        master_addr, master_port: Rendezvous of this group alone.
        device: "cpu" or "cuda".
        memory_frac: The share of its GPU's memory that this rank may take, where other trials have
            the rest; None = all of it.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        master_addr: str = "127.0.0.1",
        master_port: int,
        device: str = "cpu",
        memory_frac: float | None = None,
    ) -> None:
        self.workspace = workspace
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._shares_gpu = memory_frac is not None
        if device == "cuda":
            # Before the group is made: NCCL takes the current device.
            torch.cuda.set_device(local_rank)
            if memory_frac is not None:
                torch.cuda.set_per_process_memory_fraction(memory_frac)
        init_process_group(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            address=master_addr,
            port=master_port,
            device=device,
            timeout_s=workspace.collective_timeout_s,
        )
        self._mirror = Mirror.of(workspace)
        # One rank of every host looks after the files that its host keeps.
        self._leads = local_rank == 0
        self._hosts = sum(gather_objects(self._leads))
        self._warm: Warm | None = None
        # By hash, in the order of the lanes; without lanes it is one trial.
        self._runs: dict[str, RunningTrial] = {}
        # For what lanes do together.
        self._common = self._new_meter()
        self._leaving = False
        # The half a million objects of the imported libraries stay, so that no later collection
        # need walk over them.
        gc.collect()
        gc.freeze()

    # ---- the three calls of a trial ----

    def start(self, spec: TrialSpec) -> int:
        """Make the engine ready for a trial, at its last committed epoch. Collective.

        Returns:
            Epochs already done.
        """
        return self.start_lanes([spec])

    def epoch(self) -> EpochReport:
        """Train one epoch, validate, keep the best, commit a checkpoint. Collective."""
        (report,) = self.epoch_of_lanes().values()
        return report

    def finish(self, *, pruned: bool = False) -> TrialResult:
        """Test the best epoch's weights (confirm phase only) and write the result. Collective.

        Args:
            pruned: The trial ends here because others of its study do better. It has no score.
        """
        (trial,) = self._running()
        return self.finish_lane(trial, pruned=pruned)

    # ---- the same for trials that train side by side ----

    def start_lanes(self, specs: Sequence[TrialSpec]) -> int:
        """Make ready for trials that differ in their learning rate and number only. Collective.

        Returns:
            Epochs already done, by all of them.

        Raises:
            LanesUnevenError: They are not equally far. They can be trained one by one.
            LanesApartError: The same, and the engine shares no frozen weights.
        """
        folders = [self.workspace.home.trial(spec) for spec in specs]
        started_at = time.time()
        # An earlier start may have failed half way.
        self._runs = {}
        with self._boundary(folders, started_at):
            # Epoch 0 is whatever comes before the first step.
            self._seed(specs[0], epoch=0)
            if specs[0].training.threads_per_worker is not None:
                torch.set_num_threads(specs[0].training.threads_per_worker)
            if self._warm is not None:
                self._warm.keep_lanes(len(specs))
            self._common.take()
            for number, spec in enumerate(specs):
                self._start_lane(number, spec, started_at)
            if len(specs) > 1:
                _check_level(self._runs.values())
            return next(iter(self._runs.values())).progress.epoch

    def _new_meter(self) -> PhaseMeter:
        return PhaseMeter(torch.device(self.device), shares_gpu=self._shares_gpu)

    def _start_lane(self, number: int, spec: TrialSpec, started_at: float) -> None:
        folder = self.workspace.home.trial(spec)
        if self.rank == 0:
            folder.write_spec(spec)
        meter = self._new_meter()
        checkpoints = Checkpoints(folder.checkpoint, self.workspace.fence, self._mirror)
        with meter.phase("load"):
            warm = self._warm_for(spec, meter)
            if number > 0 and not warm.engine.has_lanes:
                raise LanesApartError("the engine's frozen weights are partitioned")
            warm = warm.lane(number)
            state = self._load_or_reset(warm, checkpoints, folder)
        progress = self._progress(state, meter)
        # A trial that is taken up began with its first attempt.
        progress.started_at = min(progress.started_at, started_at)
        progress.world_sizes.append(self.world_size)
        progress.hosts.append(self._hosts)
        batches = self._train_batches(spec, warm)
        run = RunningTrial(spec, folder, warm, batches, meter, checkpoints, progress)
        self._runs[spec.hash] = run
        self._log(
            run,
            f"start at epoch {progress.epoch}: lr {spec.learning_rate:.3g}, "
            f"seed {spec.seed}, {spec.phase}, pid {os.getpid()}",
        )

    def epoch_of_lanes(self) -> dict[str, EpochReport]:
        """Train one epoch of every trial that is not done, and keep what it gave. Collective.

        Returns:
            A report of every trial, by its hash.
        """
        runs = list(self._running().values())
        with self._boundary([run.folder for run in runs], runs[0].progress.started_at):
            reports = {}
            going = []
            for run in runs:
                if run.done:
                    reports[run.folder.hash] = EpochReport(None, True)
                else:
                    going.append(run)
            if going:
                reports |= self._train(going)
            return reports

    def _train(self, runs: list[RunningTrial]) -> dict[str, EpochReport]:
        """Train and validate one epoch of trials that are equally far. Collective."""
        number = runs[0].progress.epoch + 1
        for run in runs:
            run.progress.lanes = max(run.progress.lanes, len(runs))
        starts = [self._epoch_start(run) for run in runs]
        self._seed(runs[0].spec, epoch=number)
        meter = LanesMeter(runs, self._common)
        with meter.phase("train"):
            losses = train_epoch(starts, number, meter, leaving=lambda: self._leaving)
        reports = {}
        going: list[tuple[EpochStart, float]] = []
        for start, loss in zip(starts, losses, strict=True):
            # The ranks have voted on this, so that all of them end here.
            if loss is None:
                why = f"epoch {number}: a loss or gradient is not finite"
                reports[start.run.folder.hash] = self._diverged(start.run, why)
            else:
                going.append((start, loss))
        if not going:
            return reports
        evaluations = self._evaluate([start.run for start, _ in going], "validation")
        for (start, loss), evaluation in zip(going, evaluations, strict=True):
            report = self._keep_epoch(start, number, loss, evaluation)
            reports[start.run.folder.hash] = report
        return reports

    def _keep_epoch(
        self, start: EpochStart, number: int, loss: float, evaluation: Evaluation
    ) -> EpochReport:
        """Note an epoch, keep the best, commit a checkpoint. Collective."""
        run = start.run
        if not math.isfinite(evaluation.score):
            return self._diverged(run, f"epoch {number}: the validation score is not finite")
        record = EpochRecord(
            epoch=number,
            step=number * len(run.batches),
            train_loss=loss,
            validation_score=evaluation.score,
            validation_scores=evaluation.scores,
            learning_rate=run.learning_rate(number * len(run.batches) - 1),
            seconds=run.meter.seconds("train") - start.before_s,
            # The meter counts the whole trial, the record this epoch.
            energy_kwh=start.energy_kwh(*self._train_energy(run)),
        )
        with run.meter.phase("checkpoint"):
            self._keep(run, record, evaluation)
        return EpochReport(record, run.done)

    def finish_lane(self, trial: str, *, pruned: bool = False) -> TrialResult:
        """End one of the trials as `finish` does, by its hash. Collective."""
        run = self._running()[trial]
        with self._boundary([run.folder], run.progress.started_at):
            if pruned:
                run.status = Status.PRUNED
            test: Evaluation | None = None
            # A search trial never sees the test split: choices rest on validation alone.
            if run.spec.phase is Phase.CONFIRM and run.status is None:
                test = self._test(run)
                if not math.isfinite(test.score):
                    self._diverged(run, "the test score is not finite")
            if run.spec.phase is Phase.PRETRAIN and run.status is None:
                run.weights_sha256 = self._save_tensors(run, run.folder.weights)
            validity: ValidityRecord | None = None
            if run.status is None:
                validity = self._validity(run)
            # Collective: all ranks put it together, and one writes it.
            result = build_result(run, test, validity)
            if self.rank == 0:
                self._mirror.end(run.folder, result)
                self._log(run, f"{result.status}: score {result.score}")
            # Checkpoints go when the result is there, not before.
            dist.barrier()
            if self._leads:
                run.checkpoints.clear()
            self._mirror.push_log(run.folder.log(self.rank))
            del self._runs[trial]
            return result

    def leave(self) -> None:
        """End the epoch at its next step, with a checkpoint and `PreemptedError` on all ranks.

        A signal handler calls this when the machine gives notice.
        """
        self._leaving = True

    def baseline_bytes(self) -> int:
        """The bytes that this process holds now, by which a group is seen to grow."""
        return baseline_bytes(torch.device(self.device))

    def close(self) -> None:
        """Free the engine and leave the process group, waiting for nobody."""
        if self._warm is not None:
            self._warm.release()
            self._warm = None
        close_process_group()

    # ---- parts ----

    def _diverged(self, run: RunningTrial, why: str) -> EpochReport:
        run.status = Status.DIVERGED
        self._log(run, why)
        return EpochReport(None, True)

    def _epoch_start(self, run: RunningTrial) -> EpochStart:
        if run.progress.midway is None:
            return EpochStart(run, None, run.meter.seconds("train"), *self._train_energy(run))
        midway = Midway(**run.progress.midway)
        return EpochStart(run, midway, midway.before_s, midway.before_kwh, midway.before_source)

    def _running(self) -> dict[str, RunningTrial]:
        if not self._runs:
            raise AssertionError("start() comes before epoch() and finish()")
        return self._runs

    def _warm_for(self, spec: TrialSpec, meter: PhaseMeter) -> Warm:
        if self._warm is not None and not self._warm.turn_to(spec, self.workspace, meter):
            # Released before the next is built: memory may not hold two.
            self._warm.release()
            self._warm = None
        if self._warm is None:
            self._fetch_pretrained(spec)
            self._warm = build_warm(spec, self.workspace, device=self.device, meter=meter)
        return self._warm

    def _load_or_reset(
        self, warm: Warm, checkpoints: Checkpoints, folder: TrialFolder
    ) -> dict[str, Any] | None:
        """Take up the last committed epoch, or go back to step 0. Collective."""
        state = checkpoints.load(warm.engine)
        if state is None:
            warm.reset()
        elif self.rank == 0:
            self._mirror.fetch_begun(folder)
        # From here on the weights may differ from step 0.
        warm.pristine = False
        return state

    def _fetch_pretrained(self, spec: TrialSpec) -> None:
        """Bring the weights that the arm starts from to every host. Collective."""
        if spec.arm.pretrain is not None and self.workspace.storage is not None:
            if self._leads:
                self._mirror.fetch_weights(self.workspace.home.pretrained(spec.arm.pretrain))
            # Only now is the file there for the other ranks of the host.
            dist.barrier()

    def _progress(self, state: dict[str, Any] | None, meter: PhaseMeter) -> TrialProgress:
        if state is None:
            return TrialProgress()
        progress = TrialProgress.from_json(state)
        attempt = len(progress.world_sizes)
        for rank, accounts in progress.meters.items():
            # This attempt may give a board to another rank; what it spends is added then.
            progress.meters[rank] = name_devices_by_attempt(accounts, attempt)
        meter.load_state(progress.meters.get(str(self.rank), {}))
        progress.resumed_from.append(progress.epoch)
        return progress

    def _train_batches(self, spec: TrialSpec, warm: Warm) -> TrainBatches:
        micro, _ = micro_batching(spec.training, self.world_size)
        return TrainBatches(
            warm.data.split("train", confirm=False),
            warm.objective.collate,
            batch_size=spec.training.batch_size,
            micro_batch_size=micro,
            rank=self.rank,
            world_size=self.world_size,
            epoch_steps=spec.training.epoch_steps,
        )

    def _train_energy(self, run: RunningTrial) -> tuple[float | None, str | None]:
        """Energy of the trial's training so far in kWh, and its source. Collective.

        Each device counts once. Before the first step there is no source.
        """
        train = run.accounts()[0].get("train")
        if train is None:
            return 0.0, None
        return train.energy_kwh, train.energy_source

    def _evaluate(
        self, runs: Sequence[RunningTrial], split: SplitName, *, phase: str = "eval"
    ) -> list[Evaluation]:
        warm = runs[0].warm
        engines = [run.warm.engine for run in runs]
        at_hand = weights_at_hand(
            engines,
            warm.objective,
            usable_bytes=self.workspace.usable_bytes,
            log=partial(self._log, runs[0]),
        )
        meter = LanesMeter(runs, self._common)
        given: Callable[[Sequence[int], Batch], GivenPass] | None = None
        # Test rows are read once in a trial, so nothing is kept of them.
        if warm.states is not None and split in warm.states.places:
            given = partial(warm.states.given, split)
        with meter.phase(phase), at_hand:
            return evaluate(
                engines,
                warm.objective,
                warm.data.split(split, confirm=runs[0].spec.phase is Phase.CONFIRM),
                meter,
                rank=self.rank,
                world_size=self.world_size,
                batch_size=runs[0].spec.training.eval_batch_size,
                given=given,
            )

    def _keep(self, run: RunningTrial, record: EpochRecord, evaluation: Evaluation) -> None:
        """Note the epoch and keep the best weights; commit a checkpoint unless the trial ends."""
        if self.rank == 0:
            self._check_fence(run.folder)
        progress = run.progress
        progress.midway = None
        progress.epochs.append(record.model_dump(mode="json"))
        if run.improves(record.validation_score):
            self._keep_best(run, record, evaluation)
        if self.rank == 0:
            run.folder.add_epoch(record)
        self._log(
            run,
            f"epoch {record.epoch}: loss {record.train_loss:.4f}, "
            f"validation {record.validation_score:.2f}",
        )
        if not run.done:
            if self.rank == 0:
                # Before the marker, because the state that it holds speaks of these files.
                self._mirror.push(run.folder)
            # Before `to_json`, which must hold the accounts of all ranks.
            run.note_meters()
            progress.checkpoint_bytes = run.checkpoints.save(
                run.warm.engine, record.epoch, progress.to_json()
            )

    def _keep_best(self, run: RunningTrial, record: EpochRecord, evaluation: Evaluation) -> None:
        progress = run.progress
        progress.best_epoch = record.epoch
        progress.best_score = record.validation_score
        progress.best = evaluation.scores
        if self.rank == 0:
            write_atomic(run.folder.predictions("validation"), evaluation.to_parquet())
        # Only a confirm run is tested with its best weights.
        if run.spec.phase is Phase.CONFIRM:
            progress.best_sha256 = self._save_tensors(run, run.folder.best)

    def _save_tensors(self, run: RunningTrial, path: Path) -> str:
        """Write the trained tensors whole; return the file's SHA-256 on every rank. Collective."""
        state = run.warm.engine.trained_state()
        written = ""
        if self.rank == 0:
            self._check_fence(run.folder)
            remove_leavings(path)
            write_tensors(path, state)
            written = sha256(path)
        of_rank_0: str = gather_objects(written)[0]
        return of_rank_0

    def _test(self, run: RunningTrial) -> Evaluation:
        # The engine still has the last epoch's weights.
        if run.progress.best_epoch != run.progress.epoch:
            with run.meter.phase("load"):
                self._load_best(run)
        (test,) = self._evaluate([run], "test", phase="test")
        if self.rank == 0:
            self._check_fence(run.folder)
            write_atomic(run.folder.predictions("test"), test.to_parquet())
        return test

    def _load_best(self, run: RunningTrial) -> None:
        """Bring back the best epoch's weights. Collective.

        Raises:
            CheckpointError: The file is not the one that was written then. It is damaged, or its
                epoch was lost in a cut and gave other weights when it was trained again. The next
                attempt begins anew.
        """
        best = run.folder.best
        # Rank 0 alone reads the file, but every rank must raise if it is another.
        if not all_agree(self.rank != 0 or digest(best) == run.progress.best_sha256):
            if self._leads:
                run.checkpoints.clear()
            raise CheckpointError(
                f"{best}: not the weights of epoch {run.progress.best_epoch}; "
                "the trial is trained anew"
            )
        state: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            state = load_file(best)
        run.warm.engine.load_trained(state)

    def _validity(self, run: RunningTrial) -> ValidityRecord:
        """Check the weights that were scored, or the last ones if there was no test. Collective."""
        with run.meter.phase("eval"):
            return validity_of(run, probe(run.warm.engine, run.warm.objective, run.batches.data))

    def _seed(self, spec: TrialSpec, *, epoch: int) -> None:
        """Reseed every stream, so that a resumed or warm trial draws what a cold one draws."""
        # With the rank: otherwise all ranks would draw the same dropout masks.
        seed = spec.stream("dropout", epoch, self.rank)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def _check_fence(self, folder: TrialFolder) -> None:
        """Raise StaleDriverError if another driver has taken the sweep, or the shared run, over.

        This comes before everything that counts is written.
        """
        if self.workspace.fence is not None:
            self.workspace.fence.check(shared=folder.shared)

    def _log(self, run: RunningTrial, message: str) -> None:
        _log_to(run.folder.log(self.rank), message)

    @contextmanager
    def _boundary(self, folders: Sequence[TrialFolder], started_at: float) -> Iterator[None]:
        """The one place where a trial's exception becomes its status.

        The machine's failures pass through, because another attempt may succeed. A rank that fails
        alone writes the result and raises; the group then ends the others. Of several lanes nobody
        knows whose error it was: none has a status, and each is tried alone.
        """
        try:
            yield
        # Not BaseException: Ctrl-C says nothing about the trial.
        except Exception as error:
            for folder in folders:
                _log_to(folder.log(self.rank), f"{type(error).__name__}: {error}")
                logging.getLogger("suite").debug("trial %s", folder.hash, exc_info=True)
                self._mirror.push_log(folder.log(self.rank))
            if is_infrastructure(error) or isinstance(error, LanesApartError):
                raise
            if len(folders) > 1:
                why = redact(f"{type(error).__name__}: {error}")
                raise LanesApartError(f"one of {len(folders)} lanes failed: {why}") from error
            (folder,) = folders
            self._check_fence(folder)
            status = status_of(error)
            record = failure_record(error, log_path=str(folder.log(self.rank)))
            write_failed(folder, status, record, started_at=started_at)
            self._mirror.settle(folder)
            self._mirror.drop_checkpoint(folder)
            raise TrialEndedError(redact(f"{status}: {type(error).__name__}: {error}")) from error


def _check_level(runs: Iterable[RunningTrial]) -> None:
    """Check that lanes are equally far: at the same step of the same epoch.

    Raises:
        LanesUnevenError: They are not.
    """
    places = set()
    for run in runs:
        step = 0
        if run.progress.midway is not None:
            step = Midway(**run.progress.midway).step
        places.add((run.progress.epoch, step))
    if len(places) > 1:
        raise LanesUnevenError(f"lanes are at different (epoch, step): {sorted(places)}")


def _log_to(path: Path, message: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {redact(message)}\n")
