"""Rank the arms of a backbone on a task, or on the mean over tasks, in one sweep of one home.

Ranks need the answers of all these arms at once. So they are stored in the rows, with a digest of
the rows that they compare, and computed again only when one of those has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from suite.config.hashing import short_hash
from suite.config.reference import MEAN
from suite.config.task import TaskConfig
from suite.errors import StatisticsError, SuiteError
from suite.leaderboard.fields import Row, with_values
from suite.metrics.values import Values
from suite.plan.cell_state import CellStatus
from suite.record.cells import Trial
from suite.record.looks import Looks, joint
from suite.record.looks import from_json as looks_from_json
from suite.stats.answers import Answers, read_answers
from suite.stats.compare import NO_RANK, Evidence, gather, over_tasks, select_arms
from suite.stats.interval import mean_interval
from suite.stats.power import Power, power_of, spread_of
from suite.stats.ranks import Rank, pairs_of, rank_groups, rank_text

FORMAT = 8
"""Raised when ranks are computed in another way: all are then computed again."""
ALONE = "no other finished row of this sweep, backbone and task"
Place = tuple[str, str]
"""A backbone and a task, or `mean`."""
Read = Callable[[Row], Sequence[Trial]]
"""Gives the confirm runs of a finished row."""


@dataclass(frozen=True, slots=True)
class TaskEvidence:
    """The evidence of one task: the arms that can be compared, and why others cannot."""

    arms: list[str]
    evidence: Evidence | None
    config: TaskConfig | None
    missing: dict[str, str]


Known = dict[tuple[str, ...], TaskEvidence]
"""Evidence by home, sweep, backbone, task and the digest of the rows behind it."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The ranks of the arms of one place.

    Attributes:
        ranks: Rank by arm.
        intervals: Interval of the mean over tasks by arm: low, high, and what it is over.
        missing: Why an arm has no rank, by arm; the entry "" says why none has.
        power: What these ranks could tell apart; None where there are none.
    """

    ranks: dict[str, Rank] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    power: Power | None = None

    def of_arm(self, arm: str) -> dict[str, Any]:
        """The fields of an arm's rank, or why it has none."""
        if arm not in self.ranks:
            reason = self.missing.get("", "its tasks do not all have a rank")
            return no_rank(self.missing.get(arm, reason))
        found = no_rank(None) | {"rank": rank_text(self.ranks[arm])}
        if self.power is not None:
            found["shown_difference"] = self.power.shown
            found["seeds_for_point"] = self.power.seeds_for_point
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the arms of a place; `ranking` is None where the rows carry it already."""

    digest: str
    arms: set[str]
    ranking: Ranking | None


def no_rank(reason: str | None) -> dict[str, Any]:
    """The fields of a row without a rank."""
    return {
        "rank": None,
        "rank_missing": reason,
        "shown_difference": None,
        "seeds_for_point": None,
    }


def is_ranked(row: Row) -> bool:
    """Whether a row takes part: it is finished and was not rejected."""
    return row.status == CellStatus.DONE and row.admitted is not False


def why_not_ranked(row: Row) -> str:
    """Why a row takes no part."""
    if row.admitted is False:
        return "rejected rows are not ranked"
    return "only finished rows are ranked"


def tasks_of_mean(rows: Collection[Row]) -> int:
    """Over how many tasks the mean of an arm is: all that the sweep plans, begun or not.

    Args:
        rows: All rows of one sweep of one home.
    """
    # Rows of an earlier version do not hold how many are planned.
    return max(len({row.task for row in rows}), max(row.planned_tasks for row in rows))


def planned_arms(rows: Collection[Row]) -> int:
    """How many arms the sweep plans where these rows are compared; 0 = not known.

    Args:
        rows: Rows of one sweep, home and backbone.
    """
    # A mean is over all tasks, so the task with the fewest arms says how many can have one.
    return min(row.planned_arms for row in rows)


def with_ranks(rows: Sequence[Row], read: Read, known: Known | None = None) -> list[Row]:
    """The same rows with their rank and that of their arm's mean row, or the reasons for none.

    Args:
        rows: The rows of all cells of one sweep of one home.
        read: Function that is called for the rows of a place whose ranks do not hold any more.
        known: Evidence of earlier calls, which this one adds to; None = nothing is remembered.
    """
    # A new dictionary each time, because a default of {} would be shared by all calls.
    if known is None:
        known = {}
    places = _places(rows)
    found: dict[Place, Comparison] = {}
    for place, members in places.items():
        digest = _digest(members)
        ranking = None
        # To read the answers of all arms is slow, so ranks that still hold are kept.
        if not _holds(place, members, digest):
            ranking = _rank(members, read, known)
        found[place] = Comparison(digest, _arms(members), ranking)
    # A driver calls this at every update, and each call may add new evidence.
    _forget(known, rows, places.values())
    return [_ranked(row, found) for row in rows]


def _forget(known: Known, rows: Sequence[Row], places: Iterable[Sequence[Row]]) -> None:
    """Drop the evidence of comparisons that are no longer made."""
    sweeps = {(row.home, row.sweep) for row in rows}
    current = set()
    for members in places:
        for same_task in _by_task(members):
            current.add(_evidence_key(same_task))
    # A copy of the keys, because the loop deletes from the dictionary.
    for key in list(known):
        if key[:2] in sweeps and key not in current:
            del known[key]


def _places(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    """The rows that are compared with one another; a place with one arm has none."""
    finished: dict[Place, list[Row]] = defaultdict(list)
    tasks: dict[str, set[str]] = defaultdict(set)
    # The order of the arms decides the last bits of the sums, so it must not depend on the
    # caller's.
    for row in sorted(rows, key=lambda row: row.cell_key):
        tasks[row.backbone].add(row.task)
        if is_ranked(row):
            finished[row.backbone, row.task].append(row)
    for backbone, names in tasks.items():
        # With one task the mean is that task.
        if len(names) > 1 and len(names) == tasks_of_mean(rows):
            finished[backbone, MEAN] = _complete(finished, backbone, names)
    places = {}
    for place, members in finished.items():
        if len(_arms(members)) > 1:
            places[place] = members
    return places


def _arms(rows: Iterable[Row]) -> set[str]:
    return {row.arm for row in rows}


def _complete(
    finished: Mapping[Place, Sequence[Row]], backbone: str, tasks: Iterable[str]
) -> list[Row]:
    """The rows of the arms that have finished all tasks.

    There are none where more is better on some tasks and less on others.
    """
    by_arm: dict[str, list[Row]] = defaultdict(list)
    names = sorted(tasks)
    for task in names:
        for row in finished.get((backbone, task), ()):
            by_arm[row.arm].append(row)
    whole: list[Row] = []
    for members in by_arm.values():
        # A mean over fewer tasks is another quantity and cannot be compared.
        if len(members) == len(names):
            whole += members
    directions = {row.higher_is_better for row in whole}
    # The mean of an accuracy and a perplexity has no better and worse.
    if len(directions) > 1:
        return []
    return whole


def _digest(members: Sequence[Row]) -> str:
    # Sorted, so that the same rows in another order have the same digest.
    rows = sorted([row.arm, row.task, row.digest] for row in members)
    return short_hash([FORMAT, planned_arms(members), rows])


def _holds(place: Place, members: Sequence[Row], digest: str) -> bool:
    """Whether the rows carry the ranks of exactly this comparison."""
    # The rank of a mean row is stored in the rows of its tasks and has a digest of its own.
    for row in members:
        stored = row.ranked
        if place[1] == MEAN:
            stored = row.mean_ranked
        if stored != digest:
            return False
    return True


def _ranked(row: Row, found: Mapping[Place, Comparison]) -> Row:
    # Where one of the two returns nothing, the row keeps its stored values.
    return with_values(row, **_own_rank(row, found), **_mean_rank(row, found))


def _own_rank(row: Row, found: Mapping[Place, Comparison]) -> dict[str, Any]:
    if not is_ranked(row):
        return no_rank(why_not_ranked(row)) | {"ranked": ""}
    place = found.get((row.backbone, row.task))
    if place is None:
        return no_rank(ALONE) | {"ranked": ""}
    if place.ranking is None:
        return {}
    return place.ranking.of_arm(row.arm) | {"ranked": place.digest}


def _mean_rank(row: Row, found: Mapping[Place, Comparison]) -> dict[str, Any]:
    """What the arm's mean row will show; the rows of all its tasks carry it."""
    place = found.get((row.backbone, MEAN))
    if place is None or row.arm not in place.arms:
        return {"mean_rank": {}, "mean_ranked": ""}
    if place.ranking is None:
        return {}
    values = place.ranking.of_arm(row.arm)
    if row.arm in place.ranking.intervals:
        low, high, of = place.ranking.intervals[row.arm]
        values |= {"ci_low": low, "ci_high": high, "ci_of": of}
    return {"mean_rank": values, "mean_ranked": place.digest}


def _rank(members: Sequence[Row], read: Read, known: Known) -> Ranking:
    tasks = []
    for same_task in _by_task(members):
        tasks.append(_evidence(same_task, read, known))
    try:
        # All rows of a place have the same direction, so the first one tells it.
        higher_is_better = members[0].higher_is_better is not False
        return _ranking(tasks, members, higher_is_better=higher_is_better)
    except StatisticsError as reason:
        return Ranking(missing={"": str(reason)})


def _by_task(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.task].append(row)
    return [found[task] for task in sorted(found)]


def _evidence_key(same_task: Sequence[Row]) -> tuple[str, ...]:
    first = same_task[0]
    return first.home, first.sweep, first.backbone, first.task, _digest(same_task)


def _evidence(same_task: Sequence[Row], read: Read, known: Known) -> TaskEvidence:
    """Evidence of one task, computed once for its own ranks and the mean's."""
    key = _evidence_key(same_task)
    if key not in known:
        known[key] = _read_evidence(same_task, read)
    return known[key]


def _read_evidence(rows: Sequence[Row], read: Read) -> TaskEvidence:
    answers: dict[str, Answers] = {}
    missing: dict[str, str] = {}
    for row in rows:
        try:
            # One arm without predictions must not take the rank from the others.
            answers[row.arm] = read_answers(read(row))
        except SuiteError as reason:
            missing[row.arm] = str(reason)
    if not answers:
        return TaskEvidence([], None, None, missing)
    task = next(iter(answers.values())).task
    try:
        return TaskEvidence(list(answers), gather(list(answers.values())), task, missing)
    except SuiteError as reason:
        return TaskEvidence([], None, task, {**missing, "": str(reason)})


def _ranking(
    tasks: Sequence[TaskEvidence], members: Sequence[Row], *, higher_is_better: bool
) -> Ranking:
    """Ranks of the arms that have answers to all tasks, and intervals of means over tasks."""
    missing: dict[str, str] = {}
    for task in tasks:
        missing |= task.missing
    common = set(tasks[0].arms)
    for task in tasks:
        common &= set(task.arms)
    # In the order of the first task's arms, which `_places` has sorted.
    arms = [arm for arm in tasks[0].arms if arm in common]
    # A rank of one among one says nothing.
    if len(arms) < 2:
        return Ranking(missing={"": "fewer than two arms can be compared", **missing})
    parts = []
    configs = []
    for task in tasks:
        if task.evidence is not None:
            # Tasks may have other arms beside these, so each one's evidence is cut to the same
            # ones.
            parts.append(select_arms(task.evidence, [task.arms.index(arm) for arm in arms]))
        if task.config is not None:
            configs.append(task.config)
    evidence = over_tasks(parts)
    # On one task the row has an interval of its own already.
    intervals = {}
    if len(tasks) > 1:
        intervals = _intervals(arms, evidence, configs)
    spread = spread_of(evidence)
    # The intervals of one seed are over the items only, and no rank can be made of them.
    if spread is None:
        return Ranking({}, intervals, {"": NO_RANK, **missing})
    looks = _looks_by_pair(arms, members)
    planned = max(planned_arms(members), len(arms))
    groups = rank_groups(evidence, higher_is_better=higher_is_better, looks=looks, planned=planned)
    # The diagonal, of an arm with itself, is no comparison.
    most_looks = float(looks[np.triu_indices(len(arms), 1)].max())
    power = power_of(spread, seeds=len(evidence.seeds), pairs=pairs_of(planned), looks=most_looks)
    return Ranking(dict(zip(arms, groups, strict=True)), intervals, missing, power)


def _looks_by_pair(arms: Sequence[str], rows: Sequence[Row]) -> Values:
    """How often the test scores of every two arms were looked at, (A, A)."""
    found = np.ones((len(arms), len(arms)))
    # Nearly all sweeps: their rows have one set of seeds, and each row its one learning rate.
    if all(row.test_looks < 2 for row in rows):
        return found
    by_arm: dict[str, list[Looks]] = defaultdict(list)
    for row in rows:
        by_arm[row.arm].append(looks_from_json(row.looks))
    for n, arm in enumerate(arms):
        for m, other in enumerate(arms):
            found[n, m] = joint([*by_arm[arm], *by_arm[other]])
    return found


def _intervals(
    arms: Sequence[str], evidence: Evidence, tasks: Sequence[TaskConfig]
) -> dict[str, tuple[float, float, str]]:
    found = {}
    for n, arm in enumerate(arms):
        scores = evidence.scores[n].tolist()
        # The last bit of a variance that is zero may fall below it.
        item_variance = max(float(evidence.items[n, n]), 0.0)
        try:
            interval = mean_interval(scores, item_variance, tasks)
        except StatisticsError:  # as extreme as can be on every task
            continue
        found[arm] = (interval.low, interval.high, interval.of)
    return found
