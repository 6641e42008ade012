"""Which printed number belongs to which cell, and whether each belongs to one at all."""

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
    """What a paper printed for an arm on a task, or on `mean` (`Reference.as_row`); empty where it
    printed nothing.

    Args:
        tasks: Of the sweep: a mean over other tasks than the paper's is not compared.
    """
    for line in references:
        if line.evaluation or not _about(line, arm):
            continue
        if line.score_on(task, tasks) is not None:
            return line.as_row(task)
    return {}


def evaluated(
    references: Iterable[Reference], *, trained: bool, **arm: Any
) -> dict[str, dict[str, Any]]:
    """What a paper printed of an arm's evaluation by lm-eval, by that library's `task/metric`
    (`Reference.as_row`).

    Args:
        arm: As `Reference.matches`.
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
    """See that every line is about a cell of the plan, and that no cell has two.

    A line may have scores on known tasks beside those of the sweep, so that a sweep can be run on
    some of its tasks.

    Args:
        arms: Of the plan, each once.
        tasks: Of the sweep.
        where: The sweep's file, for errors.

    Raises:
        ConfigError: Names the line.
    """
    for number, line in enumerate(references):
        place = f"{where}: reference[{number}] {line}"
        if not any(_about(line, arm) for arm in arms):
            raise ConfigError(
                f"{place}: no arm of this sweep is like that; correct it, or run part of a sweep "
                "with --set reference=[]"
            )
        if line.evaluation:
            continue
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
        for task in line.scores if _about(line, arm) else ():
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
