"""The same answer to every item: an arm that is not shown to do better has learned nothing that its score shows."""

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
    """What one answer to all items of `answers` gives, as if runs with the same seeds had given it: the best class, or the mean number.

    It is chosen by the test items themselves, so no constant that training could have found scores more.

    Raises:
        StatisticsError: The answers are texts: none of them fits all items.
        ConfigError: The task's own score cannot take it.
    """
    task, items = answers.task, answers.items
    if not isinstance(task, LabelTask):
        raise StatisticsError("answers are texts: none of them fits all items")
    constants = [fmean(items.golds)] if task.is_regression else sorted(set(items.golds))
    runs = {
        constant: replace(items, predictions=[constant] * len(items.golds))
        for constant in constants
    }
    scores = {constant: score_of(task, run) for constant, run in runs.items()}
    best = (max if task.higher_is_better else min)(scores, key=scores.__getitem__)
    return replace(
        answers,
        runs=dict.fromkeys(answers.runs, runs[best]),
        scores=dict.fromkeys(answers.scores, scores[best]),
    )


def beats_constant(row: Mapping[str, Any]) -> bool | None:
    """Whether a leaderboard row's score is shown to be better than the same answer to every item, not by the luck of seeds and items.

    None where there is no such answer, on a mean row, and before there is a score.
    """
    if row["constant_p"] is None or row["score_mean"] is None:
        return None
    gain = row["score_mean"] - row["constant_score"]
    return bool(
        row["constant_p"] < 1 - LEVEL
        and (gain < 0 if row["higher_is_better"] is False else gain > 0)
    )
