"""Run a sweep, or go on with it: the process that hands out trials and tells the listeners."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray import tune
from ray.tune.error import TuneError
from ray.tune.experiment import Trial as TuneTrial

from suite.cluster.access import ray_says_nothing, tune_keeps_secrets
from suite.cluster.head import head_watched
from suite.cluster.session import (
    ANSWER_S,
    alive_nodes,
    ask_nodes,
    check_interface,
    cluster,
    free_nodes,
    has_working_folder_of_job,
)
from suite.cluster.shared import check_home_is_shared, open_mirror, remove_on_all_nodes
from suite.config.sweep import SweepConfig
from suite.config.training import Partitioning, TrainingConfig
from suite.config.variables import environment
from suite.errors import ConfigError, ResourceError, StorageError
from suite.plan.cell_state import CellState, all_over, read_states
from suite.plan.definition import check_definition, known_plan, only_driver, store_definition
from suite.plan.events import Listener, Listeners, Outcome
from suite.plan.gpus import (
    ASK_S,
    Gpus,
    as_computed,
    local_gpus,
    missing_for_offload,
    no_offload,
    usable,
)
from suite.plan.partitioning import (
    USABLE_FRAC,
    Decision,
    candidates,
    recorded,
    settle,
    worker_bytes,
)
from suite.plan.plan import Plan, make_plan
from suite.plan.preflight import (
    check_data,
    check_gpus_are_up,
    check_home,
    check_pretrained,
    check_records,
    warn_of_other_runs,
    warn_of_untried,
)
from suite.plan.pruning import Pruning
from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout, lay_out
from suite.plan.second_objective import check_measurable
from suite.plan.status import CellReport, cell_status
from suite.record.attempts import asked_again
from suite.record.folder import Home
from suite.redact import printable
from suite.signals import EXIT_CODES, on_stop
from suite.storage.lease import Lease
from suite.storage.mirror import Mirror
from suite.storage.urls import checked_url, open_storage
from suite.storage.workspace import Workspace
from suite.tune.callback import HaltError, SweepCallback, why_paused
from suite.tune.elastic import ElasticScheduler, WarmGroupScheduler, placement_request
from suite.tune.group import TRAINER, RunSettings
from suite.tune.measure import anything_left, check_lm_eval, measure_confirmed
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import TrialTrainable

log = logging.getLogger(__name__)
WorkerMemory = Callable[[], int | None]
"""Gives the bytes that one worker may take; None = unknown."""
FAREWELL_S = 10.0
"""How long listeners may take for their last words after the cluster's head is gone."""
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # CSV, JSON and TensorBoard files of every trial
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `_signals_stop` has its own
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",  # Tune's own state is not used to resume
    "TUNE_MAX_PENDING_TRIALS_PG": "1000000",  # the queue hands out what fits
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
        storage: URL below which the home is mirrored, where the nodes share no disk; None = they
            share the home.
        retry_given_up: Begin the retries of trials anew that earlier runs gave up.

    Raises:
        SuiteError: Something is wrong with the sweep, its data, the home or the resources; no
            worker has started.
    """
    check_home(home)
    if storage is None and has_working_folder_of_job():
        _refuse_folder_of_job(home)
    # Workers of a running cluster have the working folder of `ray start`.
    if storage is not None:
        storage = checked_url(storage)
        # Asked once, before the lease, which would wait for a storage that was never there.
        open_storage(storage).check()
    home.path.mkdir(parents=True, exist_ok=True)
    home = Home(home.path.resolve())
    if data_root is not None:
        data_root = data_root.resolve()
    # First of all: what follows writes to the home, and another driver may be at work in it.
    patience_s = config.timeouts.patience_s
    with only_driver(home, config.name, storage=storage, patience_s=patience_s) as lease:
        mirror = open_mirror(home, storage, patience_s=patience_s)
        known = known_plan(home, config.name)
        known_workers = None if known is None else known.world_size
        plan = make_plan(config, where=where, world_size=config.resources.workers or known_workers)
        check_definition(plan, home)
        if retry_given_up:
            _try_again(plan, mirror)
        listener = Listeners(listeners, muted=lambda: bool(lease.loss()))
        # Without a definition too: it may be lost, or left out of a copy, and its trials be there.
        states = read_states(plan, home)
        check_records(states, home)
        if known is not None and _is_over(plan, states, home, data_root=data_root):
            store_definition(plan, home)
            mirror.push_definition(config.name)
            return _nothing_left(plan, home, listener)

        # Everything that can be found wrong is found before Ray starts the first worker.
        if storage is None:
            check_pretrained(states)
        warn_of_untried(plan)
        check_data(plan, cache=home.cache, data_root=data_root)
        mirror.push_tokenizers()
        check_lm_eval(plan, home=home, data_root=data_root)
        with cluster(address, threads=config.threads_per_worker) as nodes:
            if address is not None:
                check_gpus_are_up(config.resources, states, nodes)
            layout = lay_out(config.resources, nodes, workers=known_workers)
            # Only the cluster tells how many GPUs there are for a sweep that names no number.
            if layout.workers != plan.world_size:
                plan = make_plan(config, where=where, world_size=layout.workers)
            check_home_is_shared(home, storage)
            if layout.interface is not None:
                check_interface(layout.interface)
            # First: what is stored may not change any more.
            check_measurable(config, layout.device, here=address is None, where=where)
            store_definition(plan, home)
            mirror.push_definition(config.name)
            gpus = _asked_gpus(layout, config.training)
            memory = partial(worker_bytes, plan, layout, nodes, gpus)
            sized = replace(plan, config=as_computed(config, gpus))
            warn_of_other_runs(
                sized.config.training,
                states,
                layout.device,
                here=address is None,
                threads=config.threads_per_worker,
            )
            decision = decide(sized, layout, memory, home=home, data_root=data_root, where=where)
            log.info("weights: %s: %s", decision.partitioning, decision.why)
            lanes = _lanes(
                sized,
                layout,
                memory,
                decision.partitioning,
                data_root=data_root,
                home=home,
                where=where,
            )
            log.info("search trials side by side, by arm: %s", lanes or "none")
            workspace = Workspace(
                home=home,
                data_root=data_root,
                collective_timeout_s=config.timeouts.collective_s,
                scratch=home.path / ".tune" / config.name,
                storage=storage,
                patience_s=patience_s,
                fence=lease.fence,
                partitioning=decision.partitioning,
                frozen_states_bytes=config.resources.frozen_states_bytes,
                usable_bytes=_usable_bytes(plan, memory, decision.partitioning),
            )
            settings = RunSettings(
                workspace=workspace,
                layout=layout,
                timeouts=config.timeouts,
                trainer=trainer,
                pruning=_pruning(config),
                failures=config.failures,
            )
            return _run(plan, settings, listener, lease, lanes)


# ---- before the first worker ---------------------------------------------------------------------


def _try_again(plan: Plan, mirror: Mirror) -> None:
    """Begin the retries of every trial anew that was given up, pretrain runs included."""
    given_up = {}
    for state in read_states(plan, mirror.home).values():
        for name in state.given_up:
            given_up[name] = mirror.home.trial(name)
        pretrain = state.pretrain
        if pretrain is not None and pretrain.given_up:
            given_up[pretrain.spec.hash] = pretrain.folder
    for folder in given_up.values():
        mirror.add_failure(folder, asked_again())


def _pruning(config: SweepConfig) -> Pruning | None:
    if config.search.pruner is None:
        return None
    return Pruning(config.search.pruner, config.search.startup_trials)


def _refuse_folder_of_job(home: Home) -> None:
    if home.path.resolve().is_relative_to(Path.cwd()):
        raise ConfigError(
            f"--home {home.path}: lies in the job's own folder, which Ray removes; expected the"
            " absolute path of a folder that every node of the cluster sees, or --storage s3://..."
        )


def _is_over(
    plan: Plan, states: Mapping[str, CellState], home: Home, *, data_root: Path | None
) -> bool:
    """Whether every trial has ended and lm-eval has measured what the sweep wants measured."""
    if not all_over(states):
        return False
    return not anything_left(plan, states, home, data_root=data_root)


def _nothing_left(plan: Plan, home: Home, listener: Listeners) -> Outcome:
    """Tell the listeners how a sweep stands in which nothing is left to do."""
    states = read_states(plan, home)
    listener.on_start(plan, states)
    cells = tuple(cell_status(state) for state in states.values())
    outcome = Outcome(0, cells, failed=_incomplete(cells))
    listener.on_end(outcome)
    return outcome


def _incomplete(cells: Sequence[CellReport]) -> tuple[str, ...]:
    return tuple(cell.key for cell in cells if not cell.status.is_complete)


def decide(
    plan: Plan,
    layout: Layout,
    memory: WorkerMemory,
    *,
    home: Home,
    data_root: Path | None,
    where: str,
) -> Decision:
    """Decide how all trials of a sweep lay out their weights.

    Args:
        plan: The sweep.
        layout: What one trial gets.
        memory: Says what one worker may take.
        home: Where its trials are.
        data_root: Local data root that replaces the hub.
        where: The sweep's file, for errors.
    """
    # Imports torch, as in `check_data`.
    from suite.profiling.fit import first_that_fits, most_parameters

    training = plan.config.training
    device = layout.device
    known = recorded(read_states(plan, home).values())
    memory_bytes: int | None = None
    parameters = 0
    # To count and to ask takes a second or more, and a sweep may leave nothing open.
    if known is None and len(candidates(training)) > 1:
        parameters = most_parameters(plan, where=where, cache=home.cache, data_root=data_root)
        memory_bytes = memory()
        if memory_bytes is None:
            log.warning(
                "the memory of a worker is unknown: weights are partitioned;"
                " a new sweep can say otherwise (training.zero_stage, training.frozen_weights)"
            )
    decision = settle(
        training,
        device=device,
        worker_bytes=memory_bytes,
        parameters=parameters,
        recorded=known,
    )
    if decision is not None:
        return decision
    assert memory_bytes is not None  # unknown memory settles it
    return first_that_fits(
        plan,
        device=device,
        worker_bytes=memory_bytes,
        where=where,
        cache=home.cache,
        data_root=data_root,
    )


def _lanes(
    plan: Plan,
    layout: Layout,
    memory: WorkerMemory,
    partitioning: Partitioning,
    *,
    home: Home,
    data_root: Path | None,
    where: str,
) -> dict[str, int]:
    """By arm, how many search trials train side by side; the arguments are those of `decide`."""
    # Imports torch, as in `check_data`.
    from suite.profiling.fit import lanes_that_fit

    if all(plan.lanes(cell) == 1 for cell in plan.cells):
        return {}
    memory_bytes = memory()
    if memory_bytes is None:
        return {}
    return lanes_that_fit(
        plan,
        partitioning,
        device=layout.device,
        worker_bytes=memory_bytes,
        where=where,
        cache=home.cache,
        data_root=data_root,
    )


def _usable_bytes(plan: Plan, memory: WorkerMemory, partitioning: Partitioning) -> int | None:
    """What the states of a trial may take of a worker's memory; None = unknown, or not asked."""
    # Below stage 3 no weights are partitioned, and nobody reads it.
    if partitioning.applied_to(plan.config.training).zero_stage != 3:
        return None
    memory_bytes = memory()
    if memory_bytes is None:
        return None
    return int(USABLE_FRAC * memory_bytes)


def _asked_gpus(layout: Layout, training: TrainingConfig) -> Gpus:
    """What torch says of the GPUs that are up; those to come are taken to be as good.

    Raises:
        ResourceError: A node's torch cannot use its GPUs, no node answers, or DeepSpeed cannot
            offload there.
    """
    if layout.device != "cuda":
        return Gpus()
    nodes = alive_nodes(with_gpu=True)
    answers = ask_nodes(nodes, local_gpus, timeout_s=ASK_S + ANSWER_S)
    silent = [name for node, name in nodes.items() if node not in answers]
    if silent:
        said = f"{', '.join(silent)}: did not say within {ASK_S + ANSWER_S:g} s what GPUs it has"
        # How weights are laid out would be decided for all runs of the sweep, by a guess.
        if not answers:
            raise ResourceError(f"node {said}; see what keeps it busy, then run this again")
        log.warning("node %s; they are taken to be as good as those of the other nodes", said)
    gpus = usable({f"node {nodes[node]}": answer for node, answer in answers.items()})
    if training.offload != "none":
        for node, missing in ask_nodes(nodes, missing_for_offload).items():
            if missing:
                raise ResourceError(f"node {nodes[node]}: {no_offload(missing)}")
    return gpus


# ---- the trials ----------------------------------------------------------------------------------


def _run(
    plan: Plan,
    settings: RunSettings,
    listener: Listeners,
    lease: Lease,
    lanes: Mapping[str, int],
) -> Outcome:
    """Run the trials and then lm-eval, and tell the listeners how the sweep ended."""
    config = plan.config
    queue = TrialQueue(
        plan,
        settings.workspace.home,
        slots=config.resources.concurrent_trials or sys.maxsize,
        capacity=settings.layout.capacity,
        lanes=lanes,
        fence=lease.fence,
    )
    searcher = SweepSearcher(queue)
    callback = SweepCallback(searcher, settings, listener, lease)
    searcher.stopped = callback.must_stop
    queue.fetch = callback.fetch
    listener.on_start(plan, queue.states)
    gone = partial(_end_without_head, callback)
    with head_watched(gone, leaving=lambda: callback.in_order):
        return _run_to_its_end(plan, settings, callback)


def _end_without_head(callback: SweepCallback, why: str) -> None:
    """End this process in order: its main thread waits for the head inside Ray, for ever.

    What had ended is kept, as after any kill of the driver.
    """
    reason = why
    # Who ends all processes of a machine ends Ray's, too: that is no failure of the cluster.
    if callback.in_order:
        reason = callback.reason
        why = f"{reason}, and {why}"
    try:
        cells = tuple(cell_status(state) for state in callback.searcher.queue.states.values())
        outcome = Outcome(callback.finished, cells, interrupted=True, reason=reason)
        # Ray ends the process soon, and a listener may wait for a server of its own.
        farewell = threading.Thread(target=callback.listeners.on_end, args=(outcome,), daemon=True)
        farewell.start()
        farewell.join(FAREWELL_S)
        callback.lease.release()
    finally:
        what_to_do = "run the same command again (with --address: when the head is back)"
        line = printable(f"{why}; nothing that finished is lost; {what_to_do}")
        print(line, file=sys.stderr, flush=True)
        os._exit(EXIT_CODES.get(reason, 1))


def _run_to_its_end(plan: Plan, settings: RunSettings, callback: SweepCallback) -> Outcome:
    config = plan.config
    searcher = callback.searcher
    queue = searcher.queue
    lease = callback.lease
    # An earlier run may have left a search that cannot go on: no trial is started then.
    reason = callback.reason = queue.unmeasured() or ""
    if not reason and not all_over(queue.states):
        reason = _fit(plan, settings, searcher, callback)
    reason = reason or lease.loss()
    not_measured = {} if reason else measure_confirmed(plan, queue.states, settings)
    cells = tuple(cell_status(state) for state in queue.states.values())
    outcome = Outcome(
        callback.finished,
        cells,
        failed=() if reason else _incomplete(cells),  # those of a sweep cut short may yet run
        interrupted=bool(reason),
        reason=reason,
        not_measured=not_measured,
    )
    callback.listeners.on_end(outcome)
    if not lease.loss():
        with suppress(StorageError, OSError):  # a view, which the next run writes again
            callback.mirror.push_definition(config.name)
    return outcome


def _fit(
    plan: Plan, settings: RunSettings, searcher: SweepSearcher, callback: SweepCallback
) -> str:
    """Run Tune until the queue is empty; returns why it ended earlier, or nothing."""
    # In the home, which every node shares; no other driver uses it while we hold the sweep.
    scratch = settings.workspace.scratch
    assert scratch is not None
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with (
            environment(TUNE_ENVIRONMENT),
            tune_keeps_secrets(),
            ray_says_nothing(),
            _signals_stop(callback),
        ):
            _tuner(plan, settings, searcher, callback).fit()
    except HaltError:
        return callback.reason
    except (OSError, StorageError, TuneError) as error:
        why = why_paused(error)
        if not why:
            raise
        return why
    finally:
        callback.end_leave_request()
        if not callback.lease.loss():  # else another driver may use the folder by now
            _remove_scratch(settings.workspace, scratch)
    queue = searcher.queue
    ended_early = queue.waiting or not all_over(queue.states)
    return callback.reason if ended_early else ""


def _tuner(
    plan: Plan, settings: RunSettings, searcher: SweepSearcher, callback: SweepCallback
) -> tune.Tuner:
    layout = settings.layout
    trainable = tune.with_resources(
        TrialTrainable, lambda trial: placement_request(layout, trial["workers"])
    )
    return tune.Tuner(
        trainable,
        param_space={"settings": settings},
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,  # as many as the searcher has
            scheduler=_scheduler(plan, settings, searcher),
            reuse_actors=True,  # the next trial finds a warm group
            trial_dirname_creator=_trial_id,
            trial_name_creator=_trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(settings.workspace.scratch),
            callbacks=[callback],
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=0, checkpoint_at_end=False
            ),
            # Tune tries nothing again: `suite.record.attempts` counts, and the searcher suggests
            # the trial anew.
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )


def _scheduler(
    plan: Plan, settings: RunSettings, searcher: SweepSearcher
) -> WarmGroupScheduler | None:
    """Tune's scheduler for this sweep; None = Tune's own, which suits trials of one size."""
    resources = plan.config.resources
    if resources.min_workers is not None:
        layout = settings.layout
        return ElasticScheduler(resources, searcher, lambda: layout.room_on(free_nodes()))
    sizes = {plan.workers(cell) for cell in plan.cells}
    return WarmGroupScheduler() if len(sizes) > 1 else None


def _trial_id(trial: TuneTrial) -> str:
    return str(trial.trial_id)


def _remove_scratch(workspace: Workspace, scratch: Path) -> None:
    if workspace.storage is not None:
        remove_on_all_nodes(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # other sweeps of this home keep theirs there
        scratch.parent.rmdir()


@contextmanager
def _signals_stop(callback: SweepCallback) -> Iterator[None]:
    """Have a signal of `STOPS` end the sweep in order; a second one ends it at once."""

    def stop(reason: str) -> None:
        callback.reason = reason
        callback.in_order = True
        restore()  # the second signal meets the handler from before

    with on_stop(stop) as restore:
        yield
