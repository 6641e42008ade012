"""`suite compare`: whether two arms differ, on the same items and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from suite.cli import render
from suite.cli.options import (
    DEFAULT_HOME,
    Format,
    FormatOption,
    HomeOption,
    OnlySweepOption,
    OnlyTaskOption,
    existing_home,
)
from suite.cli.render import Column, Row, column
from suite.config.reference import MEAN
from suite.errors import ConfigError, StatisticsError, SuiteError, UnknownNameError

if TYPE_CHECKING:
    from suite.cli.select import Arms
    from suite.metrics.values import Values
    from suite.record.cells import Cell
    from suite.record.folder import Home
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
    "p",
    "p_holm",
    "effect",
    "seeds",
    "items",
    "higher_is_better",
    "better",
    "missing",
)
Pair: TypeAlias = "tuple[Sequence[Cell], Sequence[Cell]]"


def compare(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[ARM_A",
            help="[SWEEP:] a method, ATTENTION/METHOD, ... or the beginning of a key.",
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(metavar="ARM_B]", help="The arm to compare it with, named the same way."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    sweep: OnlySweepOption = None,
    task: OnlyTaskOption = None,
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all-pairs",
            help="Compare every two arms with the same backbone, instead of two by name.",
        ),
    ] = False,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Print the difference A - B per task and on their mean, with interval, p-value and effect.

    Holm's correction covers everything that is printed.
    """
    # What a command computes with is imported when it runs: `--help` must not wait.
    from suite.cli.select import read_arms
    from suite.record.folder import Home

    place = Home(existing_home(home))
    # Both arguments are optional for typer, because --all-pairs takes none.
    given = []
    for name in (first, second):
        if name is not None:
            given.append(name)
    wanted = 0 if all_pairs else 2
    if len(given) != wanted:
        got = " and ".join(given) or "no arm"
        if all_pairs:
            got += ", and --all-pairs"
        raise ConfigError(f"got {got}; give two arms, or --all-pairs")
    arms = read_arms(place, sweep)
    pairs = []
    if given:
        pairs.append(_named(arms, given, place))
    else:
        for pair in combinations(arms.values(), 2):
            if _comparable(*pair):
                pairs.append(pair)
    if task is not None:
        _check_task(task, pairs)
    # One comparer for all pairs: reading the answers is the slow part.
    comparer = _Comparer(arms)
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        rows += comparer.rows(a, b, task)
    # After all rows are there: Holm's correction depends on how many there are.
    _adjust(rows)
    if not rows:
        raise StatisticsError(f"{home}: no two arms of one sweep and backbone have been confirmed")
    # Without a single comparison there is no table: say why, each reason once.
    reasons = dict.fromkeys(row["missing"] for row in rows)
    if None not in reasons:
        raise StatisticsError("; ".join(reasons))
    render.render(rows, _columns(rows), fmt, keys=KEYS, title=_title(rows))


def _check_task(task: str, pairs: Sequence[Pair]) -> None:
    known = set()
    for a, b in pairs:
        known |= {cell.task for cell in (*a, *b)}
    if task not in known:
        raise UnknownNameError("task", task, known, where="--task")


def _named(arms: Arms, given: Sequence[str], home: Home) -> Pair:
    from suite.cli.select import choose_arm

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
    """The sweep of an arm's cells; every cell has a trial."""
    # A cell may have no search trials, where the learning rate is fixed.
    first = cells[0]
    return (first.search or first.confirm)[0].spec.sweep


@dataclass
class _Comparer:
    """Compares arms of one home; every cell's answers are read once."""

    arms: Arms
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
                noise = self._noise((a, b), [task], evidence[task].seeds)
                row |= _difference(evidence[task], noise, _task(left[task]).higher_is_better)
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
            rows.append(_blank(MEAN, a, b) | self._mean((a, b), evidence, directions.pop()))
        return rows

    def _evidence(self, a: Cell, b: Cell) -> Evidence:
        from suite.stats.answers import read_answers
        from suite.stats.compare import gather

        answers = []
        for cell in (a, b):
            key = _sweep([cell]), cell.key
            if key not in self._answers:
                self._answers[key] = read_answers(cell.confirmed())
            answers.append(self._answers[key])
        return gather(answers)

    def _mean(
        self, pair: Pair, evidence: Mapping[str, Evidence], higher_is_better: bool
    ) -> dict[str, Any]:
        """The difference on the mean over the tasks that can be compared."""
        from suite.stats.compare import over_tasks

        try:
            joint = over_tasks(list(evidence.values()))
        except StatisticsError as reason:
            return {"missing": str(reason)}
        return _difference(joint, self._noise(pair, list(evidence), joint.seeds), higher_is_better)

    def _noise(self, pair: Pair, tasks: Sequence[str], seeds: Sequence[int]) -> Values:
        """Scores by arm and seed, on the mean over the tasks, from which the variance is pooled.

        They are those of all arms that share a sweep and a backbone with one of the pair.
        """
        import numpy as np

        kin = set()
        own = set()
        for cells in pair:
            kin.add((_sweep(cells), cells[0].arm.backbone.name))
            own.add((_sweep(cells), cells[0].arm.key))
        means = []
        for key, cells in self.arms.items():
            if (key[0], cells[0].arm.backbone.name) not in kin:
                continue
            # The pair's own scores are what is asked about, rejected or not.
            table = []
            for cell in cells:
                if cell.task in tasks:
                    table.append(_scores(cell, seeds, trusted=key in own))
            # An arm without all scores is left out: its mean would be over other tasks.
            if len(table) == len(tasks) and all(table):
                means.append(np.mean(table, axis=0))
        return np.array(means)


def _scores(cell: Cell, seeds: Sequence[int], *, trusted: bool) -> list[float]:
    """Scores of the confirm runs with these seeds; empty where one is missing.

    Also empty where the cell's row is rejected, unless it is `trusted`.
    """
    from suite.leaderboard.validity import judge

    found = {}
    for trial in cell.confirmed():
        if trial.result is not None and trial.result.score is not None:
            found[trial.spec.seed] = trial.result.score
    if any(seed not in found for seed in seeds):
        return []
    if not trusted and judge(cell.confirmed(), cell.search)["admitted"] is False:
        return []
    return [found[seed] for seed in seeds]


def _blank(task: str, a: Sequence[Cell], b: Sequence[Cell]) -> dict[str, Any]:
    names = {
        "task": task,
        "arm_a": a[0].arm.key,
        "arm_b": b[0].arm.key,
        "sweep_a": _sweep(a),
        "sweep_b": _sweep(b),
    }
    return dict.fromkeys(KEYS) | names


def _difference(evidence: Evidence, noise: Values | None, higher_is_better: bool) -> dict[str, Any]:
    from suite.stats.compare import difference

    found = asdict(difference(evidence, noise))
    found["score_a"] = found.pop("first")
    found["score_b"] = found.pop("second")
    found["seeds"] = len(evidence.seeds)
    found["items"] = evidence.units
    found["higher_is_better"] = higher_is_better
    return found


def _adjust(rows: Sequence[dict[str, Any]]) -> None:
    """Add Holm's p-values: one family of all tasks and pairs, and another of the means."""
    import numpy as np

    from suite.stats.significance import LEVEL, holm

    for of_means in (False, True):
        family = []
        p_values = []
        for row in rows:
            if (row["task"] == MEAN) == of_means and row["p"] is not None:
                family.append(row)
                p_values.append(row["p"])
        adjusted = holm(np.array(p_values))
        for row, p in zip(family, adjusted, strict=True):
            row["p_holm"] = float(p)
            if p < 1 - LEVEL:
                # A lower perplexity wins: the sign alone does not tell who is better.
                a_wins = (row["difference"] > 0) == row["higher_is_better"]
                row["better"] = "a" if a_wins else "b"


def _columns(rows: Sequence[Row]) -> list[Column]:
    # The title names the arms of a single pair; of several, every row names its own.
    scores = [
        column("task"),
        column("score_a", "A", render.score),
        column("score_b", "B", render.score),
    ]
    if _several_pairs(rows):
        scores = [
            column("arm_a", "A"),
            column("arm_b", "B"),
            column("task"),
            column("score_a", "score A", render.score),
            column("score_b", "score B", render.score),
        ]
    return [
        *scores,
        Column("A - B", lambda row: _signed(row["difference"]), right=True),
        Column("95% interval", _interval, right=True),
        column("p", show=_p),
        column("p_holm", "p (Holm)", _p),
        column("effect", "effect g", render.brief, rank=2),
        column("seeds", show=render.count, rank=3),
        column("items", show=render.count, rank=3),
        Column("", _verdict),
    ]


def _several_pairs(rows: Sequence[Row]) -> bool:
    return len({(row["arm_a"], row["arm_b"]) for row in rows}) > 1


def _interval(row: Row) -> str:
    if row["p"] is None:
        return render.MISSING
    return f"{_signed(row['low'])} to {_signed(row['high'])}"


def _signed(value: float | None) -> str:
    return render.number(value, "+.2f")


def _p(value: float | None) -> str:
    if value is None:
        return render.MISSING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"


def _verdict(row: Row) -> str:
    if row["missing"]:
        return str(row["missing"])
    # Not `equal`: with few seeds a real difference may stay hidden.
    return {"a": "A is better", "b": "B is better"}.get(row["better"], "cannot be told apart")


def _title(rows: Sequence[Row]) -> str:
    """Title that says which arm is A and which is B; empty for several pairs."""
    if _several_pairs(rows):
        return ""
    return f"A: {rows[0]['sweep_a']}:{rows[0]['arm_a']}\nB: {rows[0]['sweep_b']}:{rows[0]['arm_b']}"


def _task(cell: Cell) -> Any:
    return (cell.search or cell.confirm)[0].spec.task
