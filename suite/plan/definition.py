"""The definition a home holds for a sweep, and who is running it now."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from suite.config.hashing import canonical_json
from suite.config.loader import Strict
from suite.config.sweep import SweepConfig
from suite.config.task_base import PLACE
from suite.errors import ConfigError, SweepConflictError
from suite.files import read_json, write_json
from suite.plan.cell_state import read_states
from suite.plan.plan import Plan, PlannedCell
from suite.record.cells import read_cells
from suite.record.folder import Home
from suite.record.looks import Setting, keep_look
from suite.record.spec import TrialSpec
from suite.storage.base import PATIENCE_S
from suite.storage.lease import Claim, Lease, held_lease, holder

# None of these changes what a trial is. Of `resources` the number of workers does, which
# `_worker_changes` compares by itself.
FREE = (
    "description",
    "reference",
    "architectures",
    "search.trials",
    "search.edge_guard",
    "search.stop",
    "search.lanes",
    "confirm.seeds",
    "resources",
    "timeouts",
    "failures",
    "tracking",
    "lm_eval",
)
"""Keys of a sweep that may change between two runs of it.

Once studies have trials, `_architecture_changes` may refuse a change of `architectures`.
"""
AXES = ("backbones", "attention", "methods", "tasks")
"""Lists that may grow; an entry that was there before must stay as it was."""


class StoredCells(Strict):
    """What a sweep's names stood for when it was last run: `sweeps/<name>.cells`."""

    world_size: int
    cells: list[PlannedCell]
    pretrains: list[TrialSpec] = []

    def plan(self, config: SweepConfig) -> Plan:
        """The plan that these cells and their sweep make."""
        return Plan(config, tuple(self.cells), self.world_size, tuple(self.pretrains))


def read_plan(home: Home, sweep: str) -> Plan:
    """The plan of a sweep as it was last run in this home.

    Raises:
        ConfigError: This home holds no such sweep, or one that another version wrote.
    """
    plan = known_plan(home, sweep)
    if plan is None:
        raise ConfigError(
            f"{home.path}: holds no sweep {sweep!r}; it holds "
            f"{', '.join(sweeps(home)) or 'none'} (choose with --home)"
        )
    return plan


def known_plan(home: Home, sweep: str) -> Plan | None:
    """The plan of a sweep as `read_plan` gives it, or None where the sweep has not been run here.

    Raises:
        ConfigError: Another version wrote the definition, or half of it is missing.
    """
    config_path, cells_path = home.sweep_definition(sweep), home.sweep_cells(sweep)
    # A crash between the two writes leaves only the cells, and those are no sweep yet.
    if not config_path.exists():
        return None
    if not cells_path.exists():
        raise ConfigError(
            f"{cells_path}: is missing beside {config_path.name}; copy it back from where it is "
            f"whole (a storage or a backup), or remove {config_path.name} too, and the next run "
            "of the sweep writes both anew (trials stay)"
        )
    try:
        stored = StoredCells.model_validate_json(cells_path.read_bytes())
        config = SweepConfig.model_validate_json(config_path.read_bytes())
    except ValidationError as error:
        raise ConfigError(
            f"{cells_path}, {config_path.name}: not a definition of this version of the suite "
            f"({error.error_count()} errors); "
            "choose another --home, or remove both files to write them anew (trials stay)"
        ) from None
    return stored.plan(config)


def sweeps(home: Home) -> list[str]:
    """Names of all sweeps in a home."""
    # The files beside a definition end in .cells, .lock and .driver, so this finds none of them.
    return sorted(path.stem for path in home.part("sweeps").glob("*.json"))


def check_definition(plan: Plan, home: Home) -> None:
    """Compare a plan with what the home holds under its name.

    Raises:
        SweepConflictError: It is another sweep. The message says what changed and how to go on.
    """
    known = known_plan(home, plan.config.name)
    if known is None:
        return
    changes = _changes(known, plan) + _architecture_changes(known, plan, home)
    if changes:
        raise SweepConflictError(
            f"{home.sweep_definition(plan.config.name)}: this home holds another sweep named "
            f"{plan.config.name!r}:\n  "
            + "\n  ".join(changes)
            + "\nto go on: give the sweep another name, choose another --home, or undo the change "
            "(--set key=value)"
        )


def store_definition(plan: Plan, home: Home) -> None:
    """Write a checked plan: the sweep as given, and what its names stood for.

    Where the seeds of the confirm runs change, the cells that have a test score already are kept
    (`suite.record.looks`).
    """
    known = known_plan(home, plan.config.name)
    # Before the definition: a crash between the two leaves one record that says the same again.
    if known is not None and set(known.config.confirm.seeds) != set(plan.config.confirm.seeds):
        _keep_look(known, home)
    stored = stored_cells(plan)
    # The definition comes last. A sweep is known by this file, so a crash before it leaves no half
    # of a sweep.
    write_json(home.sweep_cells(plan.config.name), stored.model_dump(mode="json"))
    write_json(home.sweep_definition(plan.config.name), plan.config.model_dump(mode="json"))


def _keep_look(plan: Plan, home: Home) -> None:
    """Keep all sets of confirm runs with a test score, those of an earlier choice among them."""
    kept: dict[tuple[tuple[int, ...], int], dict[str, Setting]] = defaultdict(dict)
    for key, state in read_states(plan, home, outcomes=True).items():
        places: Counter[tuple[int, ...]] = Counter()
        for setting, seeds in state.own_looks.sets:
            if (setting, seeds) not in state.logged:
                # A record has one setting of a cell, so a second one goes into a second record.
                kept[seeds, places[seeds]][key] = setting
                places[seeds] += 1
    for (seeds, _), settings in kept.items():
        keep_look(home, plan.config.name, seeds, settings)


def stored_cells(plan: Plan) -> StoredCells:
    """What the names of a plan's sweep stand for."""
    return StoredCells(
        world_size=plan.world_size, cells=list(plan.cells), pretrains=list(plan.pretrains)
    )


@contextlib.contextmanager
def only_driver(
    home: Home, sweep: str, *, storage: str | None = None, patience_s: float = PATIENCE_S
) -> Iterator[Lease]:
    """Hold a sweep for this process.

    The sweep's lease decides who holds it. The lock on this machine says at once whether somebody
    here does.

    Args:
        home: Where the sweep lives.
        sweep: Its name.
        storage: URL below which the home is mirrored. The lease lies there if one is given, else in
            the home.
        patience_s: How long a storage that goes away is asked again.

    Raises:
        SweepConflictError: Another process holds it.
        StorageError: The storage cannot be used.
    """
    path = _lock_path(home, sweep)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    root = lease_root(home, storage)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # A process that is frozen still holds the lock, and may have lost the sweep. The lease
        # tells, if both look at the same one.
        _check_same_root(home, sweep, root)
    try:
        with held_lease(root, sweep, patience_s=patience_s) as lease:
            # This is for messages alone: it says who runs the sweep and where the lease lies.
            write_json(
                _owner_path(home, sweep),
                {"pid": os.getpid(), "host": socket.gethostname(), "lease": str(root)},
            )
            yield lease
    finally:
        # This does nothing where the lock was not acquired.
        lock.release()


def _check_same_root(home: Home, sweep: str, root: str | Path) -> None:
    owner = _owner(home, sweep)
    # Without an owner's file nothing is known here, and the lease decides.
    if owner.get("lease", str(root)) != str(root):
        raise SweepConflictError(
            f"{home.path}: sweep {sweep!r} is being run by process {owner.get('pid')} with its "
            f"claim in {owner['lease']}, here it would be in {root}; give the same --storage, end "
            "that process, or choose another --home"
        )


def lease_root(home: Home, storage: str | None) -> str | Path:
    """Folder or URL that holds the leases of a home's sweeps."""
    return storage or home.sweep_definition("x").parent


def lease_root_here(home: Home, sweep: str) -> str | Path:
    """Where the lease of a sweep lies whose storage nobody named.

    A live driver of this machine has told where; else it can only lie in the home.
    """
    root = None
    if driver_pid(home, sweep) is not None:
        root = _owner(home, sweep).get("lease")
    # Anybody who can write the home can write the file.
    if isinstance(root, str):
        return root
    return lease_root(home, None)


def live_claim(home: Home, sweep: str, root: str | Path) -> Claim | None:
    """The claim of who runs a sweep; None = nobody, as far as can be told without waiting."""
    claim = holder(root, sweep)
    # After a power cut the claim stands, and nobody has the lock. In a storage it may be that of
    # another machine of this name, whose lock is elsewhere.
    is_own = root == lease_root(home, None)
    if claim is not None and is_own and claim.is_of_earlier_boot:
        return claim if driver_pid(home, sweep) is not None else None
    return claim


def driver_pid(home: Home, sweep: str) -> int | None:
    """Process id of the sweep's live driver, or None."""
    # Opened for reading alone: the home may be another user's, or lie on a read-only mount.
    try:
        file = _lock_path(home, sweep).open("rb")
    except FileNotFoundError:
        return None
    with file:
        try:
            # Shared, so that those who ask do not take one another for a driver.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            # Without flock, as on some mounts of Lustre, the file is there only while it is held.
            if not isinstance(error, BlockingIOError) and error.errno != errno.ENOSYS:
                raise
            pid = _owner(home, sweep).get("pid")
            # Anybody who can write the home can write the file.
            if isinstance(pid, int):
                return pid
    return None


def _lock_path(home: Home, sweep: str) -> Path:
    return home.sweep_definition(sweep).with_suffix(".lock")


def _owner_path(home: Home, sweep: str) -> Path:
    return home.sweep_definition(sweep).with_suffix(".driver")


def _owner(home: Home, sweep: str) -> dict[str, Any]:
    try:
        owner = read_json(_owner_path(home, sweep))
    # The file serves messages alone, so one that cannot be read is as good as none.
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(owner, dict):
        return {}
    return owner


def _changes(old: Plan, new: Plan) -> list[str]:
    """Give one line for every key that may not change and did: `key: old -> new`."""
    before = old.config.model_dump(mode="json")
    after = new.config.model_dump(mode="json")
    # The axes are compared entry by entry below.
    lines = _scalar_changes(before, after, free=(*FREE, *AXES))
    for axis in AXES:
        # In canonical form, because the order of an entry's keys says nothing.
        stay = {canonical_json(entry) for entry in after[axis]}
        for entry in before[axis]:
            if canonical_json(entry) not in stay:
                lines.append(f"{axis}: {json.dumps(entry)} is gone or has changed")
    lines += _worker_changes(old, new)
    cells = {cell.key: cell for cell in new.cells}
    for was in old.cells:
        now = cells.get(was.key)
        # An axis entry that is gone has its line already.
        if now is None:
            continue
        for line in _model_changes(was.task, now.task):
            lines.append(f"tasks/{was.task.name}.yaml: {line}")
        for line in _model_changes(was.learning_rate, now.learning_rate):
            lines.append(f"learning rate of {was.arm.method}: {line}")
    runs = {run.arm.key: run for run in new.pretrains}
    for earlier in old.pretrains:
        run = runs.get(earlier.arm.key)
        # What this arm depends on has changed, and that has its line above.
        if run is None:
            continue
        for line in _model_changes(earlier.task, run.task):
            lines.append(f"corpus tasks/{run.task.name}.yaml: {line}")
    # Many cells share a task file, whose change is one line.
    return list(dict.fromkeys(lines))


def _architecture_changes(old: Plan, new: Plan, home: Home) -> list[str]:
    """Give one line for every architecture that comes, goes or changes its study, with trials.

    An architecture that joins a shared study late would lose its contest untried, and with one that
    goes its trials would vanish. One with a study of its own may come at any time.
    """
    before = _by_architecture(old)
    after = _by_architecture(new)
    found = []
    for group in before.keys() & after.keys():
        was = before[group]
        now = after[group]
        changed = [(was[name], "gone") for name in was.keys() - now.keys()]
        for name in now.keys() - was.keys():
            if new.study_of(now[name]) != now[name].key:
                changed.append((now[name], "new"))
        # Trials of studies of their own would be more than the budget of one that is shared.
        modes = f"architectures: {old.config.architectures} -> {new.config.architectures}"
        for name in was.keys() & now.keys():
            if old.study_of(was[name]) != new.study_of(now[name]):
                changed.append((now[name], f"searched otherwise ({modes})"))
        if changed:
            found.append((was, changed))
    # To read the trials takes time, and only here does it matter which there are.
    trials = read_cells(home, old.config.name) if found else {}
    lines = set()
    for was, changed in found:
        if all(cell.key not in trials for cell in was.values()):
            continue
        for cell, what in changed:
            lines.add(
                f"architectures of {cell.arm.method}: {json.dumps(cell.arm.architecture)} is "
                f"{what}, and the method has trials already"
            )
    return sorted(lines)


def _by_architecture(plan: Plan) -> dict[str, dict[str, PlannedCell]]:
    """The cells of a plan by all but their architecture, and by their architecture."""
    groups: dict[str, dict[str, PlannedCell]] = {}
    for cell in plan.cells:
        rest = cell.arm.model_dump(mode="json", exclude={"architecture"})
        group = groups.setdefault(canonical_json([rest, cell.task.name]), {})
        group[canonical_json(cell.arm.architecture)] = cell
    return groups


def _worker_changes(old: Plan, new: Plan) -> list[str]:
    """Give one line for every cell of both plans whose number of workers has changed."""
    now = {cell.key: cell for cell in new.cells}
    # Of both plans, because a backbone may have gained or lost a number of workers of its own.
    by_name = old.config.resources.workers_by_backbone | new.config.resources.workers_by_backbone
    changed = []
    for cell in old.cells:
        before = old.workers(cell)
        after = new.workers(now.get(cell.key, cell))
        if before == after:
            continue
        key = "resources.workers"
        if cell.arm.backbone.name in by_name:
            key = f"{key}_by_backbone.{cell.arm.backbone.name}"
        changed.append(f"{key}: {before} -> {after}")
    return changed


def _model_changes(old: Strict, new: Strict) -> list[str]:
    before = old.model_dump(mode="json", exclude=PLACE)
    after = new.model_dump(mode="json", exclude=PLACE)
    return _scalar_changes(before, after)


def _scalar_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, free: Sequence[str] = ()
) -> list[str]:
    before = _flat(old)
    after = _flat(new)
    changed = []
    for key in sorted(before.keys() | after.keys()):
        was = _show(before, key)
        now = _show(after, key)
        if was != now and not any(key == name or key.startswith(f"{name}.") for name in free):
            changed.append(f"{key}: {was} -> {now}")
    return changed


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted key; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        # An empty mapping has no leaves of its own, yet it differs from an absent one.
        if isinstance(item, Mapping) and item:
            flat.update(_flat(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _show(flat: Mapping[str, Any], key: str) -> str:
    # A key that comes or goes is a change too, and null is another value than none.
    if key not in flat:
        return "absent"
    return json.dumps(flat[key])
