"""Measure subjects with lm-eval.

Everything is checked and read before the first model is loaded, and nothing is measured twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from suite.config.lm_eval import LmEvalConfig, Request, parse_requests
from suite.errors import SuiteError
from suite.evaluation.harness import check_room, evaluate, settings_of
from suite.evaluation.library import Library, Loaded
from suite.evaluation.subjects import Subject
from suite.meters import release_memory
from suite.record.lm_eval import Settings, add_evaluation, check_folder, read_record


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to measure on one subject."""

    subject: Subject
    left: list[tuple[Request, Settings]]


def plan(
    subjects: Sequence[Subject],
    config: LmEvalConfig,
    library: Library,
    *,
    device: str,
    again: bool = False,
) -> tuple[list[Work], dict[Path, set[str]]]:
    """Find what is not measured yet.

    Args:
        again: Also measure what was measured before.

    Returns:
        The work that is left, and by a subject's folder the keys of all results asked for.
    """
    work: list[Work] = []
    wanted: dict[Path, set[str]] = {}
    requests = parse_requests(config.tasks)
    for subject in subjects:
        known = {}
        if not again:
            known = read_record(subject.folder).evaluations
        left = []
        wanted[subject.folder] = set()
        for request in requests:
            settings = settings_of(
                request, config, library, positions=subject.positions, device=device
            )
            # Also for what is there already: the caller shows old and new results in one table.
            wanted[subject.folder].add(settings.key)
            if settings.key not in known:
                left.append((request, settings))
        if left:
            work.append(Work(subject, left))
    return work, wanted


def load_tasks(work: Sequence[Work], library: Library) -> dict[Request, Loaded]:
    """Load the tasks that are wanted, with their data.

    Raises:
        ConfigError, DataError: As in `Library.load` and `check_room`.
    """
    loaded: dict[Request, Loaded] = {}
    for item in work:
        for request, settings in item.left:
            # Subjects share tasks, whose data take long to read.
            if request not in loaded:
                loaded[request] = library.load(request)
            # Subjects differ in length, so a task that fits one model may not fit the next.
            check_room(loaded[request], settings)
    return loaded


def measure(
    subjects: Sequence[Subject],
    config: LmEvalConfig,
    *,
    device: str,
    again: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Measure every subject, and write `lm-eval.json` into its folder after each task.

    Args:
        again: Also measure what was measured before.
        on_progress: Takes a line when a subject begins.

    Returns:
        Why a subject was not loaded or measured, by its folder. The others are still measured.

    Raises:
        ConfigError: A task does not exist, or an option does not go with a model.
        DataError: The data of a task cannot be had.
        OSError: A folder cannot be written.
    """
    library = Library(config.include_path)
    work, _ = plan(subjects, config, library, device=device, again=again)
    # Hours of measuring are lost where the numbers cannot be stored.
    for item in work:
        check_folder(item.subject.folder)
    loaded = load_tasks(work, library)
    failed = {}
    for number, item in enumerate(work, 1):
        folder = item.subject.folder
        tasks = ", ".join(str(request) for request, _ in item.left)
        on_progress(f"{number} of {len(work)}: {folder.name}, {tasks}")
        try:
            _measure_one(item, loaded, config, device=device)
        except (SuiteError, torch.cuda.OutOfMemoryError) as error:
            # One model that is broken or too large is no reason to leave out the others.
            failed[str(folder)] = str(error)
        # Outside of `_measure_one`, which holds the model until it returns.
        release_memory()
    return failed


def _measure_one(
    item: Work, loaded: dict[Request, Loaded], config: LmEvalConfig, *, device: str
) -> None:
    opened = item.subject.open()
    for request, settings in item.left:
        evaluation = evaluate(
            opened, loaded[request], settings, batch_size=config.batch_size, device=device
        )
        # Stored after every task: an interrupted call repeats one task at most.
        add_evaluation(item.subject.folder, evaluation)
