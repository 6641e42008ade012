"""The constant answer: a baseline that answers every item alike.

An arm that is not shown to beat it is not shown to learn (`suite.leaderboard.learning`).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from suite.config.task import LabelTask
from suite.errors import StatisticsError
from suite.stats.answers import Answers, score_of


def best_constant(answers: Answers) -> Answers:
    """The best constant answer, as if runs with the same seeds had given it to every item.

    It is the best class, or the mean number. The test items themselves choose it, so no constant
    that training could have found scores more.

    Raises:
        StatisticsError: The answers are texts, and no text fits all items.
        ConfigError: The task's own score cannot take a constant answer.
    """
    task = answers.task
    items = answers.items
    if not isinstance(task, LabelTask):
        raise StatisticsError("answers are texts: none of them fits all items")
    constants = sorted(set(items.golds))
    if task.is_regression:
        # the mean has the least squared error of all constants
        constants = [fmean(items.golds)]
    best_run = None
    best_score = 0.0
    for constant in constants:
        run = replace(items, predictions=[constant] * len(items.golds))
        score = score_of(task, run)
        # of two classes that score the same the first one stays
        better = score > best_score if task.higher_is_better else score < best_score
        if best_run is None or better:
            best_run = run
            best_score = score
    assert best_run is not None, "a cell with a score was tested on at least one item"
    return replace(
        answers,
        runs=dict.fromkeys(answers.runs, best_run),
        scores=dict.fromkeys(answers.scores, best_score),
    )
