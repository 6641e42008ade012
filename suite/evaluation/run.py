"""Measure subjects with lm-eval: everything is checked and read before the first model is loaded, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from suite.config.lm_eval import LmEvalConfig, Request, parse_requests
from suite.errors import SuiteError
from suite.evaluation.harness import check_room, evaluate, settings_of
from suite.evaluation.library import Library, Loaded
from suite.evaluation.subjects import Subject
from suite.meters import release_memory
from suite.record.lm_eval import Settings, add_evaluation, read_record


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do on one subject."""

    subject: Subject
    left: list[tuple[Request, Settings]]


def plan(
    subjects: Sequence[Subject],
    config: LmEvalConfig,
    library: Library,
    *,
    device: str,
    again: bool = False,
) -> tuple[list[Work], set[str]]:
    """What was not measured yet, and the names that the results have in `lm-eval.json`.

    Args:
        again: Measure what was measured, too.
    """
    work, names = [], set[str]()
    for subject in subjects:
        known = {} if again else read_record(subject.folder).evaluations
        asked = [
            (r, settings_of(r, config, library, positions=subject.positions, device=device))
            for r in parse_requests(config.tasks)
        ]
        names |= {settings.name for _, settings in asked}
        left = [(request, settings) for request, settings in asked if settings.key not in known]
        work += [Work(subject, left)] if left else []
    return work, names


def load_tasks(work: Sequence[Work], library: Library) -> dict[Request, Loaded]:
    """The tasks that are wanted, with their data.

    Raises:
        ConfigError, DataError: As `Library.load`; or the answers of one leave no room for its questions.
    """
    loaded: dict[Request, Loaded] = {}
    for item in work:
        for request, settings in item.left:
            loaded[request] = loaded.get(request) or library.load(request)
            check_room(loaded[request], settings)
    return loaded


def measure(
    subjects: Sequence[Subject],
    config: LmEvalConfig,
    *,
    device: str,
    again: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Measure every subject and write `lm-eval.json` into its folder after each task.

    Args:
        say: Told what begins.

    Returns:
        What could not be loaded or measured: folder -> why. The others are done all the same.

    Raises:
        ConfigError: A task, or an option that does not go with a model.
        DataError: The data of a task cannot be had.
    """
    library = Library(config.include_path)
    work, _ = plan(subjects, config, library, device=device, again=again)
    loaded, failed = load_tasks(work, library), {}
    for number, item in enumerate(work, 1):
        say(
            f"{number} of {len(work)}: {item.subject.folder.name}, {', '.join(str(request) for request, _ in item.left)}"
        )
        try:
            _measure(item, loaded, config, device=device)
        except (SuiteError, torch.cuda.OutOfMemoryError) as error:
            failed[str(item.subject.folder)] = str(error)
        release_memory()
    return failed


def _measure(
    item: Work, loaded: dict[Request, Loaded], config: LmEvalConfig, *, device: str
) -> None:
    opened = item.subject.open()
    for request, settings in item.left:
        evaluation = evaluate(
            opened, loaded[request], settings, batch_size=config.batch_size, device=device
        )
        add_evaluation(item.subject.folder, evaluation)
