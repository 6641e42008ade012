"""`suite compare`: whether two arms differ, on the same items and seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer

from suite.cli import complete, render
from suite.cli.options import (
    Format,
    FormatOption,
    HomeOption,
    OnlySweepOption,
    OnlyTaskOption,
    existing_home,
)
from suite.cli.render import Column, Row, column, put
from suite.config.names import DEFAULT_HOME
from suite.config.reference import MEAN
from suite.errors import ConfigError
from suite.report.values import ITEMS_ONLY


def compare(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="ARM_A",
            autocompletion=complete.arms,
            help="[SWEEP:] a method, ATTENTION/METHOD, ... or the beginning of a key.",
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="ARM_B",
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

    Holm's correction covers all tasks and pairs that are printed or that the sweep still plans, and
    further looks at test scores; the means are a family of their own. One seed gives no p-value.
    """
    # What a command computes with is imported when it runs: `--help` must not wait.
    from suite.leaderboard.pairs import KEYS, compare_arms
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
    rows = compare_arms(place, given, sweep=sweep, task=task)
    render.render(rows, _columns(rows), fmt, keys=KEYS, title=_title(rows))
    if fmt.for_people:
        _say_what_it_rests_on(rows, named=not all_pairs)


def _say_what_it_rests_on(rows: Sequence[Row], *, named: bool) -> None:
    """Say on stderr what Holm's correction covers, and what these seeds could tell apart."""
    from suite.stats.power import sentence_of

    families = defaultdict(list)
    for row in rows:
        if row["comparisons"] is not None:
            families[row["task"] == MEAN].append(row["comparisons"])
    words = {False: "tasks and pairs", True: "means over tasks"}
    for of_means, counts in families.items():
        count = counts[0]
        which = "shown"
        if count > len(counts):
            which = f"planned, of which {len(counts)} can be compared so far"
        if count > 1:
            put(f"p (Holm) corrects for all {count} {words[of_means]} {which}", err=True)
    # Somebody who takes the two arms that lie farthest apart has looked at all pairs.
    of_one_sweep = rows[0]["sweep_a"] == rows[0]["sweep_b"]
    if named and families and of_one_sweep:
        put(
            "the p-values are for two arms that were named before anybody saw their scores; for a "
            "pair that was chosen from a table take those of --all-pairs",
            err=True,
        )
    # Of several pairs, the table has a column.
    if _several_pairs(rows):
        return
    for row in rows:
        if row["p"] is not None:
            said = sentence_of(row)
            render.say(f"{row['task']}: {said}", err=True)


def _columns(rows: Sequence[Row]) -> list[Column]:
    # The title names the arms of a single pair; of several, every row names its own.
    scores = [
        column("task"),
        column("score_a", "A", render.score, rank=1),
        column("score_b", "B", render.score, rank=1),
    ]
    power = []
    if _several_pairs(rows):
        names = _short_names({row["arm_a"] for row in rows} | {row["arm_b"] for row in rows})
        scores = [
            Column("A", lambda row: names[row["arm_a"]]),
            Column("B", lambda row: names[row["arm_b"]]),
            column("task", rank=1),
            column("score_a", "score A", render.score, rank=6),
            column("score_b", "score B", render.score, rank=6),
        ]
        # Of several pairs, each is of one sweep.
        if len({row["sweep_a"] for row in rows}) > 1:
            scores.insert(0, column("sweep_a", "sweep"))
        power.append(column("shown_difference", "tells apart", _tells_apart, rank=6))
    looks = []
    if any((row["test_looks"] or 0) > 1 for row in rows):
        looks = [column("test_looks", "test looks", render.count, rank=3)]
    return [
        *scores,
        Column("A - B", lambda row: _signed(row["difference"]), right=True),
        Column("95% interval", _interval, right=True, rank=2),
        column("p", show=_p, rank=4),
        column("p_holm", "p (Holm)", _p, rank=3),
        column("effect", "effect g", render.brief, rank=5),
        column("seeds", show=render.count, rank=6),
        column("items", show=render.count, rank=6),
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
    pairs = {(row["sweep_a"], row["arm_a"], row["sweep_b"], row["arm_b"]) for row in rows}
    return len(pairs) > 1


def _interval(row: Row) -> str:
    if row["low"] is None:
        return render.MISSING
    shown = f"{_signed(row['low'])} to {_signed(row['high'])}"
    if row["interval_of"] == "items":
        shown += f" ({ITEMS_ONLY})"
    return shown


def _signed(value: float | None) -> str:
    return render.number(value, "+.2f")


def _tells_apart(value: float | None) -> str:
    # It takes a while to import.
    from suite.stats.power import size_text

    if value is None:
        return render.MISSING
    return size_text(value)


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
