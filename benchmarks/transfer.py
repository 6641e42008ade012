"""The same arms in several sweeps side by side: does the winner of a cheap sweep win in an expensive one, and at the same learning rate?

    python -m benchmarks.transfer runs:small runs:middle other-home:large

Each sweep is HOME:SWEEP, the cheapest first. A rank is the range of places that paired tests leave open (docs/statistics.md), a score
has its 95% interval, and the learning rate is the chosen one. Below the table stands, for every task, where the leader of the cheapest
sweep ends up in each other one and how far below the best, what became of the pairs that were told apart, and how far the rates moved.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.config.reference import MEAN
from suite.errors import StatisticsError
from suite.leaderboard.pairs import compare_arms
from suite.plan.cell_state import CellStatus
from suite.record.folder import Home
from suite.report import values
from suite.report.data import read
from suite.report.values import MISSING

Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One sweep of the table.

    Attributes:
        rows: By task and arm, the row of its leaderboard.
        apart: By task, the pairs (better, worse) that a paired test tells apart; a task is absent
            where the home has no answers to test.
    """

    name: str
    rows: dict[str, dict[str, Row]]
    apart: dict[str, set[tuple[str, str]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="+", metavar="HOME:SWEEP", help="the cheapest first")
    found = [read_sweep(given) for given in parser.parse_args().sweeps]
    print("\n".join([*table(found), "", *verdicts(found)]))


def read_sweep(given: str) -> Sweep:
    """Read the rows and the pairs of one sweep.

    Args:
        given: `HOME:SWEEP`.
    """
    folder, _, name = given.rpartition(":")
    home = Home(Path(folder))
    rows: dict[str, dict[str, Row]] = {}
    # Pairs come by key, and a key holds the architecture, which differs between sweeps.
    names: dict[str, str] = {}
    for row in read(home.path, name).shown:
        # What a sweep has not finished, or is no evidence, says nothing about another one.
        if row["status"] != CellStatus.DONE or row["admitted"] is False:
            continue
        arm = name_of(row)
        # Two architectures of one method could not be told from each other in another sweep.
        if arm in rows.setdefault(row["task"], {}):
            raise SystemExit(f"{given}: has several arms {arm} on {row['task']}, expected one")
        rows[row["task"]][arm] = row
        names[row["arm"]] = arm
    apart = {}
    for task in rows:
        pairs = pairs_of(home, name, task, names)
        if pairs is not None:
            apart[task] = pairs
    return Sweep(name, rows, apart)


def name_of(row: Row) -> str:
    """An arm without its architecture, since each budget may choose another one."""
    return " ".join([values.backbone(row), values.attention(row), row["method"]])


def pairs_of(
    home: Home, sweep: str, task: str, names: dict[str, str]
) -> set[tuple[str, str]] | None:
    """The pairs (better, worse) of a task; None where nothing can be tested."""
    # One task at a time, so that Holm's correction covers the pairs that the ranks of the task cover.
    only = None if task == MEAN else task
    try:
        compared = compare_arms(home, [], sweep=sweep, task=only)
    except StatisticsError:
        # Imported results have ranks, but not the answers behind them.
        return None
    pairs = set()
    for row in compared:
        # An arm that is not finished, or lost its contest, has no name here.
        if row["task"] != task or row["arm_a"] not in names or row["arm_b"] not in names:
            continue
        # Without a correction's verdict a pair counts as not told apart.
        if row["better"] is not None:
            pair = names[row["arm_a"]], names[row["arm_b"]]
            if row["better"] == "b":
                pair = pair[1], pair[0]
            pairs.add(pair)
    return pairs


def table(sweeps: Sequence[Sweep]) -> list[str]:
    """A row per task and arm, in the order of the first sweep; three columns per sweep."""
    heads = ["task", "arm"]
    for sweep in sweeps:
        heads += [f"rank, {sweep.name}", f"score, {sweep.name}", f"rate, {sweep.name}"]
    lines = [heads, ["---"] * len(heads)]
    for task, arms in sweeps[0].rows.items():
        for arm in arms:
            line = [task, arm]
            for sweep in sweeps:
                line += cells(sweep.rows.get(task, {}).get(arm))
            lines.append(line)
    return ["| " + " | ".join(line) + " |" for line in lines]


def cells(row: Row | None) -> list[str]:
    if row is None:
        return [MISSING] * 3
    score = values.score(row["score_mean"])
    if row["ci_low"] is not None:
        score += f" ({values.score(row['ci_low'])} to {values.score(row['ci_high'])})"
    return [row["rank"] or MISSING, score, values.learning_rate(row)]


def verdicts(sweeps: Sequence[Sweep]) -> list[str]:
    """What the first sweep said of each other one."""
    lines = []
    cheap = sweeps[0]
    for task in cheap.rows:
        for other in sweeps[1:]:
            # An arm that one sweep lacks says nothing about the other.
            common = cheap.rows[task].keys() & other.rows.get(task, {}).keys()
            said = [f"- {task}, {cheap.name} to {other.name}:"]
            said.append(leader(cheap.rows[task], other.rows.get(task, {}), common))
            if task in cheap.apart and task in other.apart:
                said.append(kept(cheap.apart[task], other.apart[task], common))
            said += rates(cheap.rows[task], other.rows.get(task, {}), common)
            lines.append(" ".join(said))
    return lines


def leader(rows: dict[str, Row], others: dict[str, Row], common: set[str]) -> str:
    """Where the best score of the first sweep ends up in the other one."""
    scored = [arm for arm in common if rows[arm]["score_mean"] is not None]
    if not scored:
        return "no arm has a score in both."
    # A row that does not say counts as one where more is better.
    less_is_better = rows[scored[0]]["higher_is_better"] is False
    scored.sort(key=lambda arm: rows[arm]["score_mean"], reverse=not less_is_better)
    first = others[scored[0]]
    said = (
        f"the leader, {scored[0]}, has rank {first['rank'] or 'none'} there (of {len(others)} arms)"
    )
    best = [arm["score_mean"] for arm in others.values() if arm["score_mean"] is not None]
    if first["score_mean"] is not None:
        gap = first["score_mean"] - (min(best) if less_is_better else max(best))
        said += f", {values.score(abs(gap))} from the best score"
    return f"{said}."


def kept(apart: set[tuple[str, str]], others: set[tuple[str, str]], common: set[str]) -> str:
    """How many pairs that the first sweep tells apart stand the same way in the other one."""
    pairs = {pair for pair in apart if common.issuperset(pair)}
    reversed_pairs = {(worse, better) for better, worse in pairs}
    same = len(pairs & others)
    turned = len(reversed_pairs & others)
    return (
        f"Of {len(pairs)} pairs told apart, {same} stand the same way there, {turned} the other"
        f" way, and {len(pairs) - same - turned} are not told apart."
    )


def rates(rows: dict[str, Row], others: dict[str, Row], common: set[str]) -> list[str]:
    """How far the chosen learning rates lie from those of the first sweep; a mean over tasks has none."""
    moved = {
        arm: math.log10(others[arm]["learning_rate"] / rows[arm]["learning_rate"])
        for arm in sorted(common)
        if others[arm]["learning_rate"] and rows[arm]["learning_rate"]
    }
    if not moved:
        return []
    middle = statistics.median(abs(decades) for decades in moved.values())
    arm = max(moved, key=lambda arm: abs(moved[arm]))
    return [f"Rates moved by {middle:.2f} decades (median), at most by {moved[arm]:+.2f} ({arm})."]


if __name__ == "__main__":
    main()
