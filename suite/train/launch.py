"""Train one trial without Ray: in this process, or with one process per rank on this machine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from suite.errors import UNGUARDED, ConfigError, ResourceError, SuiteError
from suite.record.result import MEND, TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.loop import Trainer, TrialEndedError
from suite.train.process_group import free_port


def train_trial(spec: TrialSpec, workspace: Workspace) -> TrialResult:
    """Run a trial to its end, or go on with one that was cut off.

    The result of a finished trial is returned as it is.

    Args:
        spec: `world_size` says how many ranks. More than one are started as processes here, each
            with its share of the CPUs or a GPU of its own.

    Raises:
        ConfigError: Its stored result is damaged.
        ResourceError: Fewer GPUs than ranks, or a rank was killed.
    """
    folder = workspace.home.trial(spec)
    done = folder.result()
    if done is not None and done.damaged is not None:
        raise ConfigError(f"{done.damaged}; {MEND}")
    if done is not None:
        return done
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    if device == "cuda" and torch.cuda.device_count() < spec.world_size:
        raise ResourceError(
            f"--ranks {spec.world_size}: this machine has {torch.cuda.device_count()} GPUs"
        )
    # Chosen here, because all ranks must know the same one.
    port = free_port()
    if spec.world_size == 1:
        _rank(0, spec, workspace, port, device)
    else:
        threads = max(1, (os.cpu_count() or 1) // spec.world_size)
        # The ranks inherit it. What the user has set stays.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        try:
            _spawn(spec, workspace, port, device)
        except (mp.ProcessRaisedException, SuiteError, OSError):
            # A trial that ended without a score has said so in its result.
            if folder.result() is None:
                raise
        except mp.ProcessExitedException as error:
            if folder.result() is None:
                raise ResourceError(
                    f"{folder.path}: {error} before the trial ended; the kernel ends a process when"
                    f" memory runs out ({UNGUARDED})"
                ) from error
    result = folder.result()
    assert result is not None, f"{folder.path}: the trial ended without a result"
    return result


def _spawn(spec: TrialSpec, workspace: Workspace, port: int, device: str) -> None:
    """Run every rank in a process of its own.

    Raises:
        SuiteError, OSError: What a rank raised; its process could hand on a traceback alone.
    """
    with tempfile.TemporaryDirectory() as errors:
        try:
            mp.spawn(
                _rank, args=(spec, workspace, port, device, Path(errors)), nprocs=spec.world_size
            )
        except mp.ProcessRaisedException as ended:
            kept = Path(errors, str(ended.error_index))
            if not kept.exists():
                raise
            number, message, file = json.loads(kept.read_text())
            if number is None:
                raise SuiteError(message) from ended
            raise OSError(number, message, file) from ended


def _rank(
    rank: int,
    spec: TrialSpec,
    workspace: Workspace,
    port: int,
    device: str,
    errors: Path | None = None,
) -> None:
    trainer = Trainer(
        workspace,
        rank=rank,
        world_size=spec.world_size,
        local_rank=rank,
        master_port=port,
        device=device,
    )
    try:
        trainer.start(spec)
        while not trainer.epoch().done:
            pass
        trainer.finish()
    except BaseException as error:
        # The spawner ends the other ranks. They may wait in a collective, and leaving the group in
        # order would wait for them.
        if errors is not None:
            if isinstance(error, SuiteError):
                (errors / str(rank)).write_text(json.dumps([None, str(error), None]))
            elif isinstance(error, OSError):
                said = [error.errno, error.strerror or str(error), error.filename]
                (errors / str(rank)).write_text(json.dumps(said, default=str))
            raise
        trainer.close()
        if not isinstance(error, TrialEndedError):
            raise
        return
    trainer.close()
