"""Which rows are shown to learn, over which family of rows, and how much a loss fell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from suite.leaderboard.fields import Row
from suite.leaderboard.intervals import constant_fields
from suite.leaderboard.learning import with_learning
from suite.leaderboard.measures import CellResults, loss_fall, loss_fall_p
from suite.leaderboard.table import compare
from suite.record.result import EpochRecord, TrialResult
from suite.report.values import shows_baseline
from tests.answers import make_answers, some_right
from tests.records import make_result, make_spec
from tests.test_validity import GOOD

ROW = Row(
    sweep="demo",
    backbone="bert",
    task="mrpc",
    arm="a",
    status="done",
    score_mean=80.0,
    constant_score=70.0,
    constant_p=0.02,
)


def labels(*rows: Row) -> list[tuple[float | None, bool | None]]:
    return [(row.constant_p_holm, row.shown_to_learn) for row in with_learning(rows)]


def test_more_rows_in_the_family_ask_for_more_evidence() -> None:
    assert labels(ROW) == [(0.02, True)]
    others = [replace(ROW, arm=name, constant_p=0.5) for name in "bc"]
    assert labels(ROW, *others)[0] == (0.06, False)


def test_a_verdict_does_not_change_while_the_other_arms_finish() -> None:
    first = replace(ROW, planned_arms=3)
    assert labels(first)[0] == pytest.approx((0.06, False))
    others = [replace(first, arm=name, constant_p=0.5) for name in "bc"]
    assert labels(first, *others)[0] == pytest.approx((0.06, False))
    assert labels(first, replace(first, arm="b", status="partial"))[0] == pytest.approx(
        (0.06, False)
    )


def test_each_look_at_the_test_scores_is_paid_for() -> None:
    assert labels(replace(ROW, test_looks=1)) == [(0.02, True)]
    assert labels(replace(ROW, test_looks=3)) == [(0.06, False)]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "sst2"},
        {"backbone": "t5"},
        {"sweep": "other"},
        {"home": "other"},
        {"admitted": False},
        {"status": "partial"},
        {"constant_p": None},
    ],
)
def test_the_family_is_that_of_the_ranks(change: dict[str, Any]) -> None:
    assert labels(ROW, replace(ROW, **({"arm": "b"} | change)))[0] == (0.02, True)


@pytest.mark.parametrize("change", [{"admitted": False}, {"status": "partial"}])
def test_a_row_that_is_not_ranked_is_not_judged(change: dict[str, Any]) -> None:
    assert labels(replace(ROW, **change)) == [(None, None)]


def test_a_row_that_is_not_shown_to_learn_keeps_its_place_in_the_mean() -> None:
    rows = [replace(ROW, task="sst2", score_mean=60.0, constant_p=0.9), ROW]
    *cells, mean = compare(rows)
    assert {row.task: row.shown_to_learn for row in cells} == {"sst2": False, "mrpc": True}
    assert (mean.task, mean.score_mean, mean.shown_to_learn) == ("mean", 70.0, None)
    assert {row.task: shows_baseline(vars(row)) for row in [*cells, mean]} == {
        "sst2": True,
        "mrpc": False,
        "mean": False,
    }


def test_only_the_better_direction_shows_that_a_row_learns() -> None:
    right = some_right(np.random.default_rng(0), 0.9)
    wrong = [[not item for item in run] for run in right]
    assert constant_fields(make_answers(right))["constant_p"] < 0.01
    assert constant_fields(make_answers(wrong))["constant_p"] == 1.0


def test_one_seed_has_a_constant_answer_and_no_p_value() -> None:
    right = [[i % 10 > 0 for i in range(100)]]
    found = constant_fields(make_answers(right))
    assert (found["constant_score"], found["constant_p"]) == (50.0, None)
    assert found["constant_missing"].startswith("one seed: no p-value")
    untested = replace(ROW, constant_p=None)
    assert labels(untested) == [(None, None)] and shows_baseline(vars(untested))


def run(*losses: float, halves: tuple[float, float] | None = None) -> TrialResult:
    epochs = []
    for number, loss in enumerate(losses, 1):
        epochs.append(
            EpochRecord(
                epoch=number,
                step=number,
                train_loss=loss,
                validation_score=50.0,
                validation_scores={},
                learning_rate=1e-3,
                seconds=1.0,
            )
        )
    validity = None
    if halves is not None:
        validity = GOOD.model_copy(update={"loss_first": halves[0], "loss_last": halves[1]})
    return make_result(make_spec()).model_copy(update={"epochs": epochs, "validity": validity})


def test_the_fall_of_a_loss_is_from_the_first_epoch_to_the_last_or_between_halves() -> None:
    runs = [run(1.0, 0.1, 0.9), run(1.0, 0.8), run(0.9, halves=(0.9, 0.6))]
    found = CellResults(runs, [])
    assert loss_fall(found) == pytest.approx((0.1 + 0.2 + 0.3) / 3, abs=1e-12)
    assert loss_fall_p(found) == pytest.approx(ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue, rel=1e-4)


def test_a_run_without_two_losses_leaves_the_fall_open() -> None:
    assert loss_fall(CellResults([run(1.0, 0.5), run(1.0)], [])) is None
    assert loss_fall_p(CellResults([run(1.0, 0.5), run(1.0)], [])) is None
    one = CellResults([run(1.0, 0.5)], [])
    assert (loss_fall(one), loss_fall_p(one)) == (0.5, None)
