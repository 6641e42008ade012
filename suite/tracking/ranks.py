"""Ranks in MLflow: one run of kind `ranks` for the arms of a backbone on a task, or on the mean over tasks.

Ranks need the answers of all these arms at once, so they are computed when cells are written, from the trial folders, and
again only when a cell that takes part has changed. The leaderboard joins them to its rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from suite.config.hashing import canonical_json, short_hash
from suite.config.reference import MEAN
from suite.config.task import TaskConfig
from suite.errors import StatisticsError, SuiteError
from suite.record.cells import Cell
from suite.stats.answers import Answers, read_answers
from suite.stats.compare import Evidence, gather, over_tasks, select_arms
from suite.stats.interval import mean_interval
from suite.stats.ranks import Rank, rank_groups, rank_text
from suite.tracking.baselines import Row
from suite.tracking.store import MAX_TAG_CHARS, Store, StoredRun
from suite.tracking.summary import CellSummary, from_tags, with_values

FORMAT = 1
"""Raised when what is written changes."""
KIND = "ranks"
Place = tuple[str, str]
"""A backbone and a task, or "mean"."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """What a run says.

    Attributes:
        ranks: By arm.
        intervals: Of mean rows, by arm: low, high, of what.
        missing: By arm why it has no rank, and under "" why none has.
    """

    ranks: dict[str, Rank] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def tags(self) -> dict[str, str]:
        """One tag each; of more arms than a tag holds (some 150), none is ranked."""
        texts = {
            name: canonical_json(value)
            for name, value in (
                ("ranks", self.ranks),
                ("intervals", self.intervals),
                ("missing", self.missing),
            )
        }
        if any(len(text) > MAX_TAG_CHARS for text in texts.values()):
            return Ranked(missing={"": f"{len(self.ranks)} arms: too many to store"}).tags()
        return {f"suite.{name}": text for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Participant:
    """A finished cell: what its run in MLflow says, and where its trials are."""

    summary: CellSummary
    digest: str
    read: Callable[[], Cell]


@dataclass(frozen=True, slots=True)
class _Task:
    """What there is of one task: the arms that can be compared, and why others cannot."""

    arms: list[str]
    evidence: Evidence | None
    config: TaskConfig | None
    missing: dict[str, str]


class RankWriter:
    """Keeps the ranks of one home up to date in one store; evidence is kept between calls."""

    def __init__(self, store: Store, home_id: str) -> None:
        self.store, self.home_id = store, home_id
        self._runs: dict[str, dict[Place, StoredRun]] = {}
        self._evidence: dict[tuple[str, str], _Task] = {}

    def sync(
        self,
        experiment: str,
        sweep: str,
        cells: Mapping[str, Mapping[str, str]],
        read: Callable[[str], Cell],
    ) -> int:
        """Write what changed.

        Args:
            experiment: MLflow's id of the sweep.
            sweep: Its name.
            cells: Tags of every cell's run, by key of the cell.
            read: The trials of a cell that belong to the sweep.

        Returns:
            Runs written.
        """
        finished: dict[Place, list[Participant]] = defaultdict(list)
        tasks: dict[str, set[str]] = defaultdict(set)
        for key, tags in sorted(cells.items()):
            if "suite.summary" not in tags:
                continue
            cell = from_tags(dict(tags))
            tasks[cell.backbone].add(cell.task)
            if takes_part(cell):
                finished[cell.backbone, cell.task].append(
                    Participant(cell, tags.get("suite.digest", ""), partial(read, key))
                )
        for backbone, names in tasks.items():
            if len(names) > 1:
                finished[backbone, MEAN] = _complete(finished, backbone, names)
        return sum(
            self._write(experiment, sweep, place, cells_)
            for place, cells_ in sorted(finished.items())
        )

    def _write(
        self, experiment: str, sweep: str, place: Place, cells: Sequence[Participant]
    ) -> bool:
        digest = short_hash(
            [FORMAT, sorted([c.summary.arm, c.summary.task, c.digest] for c in cells)]
        )
        known = self._known(experiment, sweep).get(place)
        if (known is None and len({c.summary.arm for c in cells}) < 2) or (
            known is not None and known.tags.get("suite.digest") == digest
        ):
            return False
        found = self._rank(place, cells)
        end_s = max((c.summary.ended_at or 0.0 for c in cells), default=0.0)
        if known is None:
            names = {
                "sweep": sweep,
                "backbone": place[0],
                "task": place[1],
                "suite.kind": KIND,
                "suite.home": self.home_id,
            }
            known = self.store.create_run(
                experiment, name=f"ranks {place[0]} {place[1]}", start_s=end_s, tags=names
            )
        tags = {**found.tags(), "suite.digest": digest}
        self.store.finish(known.id, "FINISHED", end_s)
        self.store.log(known.id, tags=tags)
        self._runs[sweep][place] = replace(known, tags={**known.tags, **tags})
        return True

    def _known(self, experiment: str, sweep: str) -> dict[Place, StoredRun]:
        if sweep not in self._runs:
            kept: dict[Place, StoredRun] = {}
            for run in self.store.runs(
                [experiment], {"suite.kind": KIND, "suite.home": self.home_id}
            ):
                if kept.setdefault((run.tags["backbone"], run.tags["task"]), run) is not run:
                    self.store.delete_run(run.id)
            self._runs[sweep] = kept
        return self._runs[sweep]

    def _rank(self, place: Place, cells: Sequence[Participant]) -> Ranked:
        if not cells:
            return Ranked()
        by_task: dict[str, list[Participant]] = defaultdict(list)
        for cell in cells:
            by_task[cell.summary.task].append(cell)
        try:
            return _ranked(
                [self._task(found) for _, found in sorted(by_task.items())],
                cells[0].summary.higher_is_better is not False,
            )
        except StatisticsError as reason:
            return Ranked(missing={"": str(reason)})

    def _task(self, cells: Sequence[Participant]) -> _Task:
        key = cells[0].summary.task, short_hash(sorted([c.summary.arm, c.digest] for c in cells))
        if key not in self._evidence:
            self._evidence = {
                known: task for known, task in self._evidence.items() if known[0] != key[0]
            }
            self._evidence[key] = _read_task(cells)
        return self._evidence[key]


def takes_part(cell: CellSummary) -> bool:
    """Whether a cell is ranked: it is done and was not rejected."""
    return cell.status == "done" and cell.admitted is not False


def _complete(
    finished: Mapping[Place, Sequence[Participant]], backbone: str, tasks: Iterable[str]
) -> list[Participant]:
    """Every cell of the arms that have finished all tasks; none where the tasks' scores point in both directions."""
    cells = [c for task in tasks for c in finished.get((backbone, task), ())]
    count = defaultdict[str, int](int)
    for cell in cells:
        count[cell.summary.arm] += 1
    whole = [c for c in cells if count[c.summary.arm] == len(set(tasks))]
    return whole if len({c.summary.higher_is_better for c in whole}) == 1 else []


def _read_task(cells: Sequence[Participant]) -> _Task:
    answers: dict[str, Answers] = {}
    missing: dict[str, str] = {}
    for cell in cells:
        try:
            answers[cell.summary.arm] = read_answers(cell.read().confirmed())
        except SuiteError as reason:
            missing[cell.summary.arm] = str(reason)
    if not answers:
        return _Task([], None, None, missing)
    first = next(iter(answers.values()))
    try:
        return _Task(list(answers), gather(list(answers.values())), first.task, missing)
    except SuiteError as reason:
        return _Task([], None, first.task, missing | {"": str(reason)})


def _ranked(tasks: Sequence[_Task], higher_is_better: bool) -> Ranked:
    """Of the arms that have answers to all tasks; of several tasks with the interval of their mean."""
    missing = {arm: reason for task in tasks for arm, reason in task.missing.items()}
    arms = [arm for arm in tasks[0].arms if all(arm in task.arms for task in tasks)]
    if len(arms) < 2:
        return Ranked(missing={"": "fewer than two arms can be compared", **missing})
    parts = [
        select_arms(task.evidence, [task.arms.index(arm) for arm in arms])
        for task in tasks
        if task.evidence is not None
    ]
    evidence = over_tasks(parts)
    ranks = dict(zip(arms, rank_groups(evidence, higher_is_better=higher_is_better), strict=True))
    configs = [task.config for task in tasks if task.config is not None]
    return Ranked(ranks, _intervals(arms, evidence, configs) if len(tasks) > 1 else {}, missing)


def _intervals(
    arms: Sequence[str], evidence: Evidence, tasks: Sequence[TaskConfig]
) -> dict[str, tuple[float, float, str]]:
    found = {}
    for n, arm in enumerate(arms):
        try:
            interval = mean_interval(
                evidence.scores[n].tolist(), max(float(evidence.items[n, n]), 0.0), tasks
            )
        except StatisticsError:  # as extreme as can be on every task
            continue
        found[arm] = (interval.low, interval.high, interval.of)
    return found


Key = tuple[str, str, str, str]
"""Home, sweep, backbone, task."""


def read_ranks(store: Store, experiments: Sequence[str]) -> dict[Key, Ranked]:
    """What is stored, of all homes and sweeps."""
    runs = (
        store.runs(experiments, {"suite.kind": KIND}, having="suite.ranks") if experiments else []
    )
    return {
        (r.tags["suite.home"], r.tags["sweep"], r.tags["backbone"], r.tags["task"]): _from_tags(
            r.tags
        )
        for r in runs
        if "suite.digest" in r.tags
    }


def _from_tags(tags: Mapping[str, str]) -> Ranked:
    ranks, intervals, missing = (
        json.loads(tags[f"suite.{name}"]) for name in ("ranks", "intervals", "missing")
    )
    return Ranked(
        {arm: (low, high) for arm, (low, high) in ranks.items()},
        {arm: (low, high, of) for arm, (low, high, of) in intervals.items()},
        missing,
    )


def with_ranks(rows: Sequence[Row], ranks: Mapping[Key, Ranked]) -> list[Row]:
    """The same rows with their rank, or the reason why they have none; mean rows with their interval."""
    return [
        (_joined(cell, ranks.get((home, cell.sweep, cell.backbone, cell.task))), home)
        for cell, home in rows
    ]


def _joined(cell: CellSummary, ranked: Ranked | None) -> CellSummary:
    if not takes_part(cell):
        return with_values(
            cell,
            rank_missing="rejected rows are not ranked"
            if cell.admitted is False
            else "only finished rows are ranked",
        )
    if ranked is None:
        return with_values(
            cell, rank_missing="no other finished row of this sweep, backbone and task"
        )
    if cell.arm in ranked.intervals:
        low, high, of = ranked.intervals[cell.arm]
        cell = with_values(cell, ci_low=low, ci_high=high, ci_of=of)
    if cell.arm not in ranked.ranks:
        return with_values(
            cell,
            rank_missing=ranked.missing.get(
                cell.arm, ranked.missing.get("", "its tasks do not all have a rank")
            ),
        )
    return with_values(cell, rank=rank_text(ranked.ranks[cell.arm]))
