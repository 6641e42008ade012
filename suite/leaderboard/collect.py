"""Collect the rows of a sweep from the trial folders of its home; rows that still hold are kept.

A row's digest covers what its numbers can depend on: the part of the sweep's definition that is
about the cell, and the names and times of its trials' files. So the digest tells whether a row
still holds before any result is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from suite.config.hashing import short_hash
from suite.config.reference import MEAN
from suite.files import stamp
from suite.leaderboard.costs import selection_of
from suite.leaderboard.fields import NAMES, Row, with_values
from suite.leaderboard.measures import CellResults
from suite.leaderboard.ranks import Known, with_ranks
from suite.leaderboard.row import cell_row
from suite.plan.cell_state import CellState, make_states
from suite.plan.definition import read_plan
from suite.plan.plan import Plan, PlannedCell
from suite.record.cells import Cell, Trial, group_cells
from suite.record.folder import RESULT, Home, TrialFolder
from suite.record.lm_eval import FILE as LM_EVAL
from suite.record.looks import names as names_of_looks
from suite.record.references import printed
from suite.record.spec import RECIPE_NUMBERS
from suite.storage.identity import home_id

# This is part of every row's digest, so rows of another format never hold.
FORMAT = short_hash([9, NAMES, RECIPE_NUMBERS])
"""The format of the rows. Raise the number when a field is computed in another way.

All rows are then made again.
"""
DECIDING = {"search", "confirm", "training", "limit", "decoder_objective", "tasks"}
"""Parts of a sweep that decide which trials count, and when a cell is done or a mean over tasks."""

# These two live as long as the process: a driver asks for the same rows at every update.
_cell_of_folder: dict[str, tuple[str, str]] = {}
"""Sweep and key of the cell by path of the trial folder.

A folder's name is the hash of its specification, which therefore never changes. To read 100,000 of
them again at every update would take 20 s.
"""
_evidence: Known = {}


def sweep_rows(home: Home, sweep: str, *, known: Sequence[Row] = ()) -> list[Row]:
    """The rows of all cells of a sweep that have a trial, in the plan's order.

    Args:
        home: Its folders are only read.
        sweep: Its name.
        known: Rows of earlier calls, of any home and sweep; those that still hold are used again.

    Raises:
        ConfigError: The home holds no such sweep, or a record of another version.
    """
    definition = _definition(home, sweep)
    # The rows of several homes may lie in one store, so a row is known by its home as well.
    own = home_id(home)
    before = {}
    for row in known:
        if row.home == own and row.sweep == sweep:
            before[row.cell_key] = row
    folders = folders_by_cell(home, sweep)
    digests = _digests(definition, home, folders)
    changed = []
    for key in definition.cells:
        # The digest decides without reading a result, which is the slow part.
        if key in folders and (key not in before or before[key].digest != digests[key]):
            changed.append(key)
    states = _states(definition, home, folders, changed)
    rows = []
    anew = set(changed)
    arms = definition.plan.arms_by_place()
    for key in definition.cells:
        if key in anew:
            row = cell_row(states[key], home=own, digest=digests[key])
            row = with_values(row, **_of_contest(definition, key, states))
        elif key in folders:
            row = before[key]
        else:
            continue
        # A sweep may get another arm, which changes nothing else of the rows that are there.
        rows.append(with_values(row, planned_arms=len(arms[row.backbone, row.task])))

    # Ranks need the answers of rows that were kept, whose runs have not been read yet.
    def read(row: Row) -> list[Trial]:
        return _confirmed(definition, folders, row, states)

    return with_ranks(rows, read, _evidence)


@dataclass(frozen=True, slots=True)
class _Definition:
    """A sweep as its home stores it.

    Attributes:
        plan: The sweep.
        cells: Planned cells by key.
        contests: Keys of the cells of each architecture contest, by its name.
        asked: What the definition says about each cell, as a digest, by key.
    """

    plan: Plan
    cells: Mapping[str, PlannedCell]
    contests: Mapping[str, Sequence[str]]
    asked: Mapping[str, str]


def _definition(home: Home, sweep: str) -> _Definition:
    # They are the cache's key: a definition that is written again is read again.
    stamps = stamp(home.sweep_definition(sweep)), stamp(home.sweep_cells(sweep))
    return _read_definition(home.path, sweep, stamps)


@lru_cache(maxsize=16)
def _read_definition(home: Path, sweep: str, stamps: object) -> _Definition:
    """Read a definition once for many updates; `stamps` change when the definition does."""
    plan = read_plan(Home(home), sweep)
    of_sweep = short_hash(plan.config.model_dump(mode="json", include=DECIDING))
    cells: dict[str, PlannedCell] = {}
    asked: dict[str, str] = {}
    contests: dict[str, list[str]] = defaultdict(list)
    for cell in plan.cells:
        cells[cell.key] = cell
        asked[cell.key] = _asked(plan, cell, of_sweep)
        if cell.contest is not None:
            contests[cell.contest].append(cell.key)
    return _Definition(plan, cells, contests, asked)


def _asked(plan: Plan, cell: PlannedCell, of_sweep: str) -> str:
    config = plan.config
    references = []
    if config.reference:
        # A row shows what a paper printed for its own task, and its arm's mean row the other.
        for task in (cell.task.name, MEAN):
            references.append(printed(config.reference, cell.arm, task, set(config.tasks)))
    return short_hash(
        # What is in this list makes the row anew when it changes, so a new input of a row belongs
        # here.
        [
            FORMAT,
            of_sweep,
            plan.workers(cell),
            cell.arm.key,
            cell.task.model_dump(mode="json"),
            cell.learning_rate.model_dump(mode="json"),
            cell.contest,
            references,
        ]
    )


def folders_by_cell(home: Home, sweep: str) -> dict[str, list[TrialFolder]]:
    """Folders of a sweep's trials by key of the cell, each in the order of the folders' names."""
    found: dict[str, list[TrialFolder]] = defaultdict(list)
    for folder in home.trials():
        path = str(folder.path)
        if path not in _cell_of_folder:
            spec = folder.spec()
            if spec is None:  # it is just being written
                continue
            _cell_of_folder[path] = (spec.sweep, spec.cell)
        place = _cell_of_folder[path]
        if place[0] == sweep:
            found[place[1]].append(folder)
    return found


def _digests(
    definition: _Definition, home: Home, folders: Mapping[str, Sequence[TrialFolder]]
) -> dict[str, str]:
    """The digest of every planned cell that has trials.

    A cell's row also depends on the other cells of its contest, and on its pretrain run.
    """
    files = {}
    for key in definition.cells:
        files[key] = short_hash([_marks(folder) for folder in folders.get(key, ())])
    contests = {}
    for name, keys in definition.contests.items():
        contests[name] = short_hash([files[key] for key in keys])
    pretrains = {}
    for spec in definition.plan.pretrains:
        pretrains[spec.hash] = stamp(home.trial(spec).path / RESULT)
    # A look that another host has kept arrives without a change of the definition.
    looks = names_of_looks(home, definition.plan.config.name)
    found = {}
    for key, cell in definition.cells.items():
        if key in folders:
            parts: list[Any] = [definition.asked[key], files[key], looks]
            # A cell without a contest or a pretrain run has "" here, which is the key of none.
            parts.append(contests.get(cell.contest or ""))
            parts.append(pretrains.get(cell.arm.pretrain or ""))
            found[key] = short_hash(parts)
    return found


def _marks(folder: TrialFolder) -> list[str | int | None]:
    """The hash of a trial and the times of its files: whether a row made of it still holds.

    The times change when the trial is handed out, ends or is measured by lm-eval, and when somebody
    changes or removes its answers, from which the score is computed again.
    """
    # Times are enough: the files are replaced whole and never written in place.
    files = (folder.path / RESULT, folder.predictions("test"), folder.path / LM_EVAL)
    return [folder.hash, *map(stamp, files)]


def _states(
    definition: _Definition,
    home: Home,
    folders: Mapping[str, Sequence[TrialFolder]],
    changed: Sequence[str],
) -> dict[str, CellState]:
    """The states of the cells that changed, and of those that compete with them."""
    # A dictionary rather than a set, because it keeps the plan's order.
    needed = dict.fromkeys(changed)
    for key in changed:
        # Only the whole contest can tell who won, so all its cells are read.
        contest = definition.cells[key].contest
        if contest is not None:
            needed |= dict.fromkeys(definition.contests[contest])
    cells = []
    trials = []
    for key in needed:
        cells.append(definition.cells[key])
        for folder in folders.get(key, ()):
            spec = folder.spec()
            if spec is not None:
                trials.append(Trial(folder, spec, folder.result()))
    found: dict[str, Cell] = group_cells(trials)
    return make_states(definition.plan, home, cells, found)


def _of_contest(
    definition: _Definition, key: str, states: Mapping[str, CellState]
) -> dict[str, float | None]:
    """The searches of all architectures that competed with a cell's on its task.

    Empty where it has not won a contest.
    """
    state = states[key]
    contest = definition.cells[key].contest
    if contest is None or not state.won:
        return {}
    ended = []
    for other in definition.contests[contest]:
        # One contest spans all tasks, and a row is about its own.
        if definition.cells[other].task.name == state.cell.task.name:
            for trial in states[other].searched:
                if trial.result is not None:
                    ended.append(trial.result)
    confirmed = [trial.result for trial in state.at_best if trial.result is not None]
    return selection_of(CellResults(confirmed, ended))


def _confirmed(
    definition: _Definition,
    folders: Mapping[str, Sequence[TrialFolder]],
    row: Row,
    states: Mapping[str, CellState],
) -> list[Trial]:
    """The confirm runs of a row, by seed; for a row that was kept they are read from disk."""
    key = row.cell_key
    if key in states:
        return [trial for trial in states[key].at_best if trial.result is not None]
    trials = []
    for folder in folders[key]:
        spec = folder.spec()
        # Its result is not read yet, as most folders of a cell are search trials at other rates.
        if spec is None or spec.learning_rate != row.learning_rate:
            continue
        if spec.training.batch_size != row.batch_size:
            continue
        trial = Trial(folder, spec, None)
        if definition.plan.includes(definition.cells[key], trial):
            trials.append(Trial(folder, spec, folder.result()))
    return group_cells(trials)[key].confirm
