"""The baseline that gives the same answer to every item.

An arm that is not shown to beat it has learned nothing that its score could show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from suite.config.task import LabelTask
from suite.errors import StatisticsError
from suite.stats.answers import Answers, score_of
from suite.stats.significance import LEVEL


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


def beats_constant(row: Mapping[str, Any]) -> bool | None:
    """Whether a leaderboard row is significantly better than the best constant answer.

    Returns:
        None where no constant answer exists, on a mean row, and before there is a score.
    """
    if row["constant_p"] is None or row["score_mean"] is None:
        return None
    gain = row["score_mean"] - row["constant_score"]
    if row["higher_is_better"] is False:
        gain = -gain
    return bool(row["constant_p"] < 1 - LEVEL and gain > 0)
