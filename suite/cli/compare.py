"""`suite compare`: whether two arms differ, on the same items and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from suite.cli import complete, render
from suite.cli.options import DEFAULT_HOME, Format, FormatOption, HomeOption, existing_home
from suite.cli.render import Column, Row, column
from suite.config.reference import MEAN
from suite.errors import ConfigError, StatisticsError, SuiteError, UnknownNameError

if TYPE_CHECKING:
    from suite.cli.select import Arms
    from suite.metrics.quality import Values
    from suite.record.cells import Cell
    from suite.record.folder import Home
    from suite.stats.answers import Answers
    from suite.stats.compare import Evidence

KEYS = (
    *(
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
    ),
    *("seeds", "items", "higher_is_better", "better", "missing"),
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
        str | None, typer.Argument(metavar="ARM_B]", help="The same of the arm to compare it with.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete.sweeps_of_home, help="Only this sweep."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="T", autocompletion=complete.tasks, help="Only this task.")
    ] = None,
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all-pairs", help="Every two arms with the same backbone, instead of two by name."
        ),
    ] = False,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """The difference A - B per task and on their mean, with its interval, p-value and effect; Holm's correction over what is printed."""
    from suite.cli.select import read_arms
    from suite.record.folder import Home

    place = Home(existing_home(home))
    given = [name for name in (first, second) if name is not None]
    if len(given) != (0 if all_pairs else 2):
        raise ConfigError(
            f"got {' and '.join(given) or 'no arm'}{', and --all-pairs' if all_pairs else ''}; give two arms, or --all-pairs"
        )
    arms = read_arms(place, sweep)
    if given:
        pairs = [_named(arms, given, place)]
    else:
        pairs = [pair for pair in combinations(arms.values(), 2) if _comparable(*pair)]
    known = {cell.task for pair in pairs for cells in pair for cell in cells}
    if task is not None and task not in known:
        raise UnknownNameError("task", task, known, where="--task")
    comparer = _Comparer(arms)
    rows = _adjusted([row for a, b in pairs for row in comparer.rows(a, b, task)])
    reasons = dict.fromkeys(row["missing"] for row in rows)
    if None not in reasons:
        raise StatisticsError(
            "; ".join(map(str, reasons))
            or f"{home}: no two arms of one sweep and backbone have been confirmed"
        )
    render.render(rows, _columns(rows), fmt, keys=KEYS, title=_title(rows))


def _named(arms: Arms, given: Sequence[str], home: Home) -> Pair:
    from suite.cli.select import choose_arm

    a, b = (choose_arm(arms, name, home) for name in given)
    if (_sweep(a), a[0].arm.key) == (_sweep(b), b[0].arm.key):
        raise ConfigError(f"{' and '.join(map(repr, given))} are the same arm, {a[0].arm.key}")
    return a, b


def _comparable(a: Sequence[Cell], b: Sequence[Cell]) -> bool:
    """Whether two arms of a home are one comparison of `--all-pairs`."""
    same = a[0].arm.backbone.name == b[0].arm.backbone.name and _sweep(a) == _sweep(b)
    return same and all(any(cell.confirmed() for cell in cells) for cells in (a, b))


def _sweep(cells: Sequence[Cell]) -> str:
    return next(trial.spec.sweep for cell in cells for trial in (*cell.search, *cell.confirm))


@dataclass
class _Comparer:
    """Compares arms of one home; every cell's answers are read once."""

    arms: Arms
    _answers: dict[tuple[str, str], Answers] = field(default_factory=dict)

    def rows(self, a: Sequence[Cell], b: Sequence[Cell], only: str | None) -> list[dict[str, Any]]:
        """A row per task that either arm has, and one for the mean where several can be compared."""
        left, right = ({cell.task: cell for cell in cells} for cells in (a, b))
        tasks = sorted(task for task in {*left, *right} if only in (None, task))
        evidence: dict[str, Evidence] = {}
        rows = []
        for task in tasks:
            row = _blank(task, a, b)
            try:
                if task not in left or task not in right:
                    raise StatisticsError(
                        f"task {task}: only {'A' if task in left else 'B'} has run on it"
                    )
                evidence[task] = self._evidence(left[task], right[task])
                noise = self._noise((a, b), [task], evidence[task].seeds)
                rows.append(
                    row | _difference(evidence[task], noise, _task(left[task]).higher_is_better)
                )
            except SuiteError as reason:
                rows.append(row | {"missing": str(reason)})
        directions = {row["higher_is_better"] for row in rows if row["missing"] is None}
        if len(evidence) > 1 and len(directions) == 1:
            rows.append(_blank(MEAN, a, b) | self._mean((a, b), evidence, directions.pop()))
        return rows

    def _evidence(self, a: Cell, b: Cell) -> Evidence:
        from suite.stats.answers import read_answers
        from suite.stats.compare import gather

        for cell in (a, b):
            key = _sweep([cell]), cell.key
            if key not in self._answers:
                self._answers[key] = read_answers(cell.confirmed())
        return gather([self._answers[_sweep([cell]), cell.key] for cell in (a, b)])

    def _mean(
        self, pair: Pair, evidence: Mapping[str, Evidence], higher_is_better: bool
    ) -> dict[str, Any]:
        """On the mean over the tasks that can be compared."""
        from suite.stats.compare import over_tasks

        try:
            joint = over_tasks(list(evidence.values()))
        except StatisticsError as reason:
            return {"missing": str(reason)}
        return _difference(joint, self._noise(pair, list(evidence), joint.seeds), higher_is_better)

    def _noise(self, pair: Pair, tasks: Sequence[str], seeds: Sequence[int]) -> Values:
        """Scores by arm and seed, on the mean over the tasks, of all arms that share a sweep and a backbone with one of the pair."""
        import numpy as np

        kin = {(_sweep(cells), cells[0].arm.backbone.name) for cells in pair}
        own = [(_sweep(cells), cells[0].arm.key) for cells in pair]
        tables = [
            [_scores(cell, seeds, trusted=key in own) for cell in cells if cell.task in tasks]
            for key, cells in self.arms.items()
            if (key[0], cells[0].arm.backbone.name) in kin
        ]
        return np.array(
            [np.mean(table, axis=0) for table in tables if len(table) == len(tasks) and all(table)]
        )


def _scores(cell: Cell, seeds: Sequence[int], *, trusted: bool) -> list[float]:
    """Of the confirm runs with these seeds; empty where one is missing, or the row was rejected and is not trusted all the same."""
    from suite.leaderboard.validity import judge

    found = {
        t.spec.seed: t.result.score
        for t in cell.confirmed()
        if t.result is not None and t.result.score is not None
    }
    if not found.keys() >= set(seeds) or not (
        trusted or judge(cell.confirmed(), cell.search)["admitted"] is not False
    ):
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
    scores = {"score_a": found.pop("first"), "score_b": found.pop("second")}
    return {
        **scores,
        **found,
        "seeds": len(evidence.seeds),
        "items": evidence.units,
        "higher_is_better": higher_is_better,
    }


def _adjusted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With Holm's p-values: over all tasks and pairs, and over all pairs for the means, which are a question of their own."""
    import numpy as np

    from suite.stats.significance import LEVEL, holm

    for of_means in (False, True):
        family = [row for row in rows if (row["task"] == MEAN) == of_means and row["p"] is not None]
        for row, p in zip(family, holm(np.array([row["p"] for row in family])), strict=True):
            row["p_holm"] = float(p)
            if p < 1 - LEVEL:
                if (row["difference"] > 0) == row["higher_is_better"]:
                    row["better"] = "a"
                else:
                    row["better"] = "b"
    return list(rows)


def _columns(rows: Sequence[Row]) -> list[Column]:
    pairs = len({(row["arm_a"], row["arm_b"]) for row in rows}) > 1
    return [
        *([column("arm_a", "A"), column("arm_b", "B")] if pairs else []),
        column("task"),
        column("score_a", "A" if not pairs else "score A", render.score),
        column("score_b", "B" if not pairs else "score B", render.score),
        Column("A - B", lambda row: _signed(row["difference"]), right=True),
        Column(
            "95% interval",
            lambda row: (
                f"{_signed(row['low'])} to {_signed(row['high'])}"
                if row["p"] is not None
                else render.MISSING
            ),
            right=True,
        ),
        column("p", show=_p),
        column("p_holm", "p (Holm)", _p),
        column("effect", "effect g", render.brief, rank=2),
        column("seeds", show=render.count, rank=3),
        column("items", show=render.count, rank=3),
        Column("", _verdict),
    ]


def _signed(value: float | None) -> str:
    if value is None:
        return render.MISSING
    return f"{value:+.2f}"


def _p(value: float | None) -> str:
    if value is None:
        return render.MISSING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"


def _verdict(row: Row) -> str:
    if row["missing"]:
        return str(row["missing"])
    return {"a": "A is better", "b": "B is better"}.get(row["better"], "cannot be told apart")


def _title(rows: Sequence[Row]) -> str:
    """Which arm is which, where there are only two."""
    if len({(row["arm_a"], row["arm_b"]) for row in rows}) > 1:
        return ""
    return f"A: {rows[0]['sweep_a']}:{rows[0]['arm_a']}\nB: {rows[0]['sweep_b']}:{rows[0]['arm_b']}"


def _task(cell: Cell) -> Any:
    return (cell.search or cell.confirm)[0].spec.task
