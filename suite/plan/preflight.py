"""The checks of a sweep before its first worker starts, and in a dry run."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from suite.config.precision import precision_of, precisions_of
from suite.config.sweep import BackboneChoice, ResourceConfig, SweepConfig
from suite.config.task import FileData, HubData, TaskConfig
from suite.config.training import Precision, TrainingConfig
from suite.errors import ConfigError, ResourceError, no_room_for_states
from suite.files import nearest
from suite.plan.cell_state import CellState, all_over
from suite.plan.plan import Plan, objectives, pretrain_objective
from suite.plan.resources import Node
from suite.record.cells import lost_specs
from suite.record.folder import PARTS, Home
from suite.record.provenance import COMPARED_VERSIONS, versions
from suite.record.result import LOST_WEIGHTS, MEND, MEND_SPEC

if TYPE_CHECKING:
    from suite.backbones.loading import ResolvedBackbone
    from suite.data.objective import Objective
    from suite.data.prepare import Prepared

log = logging.getLogger(__name__)
MIN_FREE_BYTES = 256 * 2**20


def check_home(home: Home) -> None:
    """Check that a home can be written to, without writing; it need not exist yet.

    Raises:
        ResourceError: Another user may have prepared it, it cannot be written to, it, or
            a folder in it, is no folder or a link to nothing, or its disk is full.
    """
    for part in PARTS:
        home.part(part)
    for place in (home.path, *home.path.parents):
        if place.is_symlink() and not place.exists():
            raise ResourceError(
                f"{place}: a link to {place.readlink()}, which is not there; mount or make that, or"
                " choose another --home"
            )
    there = nearest(home.path)
    if there == home.path.resolve():
        _check_owner(home.path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ResourceError(
            f"{there}: cannot be written to; choose another --home, or ask for its rights"
        )
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise ResourceError(
            f"{there}: {free / 2**20:.0f} MiB free,"
            f" expected at least {MIN_FREE_BYTES / 2**20:.0f};"
            " free some space or choose another --home"
        )


def _check_owner(path: Path) -> None:
    """Refuse a home that another user made where everybody may make folders.

    That user could put trials of their own into it.
    """
    owner = path.lstat().st_uid
    anybody_may_write = path.parent.stat().st_mode & 0o002  # write permission for others
    if anybody_may_write and owner not in (os.getuid(), 0):
        raise ResourceError(
            f"{path}: belongs to user {owner}, in a folder in which everybody may write;"
            " choose another --home"
        )


def check_records(states: Mapping[str, CellState], home: Home) -> None:
    """Refuse to go on from damaged records, on which what is proposed next would rest.

    Raises:
        ConfigError: A record is damaged, or a finished trial no longer says what it was. The
            message names them all.
    """
    known = {trial.folder.hash for state in states.values() for trial in state.trials}
    lost = lost_specs(home, known=known)
    if lost:
        raise ConfigError("\n".join([*lost, f"nothing was run; {MEND_SPEC}"]))
    found: dict[str, None] = {}  # cells share their pretrain runs
    for state in states.values():
        results = [trial.result for trial in (*state.search.values(), *state.confirm.values())]
        if state.pretrain is not None:
            results.append(state.pretrain.result)
        for result in results:
            if result is not None and result.damaged is not None:
                found[result.damaged] = None
    if found:
        raise ConfigError("\n".join([*found, f"nothing was run; {MEND}"]))


def check_pretrained(states: Mapping[str, CellState]) -> None:
    """Refuse to go on where trials are left that need the weights of a pretrain run, lost since.

    This looks whether they are there; a trial that reads them checks their bytes. With a storage
    they need not lie here.

    Raises:
        ConfigError: A finished pretrain run has no weights. The message names them all.
    """
    lost: dict[str, None] = {}  # cells share their pretrain runs
    for state in states.values():
        run = state.pretrain
        if run is None or not run.ready or state.status.is_over:
            continue
        if not run.folder.weights.is_file():
            lost[f"{run.folder.weights}: {LOST_WEIGHTS}"] = None
    if lost:
        raise ConfigError("\n".join(lost))


def warn_of_other_runs(
    training: TrainingConfig,
    states: Mapping[str, CellState],
    device: str | None,
    *,
    here: bool = True,
    threads: int | None = None,
) -> None:
    """Say what of this environment differs from that of the runs which the sweep goes on from.

    The leaderboard rejects a row with runs of other versions or precisions, and ranks no rows of
    both together. Other threads change times and energies alone.

    Args:
        training: Of the sweep.
        states: Its cells.
        device: "cuda" or "cpu"; None = not known yet, so the precision is not either.
        here: Whether the workers are on this host. Others may have other processors or GPUs.
        threads: Of a worker; None = not known.
    """
    if all_over(states):
        return
    differ: dict[str, None] = {}
    other_threads = set()
    now = versions()
    precisions: list[Precision] = []
    if device is not None:
        precisions = [precision_of(training, device)] if here else precisions_of(training, device)
    for state in states.values():
        for trial in state.trials:
            result = trial.result
            if result is None or result.score is None:
                continue
            then = result.provenance.get("versions") or {}
            for package in COMPARED_VERSIONS:
                if then.get(package) not in (None, now[package]):
                    differ[f"{package} {then[package]} (here {now[package]})"] = None
            had = result.provenance.get("threads_per_worker")
            if threads is not None and had not in (None, threads):
                other_threads.add(had)
            if precisions and result.precision not in (None, *precisions):
                differ[f"precision {result.precision} (here {' or '.join(precisions)})"] = None
    if differ:
        log.warning(
            "runs of this sweep had %s; a row with runs of both is rejected, and rows of both are "
            "not ranked together: go on with the versions and machines that they had, or give the "
            "sweep another name",
            ", ".join(differ),
        )
    if other_threads:
        log.warning(
            "runs of this sweep had %s threads a worker (here %d), and times and energies of both "
            "do not compare: set resources.cpus_per_worker as it was, or name the sweep otherwise",
            " or ".join(map(str, sorted(other_threads))),
            threads,
        )


def check_gpus_are_up(
    resources: ResourceConfig, states: Mapping[str, CellState], nodes: Sequence[Node]
) -> None:
    """Refuse to go on on the processors of a cluster whose nodes with GPUs are not up yet.

    Raises:
        ResourceError: Trials of the sweep ran on GPUs, it leaves open on what, and there are none.
    """
    if resources.gpus_per_worker is not None or any(node.get("GPU") for node in nodes):
        return
    if all_over(states):
        return
    for state in states.values():
        for trial in state.trials:
            if trial.result is not None and trial.result.provenance.get("device") == "cuda":
                raise ResourceError(
                    f"{state.cell.key}: its trials ran on GPUs, and no GPU is up: wait for the"
                    " nodes, or set resources.gpus_per_worker (0 = on CPUs)"
                )


def warn_of_untried(plan: Plan) -> None:
    """Say which studies have fewer trials than architectures: what is never tried cannot win."""
    search = plan.config.search
    # By contest, because each backbone has one of its own.
    arms: dict[str, dict[str, str]] = {}
    for cell in plan.cells:
        if cell.contest is not None and search.per == "method":
            arms.setdefault(cell.contest, {})[cell.arm.key] = cell.arm.method
    few: dict[str, None] = {}
    for methods in arms.values():
        if len(methods) > search.trials:
            few[f"{next(iter(methods.values()))} {len(methods)}"] = None
    if few:
        log.warning(
            "search.trials: %d; more architectures than that have: %s; those without a trial cannot"
            " be chosen: raise search.trials, or name one architecture",
            search.trials,
            ", ".join(few),
        )


def check_data(plan: Plan, *, cache: Path, data_root: Path | None) -> None:
    """Read, check and tokenise the data of every task for every backbone, into a cache.

    Raises:
        DataError: Data that is absent, unreadable, or not what the task says.
        IncompatibleError: There are too few rows for one batch.
        BackboneError: A backbone or tokenizer that cannot be read.
        ResourceError: There is no room for the states of frozen stacks that the sweep keeps.
    """
    # Imports torch, which showing a status does not need.
    from suite.data.prepare import prepare
    from suite.data.splits import check_batch_fits

    config = plan.config
    tasks = {cell.task.name: cell.task for cell in plan.cells}
    prepared = objectives(
        config, tasks.values(), where=config.name, cache=cache, data_root=data_root
    )
    for resolved, objective in prepared:
        data = prepare(
            objective.task, objective, limit=config.limit, data_root=data_root, cache=cache
        )
        where = f"{config.name}: task {objective.task.name}"
        check_batch_fits(data.sizes["train"], config.training.batch_size, where=where)
        if _keeps_states(plan, resolved.choice):
            with_backbone = f"{where} on {resolved.choice.name}"
            check_states_fit(config, resolved, objective, data, where=with_backbone)
    for spec in plan.pretrains:
        _, objective = pretrain_objective(spec, cache=cache, data_root=data_root)
        data = prepare(spec.task, objective, limit=spec.limit, data_root=data_root, cache=cache)
        blocks = f"in blocks of {spec.training.max_length} tokens"
        where = f"{config.name}: corpus {spec.task.name}, {blocks}"
        check_batch_fits(
            data.sizes["train"], spec.training.batch_size, where=where, key="pretrain.batch_size"
        )


def _keeps_states(plan: Plan, backbone: BackboneChoice) -> bool:
    """Whether some arm of a backbone keeps what its frozen stacks give."""
    from suite.petl import get_method

    methods = {cell.arm.method for cell in plan.cells if cell.arm.backbone == backbone}
    return any(get_method(name).keeps_states(plan.config.training) for name in methods)


def check_states_fit(
    config: SweepConfig,
    resolved: ResolvedBackbone,
    objective: Objective,
    data: Prepared,
    *,
    where: str,
) -> None:
    """Check that the home may keep the states of all rows of a task.

    Only a worker knows whether a method reads attention probabilities, and whether `auto` is fp32
    there. The sum leaves out the first and takes the second for bf16.

    Raises:
        ResourceError: The states need more room than `resources.frozen_states_gib`.
    """
    from suite.backbones.loading import build
    from suite.data.prepare import token_lengths

    stacks = resolved.family.stacks(build(resolved, objective.head, meta=True))
    width_bytes = 4
    if config.training.precision in ("auto", "bf16"):
        width_bytes = 2
    needed = 0
    for split in objective.kept_splits:
        tokens = token_lengths(data.split(split, confirm=False), len(stacks)).sum(axis=0)
        for stack, of_stack in zip(stacks, tokens.tolist(), strict=True):
            needed += of_stack * len(stack.blocks) * stack.width * width_bytes
    most = config.resources.frozen_states_bytes
    if needed > most:
        raise no_room_for_states(needed, most, where=where)


def check_local_data(plan: Plan, *, data_root: Path | None) -> None:
    """Check the data that lie on this machine as `check_data` does, and leave nothing behind.

    A tokenizer out of reach is stood in for by bytes, since a dry run needs no network.

    Raises:
        DataError: As `check_data`.
    """
    tasks = {}
    for cell in plan.cells:
        if _is_local(cell.task, data_root):
            tasks[cell.task.name] = cell.task
    if not tasks:
        return
    from suite.data.prepare import prepare
    from suite.data.splits import check_batch_fits

    config = plan.config
    with tempfile.TemporaryDirectory() as folder:
        for _, objective in objectives(config, tasks.values(), where=config.name):
            data = prepare(
                objective.task,
                objective,
                limit=config.limit,
                data_root=data_root,
                cache=Path(folder),
            )
            where = f"{config.name}: task {objective.task.name}"
            check_batch_fits(data.sizes["train"], config.training.batch_size, where=where)


def _is_local(task: TaskConfig, data_root: Path | None) -> bool:
    if isinstance(task.data, HubData):
        return data_root is not None
    return isinstance(task.data, FileData)
