"""The model of a learning-rate curve, on curves that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from suite.plan.curve_model import Candidate, CurveModel, Hint, Observation

LOW = 1e-6
HIGH = 3e-3


def observed(rates: list[float], peak: float, *, noise: float = 0.0) -> list[Observation]:
    rng = np.random.default_rng(3)
    found = []
    for rate in rates:
        utility = 88.0 - 6.0 * math.log10(rate / peak) ** 2 + float(rng.normal(0, noise))
        found.append(Observation(Candidate(rate), utility))
    return found


def test_the_mean_is_highest_where_the_curve_is_and_not_at_the_luckiest_trial() -> None:
    rates = [1e-6, 6e-6, 3e-5, 1e-4, 2e-4, 4e-4, 1e-3, 3e-3]
    trials = observed(rates, 2e-4)
    # One trial off the peak was three points lucky.
    trials[2] = Observation(trials[2].tried, (trials[4].utility or 0.0) + 0.2)
    found, _ = CurveModel(LOW, HIGH, trials).best()
    assert abs(math.log10(found.rate / 2e-4)) < 0.35


def test_the_next_trial_is_near_the_best_and_never_one_that_was_tried() -> None:
    trials = observed([5e-5, 9e-4, 3e-6], 2e-4)
    pending: list[Candidate] = []
    for _ in range(6):
        model = CurveModel(LOW, HIGH, trials, pending=pending)
        pending.append(model.next())
    assert len({candidate.rate for candidate in pending}) == 6
    assert any(abs(math.log10(candidate.rate / 2e-4)) < 0.4 for candidate in pending)


def test_a_trial_that_diverged_keeps_the_model_away() -> None:
    trials = observed([5e-5, 3e-6], 2e-4)
    diverged = Observation(Candidate(9e-4), None)
    found, _ = CurveModel(LOW, HIGH, [*trials, diverged]).best()
    assert found.rate < 9e-4


@pytest.mark.parametrize(
    ("peak", "end"), [(3e-2, "high"), (1e-7, "low"), (5e-5, None)], ids=["high", "low", "inside"]
)
def test_a_curve_that_rises_to_an_end_is_seen(peak: float, end: str | None) -> None:
    trials = observed([1e-6, 1e-5, 6e-5, 5e-4, 3e-3], peak, noise=0.3)
    assert CurveModel(LOW, HIGH, trials).rises_to() == end


def test_nothing_is_chosen_beyond_what_has_a_score() -> None:
    trials = observed([1e-5, 6e-5, 3e-4], 1e-2)
    found, _ = CurveModel(LOW, HIGH, trials).best()
    assert found.rate < 4e-4


def test_a_choice_that_failed_is_chosen_between_its_own_rates_only() -> None:
    """The other choice trains at every rate, and this one diverges at a third of them."""
    other = [
        Observation(Candidate(o.tried.rate, (0,)), o.utility)
        for o in observed([1e-5, 1e-4, 1e-3], 1e-3)
    ]
    trained = Observation(Candidate(3e-5, (1,)), 75.0)
    failed = Observation(Candidate(2e-4, (1,)), None)
    found, _ = CurveModel(LOW, HIGH, [*other, trained, failed], levels=[(0,), (1,)]).best((1,))
    assert found == trained.tried
    found, _ = CurveModel(LOW, HIGH, [*other, trained], levels=[(0,), (1,)]).best((1,))
    assert found.rate > 1e-4, "nothing says that it fails there"


@pytest.mark.parametrize(("slope", "end"), [(200.0, "high"), (-200.0, "low")])
def test_a_narrow_range_has_two_ends_and_rates_enough(slope: float, end: str) -> None:
    trials: list[Observation] = []
    for _ in range(8):
        tried = CurveModel(1e-3, 1.1e-3, trials).next()
        trials.append(Observation(tried, 80.0 + slope * math.log10(tried.rate / 1e-3)))
    assert len({trial.tried for trial in trials}) == 8
    assert CurveModel(1e-3, 1.1e-3, trials).rises_to() == end


def test_what_is_left_to_gain_shrinks_with_what_is_known_and_is_the_same_each_time() -> None:
    few = observed([1e-6, 5e-5, 3e-3], 2e-4, noise=0.3)
    rates = [float(rate) for rate in np.geomspace(LOW, HIGH, 16)]
    many = CurveModel(LOW, HIGH, observed(rates, 2e-4, noise=0.3)).gain_left()
    assert many < 0.3 < CurveModel(LOW, HIGH, few).gain_left()
    assert many == CurveModel(LOW, HIGH, observed(rates, 2e-4, noise=0.3)).gain_left()


def test_a_choice_learns_from_the_trials_of_another() -> None:
    levels = [(0,), (1,)]
    trials = []
    for rate in (1e-5, 5e-5, 2e-4, 8e-4, 2e-3):
        trials.append(Observation(Candidate(rate, (0,)), 80.0 - 6 * math.log10(rate / 2e-4) ** 2))
    trials.append(Observation(Candidate(2e-4, (1,)), 83.0))
    model = CurveModel(LOW, HIGH, trials, levels=levels)
    found, _ = model.best()
    assert found.levels == (1,)
    assert abs(math.log10(found.rate / 2e-4)) < 0.3, "one trial of its own, at the others' best"


@pytest.mark.parametrize("score", [None, 50.0], ids=["no score", "chance"])
def test_a_choice_that_fails_says_little_of_one_that_does_well_at_the_same_rates(
    score: float | None,
) -> None:
    good = {1e-5: 70.0, 1e-4: 80.0, 6e-4: 88.0}
    scored = [Observation(Candidate(rate, (0,)), score) for rate, score in good.items()]
    failed = [Observation(Candidate(rate, (1,)), score) for rate in (5e-4, 1e-3)]

    model = CurveModel(1e-6, 3e-3, [*scored, *failed], levels=[(0,), (1,)])

    chosen, mean = model.best()
    assert chosen.levels == (0,)
    assert chosen.rate == pytest.approx(6e-4, rel=0.3)
    assert mean == pytest.approx(88.0, abs=1.5)


@pytest.mark.parametrize("bad", [84.0, 70.0, 50.0])
def test_of_a_bad_choice_is_expected_what_it_gave(bad: float) -> None:
    """Large gaps count by their logarithm in the fit; of 50 beside 90, 77 was expected."""
    trials = []
    for rate, loss in ((1e-4, 1.0), (3e-4, 0.0), (1e-3, 1.0)):
        for choice, score in enumerate((90.0, 89.0, bad)):
            trials.append(Observation(Candidate(rate, (choice,)), score - loss))
    model = CurveModel(LOW, HIGH, trials, levels=[(0,), (1,), (2,)])
    expected = [model.best((choice,))[1] for choice in range(3)]
    assert expected == pytest.approx([90.0, 89.0, bad], abs=1.0)


def test_a_hint_that_the_trials_contradict_loses_its_weight() -> None:
    source = CurveModel(LOW, HIGH, observed([1e-6, 1e-5, 6e-5, 5e-4, 3e-3], 3e-5)).curve()
    trials = observed([3e-5, 4e-4, 3e-6], 3e-5)
    alone = np.array(CurveModel(LOW, HIGH, trials).curve().values)
    agreeing = CurveModel(LOW, HIGH, trials, hint=source).curve()
    opposite = Hint(source.log_rates, tuple(-value - 40.0 for value in source.values))
    disagreeing = CurveModel(LOW, HIGH, trials, hint=opposite).curve()
    assert np.abs(agreeing.values - alone).max() > 1.0
    assert np.abs(disagreeing.values - alone).max() < 0.01
