"""The same answer to every item: an arm that is not shown to do better has learned nothing that its score shows."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from suite.config.task import LabelTask
from suite.stats.answers import Answers, score_of


def best_constant(answers: Answers) -> Answers | None:
    """What one answer to all items of `answers` gives, as if runs with the same seeds had given it: the best class, or the mean number.

    It is chosen by the test items themselves, so no constant that training could have found scores more.

    Returns:
        None where answers are texts: none of them fits all items.
    """
    task, items = answers.task, answers.items
    if not isinstance(task, LabelTask):
        return None
    found = [
        replace(items, predictions=[constant] * len(items.golds))
        for constant in ([fmean(items.golds)] if task.is_regression else sorted(set(items.golds)))
    ]
    best = (max if task.higher_is_better else min)(found, key=lambda constant: score_of(task, constant))
    return replace(answers, runs=dict.fromkeys(answers.runs, best), scores=dict.fromkeys(answers.scores, score_of(task, best)))
