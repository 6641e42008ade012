"""Measure with lm-eval what a sweep has confirmed.

After the last trial a Ray task measures each model, with the resources of one worker. What goes
wrong here undoes no trial: it is reported, and the same command, or `suite lm-eval`, takes up what
is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from suite.config.lm_eval import LmEvalConfig, Request, parse_requests
from suite.errors import ConfigError, StorageError
from suite.evaluation.library import Library
from suite.plan.cell_state import CellState
from suite.plan.plan import Plan
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.lm_eval import FILE, read_record
from suite.registry import plug_in_roots
from suite.storage.mirror import Mirror
from suite.storage.workspace import Workspace
from suite.tune.group import RunSettings

if TYPE_CHECKING:
    from suite.evaluation.subjects import Subject

WAIT_S = 1.0
ANSWER_S = 60.0
"""How long fetching a finished answer may take: its node may be lost meanwhile."""
MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Job:
    """A model to measure: a confirmed run, or what it started from."""

    trial: str
    before: bool
    folder: Path


def check_lm_eval(plan: Plan, *, home: Home, data_root: Path | None) -> None:
    """Find what would stop lm-eval at the end of a sweep before its first worker starts.

    Raises:
        ConfigError: lm-eval is not installed, a task does not exist, or the sweep names a folder of
            task files that the user does not trust.
        DataError: The data of a task cannot be had.
        IncompatibleError: A cell whose model does not write from left to right.
    """
    config = plan.config.lm_eval
    if config is None:
        return
    from suite.evaluation.subjects import check_plan

    check_plan(plan, cache=home.cache, data_root=data_root)
    library = Library(config.include_path)
    if library.folder is not None:
        _check_trusted(library.folder)
    for request in parse_requests(config.tasks):
        library.load(request)


def _check_trusted(folder: Path) -> None:
    """Check that the user takes code from a folder of task files that a sweep names.

    Such a file names Python functions, and lm-eval does not sandbox its templates.
    """
    for root in plug_in_roots():
        if folder.is_relative_to(root.resolve()):
            return
    raise ConfigError(
        f"lm_eval.include_path {folder}: lm-eval's task files run code, which a sweep file cannot"
        f" allow; read them, then put the folder into SUITE_PATH (SUITE_PATH={folder})"
    )


def anything_left(
    plan: Plan, states: Mapping[str, CellState], home: Home, *, data_root: Path | None
) -> bool:
    """Whether lm-eval has not been asked everything of every model that it is to measure."""
    config = plan.config.lm_eval
    if config is None:
        return False
    return bool(_jobs(_confirmed(states), config, home, data_root=data_root))


def measure_confirmed(
    plan: Plan, states: Mapping[str, CellState], settings: RunSettings
) -> dict[str, str]:
    """Measure every confirmed run that was not measured, and with `before` what they start from.

    Returns:
        What could not be measured: folder -> why.
    """
    config = plan.config.lm_eval
    if config is None:
        return {}
    workspace = settings.workspace
    jobs = _jobs(_confirmed(states), config, workspace.home, data_root=workspace.data_root)
    if not jobs:
        return {}
    # A process for each task, because a CUDA error stays with its process.
    function: Any = ray.remote(max_calls=1)(_measure)
    task = function.options(
        num_cpus=settings.layout.cpus,
        num_gpus=settings.layout.gpus,
        max_retries=plan.config.failures.retries,
    )
    given = (workspace, config.model_dump_json(), settings.layout.device)
    # Of each model one task, so that one that dies takes no other with it.
    waiting = {task.remote(job.trial, job.before, *given): job for job in jobs}
    deadline = time.monotonic() + len(jobs) * len(config.tasks) * settings.timeouts.epoch_s
    failed: dict[str, str] = {}
    mirror = Mirror.of(settings.workspace)
    while waiting and time.monotonic() < deadline:
        # In short steps, so that Ctrl-C comes through.
        ready, _ = ray.wait(list(waiting), timeout=WAIT_S)
        for reference in ready:
            job = waiting.pop(reference)
            failed |= _outcome(reference, job)
            try:
                mirror.fetch_file(job.folder / FILE)
            # What was measured lies there, and the next run's worker fetches it first.
            except (StorageError, OSError) as error:
                failed[str(job.folder)] = str(error)
    why = f"no answer within {settings.timeouts.epoch_s:g} s a task (timeouts.epoch_s)"
    for reference, job in waiting.items():
        ray.cancel(reference, force=True)
        failed[str(job.folder)] = why
    return failed


def _confirmed(states: Mapping[str, CellState]) -> list[Trial]:
    """The confirmed runs of all cells that have a score."""
    found = []
    for state in states.values():
        for trial in state.confirmed:
            if trial.result is not None and trial.result.score is not None:
                found.append(trial)
    return found


def _jobs(
    trials: Iterable[Trial], config: LmEvalConfig, home: Home, *, data_root: Path | None
) -> list[Job]:
    """What is left to measure: the runs first, then what they start from, each start once."""
    from suite.evaluation.subjects import start_of

    library = Library(config.include_path)
    jobs = []
    starts: dict[Path, Job] = {}
    for trial in trials:
        if not _has_all(trial.folder.path, config, library):
            jobs.append(Job(trial.folder.hash, before=False, folder=trial.folder.path))
        if config.before:
            folder = start_of(trial, home, data_root=data_root).folder
            starts.setdefault(folder, Job(trial.folder.hash, before=True, folder=folder))
    for job in starts.values():
        if not _has_all(job.folder, config, library):
            jobs.append(job)
    return jobs


def _has_all(folder: Path, config: LmEvalConfig, library: Library) -> bool:
    """Whether a folder has an evaluation of every task under the settings that a config gives.

    Types and lengths that it leaves open depend on the machine: any counts.
    """
    known = []
    for evaluation in read_record(folder).evaluations.values():
        known.append(evaluation.settings.model_dump().items())
    for request in parse_requests(config.tasks):
        asked = _asked(request, config, library).items()
        if not any(asked <= settings for settings in known):
            return False
    return True


def _asked(request: Request, config: LmEvalConfig, library: Library) -> dict[str, str | int | None]:
    """The settings of an evaluation that a config gives, by their names in the record."""
    asked: dict[str, str | int | None] = {
        "task": request.name,
        "shots": request.shots,
        "limit": config.limit,
        "seed": config.seed,
        "definition": library.definition(request),
        "lm_eval": library.version,
    }
    if config.dtype != "auto":
        asked["dtype"] = config.dtype
    if config.max_length is not None:
        asked["max_length_tokens"] = config.max_length
    return asked


def _outcome(reference: Any, job: Job) -> dict[str, str]:
    """What a task could not measure: folder -> why."""
    try:
        failed: dict[str, str] = ray.get(reference, timeout=ANSWER_S)
    except RayError as error:  # the process died, or something that no check foresaw
        cause = getattr(error, "cause", None) or error
        return {str(job.folder): f"{type(cause).__name__}: {str(cause).strip()[:MESSAGE_CHARS]}"}
    return failed


def _measure(
    trial: str, before: bool, workspace: Workspace, config: str, device: str
) -> dict[str, str]:
    """Measure one model, on the GPU that Ray gave this worker."""
    from suite.evaluation.run import measure

    home = workspace.home
    mirror = Mirror.of(workspace)
    mirror.fetch_all(home.trial(trial))
    spec = home.trial(trial).spec()
    if spec is not None and spec.arm.pretrain is not None:
        mirror.fetch_weights(home.pretrained(spec.arm.pretrain))
    subject = _subject(trial, home, workspace.data_root, before=before)
    mirror.fetch_file(subject.folder / FILE)
    failed = measure([subject], LmEvalConfig.model_validate_json(config), device=device)
    mirror.push_file(subject.folder / FILE)
    return failed


def _subject(name: str, home: Home, data_root: Path | None, *, before: bool) -> Subject:
    from suite.evaluation.subjects import confirmed_run, start_of

    folder = home.trial(name)
    spec = folder.spec()
    assert spec is not None, "it was confirmed"
    trial = Trial(folder, spec, folder.result())
    if before:
        return start_of(trial, home, data_root=data_root)
    return confirmed_run(trial, home)
