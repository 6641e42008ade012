"""Find the printed number that belongs to a cell, and check that each number belongs to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from suite.config.arm import Arm
from suite.config.reference import MEAN, Reference
from suite.config.task import load_task
from suite.errors import ConfigError


def printed(
    references: Iterable[Reference], arm: Arm, task: str, tasks: Set[str]
) -> dict[str, Any]:
    """What a paper printed for an arm on a task, or on `mean`; empty where it printed nothing.

    Args:
        tasks: All tasks of the sweep: a mean over other tasks than the paper's is not compared.

    Returns:
        The line as `Reference.as_row` gives it.
    """
    for line in references:
        # Lines with an evaluation are about lm-eval's numbers, which `evaluated` gives.
        if line.evaluation or not _about(line, arm):
            continue
        if line.score_on(task, tasks) is not None:
            return line.as_row(task)
    return {}


def evaluated(
    references: Iterable[Reference], *, trained: bool, **arm: Any
) -> dict[str, dict[str, Any]]:
    """What a paper printed of an arm's evaluation by lm-eval, by that library's `task/metric`.

    Args:
        arm: The same words as for `Reference.matches`.

    Returns:
        Each line as `Reference.as_row` gives it.
    """
    state = "trained" if trained else "untrained"
    return {
        name: line.as_row(name)
        for line in references
        if line.evaluation == state and line.matches(**arm)
        for name in line.scores
    }


def check_references(
    references: Sequence[Reference], arms: Collection[Arm], tasks: Collection[str], *, where: str
) -> None:
    """Check that every line is about a cell of the plan, and that no cell has two.

    A line may have scores on known tasks beside those of the sweep, so that a sweep can be run on
    some of its tasks.

    Args:
        arms: The arms of the plan, each once.
        tasks: The tasks of the sweep.
        where: The sweep's file, for errors.

    Raises:
        ConfigError: A line is about no cell, or two are about the same one; the message names it.
    """
    for number, line in enumerate(references):
        place = f"{where}: reference[{number}] {line}"
        # Such a line is most likely misspelt, and no row would ever show it.
        if not any(_about(line, arm) for arm in arms):
            raise ConfigError(
                f"{place}: no arm of this sweep is like that; correct it, or run part of a sweep "
                "with --set reference=[]"
            )
        # Its scores are named by lm-eval's tasks, which are none of the sweep's.
        if line.evaluation:
            continue
        # This raises where there is no such task at all.
        for task in line.scores.keys() - {*tasks, MEAN}:
            load_task(task, where=f"{place}: scores")
        if not line.scores.keys() & {*tasks, MEAN}:
            raise ConfigError(
                f"{place}: none of its tasks is one of the sweep's, {', '.join(sorted(tasks))}; "
                "or set reference=[]"
            )
    for arm in arms:
        _check_single(references, arm, where=where)


def _check_single(references: Sequence[Reference], arm: Arm, *, where: str) -> None:
    seen: dict[tuple[str | None, str], int] = {}
    for number, line in enumerate(references):
        if not _about(line, arm):
            continue
        for task in line.scores:
            # With two lines for one score, their order in the file would decide which is shown.
            first = seen.setdefault((line.evaluation, task), number)
            if first != number:
                what = f"reference[{first}] {references[first]} and reference[{number}] {line}"
                raise ConfigError(
                    f"{where}: {what} both have a score for {arm.key} on {task}; "
                    "say more exactly which arm each is about"
                )


def _about(line: Reference, arm: Arm) -> bool:
    attention = arm.attention
    return line.matches(
        backbone=arm.backbone.name,
        attention=attention.name,
        options=attention.options,
        method=arm.method,
        architecture=arm.architecture,
    )
