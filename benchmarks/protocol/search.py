"""How much a search finds: regret by budget, and what each rule of the search adds or costs.

Runs the suite's own studies (start, model, edge guard, stop rule, choice, transfer) over made
curves (`benchmarks.protocol.curves`) without training, beside Optuna's samplers, random search and
an even grid, each of which confirms its best score. Regret is the best true score of the range less
the true score of the learning rate that is confirmed, in points, averaged over the curves.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.protocol.curves import HIGH, LOW, SHAPES, Curve, draw, outside
from suite.config.arm import Arm
from suite.config.space import LearningRateRange
from suite.config.sweep import BackboneChoice, SweepConfig
from suite.config.task import load_task
from suite.plan.optuna_trials import Finished
from suite.plan.plan import Plan, PlannedCell
from suite.plan.proposer import Sampler, propose
from suite.plan.study_state import StudyState
from suite.record.cells import Trial
from suite.record.folder import TrialFolder
from suite.record.result import Status, TrialResult

NOISES = (0.5, 1.0, 2.0)
BUDGETS = (4, 8, 16)
RANGE = LearningRateRange(low=1e-6, high=3e-3)
NO_GUARD: dict[str, Any] = {"edge_guard": {"extensions": 0}, "stop": None}
PEERS: dict[str, Sampler] = {
    "Optuna GP": "gp",
    "Optuna TPE": "tpe",
    "random": "random",
    "even grid": "grid",
}


class Searched:
    """A study of one or more architectures on curves that are known.

    Args:
        folder: Where the record of the first trial goes.
        curves: One curve for each architecture.
        noise: Standard deviation of what a trial's score adds to the truth, points.
        rng: Draws the noise.
        method: Whose rounds of lanes it has.
        fallen: Score of a trial at a rate that diverges; None = it has none.
        search: Keys of the sweep's `search`.
    """

    def __init__(
        self,
        folder: Path,
        curves: Sequence[Curve],
        noise: float,
        rng: np.random.Generator,
        *,
        method: str = "lora",
        fallen: float | None = None,
        **search: Any,
    ) -> None:
        self.fallen = fallen
        self.curves = curves
        self.noise = noise
        self.rng = rng
        self.folder = folder
        config = SweepConfig.model_validate(
            {
                "name": "made",
                "backbones": ["tiny-bert"],
                "methods": ["lora"],
                "tasks": ["sst2"],
                "search": search,
            }
        )
        task = load_task("sst2")
        cells = []
        for place in range(len(curves)):
            arm = Arm(
                backbone=BackboneChoice(name="tiny-bert"),
                method=method,
                architecture={"rank": 4 + place},
            )
            contest = "made" if len(curves) > 1 else None
            cells.append(PlannedCell(arm, task, RANGE, contest, place))
        self.state = StudyState(Plan(config, tuple(cells), 1), tuple(cells))

    def run(self, most: int = 200) -> Searched:
        """Search until the study has ended."""
        for _ in range(most):
            proposed = self.state.next()
            if proposed is None:
                break
            spec, record = proposed
            folder = TrialFolder(self.folder / spec.hash)
            if "hint" in record:
                folder.path.mkdir(parents=True)
                folder.write_proposal(record)
            curve = self.curves[spec.arm.architecture["rank"] - 4]
            x = math.log10(spec.learning_rate)
            error = float(self.rng.normal(0, self.noise))
            fields: dict[str, Any] = {"status": Status.DIVERGED, "score": None}
            if x <= curve.diverges:
                fields = {"status": Status.COMPLETED, "score": curve.score(x) + error}
            elif self.fallen is not None:
                fields = {"status": Status.COMPLETED, "score": self.fallen}
            result = TrialResult(trial=spec.hash, started_at=0, finished_at=1, **fields)
            self.state.add(Trial(folder, spec, result))
        return self

    @property
    def trials(self) -> int:
        return len(self.state.trials)

    def qualities(self) -> list[float]:
        """What the study expects of each architecture, points."""
        found = []
        for cell in self.state.cells:
            quality = self.state.quality(cell)
            found.append(-math.inf if quality is None else quality)
        return found

    def reached(self) -> list[float]:
        """What each architecture is worth at the rate that would be confirmed, points."""
        found = []
        for cell, curve in zip(self.state.cells, self.curves, strict=True):
            chosen = self.state.chosen(cell)
            x = LOW if chosen is None else math.log10(chosen.learning_rate)
            found.append(curve.score(x))
        return found

    def regret(self, low: float = LOW, high: float = HIGH) -> float:
        best = max(curve.best(low, high) for curve in self.curves)
        return best - self.reached()[int(np.argmax(self.qualities()))]


def made(repeats: int) -> Iterator[tuple[int, str, Curve]]:
    """The curves, the same for every search: number, shape, curve."""
    for n in range(repeats):
        for shape in SHAPES:
            yield n, shape, draw(shape, np.random.default_rng([SHAPES.index(shape), n]))


def noise_of(n: int, shape: str, noise: float) -> np.random.Generator:
    return np.random.default_rng([7, SHAPES.index(shape), n, int(10 * noise)])


def study(
    folder: Path, curve: Curve, noise: float, rng: np.random.Generator, **settings: Any
) -> Searched:
    """A finished study of one curve, without edge guard and stop rule unless asked for."""
    return Searched(folder, [curve], noise, rng, **{**NO_GUARD, **settings}).run()


def peer(sampler: Sampler, name: str, curve: Curve, noise: float, rng: Any, budget: int) -> float:
    """Regret of another search, which confirms its best score."""
    finished: list[Finished] = []
    for number in range(budget):
        rate = propose(
            name,
            RANGE,
            sampler=sampler,
            seed=0,
            startup_trials=1 if sampler == "random" else 4,
            finished=finished,
            running=(),
            number=number,
        )
        x = math.log10(rate)
        error = float(rng.normal(0, noise))
        finished.append((number, rate, curve.score(x) + error if x <= curve.diverges else None))
    scored = [(score, rate) for _, rate, score in finished if score is not None]
    if not scored:
        return curve.best() - curve.score(LOW)
    return curve.best() - curve.score(math.log10(max(scored)[1]))


def print_regret(folder: Path, repeats: int) -> None:
    """Regret by budget and noise, of the suite and of its peers."""
    _head("search", *(f"{noise} points, {b} trials" for noise in NOISES for b in BUDGETS))
    rows: dict[str, list[str]] = {"suite": [], "suite, best score": []}
    for noise in NOISES:
        for budget in BUDGETS:
            for name, choose in zip(rows, ("curve", "best"), strict=True):
                found = []
                for n, shape, curve in made(repeats):
                    rng = noise_of(n, shape, noise)
                    settings = {"trials": budget, "choose": choose}
                    found.append(study(folder, curve, noise, rng, **settings).regret())
                rows[name].append(_points(found))
    for name, cells in rows.items():
        _line(name, *cells)
    for name, sampler in PEERS.items():
        cells = []
        # Optuna's Gaussian process takes longest, so it sees fewer curves.
        fewer = max(1, repeats // 5) if sampler == "gp" else repeats
        for noise in NOISES:
            for budget in BUDGETS:
                found = []
                for n, shape, curve in made(fewer):
                    rng = noise_of(n, shape, noise)
                    found.append(peer(sampler, f"{shape}/{n}", curve, noise, rng, budget))
                cells.append(_points(found))
        _line(name, *cells)


def print_lanes(folder: Path, repeats: int) -> None:
    """What rounds of four, as READ and LST propose them, lose."""
    _head("noise", *(f"{how}, {b} trials" for b in (8, 16) for how in ("one by one", "in fours")))
    for noise in NOISES:
        cells = []
        for budget in (8, 16):
            for method in ("lora", "read"):
                found = []
                for n, shape, curve in made(repeats):
                    rng = noise_of(n, shape, noise)
                    settings = {"trials": budget, "method": method}
                    found.append(study(folder, curve, noise, rng, **settings).regret())
                cells.append(_points(found))
        _line(noise, *cells)


def print_edge(folder: Path, repeats: int) -> None:
    """Optima 0.8 decades outside: how often the range grows, and what the guard costs inside."""
    _head("noise", "trials", "extended", "regret", "trials used", "inside: trials used")
    for noise in NOISES:
        for budget in (4, 8):
            settings = {"trials": budget, "edge_guard": {"extensions": 2}}
            grown = []
            for n in range(5 * repeats):
                curve = outside(np.random.default_rng([77, n]), 0.8)
                rng = np.random.default_rng([78, n])
                grown.append(study(folder, curve, noise, rng, **settings))
            inside = []
            for n, shape, curve in made(max(1, repeats // 2)):
                rng = noise_of(n, shape, noise)
                inside.append(study(folder, curve, noise, rng, **settings).trials)
            extended = fmean(found.state.study.extensions > 0 for found in grown)
            _line(
                noise,
                budget,
                f"{extended:.0%}",
                _points([found.regret(LOW - 2, HIGH + 2) for found in grown]),
                f"{fmean(found.trials for found in grown):.1f}",
                f"{fmean(inside):.1f}",
            )


def print_stop(folder: Path, repeats: int) -> None:
    """What the stop rule saves, and what it loses."""
    _head("tolerance", "noise", "budget", "trials used", "regret", "regret of the whole budget")
    for tolerance in (0.1, 0.5):
        for noise in NOISES:
            for budget in (8, 16):
                used = []
                stopped = []
                whole = []
                for n, shape, curve in made(repeats):
                    settings = {"trials": budget, "stop": {"tolerance": tolerance}}
                    found = study(folder, curve, noise, noise_of(n, shape, noise), **settings)
                    used.append(found.trials)
                    stopped.append(found.regret())
                    rng = noise_of(n, shape, noise)
                    whole.append(study(folder, curve, noise, rng, trials=budget).regret())
                trials = f"{fmean(used):.1f}"
                _line(tolerance, noise, budget, trials, _points(stopped), _points(whole))


def print_architectures(folder: Path, repeats: int) -> None:
    """Three architectures in one study, and in three with a third of the trials each."""
    _head("noise", "trials in all", "one study", "three studies")
    for noise in NOISES:
        for budget in (8, 12, 24):
            joint = []
            apart = []
            for n, shape, curve in made(repeats):
                curves = siblings(curve, np.random.default_rng([21, n, SHAPES.index(shape)]))
                rng = np.random.default_rng([22, n])
                settings: dict[str, Any] = {"trials": budget, **NO_GUARD}
                joint.append(Searched(folder, curves, noise, rng, **settings).run().regret())
                alone = []
                for place, own in enumerate(curves):
                    rng = np.random.default_rng([22, n, place])
                    alone.append(study(folder, own, noise, rng, trials=budget // 3))
                best = max(curve.best() for curve in curves)
                winner = max(alone, key=Searched.qualities)
                apart.append(best - winner.reached()[0])
            _line(noise, budget, _points(joint), _points(apart))


def print_failing(folder: Path, repeats: int) -> None:
    """Three architectures in one study, of which one fails from the middle of the range, or always.

    The search need not know which one fails: what it finds of the others is what counts. A trial
    that fails has no score, or the constant answer's.
    """
    middle = (LOW + HIGH) / 2
    cases = ((math.inf, None), (middle, None), (-math.inf, None), (middle, 50.0), (-math.inf, 50.0))
    _head("noise", "trials", "none", "beyond the middle", "always", "50 beyond", "always 50")
    for noise in NOISES:
        for budget in (8, 12):
            cells = []
            for limit, fallen in cases:
                found = []
                for n, shape, curve in made(repeats):
                    curves = siblings(curve, np.random.default_rng([21, n, SHAPES.index(shape)]))
                    one = curves[n % 3]
                    curves[n % 3] = Curve(one.truth, min(one.diverges, limit))
                    rng = np.random.default_rng([22, n])
                    settings: dict[str, Any] = {"trials": budget, "fallen": fallen, **NO_GUARD}
                    searched = Searched(folder, curves, noise, rng, **settings)
                    found.append(searched.run().regret())
                cells.append(_points(found))
            _line(noise, budget, *cells)


def siblings(curve: Curve, rng: np.random.Generator, spread: float = 1) -> list[Curve]:
    """Three architectures: a point apart in level, a seventh of a decade in their best rate."""
    found = []
    for level, shift in zip(rng.normal(0, 1, 3), rng.normal(0, 0.15, 3), strict=True):
        found.append(curve.moved(float(shift)).raised(spread * float(level)))
    return found


def print_tasks(folder: Path, repeats: int) -> None:
    """Three architectures on two tasks, of which the second is noisier or spreads them further.

    One architecture is confirmed on both. Beside the suite's rule, the mean in points: the mean of
    ranks, the mean of what a standard deviation over the architectures makes of points, and what
    the first task alone decides; each with its regret less the rule's and the 95% interval of that.
    """
    rules = (_in_points, _in_ranks, _in_deviations, _by_the_first)
    _head(
        "noise of the second",
        "spread there",
        "in points",
        "in ranks",
        "in deviations",
        "first task alone",
    )
    for noise, spread in ((0.5, 1), (2.0, 1), (2.0, 3), (0.5, 0.2)):
        lost: dict[Any, list[float]] = {rule: [] for rule in rules}
        for n, shape, curve in made(repeats):
            rng = np.random.default_rng([31, n, SHAPES.index(shape)])
            other = draw(SHAPES[int(rng.integers(len(SHAPES)))], rng)
            tasks = [
                Searched(folder, siblings(curve, rng), 0.5, rng, trials=12, **NO_GUARD).run(),
                Searched(
                    folder, siblings(other, rng, spread), noise, rng, trials=12, **NO_GUARD
                ).run(),
            ]
            expected = np.array([task.qualities() for task in tasks])
            reached = np.mean([task.reached() for task in tasks], axis=0)
            best = np.mean([[c.best() for c in task.curves] for task in tasks], axis=0).max()
            for rule in rules:
                lost[rule].append(best - float(reached[np.argmax(rule(expected))]))
        differences = [_less(lost[rule], lost[_in_points]) for rule in rules[1:]]
        _line(noise, spread, _points(lost[_in_points]), *differences)


def _in_points(expected: np.ndarray) -> np.ndarray:
    return expected.mean(axis=0)


def _in_ranks(expected: np.ndarray) -> np.ndarray:
    return expected.argsort(axis=1).argsort(axis=1).mean(axis=0)


def _in_deviations(expected: np.ndarray) -> np.ndarray:
    spread = expected.std(axis=1, keepdims=True)
    return (expected / np.maximum(spread, 1e-9)).mean(axis=0)


def _by_the_first(expected: np.ndarray) -> np.ndarray:
    return expected[0]


def print_kept(folder: Path, repeats: int) -> None:
    """A study of eight trials that goes on: what it loses by keeping a choice that is confirmed."""
    _head("noise", "trials then", "kept", "regret of the rule", "of a new choice", "of the old one")
    for noise in NOISES:
        for trials in (12, 16):
            kept = 0
            regrets: dict[str, list[float]] = {"rule": [], "new": [], "old": []}
            for n, shape, curve in made(repeats):
                first = study(folder, curve, noise, noise_of(n, shape, noise), trials=8)
                cell = first.state.cells[0]
                old = first.state.chosen(cell)
                longer = Searched(folder, [curve], noise, first.rng, trials=trials, **NO_GUARD)
                for trial in first.state.in_order:
                    longer.state.add(trial)
                new = longer.run().state.chosen(cell)
                assert old is not None and new is not None
                rule = longer.state.nearly(cell, new, {old: 0.0})
                kept += rule == old
                for name, choice in (("rule", rule), ("new", new), ("old", old)):
                    score = curve.score(math.log10(choice.learning_rate))
                    regrets[name].append(curve.best() - score)
            share = f"{kept / len(regrets['rule']):.0%}"
            _line(noise, trials, share, *(_points(found) for found in regrets.values()))


def print_transfer(folder: Path, repeats: int) -> None:
    """A study that begins from two finished ones, whose best rate lies elsewhere by a shift."""
    _head("noise", "trials", "cold", *(f"shift {shift}" for shift in (0.0, 0.3, 0.5, 1.0)))
    for noise in NOISES:
        for budget in (4, 8):
            cells = []
            for shift in (None, 0.0, 0.3, 0.5, 1.0):
                found = []
                for n, shape, curve in made(repeats):
                    place = folder / f"{noise}-{budget}-{shift}-{n}-{shape}"
                    found.append(_transferred(place, curve, noise, budget, n, shift))
                cells.append(_points(found))
            _line(noise, budget, *cells)


def _transferred(
    folder: Path, curve: Curve, noise: float, budget: int, n: int, shift: float | None
) -> float:
    moved = _direction(curve, shift or 0.0, n) * (shift or 0.0)
    rng = np.random.default_rng([5, n])
    new = Searched(folder, [curve.moved(moved)], noise, rng, trials=budget, **NO_GUARD)
    if shift is not None:
        sources = []
        for k in range(2):
            rng = np.random.default_rng([4, n, k])
            state = study(folder, curve, noise, rng, trials=8).state
            if state.model is not None:
                sources.append((state.key, state.model.curve()))
        new.state.neighbours = lambda: sources
    return new.run().regret()


def _direction(curve: Curve, shift: float, n: int) -> int:
    """Up or down in turn, unless the best rate would leave the range."""
    best = max(np.linspace(LOW, HIGH, 200), key=lambda x: curve.score(float(x)))
    direction = 1 if n % 2 else -1
    if LOW <= best + direction * shift <= HIGH:
        return direction
    return -direction


def _points(found: Sequence[float]) -> str:
    """Mean, and 95th percentile."""
    return f"{fmean(found):.2f} ({np.quantile(found, 0.95):.1f})"


def _less(found: Sequence[float], base: Sequence[float]) -> str:
    """Mean of the differences, and half the width of its 95% interval."""
    differences = np.subtract(found, base)
    half = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences))
    return f"{fmean(found):.2f} ({differences.mean():+.2f} ± {half:.2f})"


def _head(*names: object) -> None:
    print()
    _line(*names)
    _line("---", *("--:" for _ in names[1:]))


def _line(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


PARTS = {
    "regret": print_regret,
    "lanes": print_lanes,
    "edge": print_edge,
    "stop": print_stop,
    "architectures": print_architectures,
    "failing": print_failing,
    "tasks": print_tasks,
    "kept": print_kept,
    "transfer": print_transfer,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=int, default=20, help="curves of each of five shapes")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these tables")
    asked = parser.parse_args()
    for name in asked.part or PARTS:
        with TemporaryDirectory() as folder:
            PARTS[name](Path(folder), asked.curves)


if __name__ == "__main__":
    main()
