"""Run a sweep, or go on with it: the one process that hands out trials and tells the listeners what happens."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ray import tune
from ray.tune.error import TuneError
from ray.tune.experiment import Trial as TuneTrial

from suite.cluster.access import ray_says_nothing, tune_keeps_secrets
from suite.cluster.session import check_interface, cluster, environment, free_nodes
from suite.cluster.shared import check_home_is_shared, open_mirror, remove_on_all_nodes
from suite.config.sweep import SweepConfig
from suite.errors import ResourceError, StorageError
from suite.plan.cell_state import read_states
from suite.plan.definition import check_definition, known_plan, only_driver, store_definition
from suite.plan.events import Listener, Listeners, Outcome
from suite.plan.plan import Plan, make_plan, objectives, pretrain_objective
from suite.plan.pruning import Pruning
from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout, lay_out
from suite.plan.second_objective import check_measurable
from suite.plan.status import cell_status
from suite.record.attempts import asked_again
from suite.record.folder import Home
from suite.storage.lease import Lease
from suite.storage.mirror import Mirror
from suite.storage.workspace import Workspace
from suite.tune import leave_notice as notice
from suite.tune.elastic import Elastic, Sizes, request
from suite.tune.group import TRAINER, Settings, is_full_disk
from suite.tune.measure import anything_left, check_lm_eval, measure_confirmed
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import TrialTrainable
from suite.tune.watch import MIN_FREE_BYTES, HaltError, Watch, full

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `_stoppable` has its own
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",  # Tune's own state is not used to resume
    "TUNE_MAX_PENDING_TRIALS_PG": "1000000",  # the schedule hands out what fits
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run_sweep(
    config: SweepConfig,
    *,
    home: Home,
    data_root: Path | None = None,
    address: str | None = None,
    listeners: Sequence[Listener] = (),
    where: str = "sweep",
    trainer: str = TRAINER,
    storage: str | None = None,
    retry_given_up: bool = False,
) -> Outcome:
    """Run every trial of a sweep that has not finished.

    Args:
        config: The sweep.
        home: Where its state lives; on a cluster, a folder that every node shares.
        data_root: Local data root that replaces the hub.
        address: A running Ray cluster; None = a local one, made here and ended here.
        listeners: Told what happens, in this process.
        where: The sweep's file, for errors.
        trainer: `module:Class` that trains in each rank.
        storage: URL below which the home is mirrored, where the nodes share no disk; None = they share the home.
        retry_given_up: Begin the retries of trials anew that earlier runs gave up.

    Raises:
        SuiteError: Something is wrong with the sweep, its data, the home or the resources; no worker has started.
    """
    _check_owner(home)
    home, data_root = (
        Home(home.path.resolve()),
        data_root.resolve() if data_root is not None else None,
    )
    with only_driver(home, config.name, storage=storage) as lease:
        mirror = open_mirror(home, storage, patience_s=config.timeouts.collective_s / 2)
        known = known_plan(home, config.name)
        plan = make_plan(
            config,
            where=where,
            world_size=config.resources.workers or (known.world_size if known else None),
        )
        check_definition(plan, home)
        _check_disk(home)
        if retry_given_up:
            _try_again(plan, mirror)
        told = Listeners(listeners, muted=lambda: bool(lease.loss()))
        if (
            known is not None
            and all(s.status.is_over for s in read_states(plan, home).values())
            and not _to_measure(plan, home)
        ):
            store_definition(plan, home)
            mirror.push_definition(config.name)
            return _nothing_left(plan, home, told)
        preflight(plan, home=home, data_root=data_root)
        mirror.push_tokenizers()
        check_lm_eval(plan, home=home, data_root=data_root)
        with cluster(
            address,
            threads=config.training.threads_per_worker
            or max(1, int(config.resources.cpus_per_worker)),
        ) as nodes:
            layout = lay_out(config.resources, nodes, workers=known.world_size if known else None)
            if layout.workers != plan.world_size:
                plan = make_plan(config, where=where, world_size=layout.workers)
            check_home_is_shared(home, storage)
            if layout.interface is not None:
                check_interface(layout.interface)
            store_definition(plan, home)
            mirror.push_definition(config.name)
            scratch = home.path / ".tune" / config.name
            workspace = Workspace(
                home, data_root, config.timeouts.collective_s, scratch, storage, lease.fence
            )
            if address is None:
                check_measurable(config.search.second, layout.device, where=where)
            return _run(
                plan,
                Settings(
                    workspace, layout, config.timeouts, trainer, _pruning(config), config.failures
                ),
                told,
                lease,
            )


def preflight(plan: Plan, *, home: Home, data_root: Path | None) -> None:
    """Read, check and tokenise the data of every task for every backbone, once, into the home's cache.

    Raises:
        DataError: Data that is absent, unreadable, not what the task says, or too few for one batch.
        BackboneError: A backbone or tokenizer that cannot be read.
    """
    from suite.data.prepare import (  # torch is imported where data are checked, not to show a status
        check_batch_fits,
        prepare,
    )

    tasks = {cell.task.name: cell.task for cell in plan.cells}
    for _, objective in objectives(
        plan.config, tasks.values(), where=plan.config.name, cache=home.cache, data_root=data_root
    ):
        data = prepare(
            objective.task,
            objective,
            limit=plan.config.limit,
            data_root=data_root,
            cache=home.cache,
        )
        check_batch_fits(
            data.sizes["train"],
            plan.config.training.batch_size,
            where=f"{plan.config.name}: task {objective.task.name}",
        )
    for spec in plan.pretrains:
        _, objective = pretrain_objective(spec, cache=home.cache, data_root=data_root)
        data = prepare(
            spec.task, objective, limit=spec.limit, data_root=data_root, cache=home.cache
        )
        where = f"{plan.config.name}: corpus {spec.task.name}, in blocks of {spec.training.max_length} tokens"
        check_batch_fits(
            data.sizes["train"], spec.training.batch_size, where=where, key="pretrain.batch_size"
        )


def _try_again(plan: Plan, mirror: Mirror) -> None:
    states = read_states(plan, mirror.home).values()
    pretrains = {
        state.pretrain.spec.hash: state.pretrain for state in states if state.pretrain is not None
    }
    folders = [mirror.home.trial(name) for state in states for name in state.given_up]
    for folder in (
        *folders,
        *(pretrain.folder for pretrain in pretrains.values() if pretrain.given_up),
    ):
        mirror.add_failure(folder, asked_again())


def _pruning(config: SweepConfig) -> Pruning | None:
    pruner = config.search.pruner
    return None if pruner is None else Pruning(pruner, config.search.startup_trials)


def _to_measure(plan: Plan, home: Home) -> bool:
    return plan.config.lm_eval is not None and anything_left(plan, read_states(plan, home))


def _nothing_left(plan: Plan, home: Home, told: Listeners) -> Outcome:
    states = read_states(plan, home)
    told.on_start(plan, states)
    cells = tuple(cell_status(state) for state in states.values())
    outcome = Outcome(0, cells, failed=tuple(c.key for c in cells if not c.status.is_complete))
    told.on_end(outcome)
    return outcome


def _run(plan: Plan, settings: Settings, told: Listeners, lease: Lease) -> Outcome:
    resources, layout = plan.config.resources, settings.layout
    schedule = TrialQueue(
        plan,
        settings.workspace.home,
        slots=resources.concurrent_trials or sys.maxsize,
        capacity=layout.capacity,
    )
    searcher = SweepSearcher(schedule)
    watch = Watch(searcher, settings, told, lease)
    searcher.stopped, schedule.fetch = watch.must_stop, watch.fetch
    told.on_start(plan, schedule.states)
    reason = watch.reason = schedule.unmeasured() or ""
    if any(not state.status.is_over for state in schedule.states.values()):
        reason = reason or _fit(plan, settings, searcher, watch)
    reason = reason or lease.loss()
    not_measured = {} if reason else measure_confirmed(plan, schedule.states, settings)
    cells = tuple(cell_status(state) for state in schedule.states.values())
    failed = () if reason else tuple(c.key for c in cells if not c.status.is_complete)
    outcome = Outcome(
        watch.finished,
        cells,
        failed,
        interrupted=bool(reason),
        reason=reason,
        not_measured=not_measured,
    )
    told.on_end(outcome)
    if not lease.loss():
        with suppress(StorageError):  # a view, which the next run writes again
            watch.mirror.push_definition(plan.config.name)
    return outcome


def _fit(plan: Plan, settings: Settings, searcher: SweepSearcher, watch: Watch) -> str:
    """Run Tune until the schedule is empty; returns why it ended earlier, or nothing."""
    home, layout = settings.workspace.home, settings.layout
    scratch = (
        settings.workspace.scratch
    )  # in the home, which every node shares; we are the sweep's only driver
    assert scratch is not None
    shutil.rmtree(scratch, ignore_errors=True)
    notice.take_down(str(scratch))
    try:
        with (
            environment(TUNE_ENVIRONMENT),
            tune_keeps_secrets(),
            ray_says_nothing(),
            _stoppable(watch),
        ):
            tune.Tuner(
                tune.with_resources(
                    TrialTrainable, lambda trial: request(layout, trial["workers"])
                ),
                param_space={"settings": settings},
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=-1,
                    scheduler=_scheduler(plan, layout, searcher),
                    reuse_actors=True,
                    trial_dirname_creator=_directory,
                    trial_name_creator=_directory,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(scratch),
                    callbacks=[watch],
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(
                        checkpoint_frequency=0, checkpoint_at_end=False
                    ),
                    failure_config=tune.FailureConfig(
                        max_failures=-1
                    ),  # `suite.record.attempts` counts them
                ),
            ).fit()
    except HaltError:
        return watch.reason
    except (OSError, TuneError) as error:
        if not is_full_disk(error):
            raise
        return full(home.path)
    finally:
        if not watch.lease.loss():  # else it is the next driver's by now
            _remove_scratch(settings.workspace, scratch)
    schedule = searcher.schedule
    return (
        watch.reason
        if schedule.waiting or any(not state.status.is_over for state in schedule.states.values())
        else ""
    )


def _remove_scratch(workspace: Workspace, scratch: Path) -> None:
    notice.take_down(str(scratch))
    if workspace.storage is not None:
        remove_on_all_nodes(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # other sweeps of this home keep theirs there
        scratch.parent.rmdir()


def _scheduler(plan: Plan, layout: Layout, searcher: SweepSearcher) -> Sizes | None:
    resources = plan.config.resources
    if resources.min_workers is None:
        return Sizes() if len({plan.workers(cell) for cell in plan.cells}) > 1 else None
    return Elastic(
        resources, layout, searcher.schedule, searcher.specs, lambda: layout.room_on(free_nodes())
    )


def _directory(trial: TuneTrial) -> str:
    return str(trial.trial_id)


def _check_owner(home: Home) -> None:
    """Where everybody may make folders, one of another user's making is his: its trials would be what he says."""
    home.path.mkdir(parents=True, exist_ok=True)
    owner, everybodys = home.path.lstat().st_uid, home.path.parent.stat().st_mode & 0o002
    if everybodys and owner not in (os.getuid(), 0):
        raise ResourceError(
            f"{home.path}: belongs to user {owner}, in a folder in which everybody may write; choose another --home"
        )


def _check_disk(home: Home) -> None:
    free = shutil.disk_usage(home.path).free
    if free < MIN_FREE_BYTES:
        wanted = MIN_FREE_BYTES / 2**20
        raise ResourceError(
            f"{home.path}: {free / 2**20:.0f} MiB free, expected at least {wanted:.0f}; free some space or choose another --home"
        )


@contextmanager
def _stoppable(watch: Watch) -> Iterator[None]:
    """Ctrl-C, and SIGTERM, which batch systems send before they kill, end the sweep in order; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        watch.reason, watch.in_order = (
            ("stopped by Ctrl-C" if number == signal.SIGINT else "stopped by SIGTERM"),
            True,
        )
        restore()

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
