"""Whether two arms differ, on the same items and seeds: what `suite compare` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

from suite.config.reference import MEAN
from suite.errors import ConfigError, StatisticsError, SuiteError, UnknownNameError
from suite.leaderboard.select import Arms, choose_arm, read_arms
from suite.record.looks import joint

if TYPE_CHECKING:
    from suite.plan.plan import Plan
    from suite.record.cells import Cell
    from suite.record.folder import Home
    from suite.record.spec import TrialSpec
    from suite.stats.answers import Answers
    from suite.stats.compare import Evidence

KEYS = (
    "task",
    "arm_a",
    "arm_b",
    "sweep_a",
    "sweep_b",
    "score_a",
    "score_b",
    "difference",
    "low",
    "high",
    "interval_of",
    "p",
    "p_holm",
    "comparisons",
    "p_missing",
    "effect",
    "seeds",
    "items",
    "test_looks",
    "higher_is_better",
    "better",
    "shown_difference",
    "seeds_for_point",
    "missing",
)
Pair: TypeAlias = "tuple[Sequence[Cell], Sequence[Cell]]"


def compare_arms(
    home: Home, given: Sequence[str], *, sweep: str | None = None, task: str | None = None
) -> list[dict[str, Any]]:
    """The difference A - B per task and on their mean, with interval, p-value and effect.

    Args:
        home: The home that holds the trials.
        given: The names of two arms; none = every two arms with the same backbone.
        sweep: Only this sweep; None = all of the home.
        task: Only this task.

    Returns:
        A row per task and pair, with the keys `KEYS`. Holm's correction covers all of them that
        their sweeps plan, and the means are a family of their own.

    Raises:
        ConfigError: A name is that of no arm, or of several.
        StatisticsError: Nothing can be compared; the message says why.
    """
    arms = read_arms(home, sweep)
    pairs = []
    if given:
        pairs.append(_named(arms, given, home))
    else:
        for pair in combinations(arms.values(), 2):
            if _comparable(*pair):
                pairs.append(pair)
    if task is not None:
        _check_task(task, pairs if given else [arms.values()])
    plans = _plans(home, arms.values())
    # One comparer for all pairs: reading the answers is the slow part.
    comparer = _Comparer(plans)
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        rows += comparer.rows(a, b, task)
    # After all rows are there: Holm's correction depends on how many there are.
    compared = {_sweep(cells) for cells in (pairs[0] if given else arms.values())}
    of_sweeps = [plan for sweep, plan in plans.items() if sweep in compared]
    _adjust(rows, _planned(of_sweeps, task, named=bool(given)))
    if not rows:
        raise StatisticsError(
            f"{home.path}: no two arms of one sweep and backbone have been confirmed"
        )
    # Without a single comparison there is no table: say why, each reason once.
    reasons = dict.fromkeys(row["missing"] for row in rows)
    if None not in reasons:
        raise StatisticsError("; ".join(reasons))
    return rows


def _plans(home: Home, arms: Iterable[Sequence[Cell]]) -> dict[str, Plan]:
    """The plans of these arms' sweeps by name, without sweeps that have no definition.

    Somebody copied the trial folders of those alone.
    """
    from suite.plan.definition import known_plan

    found = {}
    for sweep in sorted({_sweep(cells) for cells in arms}):
        plan = known_plan(home, sweep)
        if plan is not None:
            found[sweep] = plan
    return found


def _planned(plans: Iterable[Plan], only: str | None, *, named: bool) -> dict[bool, int]:
    """How many comparisons these sweeps plan: of tasks (False), and of means (True).

    Args:
        plans: Of the sweeps that are compared.
        only: The one task that is compared; None = all.
        named: Whether two arms were named; else all pairs are compared.
    """
    from suite.stats.ranks import pairs_of

    found = {False: 0, True: 0}
    tasks = []
    for plan in plans:
        by_backbone: dict[str, list[set[str]]] = defaultdict(list)
        of_sweep = set()
        for (backbone, task), arms in plan.arms_by_place().items():
            if only in (None, task):
                of_sweep.add(task)
                by_backbone[backbone].append(arms)
                found[False] += pairs_of(len(arms))
        tasks.append(of_sweep)
        for of_backbone in by_backbone.values():
            # One task has no mean, nor has an arm that is not planned on all tasks.
            if len(of_backbone) > 1:
                found[True] += pairs_of(len(set.intersection(*of_backbone)))
    if named and tasks:
        # Two arms of two sweeps can be compared on the tasks of both.
        return {False: len(set.intersection(*tasks)), True: 1}
    return found


def _check_task(task: str, groups: Iterable[Iterable[Sequence[Cell]]]) -> None:
    """Refuse a task that no arm of these groups has."""
    known = {cell.task for arms in groups for cells in arms for cell in cells}
    if task not in known:
        raise UnknownNameError("task", task, known, where="--task")


def _named(arms: Arms, given: Sequence[str], home: Home) -> Pair:
    a = choose_arm(arms, given[0], home)
    b = choose_arm(arms, given[1], home)
    if (_sweep(a), a[0].arm.key) == (_sweep(b), b[0].arm.key):
        raise ConfigError(f"{given[0]!r} and {given[1]!r} are the same arm, {a[0].arm.key}")
    return a, b


def _comparable(a: Sequence[Cell], b: Sequence[Cell]) -> bool:
    """Whether `--all-pairs` compares two arms: one sweep, one backbone, both confirmed."""
    if _sweep(a) != _sweep(b) or a[0].arm.backbone.name != b[0].arm.backbone.name:
        return False
    return _is_confirmed(a) and _is_confirmed(b)


def _is_confirmed(cells: Sequence[Cell]) -> bool:
    return any(cell.confirmed() for cell in cells)


def _sweep(cells: Sequence[Cell]) -> str:
    """The sweep of an arm's cells."""
    return _spec(cells[0]).sweep


@dataclass
class _Comparer:
    """Compares arms of one home; every cell's answers are read once.

    Attributes:
        plans: The plans of its sweeps by name.
    """

    plans: Mapping[str, Plan]
    _answers: dict[tuple[str, str], Answers] = field(default_factory=dict)

    def rows(self, a: Sequence[Cell], b: Sequence[Cell], only: str | None) -> list[dict[str, Any]]:
        """A row per task of either arm, and one for the mean where several can be compared."""
        left = {cell.task: cell for cell in a}
        right = {cell.task: cell for cell in b}
        evidence: dict[str, Evidence] = {}
        rows = []
        for task in sorted({*left, *right}):
            if only not in (None, task):
                continue
            row = _blank(task, a, b)
            try:
                if task not in right:
                    raise StatisticsError(f"task {task}: only A has run on it")
                if task not in left:
                    raise StatisticsError(f"task {task}: only B has run on it")
                evidence[task] = self._evidence(left[task], right[task])
                row |= _difference(evidence[task], _spec(left[task]).task.higher_is_better)
                row["test_looks"] = joint([left[task].looks, right[task].looks])
            # A task that cannot be compared keeps its row, which says why.
            except SuiteError as reason:
                row["missing"] = str(reason)
            rows.append(row)
        directions = set()
        for row in rows:
            if row["missing"] is None:
                directions.add(row["higher_is_better"])
        # A mean over accuracies and perplexities together would mean nothing.
        if len(evidence) > 1 and len(directions) == 1:
            mean = _blank(MEAN, a, b)
            # A mean over the tasks that are there would be another quantity with every further one.
            lacking = self._tasks_of_both(a, b) - set(evidence)
            if lacking:
                mean["missing"] = f"mean: {', '.join(sorted(lacking))} cannot be compared"
            else:
                looks = [cell.looks for cell in (*a, *b) if cell.task in evidence]
                mean |= _mean(evidence, directions.pop()) | {"test_looks": joint(looks)}
            rows.append(mean)
        return rows

    def _tasks_of_both(self, a: Sequence[Cell], b: Sequence[Cell]) -> set[str]:
        """The tasks that both arms are planned on, begun or not."""
        found = []
        for cells in (a, b):
            tasks = {cell.task for cell in cells}
            plan = self.plans.get(_sweep(cells))
            if plan is not None:
                for cell in plan.cells:
                    if cell.arm.key == cells[0].arm.key:
                        tasks.add(cell.task.name)
            found.append(tasks)
        return set.intersection(*found)

    def _evidence(self, a: Cell, b: Cell) -> Evidence:
        from suite.stats.compare import gather

        answers = []
        for cell in (a, b):
            key = _sweep([cell]), cell.key
            if key not in self._answers:
                self._answers[key] = _answers_of(cell)
            answers.append(self._answers[key])
        return gather(answers)


def _answers_of(cell: Cell) -> Answers:
    """The answers of a cell's confirm runs.

    Raises:
        StatisticsError: The cell is rejected, a run ended without a score, or not all seeds have
            ended; or as `read_answers`.
    """
    from suite.leaderboard.validity import judge
    from suite.record.cells import ended
    from suite.stats.answers import read_answers

    confirmed = cell.confirmed()
    verdict = judge(confirmed, cell.search)
    if verdict["admitted"] is False:
        reasons = "; ".join(verdict["rejected"])
        raise StatisticsError(f"task {cell.task}: {cell.arm.key} is rejected: {reasons}")
    for trial in confirmed:
        if trial.result is not None and trial.result.score is None:
            raise StatisticsError(
                f"task {cell.task}: seed {trial.spec.seed} of {cell.arm.key} ended without a score "
                f"({trial.result.status}), so the other seeds alone say nothing about the arm"
            )
    over = len(ended(confirmed))
    # Who compares after every seed gives luck another chance each time.
    if cell.seeds is not None and over < cell.seeds:
        raise StatisticsError(
            f"task {cell.task}: only {over} of {cell.seeds} seeds of {cell.arm.key} have ended"
        )
    return read_answers(confirmed)


def _mean(evidence: Mapping[str, Evidence], higher_is_better: bool) -> dict[str, Any]:
    """The difference on the mean over the tasks that can be compared."""
    from suite.stats.compare import over_tasks

    try:
        means = over_tasks(list(evidence.values()))
    except StatisticsError as reason:
        return {"missing": str(reason)}
    return _difference(means, higher_is_better)


def _blank(task: str, a: Sequence[Cell], b: Sequence[Cell]) -> dict[str, Any]:
    names = {
        "task": task,
        "arm_a": a[0].arm.key,
        "arm_b": b[0].arm.key,
        "sweep_a": _sweep(a),
        "sweep_b": _sweep(b),
    }
    return dict.fromkeys(KEYS) | names


def _difference(evidence: Evidence, higher_is_better: bool) -> dict[str, Any]:
    from suite.stats.compare import NO_P, difference

    found = asdict(difference(evidence))
    found["score_a"] = found.pop("first")
    found["score_b"] = found.pop("second")
    found["seeds"] = len(evidence.seeds)
    found["items"] = evidence.units
    found["higher_is_better"] = higher_is_better
    found["interval_of"] = "seeds x items"
    if found["p"] is None:
        found["interval_of"] = "items"
        found["p_missing"] = NO_P
    # Replaced below by the spread itself, once it is known how many comparisons share the level.
    found["evidence"] = evidence
    return found


def _adjust(rows: Sequence[dict[str, Any]], planned: Mapping[bool, int]) -> None:
    """Add Holm's p-values, and what could be shown with them.

    All tasks and pairs are one family, and the means over tasks are another. `planned` says how
    large each is once the sweeps have ended.
    """
    import numpy as np

    from suite.stats.power import power_of, spread_of
    from suite.stats.significance import LEVEL, counted, holm

    for of_means in (False, True):
        family = []
        p_values = []
        for row in rows:
            if (row["task"] == MEAN) == of_means and row["p"] is not None:
                family.append(row)
                p_values.append(float(counted(row["p"], row["test_looks"])))
        comparisons = max(len(family), planned[of_means])
        adjusted = holm(np.array(p_values), family=comparisons)
        for row, p in zip(family, adjusted, strict=True):
            row["p_holm"] = float(p)
            row["comparisons"] = comparisons
            if p < 1 - LEVEL:
                # A lower perplexity wins: the sign alone does not tell who is better.
                a_wins = (row["difference"] > 0) == row["higher_is_better"]
                row["better"] = "a" if a_wins else "b"
            spread = spread_of(row["evidence"])
            assert spread is not None, "there is a p-value, so there are several seeds"
            power = power_of(spread, seeds=row["seeds"], pairs=comparisons, looks=row["test_looks"])
            row["shown_difference"] = power.shown
            row["seeds_for_point"] = power.seeds_for_point
    for row in rows:
        row.pop("evidence", None)


def _spec(cell: Cell) -> TrialSpec:
    """The specification of one of a cell's trials; every cell has one."""
    # A cell may have no search trials, where the learning rate is fixed.
    return (cell.search or cell.confirm)[0].spec
