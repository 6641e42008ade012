"""`suite compare`: whether two arms differ, on the same items and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from suite.cli import complete, render
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
from suite.record.looks import joint

if TYPE_CHECKING:
    from suite.cli.select import Arms
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


def compare(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[ARM_A",
            autocompletion=complete.arms,
            help="[SWEEP:] a method, ATTENTION/METHOD, ... or the beginning of a key.",
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="ARM_B]",
            autocompletion=complete.arms,
            help="The arm to compare it with, named the same way.",
        ),
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

    Holm's correction covers all tasks and pairs that are printed, and further looks at test scores;
    the means are a family of their own. One seed gives no p-value.
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
    comparer = _Comparer()
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
    if fmt in (Format.TABLE, Format.MD):
        _say_what_it_rests_on(rows)


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
                row |= _difference(evidence[task], _task(left[task]).higher_is_better)
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
            looks = [cell.looks for cell in (*a, *b) if cell.task in evidence]
            mean = _blank(MEAN, a, b) | _mean(evidence, directions.pop())
            rows.append(mean | {"test_looks": joint(looks)})
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


def _adjust(rows: Sequence[dict[str, Any]]) -> None:
    """Add Holm's p-values, and what could be shown with them.

    All tasks and pairs are one family, and the means over tasks are another.
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
        adjusted = holm(np.array(p_values))
        for row, p in zip(family, adjusted, strict=True):
            row["p_holm"] = float(p)
            row["comparisons"] = len(family)
            if p < 1 - LEVEL:
                # A lower perplexity wins: the sign alone does not tell who is better.
                a_wins = (row["difference"] > 0) == row["higher_is_better"]
                row["better"] = "a" if a_wins else "b"
            spread = spread_of(row["evidence"])
            assert spread is not None, "there is a p-value, so there are several seeds"
            power = power_of(
                spread, seeds=row["seeds"], pairs=len(family), looks=max(row["test_looks"] or 1, 1)
            )
            row["shown_difference"] = power.shown
            row["seeds_for_point"] = power.seeds_for_point
    for row in rows:
        row.pop("evidence", None)


def _say_what_it_rests_on(rows: Sequence[Row]) -> None:
    """Say on stderr what Holm's correction covers, and what these seeds could tell apart."""
    from suite.stats.power import sentence

    families = {}
    for row in rows:
        if row["comparisons"] is not None:
            families[row["task"] == MEAN] = row["comparisons"]
    words = {False: "tasks and pairs", True: "means over tasks"}
    for of_means, count in families.items():
        if count > 1:
            typer.echo(f"p (Holm) corrects for all {count} {words[of_means]} shown", err=True)
    # Of several pairs, the table has a column.
    if _several_pairs(rows):
        return
    for row in rows:
        if row["p"] is not None:
            said = sentence(row["seeds"], row["shown_difference"], row["seeds_for_point"])
            render.say(f"{row['task']}: {said}", err=True)


def _columns(rows: Sequence[Row]) -> list[Column]:
    # The title names the arms of a single pair; of several, every row names its own.
    scores = [
        column("task"),
        column("score_a", "A", render.score),
        column("score_b", "B", render.score),
    ]
    if _several_pairs(rows):
        names = _short_names({row["arm_a"] for row in rows} | {row["arm_b"] for row in rows})
        scores = [
            Column("A", lambda row: names[row["arm_a"]]),
            Column("B", lambda row: names[row["arm_b"]]),
            column("task"),
            column("score_a", "score A", render.score, rank=3),
            column("score_b", "score B", render.score, rank=3),
        ]
    power = []
    if _several_pairs(rows):
        power.append(column("shown_difference", "tells apart", render.score, rank=3))
    looks = []
    if any((row["test_looks"] or 0) > 1 for row in rows):
        looks = [column("test_looks", "test looks", render.count)]
    return [
        *scores,
        Column("A - B", lambda row: _signed(row["difference"]), right=True),
        Column("95% interval", _interval, right=True),
        column("p", show=_p, rank=1),
        column("p_holm", "p (Holm)", _p),
        column("effect", "effect g", render.brief, rank=2),
        column("seeds", show=render.count, rank=3),
        column("items", show=render.count, rank=3),
        *power,
        *looks,
        Column("", _verdict, wraps=True),
    ]


def _short_names(keys: set[str]) -> dict[str, str]:
    """Keys of arms without the parts that all of them share, and without the digest."""
    parts = {key: key.split(".") for key in keys}
    shared = 0
    # At each place the parts of all keys; where there is one part, all share it.
    for at_place in zip(*parts.values(), strict=False):
        if len(set(at_place)) > 1:
            break
        shared += 1
    names = {}
    for key, own in parts.items():
        names[key] = ".".join(own[shared:-1])
    # Arms that differ in their options have equal names, and only the digest tells them apart.
    if len(set(names.values())) < len(names):
        return dict(zip(keys, keys, strict=True))
    return names


def _several_pairs(rows: Sequence[Row]) -> bool:
    return len({(row["arm_a"], row["arm_b"]) for row in rows}) > 1


def _interval(row: Row) -> str:
    if row["low"] is None:
        return render.MISSING
    shown = f"{_signed(row['low'])} to {_signed(row['high'])}"
    if row["interval_of"] == "items":
        shown += " (over items only)"
    return shown


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
    if row["p_missing"]:
        return str(row["p_missing"])
    # Not `equal`: with few seeds a real difference may stay hidden.
    return {"a": "A is better", "b": "B is better"}.get(row["better"], "cannot be told apart")


def _title(rows: Sequence[Row]) -> str:
    """Title that says which arm is A and which is B; empty for several pairs."""
    if _several_pairs(rows):
        return ""
    return f"A: {rows[0]['sweep_a']}:{rows[0]['arm_a']}\nB: {rows[0]['sweep_b']}:{rows[0]['arm_b']}"


def _task(cell: Cell) -> Any:
    return (cell.search or cell.confirm)[0].spec.task
