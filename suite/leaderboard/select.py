"""Finds arms and cells of a home by the names that a person types.

An arm is `[SWEEP:]ARM`, where ARM is its key (`minilm.pretrained.lora.1f2e3d4c`), the beginning
of a key, `lora`, `gqa`, `gqa/lora` or `minilm/gqa/lora`. A cell is `ARM/TASK`, or an arm that has
one task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from suite.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from suite.record.cells import Cell, Trial
    from suite.record.folder import Home

FORMS = (
    "METHOD, ATTENTION, ATTENTION/METHOD, BACKBONE/ATTENTION/METHOD, or the start of an arm's key; "
    "SWEEP: before it if several have it"
)
Arms = Mapping[tuple[str, str], Sequence["Cell"]]
"""Cells by sweep and key of the arm."""


def choose_arm(arms: Arms, given: str, home: Home) -> list[Cell]:
    """All cells of one arm, in the order of their tasks.

    Where architectures competed, a name that fits several arms means the one that was chosen.

    Args:
        arms: As `read_arms` gives them.
        given: `[SWEEP:]ARM`, see above.
        home: The home whose arms they are.

    Raises:
        ConfigError: No arm has this name, or several have; the message lists them.
    """
    name, arms = _without_sweep(given, arms)
    return _find(arms, name, given, home)


def find_cell(home: Home, given: str, *, sweep: str | None = None) -> Cell:
    """One cell by `ARM/TASK`, or by ARM where that has one task.

    Raises:
        ConfigError: As `choose_arm`; the arm has several tasks, or not this one.
    """
    name, arms = _without_sweep(given, read_arms(home, sweep))
    tasks = set()
    for cells_of_arm in arms.values():
        tasks |= {cell.task for cell in cells_of_arm}
    arm, _, task = name.rpartition("/")
    # `gqa/lora` has a slash too: only a known task after it makes the name a cell's, or that it
    # fits no arm and the part before fits one; then the task is what is wrong.
    is_arm = task not in tasks and (
        bool(_fitting(arms, name, home)) or len(_fitting(arms, arm, home)) != 1
    )
    if is_arm or not arm:
        arm = name
        task = ""
    cells = {cell.task: cell for cell in _find(arms, arm, given, home)}
    # To choose one silently would export or compare the wrong model.
    if not task and len(cells) > 1:
        names = ", ".join(f"{given}/{name}" for name in cells)
        raise ConfigError(f"{given!r}: has {len(cells)} tasks; expected one of {names}")
    if task and task not in cells:
        raise UnknownNameError("task", task, cells, where=f"{given!r}: {arm}")
    if task:
        return cells[task]
    return next(iter(cells.values()))


def read_arms(home: Home, sweep: str | None = None) -> dict[tuple[str, str], list[Cell]]:
    """Every arm of one or all sweeps of a home, by sweep and key; its cells by name of the task.

    Raises:
        ConfigError: The home holds no trial of this sweep.
    """
    from suite.record.cells import Trial, group_cells

    trials: dict[str, list[Trial]] = defaultdict(list)
    for folder in home.trials():
        # A folder without a specification was made by a trial that never began.
        spec = folder.spec()
        if spec is not None:
            trials[spec.sweep].append(Trial(folder, spec, folder.result()))
    # Before the cells are grouped, so that the message names all sweeps of the home.
    if not trials:
        raise ConfigError(
            f"{home.path}: holds no trial; rows that were imported have scores but no answers and "
            "no weights, so that leaderboard, curves and report work here, and nothing else. Give "
            "the home of the sweep itself, or unpack an archive of its trials (docs/tutorial.md)"
        )
    if sweep is not None and sweep not in trials:
        raise UnknownNameError("sweep", sweep, trials, where=str(home.path))
    arms: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    names = sorted(trials)
    if sweep is not None:
        names = [sweep]
    for name in names:
        for cell in _cells(home, name, group_cells(trials[name])):
            arms[name, cell.arm.key].append(cell)
    # Sorted, so that tables and messages list the same home in the same order every time.
    ordered = {}
    for key in sorted(arms):
        ordered[key] = sorted(arms[key], key=lambda cell: cell.task)
    return ordered


def _cells(home: Home, sweep: str, found: Mapping[str, Cell]) -> list[Cell]:
    """The cells of a sweep, without the trials that a changed definition left behind."""
    from suite.plan.cell_state import make_states
    from suite.plan.definition import known_plan

    plan = known_plan(home, sweep)
    if plan is None:  # somebody copied trial folders alone
        return list(found.values())
    cells = []
    for state in make_states(plan, home, plan.cells, found).values():
        # A planned cell without a trial that counts has nothing to show or to export.
        cell = state.as_cell()
        if cell.search or cell.confirm:
            cells.append(cell)
    return cells


def _without_sweep(given: str, arms: Arms) -> tuple[str, Arms]:
    """The name itself, and the arms of the sweep before it."""
    sweep, colon, name = given.partition(":")
    # A colon also stands in names of methods and backbones: `peft:ia3`, `gqa/peft:ia3`,
    # `package:NAME/FOLDER/pretrained/lora`.
    if not colon or sweep.rpartition("/")[2] in ("peft", "package"):
        return given, arms
    known = set()
    found = {}
    for key, cells in arms.items():
        known.add(key[0])
        if key[0] == sweep:
            found[key] = cells
    if not found:
        raise UnknownNameError("sweep", sweep, known, where=repr(given))
    return name, found


def _find(arms: Arms, name: str, given: str, home: Home) -> list[Cell]:
    found = _fitting(arms, name, home)
    if not found:
        # All names, so that a typing error gets the nearest one suggested.
        known: set[str] = set()
        for at, cells in arms.items():
            known.update((at[1], *_short_names_of(cells)))
        raise UnknownNameError("arm", name, known, where=str(home.path), advice=f"expected {FORMS}")
    if len(found) > 1:
        names = ", ".join(f"{sweep}:{key}" for sweep, key in found)
        raise ConfigError(f"{given!r}: fits {len(found)} arms: {names}; give one of them")
    return list(arms[found[0]])


def _fitting(arms: Arms, name: str, home: Home) -> list[tuple[str, str]]:
    """Sweep and key of each arm that a name may mean."""
    whole_key = []
    short_name = []
    start_of_key = []
    for at, cells in arms.items():
        if name == at[1]:
            whole_key.append(at)
        if name in _short_names_of(cells):
            short_name.append(at)
        if name and at[1].startswith(name):
            start_of_key.append(at)
    # The most exact reading that fits anything counts.
    found = whole_key or short_name or start_of_key
    if len(found) > 1:
        # The losers of a contest are rarely meant; if all lost or none did, ask.
        found = [key for key in found if _chosen(home, key) is not False] or found
    return found


def _short_names_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    arm = cells[0].arm
    return short_names(arm.backbone.name, arm.attention.name, arm.method)


def short_names(backbone: str, attention: str, method: str) -> tuple[str, ...]:
    """The short names of an arm, each of which may be enough to tell it from others."""
    return method, attention, f"{attention}/{method}", f"{backbone}/{attention}/{method}"


def _chosen(home: Home, key: tuple[str, str]) -> bool | None:
    """Whether the contest of architectures chose this arm; None if it has not decided."""
    from suite.plan.cell_state import read_states
    from suite.plan.definition import known_plan

    sweep, arm = key
    plan = known_plan(home, sweep)
    if plan is None:
        return None
    for state in read_states(plan, home).values():
        if state.cell.arm.key == arm:
            return state.chosen
    return None
