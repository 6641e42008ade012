"""Intervals, comparisons and ranks: exact where they can be worked out, and as often right as they say where they cannot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from benchmarks.protocol.verdicts import coverage, false_alarms, few_items, shown
from suite.config.task import load_task
from suite.config.task_files import CodeConfig
from suite.errors import ContradictionError, StatisticsError
from suite.leaderboard.intervals import constant_fields
from suite.metrics.items import Items
from suite.record.cells import Cell, read_cells
from suite.record.folder import Home
from suite.stats.answers import Answers, read_answers
from suite.stats.bootstrap import item_covariance
from suite.stats.compare import (
    Evidence,
    check_same,
    difference,
    gather,
    items_part,
    over_tasks,
    p_values,
    select_arms,
    variances,
)
from suite.stats.constant_baseline import best_constant
from suite.stats.interval import FREE, PERCENT, Ends, cell_interval, make_interval, mean_interval
from suite.stats.power import Spread, power_of, sentence, spread_of
from suite.stats.ranks import rank_groups, rank_text
from suite.stats.significance import half_width, holm, two_sided
from tests.answers import make_answers, some_right, write_answers, write_confirmed
from tests.records import make_task


def evidence(scores: Sequence[Sequence[float]], items: Any = 0.0) -> Evidence:
    """By arm and seed; `items` is the variance of each arm's own error, uncorrelated."""
    table = np.array(scores, dtype=np.float64)
    return Evidence(tuple(range(table.shape[1])), table, np.eye(len(table)) * items, 100)


@pytest.mark.parametrize("df", [1, 2, 4, 14, 30])
@pytest.mark.parametrize("x", [0.3, 1.0, 3.0, 10.0])
def test_the_error_is_students_t_without_items_and_normal_without_seeds(df: int, x: float) -> None:
    assert float(two_sided(2 * x, 0.0, 4.0, df)) == pytest.approx(
        2 * stats.t.sf(x, df), rel=1e-4
    )  # 100 nodes of quadrature
    assert float(two_sided(2 * x, 4.0, 0.0, df)) == pytest.approx(2 * stats.norm.sf(x), rel=1e-4)


def test_both_errors_together_are_their_sum() -> None:
    rng = np.random.default_rng(0)
    drawn = 2 * rng.normal(size=400_000) + rng.standard_t(2, 400_000)
    for x in (1.0, 4.0, 8.0):
        assert float(two_sided(x, 4.0, 1.0, 2)) == pytest.approx(
            np.mean(np.abs(drawn) > x), abs=3e-3
        )  # 400,000 draws


@pytest.mark.parametrize(("items", "seeds", "quantile"), [(1.0, 0.0, 1.95996), (0.0, 1.0, 4.30265)])
def test_the_half_width_is_the_quantile(items: float, seeds: float, quantile: float) -> None:
    assert half_width(9 * items, 9 * seeds, 2) == pytest.approx(3 * quantile, rel=1e-4)  # as above
    assert float(two_sided(half_width(2.0, 3.0, 2), 2.0, 3.0, 2)) == pytest.approx(0.05, abs=1e-8)


def test_holm_by_hand() -> None:
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )
    assert holm(np.array([0.9, 0.8])).tolist() == [1.0, 1.0]
    assert holm(np.array([])).tolist() == []
    planned = holm(np.array([0.01, 0.04, 0.03, 0.005]), family=6)
    assert planned.tolist() == pytest.approx([0.05, 0.12, 0.12, 0.03])
    assert holm(np.array([0.01, 0.04]), family=1).tolist() == pytest.approx([0.02, 0.04])


def test_the_items_variance_of_one_seed_is_that_of_a_share() -> None:
    answers = make_answers([[True] * 80 + [False] * 20])
    assert float(item_covariance([answers], resamples=20_000)[0, 0]) == pytest.approx(
        100**2 * 0.8 * 0.2 / 99, rel=0.03
    )  # 20,000 resamples: 1%


def test_the_items_variance_of_several_seeds_is_what_they_share() -> None:
    """Seeds that are right on items of their own have nothing in common: their chance hits are the spread between seeds."""
    rng = np.random.default_rng(0)
    alone = make_answers((rng.random((4, 4000)) < 0.7).tolist())
    same = make_answers([(rng.random(4000) < 0.7).tolist()] * 4)
    whole = 100**2 * 0.7 * 0.3 / 4000
    assert float(item_covariance([same])[0, 0]) == pytest.approx(
        whole, rel=0.15
    )  # 2,000 resamples: 3%
    assert abs(float(item_covariance([alone])[0, 0])) < 0.1 * whole


def test_resamples_are_the_same_every_time_and_for_every_arm() -> None:
    rng = np.random.default_rng(0)
    first, second = (make_answers(some_right(rng, 0.8)) for _ in range(2))
    together = item_covariance([first, second])
    assert item_covariance([first, second]).tolist() == together.tolist()
    assert item_covariance([second])[0, 0] == pytest.approx(together[1, 1], abs=1e-12)
    assert cell_interval(first) == cell_interval(first)


def test_groups_are_drawn_as_wholes() -> None:
    """Ten groups of ten equal items say as little as ten items."""
    right = [[i % 5 > 0] for i in range(10)]
    single = make_answers([[r for (r,) in right]])
    grouped = make_answers([[r for (r,) in right for _ in range(10)]])
    items = replace(
        grouped.runs[1],
        golds=[1] * 100,
        predictions=[float(r) for (r,) in right for _ in range(10)],
        groups=[str(i // 10) for i in range(100)],
    )
    assert item_covariance([replace(grouped, runs={1: items})])[0, 0] == pytest.approx(
        item_covariance([single])[0, 0], rel=1e-9
    )


def test_an_interval_surrounds_the_mean_and_says_what_it_is_over() -> None:
    right = some_right(np.random.default_rng(0), [0.78, 0.8, 0.82])
    found = cell_interval(make_answers(right))
    one = cell_interval(make_answers(right[:1]))
    assert found.low < 80 < found.high and found.of == "seeds x items"
    assert one.low < 78 < one.high and one.of == "items"
    assert one.high - one.low < found.high - found.low


def test_more_items_and_more_seeds_make_it_narrower() -> None:
    rng = np.random.default_rng(0)
    widths = [
        (lambda i: i.high - i.low)(
            cell_interval(make_answers(some_right(rng, 0.8, items=n, seeds=s)))
        )
        for n, s in ((100, 3), (900, 3), (900, 9))
    ]
    assert widths[0] > 1.5 * widths[1] > 1.5 * widths[2]


@pytest.mark.parametrize(
    ("mean", "width", "ends"),
    [
        (99.0, 3.0, PERCENT),
        (1.0, 3.0, PERCENT),
        (-99.0, 30.0, Ends(-100, 100)),
        (1.5, 3.0, Ends(0, np.inf)),
    ],
)
def test_an_interval_stays_within_what_is_possible(mean: float, width: float, ends: Ends) -> None:
    found = make_interval(mean, width, ends, seeds=3)
    assert ends.least < found.low < mean < found.high < ends.greatest


def test_in_the_middle_the_scale_changes_little() -> None:
    found = make_interval(50.0, 1.0, PERCENT, seeds=3)
    assert (found.low, found.high) == (
        pytest.approx(49.0, abs=1e-3),
        pytest.approx(51.0, abs=1e-3),
    )  # a logit is a line there, to 1e-4 of the width
    assert make_interval(-3.0, 1.0, FREE, seeds=1).low == -4.0


@pytest.mark.parametrize(
    ("right", "message"),
    [
        ([[True] * 9] * 3, "change the score"),
        ([[True]], "1 test item"),
        ([[True] * 4, [True] * 4], "change the score"),
    ],
)
def test_where_nothing_varies_there_is_no_interval(right: list[list[bool]], message: str) -> None:
    with pytest.raises(StatisticsError, match=message):
        cell_interval(make_answers(right))


def test_a_mean_at_the_end_of_the_scale_has_no_interval() -> None:
    with pytest.raises(StatisticsError, match="as extreme as can be"):
        mean_interval([100.0, 100.0], 1.0, [make_task()])
    with pytest.raises(StatisticsError, match="has no end"):
        make_interval(2.0, 2000.0, Ends(0.0, np.inf), seeds=3)


@functools.cache
def covered(metric: str, seeds: int, items: int, seed_sd: float) -> Any:
    return coverage(metric, seeds=seeds, items=items, seed_sd=seed_sd, data_sets=400)


@pytest.mark.parametrize(
    ("metric", "seeds", "items", "seed_sd"),
    [
        ("accuracy", 1, 200, 0.0),
        ("accuracy", 3, 200, 0.0),
        pytest.param("accuracy", 3, 200, 0.5, marks=pytest.mark.slow),
        ("f1", 3, 200, 0.15),
        pytest.param("accuracy", 5, 200, 0.3, marks=pytest.mark.slow),
        pytest.param("f1", 5, 200, 0.0, marks=pytest.mark.slow),
        ("perplexity", 3, 150, 1.0),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    metric: str, seeds: int, items: int, seed_sd: float
) -> None:
    found = covered(metric, seeds, items, seed_sd)
    assert (
        0.93 < found.ours < 0.995
    )  # 95%: 400 data sets have a standard error of 1.1%; with three seeds it errs on the wide side


def test_a_plain_bootstrap_of_three_seeds_does_not() -> None:
    found = covered("perplexity", 3, 150, 1.0)
    assert found.plain < 0.87


@pytest.mark.parametrize(
    ("first", "arms", "seeds"),
    [(1.0, 7, 3), (5.0, 7, 3), (10.0, 7, 2), (10.0, 12, 3), (5.0, 2, 5), (0.0, 4, 5)],
)
def test_equal_arms_are_rarely_told_apart(first: float, arms: int, seeds: int) -> None:
    found = false_alarms([first] + [1.0] * (arms - 1), seeds=seeds, sweeps=300)
    assert found.any_pair is not None and found.any_pair < 0.08, "5%, standard error 1.3%"
    assert found.pair is not None and found.pair < 0.08


def test_one_seed_tells_nothing_apart() -> None:
    assert false_alarms([1.0] * 7, seeds=1, sweeps=3).any_pair is None
    one = evidence([[80.0], [60.0]], items=0.01)
    with pytest.raises(StatisticsError, match="one seed: no rank; how much seeds differ"):
        rank_groups(one, higher_is_better=True)
    with pytest.raises(StatisticsError, match="one seed: no p-value"):
        p_values(one)
    found = difference(one)
    assert found.p is None and found.low < 20.0 < found.high, "an interval over the items stays"


def test_two_arms_without_noise_of_items_are_welchs_test_with_fewer_degrees_of_freedom() -> None:
    scores = [[80.0, 83.0, 81.0, 85.0], [78.0, 80.0, 80.5, 81.0]]
    found = difference(evidence(scores))
    expected = stats.ttest_ind(*scores, equal_var=False)
    # half-way from the 3 of one arm; rounded down to a tenth
    df = np.floor(10 * (3 + 0.5 * (expected.df - 3))) / 10
    assert found.p == pytest.approx(2 * stats.t.sf(expected.statistic, df), rel=1e-3)
    assert found.difference == pytest.approx(2.375)
    g = 2.375 / np.sqrt((np.var(scores[0], ddof=1) + np.var(scores[1], ddof=1)) / 2) * (1 - 3 / 23)
    assert found.effect == pytest.approx(g)


def test_calm_arms_share_a_variance_in_ranks_and_a_noisy_one_keeps_its_own() -> None:
    scores = [[80.0, 80.1, 79.9], [82.0, 82.2, 81.8], [70.0, 70.1, 70.0], [60.0, 90.0, 75.0]]
    own = np.var(scores, axis=1, ddof=1)
    _, alone, df_alone = variances(evidence(scores))
    _, pooled, df = variances(evidence(scores), pooled=True)
    assert alone[0, 1] == pytest.approx((own[0] + own[1]) / 3)
    assert df_alone[0, 1] < 4
    assert pooled[0, 1] == pytest.approx(2 * own.mean() / 3)
    assert df[0, 1] == pytest.approx(2 * 4 * 2), "both have those of all four arms"
    assert pooled[0, 3] == pytest.approx((own.mean() + own[3]) / 3)
    assert df[0, 3] < 4, "the noisy arm has two of its own"
    assert alone[0, 3] == pytest.approx((own[0] + own[3]) / 3)


def test_a_noisy_arm_borrows_no_certainty_from_calm_ones() -> None:
    rng = np.random.default_rng(0)
    calm = rng.normal(0, 0.1, (9, 3)) + 60
    scores = [[50.0, 60.0, 49.0], *calm.tolist()]
    alone = p_values(evidence(scores[:2]))[0, 1]
    assert p_values(evidence(scores))[0, 1] == alone > 0.1


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(4, 0, 0.125), (5, 0, 0.0625), (6, 0, 0.03125), (5, 1, 0.21875), (0, 0, 2.0), (20, 8, 0.0)],
)
def test_few_items_have_mcnemars_exact_p(ours: int, theirs: int, expected: float) -> None:
    first = [True] * 200
    second = [True] * 200
    first[:theirs] = [False] * theirs
    second[100 : 100 + ours] = [False] * ours
    both = gather([make_answers([first] * 3), make_answers([second] * 3)])
    assert both.least_p is not None
    assert both.least_p[0, 1] == pytest.approx(expected)
    found = difference(both)
    assert found.p is not None and found.p >= min(expected, 1.0)
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0), "the interval says the same"


def test_a_task_that_two_arms_answer_alike_makes_the_mean_no_surer() -> None:
    alike = [True] * 200
    second = [False] * 5 + alike[5:]
    one = gather([make_answers([alike] * 3), make_answers([second] * 3)])
    same = gather([make_answers([alike] * 3)] * 2)
    for tasks in ([one], [one, same], [one, same, same]):
        found = difference(over_tasks(tasks))
        assert found.p is not None and found.p >= 0.0625, "5 items against 0, as on one task"
        assert found.low <= 0
    assert difference(over_tasks([same, same])).p == 1.0


def test_no_test_of_four_answers_is_surer_than_an_eighth() -> None:
    task = load_task("cola")
    golds = [0, 1] * 50
    same = Items([float(gold) for gold in golds], golds)
    wrong = Items([1.0 - gold if n < 4 else float(gold) for n, gold in enumerate(golds)], golds)
    index = tuple(f"test/{n}" for n in range(100))
    arms = []
    for items in (same, wrong):
        arms.append(Answers(task, index, {1: items, 2: items}, {1: 0.0, 2: 0.0}))
    least = gather(arms).least_p
    assert least is not None and least[0, 1] == 0.125
    joint = over_tasks([gather(arms), gather(arms)])
    assert joint.least_p is not None and joint.least_p[0, 1] == 2 * 0.0625**2


def test_equal_arms_that_err_rarely_are_rarely_told_apart() -> None:
    assert few_items(0.02, seeds=3, own=0.0, sweeps=200) < 0.08


def test_power_says_what_is_shown_in_four_cases_of_five() -> None:
    found = power_of(Spread(1.0, 0.0), seeds=5, pairs=1)
    assert found.shown is not None
    share = shown(found.shown, arms=2, seeds=5, sweeps=300).pair
    assert share == pytest.approx(0.8, abs=0.08), "standard error 2.3%"
    assert found.seeds_for_point is not None
    enough = power_of(Spread(1.0, 0.0), seeds=found.seeds_for_point, pairs=1).shown
    fewer = power_of(Spread(1.0, 0.0), seeds=found.seeds_for_point - 1, pairs=1).shown
    assert enough is not None and fewer is not None and enough <= 1.0 < fewer
    assert power_of(Spread(1.0, 0.0), seeds=1, pairs=1).shown is None
    saturated = power_of(Spread(0.0, 0.0), seeds=3, pairs=1)
    assert (saturated.shown, saturated.seeds_for_point) == (None, None)
    assert sentence(3, None, None).startswith("scores do not vary here")
    words = "3 seeds can show a difference of 0.8 points; a difference of 1 point takes 2 seeds"
    assert sentence(3, 0.8, 2) == words
    of_perplexity = words.replace("points", "of perplexity").replace("point", "of perplexity")
    assert sentence(3, 0.8, 2, higher_is_better=False) == of_perplexity
    assert "a difference of 0.03 of perplexity" in sentence(3, 0.034, 2, higher_is_better=False)
    far = sentence(3, 0.8, None, higher_is_better=False)
    assert far.endswith("1 of perplexity is out of reach (1,000 seeds would not do)")
    assert power_of(Spread(1.0, 1.0), seeds=3, pairs=1).seeds_for_point is None, "items hide it"
    looked = power_of(Spread(1.0, 0.0), seeds=5, pairs=1, looks=3)
    assert looked == replace(power_of(Spread(1.0, 0.0), seeds=5, pairs=3), pairs=1)
    assert spread_of(evidence([[1.0], [2.0]])) is None
    # The mean of three is another number than they are, in its last bit.
    equal = [100 * 444 / 872] * 3
    still = spread_of(evidence([equal, equal]))
    assert still is not None and still.seeds == 0
    assert difference(evidence([equal, [100 * 428 / 872] * 3])).effect is None
    known = spread_of(evidence([[1.0, 3.0], [2.0, 2.0]], items=3.0))
    assert known == Spread(1.0, 6.0, units=100)


def test_where_no_verdict_is_possible_on_few_items_nothing_is_said_to_be_shown() -> None:
    few = spread_of(replace(evidence([[1.0, 3.0], [2.0, 2.0]], items=3.0), units=6))
    assert few == Spread(1.0, 6.0, units=6)
    none = power_of(few, seeds=3, pairs=3)
    assert (none.shown, none.seeds_for_point) == (None, None), "p is 2^-5, and 9.4% by Holm"
    assert power_of(few, seeds=3, pairs=1).shown is not None
    assert power_of(few, seeds=3, pairs=1, looks=2).shown is None
    assert power_of(replace(few, units=26), seeds=3, pairs=10**8).shown is not None, "no bound"
    assert "too few for a verdict" in sentence(3, None, None)


def test_an_arm_and_itself_cannot_be_told_apart() -> None:
    arm = make_answers(some_right(np.random.default_rng(0), [0.7, 0.8, 0.9]))
    both = gather([arm, arm])
    found = difference(both)
    assert (found.difference, found.p, found.effect) == (0.0, 1.0, 0.0)
    assert found.low == -found.high
    assert [rank_text(r) for r in rank_groups(both, higher_is_better=True)] == ["1-2", "1-2"]


def test_what_is_clearly_different_is_told_apart_in_the_right_direction() -> None:
    rng = np.random.default_rng(0)
    both = gather(
        [
            make_answers(some_right(rng, 0.6, items=2000)),
            make_answers(some_right(rng, 0.9, items=2000)),
        ]
    )
    assert [rank_text(r) for r in rank_groups(both, higher_is_better=True)] == ["2", "1"]
    assert [rank_text(r) for r in rank_groups(both, higher_is_better=False)] == ["1", "2"]
    found = difference(both)
    assert found.high < -25 and found.p < 1e-3


def test_a_group_in_the_middle_has_the_places_that_are_left() -> None:
    scores = [[90.0, 90.1, 90.2], [80.0, 80.2, 80.1], [80.1, 80.0, 80.2], [70.0, 70.1, 70.0]]
    assert [
        rank_text(r) for r in rank_groups(evidence(scores, items=0.01), higher_is_better=True)
    ] == ["1", "2-3", "2-3", "4"]


def test_arms_that_have_not_finished_are_corrected_for() -> None:
    both = evidence([[80.0, 81.0, 82.0], [85.0, 86.0, 87.0]], items=0.01)
    for planned, expected in ((0, ["2", "1"]), (2, ["2", "1"]), (12, ["1-2", "1-2"])):
        found = rank_groups(both, higher_is_better=True, planned=planned)
        assert list(map(rank_text, found)) == expected


def test_the_order_select_arms_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    arms = [
        make_answers(some_right(rng, share, items=400)) for share in (0.7, 0.9, 0.72, 0.5, 0.88)
    ]
    ranks = rank_groups(gather(arms), higher_is_better=True)
    order = [3, 0, 4, 1, 2]
    assert rank_groups(gather([arms[i] for i in order]), higher_is_better=True) == [
        ranks[i] for i in order
    ]
    whole = gather(arms)
    assert (
        difference(select_arms(whole, [1, 2])).difference
        == -difference(select_arms(whole, [2, 1])).difference
    )


def test_the_same_items_cancel_what_they_do_to_both() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(500) < 0.7
    arms = [make_answers([(hard & (rng.random(500) < share)).tolist()]) for share in (0.99, 0.96)]
    items = items_part(gather(arms))
    alone = sum(float(item_covariance([arm])[0, 0]) for arm in arms)
    assert items[0, 1] < 0.2 * alone


def test_only_seeds_that_both_have_are_compared() -> None:
    right = some_right(np.random.default_rng(0), [0.7, 0.8, 0.9])
    found = gather([make_answers(right), make_answers(right, seeds=(3, 2, 9))])
    assert (found.seeds, found.scores[0].tolist()) == (
        (2, 3),
        [pytest.approx(100 * np.mean(right[1])), pytest.approx(100 * np.mean(right[2]))],
    )
    with pytest.raises(StatisticsError, match="no seed in common: 1, 2, 3; 4, 5, 6"):
        gather([make_answers(right), make_answers(right, seeds=(4, 5, 6))])


def test_the_mean_over_tasks_adds_up_variances_of_items() -> None:
    tasks = [
        evidence([[80.0, 81.0], [70.0, 71.0]], items=4.0),
        evidence([[60.0, 63.0], [50.0, 50.0]], items=2.0),
    ]
    joint = over_tasks(tasks)
    assert joint.scores.tolist() == [[70.0, 72.0], [60.0, 60.5]]
    assert (joint.items.diagonal().tolist(), joint.units) == ([1.5, 1.5], 200)
    with pytest.raises(StatisticsError, match="same seeds"):
        over_tasks([tasks[0], replace(tasks[1], seeds=(7, 8))])


@pytest.mark.parametrize(
    ("task", "golds", "constant", "score"),
    [
        ("sst2", [0, 1, 1, 1], 1, 75.0),
        (
            "cola",
            [0, 1, 1, 1],
            0,
            0.0,
        ),  # Matthews correlation of a constant; of equals the first class
        (
            "mrpc",
            [0, 0, 0, 1, 1],
            1,
            (40.0 + 100 * 4 / 7) / 2,
        ),  # accuracy and F1 of the class 1: recall 1, precision 2/5
        ("stsb", [0.0, 2.5, 5.0], 2.5, 0.0),
        ("superglue-rte", [1, 1, 1, 0], 1, 75.0),
    ],
)
def test_the_best_constant_is_what_the_tasks_own_metrics_say(
    task: str, golds: list[float], constant: float, score: float
) -> None:
    items = Items([float(g) for g in golds], golds)
    answers = Answers(
        load_task(task),
        tuple(f"test/{i}" for i in range(len(golds))),
        {1: items, 2: items},
        {1: 100.0, 2: 100.0},
    )
    found = best_constant(answers)
    assert found.scores == {1: pytest.approx(score), 2: pytest.approx(score)}
    assert all(
        run.predictions == [constant] * len(golds) and run.golds == golds
        for run in found.runs.values()
    )


def test_no_text_fits_all_items() -> None:
    answers = Answers(load_task("gsm8k"), ("test/0",), {1: Items(["4"], ["4"])}, {1: 100.0})
    assert constant_fields(answers) == {
        "constant_missing": "answers are texts: none of them fits all items"
    }


def test_only_an_arm_that_the_luck_of_seeds_and_items_does_not_explain_beats_a_constant() -> None:
    def p(right: list[list[bool]]) -> float:
        found = constant_fields(make_answers(right))
        assert found["constant_score"] == 50.0
        return float(found["constant_p"])

    rng = np.random.default_rng(1)
    assert p(some_right(rng, 0.95, items=300)) < 1e-3
    assert p(some_right(rng, 0.52, items=300)) > 0.15
    assert p(some_right(rng, [0.5, 0.97, 0.55], items=300)) > 0.05, "one lucky seed of three"
    assert p([[i % 2 == 1 for i in range(100)]] * 3) == 1.0, "it is the constant"


def other(answers: Answers, **changes: Any) -> Answers:
    return replace(answers, **changes)


def test_what_was_asked_differently_is_not_compared() -> None:
    answers = make_answers([[True, False, True, True]])
    with pytest.raises(
        StatisticsError, match=r"not tested on the same items .4 and 4 items, 3 of them in both"
    ):
        check_same(answers, other(answers, index=("test/0", "test/1", "test/2", "new")))
    with pytest.raises(StatisticsError, match="in another order"):
        check_same(answers, other(answers, index=answers.index[::-1]))
    golds = other(answers, runs={1: Items([0, 0, 0, 0], [1, 1, 1, 1])})
    with pytest.raises(StatisticsError, match="2 of 4 differ in their gold answers"):
        check_same(answers, golds)
    metrics = answers.task.model_copy(update={"metrics": ["f1"]})
    with pytest.raises(StatisticsError, match="not the same metrics"):
        check_same(answers, other(answers, task=metrics))
    graded = other(answers, task=load_task("gsm8k"))
    mended = graded.task.model_copy(update={"answer": "([0-9]+)"})
    with pytest.raises(
        StatisticsError, match=r"not the same pattern of an answer .* \(\[0-9\]\+\)"
    ):
        check_same(graded, other(graded, task=mended))
    own = answers.task.model_copy(update={"code": CodeConfig(sha256="a" * 64, score=True)})
    computed = "score.. of a file with SHA-256 aaaaaaaaaaaa computed those of one arm and the suite"
    with pytest.raises(StatisticsError, match=computed):
        check_same(other(answers, task=own), answers)
    rows_alone = answers.task.model_copy(update={"code": CodeConfig(sha256="a" * 64, rows=True)})
    check_same(other(answers, task=rows_alone), answers)
    with pytest.raises(StatisticsError, match=r"not the same precision \(fp32 and bf16\)"):
        check_same(other(answers, precision="fp32"), other(answers, precision="bf16"))
    with pytest.raises(StatisticsError, match="not trained on the same data; run the sweep again"):
        check_same(other(answers, origin={"data": "a"}), other(answers, origin={"data": "b"}))
    older = {"data": "a", "torch": "2.12.0"}
    newer = {"data": "a", "torch": "2.13.0"}
    with pytest.raises(StatisticsError, match=r"the same torch \(2.12.0 and 2.13.0\)"):
        check_same(other(answers, origin=older), other(answers, origin=newer))
    check_same(other(answers, origin=older), answers)
    check_same(answers, other(answers, origin=newer))
    check_same(other(answers, origin=older), other(answers, origin=newer, sweep="another"))


def only_cell(home: Home) -> Cell:
    (cell,) = read_cells(home, "demo").values()
    return cell


def test_answers_are_read_from_their_folders(tmp_path: Path) -> None:
    right = some_right(np.random.default_rng(0), [0.7, 0.8, 0.9])
    write_confirmed(Home(tmp_path), "lora", right)
    found = read_answers(only_cell(Home(tmp_path)).confirmed())
    expected = make_answers(right)
    assert (found.index, found.scores, list(found.runs)) == (
        expected.index,
        expected.scores,
        [1, 2, 3],
    )
    assert found.runs == expected.runs


def test_answers_that_cannot_be_trusted_are_refused(tmp_path: Path) -> None:
    home = Home(tmp_path)
    specs = write_confirmed(home, "lora", some_right(np.random.default_rng(0), 0.8, items=10))
    with pytest.raises(StatisticsError, match="no confirm run has a score"):
        read_answers([])
    path = home.trial(specs[1]).predictions("test")
    kept = path.read_bytes()
    write_answers(home, specs[1], {"index": ["x"], "gold": [1], "prediction": [1.0]})
    with pytest.raises(StatisticsError, match="seeds 1 and 2 were tested on different items"):
        read_answers(only_cell(home).confirmed())
    for torn in ({"gold": [1], "prediction": [1.0]}, {"index": ["x"], "gold": [1]}):
        write_answers(home, specs[1], torn)
        with pytest.raises(StatisticsError, match="cannot be read"):
            read_answers(only_cell(home).confirmed())
    path.write_bytes(kept)
    table = pq.read_table(path).to_pydict() | {"prediction": ["{}"] * 10}
    write_answers(home, specs[1], table)
    with pytest.raises(ContradictionError, match="seed 2: its answers cannot be scored"):
        read_answers(only_cell(home).confirmed())
    path.write_bytes(b"torn")
    with pytest.raises(
        StatisticsError, match=rf"seed 2: {specs[1].hash}/predictions-test.parquet cannot be read"
    ):
        read_answers(only_cell(home).confirmed())
    path.unlink()
    with pytest.raises(StatisticsError, match=r"predictions-test.parquet is not there"):
        read_answers(only_cell(home).confirmed())
    path.write_bytes(kept)
    wrong = make_answers([[False] * 10])
    write_answers(
        home,
        specs[0],
        {"index": wrong.index, "gold": wrong.items.golds, "prediction": wrong.items.predictions},
    )
    with pytest.raises(StatisticsError, match="its answers score 0, but its record says"):
        read_answers(only_cell(home).confirmed())


OWN = """
TASK = {"description": "d", "source": "ours", "data": {"generator": "agreement"}, "inputs": ["sentence"], "metrics": ["hits"],
        "label": {"words": ["no", "yes"]}, "text_to_text": "{sentence}"}

def score(predictions, golds):
    return {"hits": 100 * sum(p == g for p, g in zip(predictions, golds)) / len(golds)}
"""


def test_a_score_of_ones_own_is_computed_anew_on_every_resample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "hits.py").write_text(OWN)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    right = some_right(np.random.default_rng(0), 0.8)
    known = make_answers(right)
    own = make_answers(right)
    own = replace(own, task=load_task("hits"))
    expected = float(item_covariance([known])[0, 0])
    found = float(item_covariance([own])[0, 0])
    assert found == pytest.approx(expected, rel=0.4)  # 200 resamples: 10%, four of them
    assert cell_interval(own).low < 80 < cell_interval(own).high


def test_a_score_of_ones_own_that_takes_no_constant_says_so_and_keeps_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    precision = "100 * sum(p == g == 1 for p, g in zip(predictions, golds)) / sum(p == 1 for p in predictions)"
    (tmp_path / "tasks" / "precise.py").write_text(
        OWN.partition("def score")[0]
        + f"def score(predictions, golds):\n    return {{'hits': {precision}}}\n"
    )
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    own = replace(
        make_answers(some_right(np.random.default_rng(0), 0.8)), task=load_task("precise")
    )
    (reason,) = constant_fields(own).values()
    assert "ZeroDivisionError" in reason and "precise.py" in reason
    assert cell_interval(own).of == "seeds x items"
