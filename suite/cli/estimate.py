"""`suite run --dry-run`: what a sweep would do and cost, from its file and its ended trials."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from suite.cli import render
from suite.cli.foreseen import verdict_lines, verdict_rows
from suite.cli.options import Format
from suite.cli.render import Column, column, put
from suite.cli.work import Work, device_hours, steps_at_most, training_examples
from suite.config.sweep import SweepConfig
from suite.config.task import PretrainTask, TaskConfig
from suite.errors import ResourceError
from suite.record.folder import Home
from suite.report.names import architecture_of

if TYPE_CHECKING:
    from suite.plan.cell_state import CellState
    from suite.plan.gpus import Gpus
    from suite.plan.partitioning import Decision
    from suite.plan.plan import Plan
    from suite.plan.resources import Layout, Node
    from suite.record.cells import Trial

UNREAD = "unknown before the data are read"


def show_plan(
    config: SweepConfig,
    *,
    where: str,
    home: Path,
    data_root: Path | None = None,
    address: str | None,
    storage: str | None = None,
    fmt: Format,
) -> None:
    """Print the cells, then resources, trials, cost and what the verdicts could tell apart.

    JSON holds them as `cells`, `cost`, `pretrain` and `verdicts`.

    Raises:
        SuiteError: The run would refuse the sweep, the home, or data that lie here.
    """
    from suite.cli.kept_plan import checked_plan
    from suite.plan.cell_state import read_states
    from suite.plan.definition import check_definition, known_plan
    from suite.plan.partitioning import cuts_nothing
    from suite.plan.preflight import (
        check_home,
        check_local_data,
        check_pretrained,
        check_records,
        warn_of_other_runs,
        warn_of_untried,
    )

    place = Home(home)
    check_home(place)
    if address is None:
        layout, elsewhere = local_layout(config)
    else:
        layout = None
        elsewhere = f"as many at a time as fit on {address}"
    known = known_plan(place, config.name)
    # A sweep that has begun keeps its number of workers: it is part of every trial's identity.
    world_size = None
    if known is not None:
        world_size = known.world_size
    elif layout is not None:
        world_size = layout.workers
    plan, work = checked_plan(config, where=where, world_size=world_size)
    if config.lm_eval is not None:
        # Imports torch, which a plan that is kept does without.
        from suite.evaluation.subjects import check_plan

        check_plan(plan)
    check_definition(plan, place)
    states = read_states(plan, place)
    check_records(states, place)
    if storage is None:
        check_pretrained(states)
    device = None
    if layout is not None:
        device = layout.device
    warn_of_other_runs(
        _as_computed(plan.config, device).training,
        states,
        device,
        threads=config.threads_per_worker,
    )
    warn_of_untried(plan)
    check_local_data(plan, data_root=data_root)
    cells = cell_rows(plan)
    cost = estimate(plan, work, states=states, layout=layout)
    decision = partitioning(plan, work, states=states, layout=layout, where=where)
    if decision is not None:
        why = decision.why
        workers = max(plan.workers(cell) for cell in plan.cells)
        # A sweep that has begun keeps its layout.
        if not cost["trials_done"] and cuts_nothing(
            config.training, decision.partitioning, workers=workers
        ):
            why += "; one worker has nothing to cut, and training.zero_stage: 0 takes less time"
        cost["partitioning"] = {**asdict(decision.partitioning), "why": why}
    pretrains = pretrain_rows(plan, place)
    verdicts = verdict_rows(plan, place)
    if fmt is Format.JSON:
        told = {"cells": cells, "cost": cost, "pretrain": pretrains, "verdicts": verdicts}
        print(json.dumps(told, indent=2))
        return
    columns = [
        column("backbone"),
        Column("attention", render.attention),
        column("method"),
        Column("architecture", architecture_of(cells)),
        column("task"),
        Column("learning rate", _rates_text, right=True),
        column("steps_at_most", "steps a trial", render.count),
    ]
    render.render(cells, columns, fmt)
    # CSV is one table: the lines below would break it for a program.
    if fmt.for_people:
        put()
        for row in pretrains:
            put(_pretrain_line(row))
        for line in [*_lines(cost, elsewhere), *verdict_lines(verdicts)]:
            put(line)


def _rates_text(row: Mapping[str, Any]) -> str:
    """`1e-06 to 0.003`, or the one learning rate that is fixed."""
    low, high = row["learning_rate"]
    if low == high:
        return f"{low:g}"
    return f"{low:g} to {high:g}"


def local_layout(config: SweepConfig) -> tuple[Layout | None, str]:
    """What one trial would get on this machine; None and the reason where it never fits."""
    from suite.plan.gpus import usable
    from suite.plan.resources import lay_out

    try:
        layout = lay_out(config.resources, [_local_node()])
        if layout.device == "cuda":
            usable({"this machine": _asked_gpus()})
        return layout, ""
    # A sweep for a cluster is often planned on a laptop: that is no error.
    except ResourceError as error:
        return None, f"not on this machine: {error}"


@cache
def _asked_gpus() -> Gpus:
    """What torch says of this machine's GPUs; asked for once, because it takes seconds."""
    from suite.plan.gpus import local_gpus

    return local_gpus()


def _as_computed(config: SweepConfig, device: str | None) -> SweepConfig:
    """The sweep with the precision that `auto` comes to on this machine's GPUs."""
    from suite.plan.gpus import as_computed

    if device != "cuda":
        return config
    return as_computed(config, _asked_gpus())


def _local_node() -> Node:
    """What a Ray cluster on this machine would have."""
    from suite.plan.partitioning import local_memory_bytes
    from suite.plan.resources import local_cpus

    return {
        "CPU": float(local_cpus()),
        "GPU": float(_local_gpus()),
        "memory": float(local_memory_bytes()),
    }


def _local_gpus() -> int:
    from suite.plan.resources import may_have_gpu

    # Importing the meters takes seconds.
    if not may_have_gpu():
        return 0
    from suite.meters.clock import Unavailable
    from suite.meters.nvml import visible_boards

    # Ray counts by NVML too, whatever torch can use.
    try:
        return len(visible_boards())
    except Unavailable:
        # AMD's boards are known to torch alone.
        import torch

        return torch.cuda.device_count()


def cell_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per cell, in the order of the plan."""
    rows = []
    for cell in plan.cells:
        arm = cell.arm
        rows.append(
            {
                **arm.names,
                "task": cell.task.name,
                "pretrain": arm.pretrain,
                "learning_rate": [cell.learning_rate.low, cell.learning_rate.high],
                "search_trials": plan.search_trials(cell),
                "confirm_runs": plan.confirm_runs(cell),
                "workers": plan.workers(cell),
                "contest": cell.contest,
                "steps_at_most": steps_at_most(plan.config, cell.task),
            }
        )
    return rows


def pretrain_rows(plan: Plan, home: Home) -> list[dict[str, Any]]:
    """One row per run of the pretrain stage."""
    from suite.plan.pretrain_state import read_pretrains
    from suite.plan.status import pretrain_status

    rows = []
    for state in read_pretrains(plan, home).values():
        spec = state.spec
        now = pretrain_status(state)
        assert isinstance(spec.task, PretrainTask)
        rows.append(
            {
                "backbone": spec.arm.backbone.name,
                "attention": spec.arm.attention.name,
                "checkpoint": now.checkpoint,
                "corpus": now.corpus,
                "objective": spec.task.objective,
                "start": spec.task.start,
                "steps": now.steps,
                "seed": spec.seed,
                "state": now.state,
                "steps_done": now.steps_done,
            }
        )
    return rows


def _pretrain_line(row: dict[str, Any]) -> str:
    start = "the converted checkpoint"
    if row["start"] == "random":
        start = "random weights"
    return (
        f"pretrain   {row['attention']} on {row['backbone']}: {row['objective']} on "
        f"{row['corpus']}, {row['steps']:,} steps from {start}; {row['state']} "
        f"({row['checkpoint']})"
    )


def partitioning(
    plan: Plan,
    work: Mapping[str, Work],
    *,
    states: Mapping[str, CellState],
    layout: Layout | None,
    where: str,
) -> Decision | None:
    """How the weights of all trials would be laid out; None where other machines decide it.

    Args:
        plan: The sweep.
        work: The computing of every arm, by its key.
        states: Its cells, as they are in the home.
        layout: What one trial gets here; None where it does not run here.
        where: The sweep's file, for errors.
    """
    from suite.plan.gpus import Gpus
    from suite.plan.partitioning import (
        candidates,
        recorded,
        settle,
        worker_bytes,
    )

    training = plan.config.training
    known = recorded(states.values())
    device = "cpu"
    memory_bytes: int | None = None
    if known is None and len(candidates(training)) > 1:
        if layout is None:
            return None
        device = layout.device
        gpus = _asked_gpus() if device == "cuda" else Gpus()
        memory_bytes = worker_bytes(plan, layout, [_local_node()], gpus)
    decision = settle(
        training,
        device=device,
        worker_bytes=memory_bytes,
        parameters=max(arm.total for arm in work.values()),
        recorded=known,
    )
    if decision is not None:
        return decision
    # Only now: it imports torch, which a dry run of a small sweep does without.
    from suite.profiling.fit import first_that_fits

    assert memory_bytes is not None  # unknown memory settles it
    plan = replace(plan, config=_as_computed(plan.config, device))
    return first_that_fits(plan, device=device, worker_bytes=memory_bytes, where=where)


def estimate(
    plan: Plan,
    work: Mapping[str, Work],
    *,
    states: Mapping[str, CellState],
    layout: Layout | None,
) -> dict[str, Any]:
    """Trials, steps and device-hours, and the time left; null = unknown.

    The time left comes from the trials of this sweep that have ended in this home.

    Args:
        plan: The sweep.
        work: The computing of every arm, by its key.
        states: Its cells, as they are in the home.
        layout: What one trial gets here; None where it does not run here.
    """
    from suite.plan.status import cell_status

    done = 0
    left = 0
    trials = {}
    for key, state in states.items():
        cell = cell_status(state)
        done += cell.done
        # A running trial counts as a whole one: how far it is changes by the minute.
        left += cell.left + cell.running
        trials[key] = state.trials
    resources = plan.config.resources
    if layout is None:
        # Nothing is known of the machines: an unset gpus_per_worker is taken for a GPU.
        on_gpus = resources.gpus_per_worker != 0
        slots = resources.concurrent_trials
    else:
        on_gpus = layout.device == "cuda"
        slots = layout.slots
    trial_s = _mean_trial_s(trials.values())
    left_s = None
    # Trials that run side by side share the time; slots are unknown on another cluster.
    if trial_s is not None and slots:
        left_s = trial_s * left / slots
    contests = set()
    workers = {}
    search_trials = 0
    search_trials_at_most = 0
    confirm_runs = 0
    for planned in plan.cells:
        if planned.contest is not None:
            contests.add(planned.contest)
        workers[planned.arm.backbone.name] = plan.workers(planned)
        search_trials += plan.search_trials(planned)
        # The edge guard may extend a search whose best rate lies at the end of its range.
        search_trials_at_most += plan.search_trials_at_most(planned)
        confirm_runs += plan.confirm_runs(planned)
    return {
        "cells": len(plan.cells),
        "search_trials": search_trials,
        "confirm_runs": confirm_runs,
        "search_trials_at_most": search_trials_at_most,
        "contests": len(contests),
        "trials_done": done,
        "trials_left": left,
        "workers_per_trial": plan.world_size,
        "workers_by_backbone": workers,
        "trials_at_a_time": slots,
        "partitioning": None,
        "optimizer_steps_at_most": _optimizer_steps(plan),
        "mean_trial_s": trial_s,
        "left_s": left_s,
        **device_hours(plan, work, trials=trials, on_gpus=on_gpus),
    }


def _mean_trial_s(cells: Iterable[Iterable[Trial]]) -> float | None:
    """Mean duration of the trials that have ended, seconds; None where none has."""
    durations = []
    for trials in cells:
        for trial in trials:
            result = trial.result
            if result is not None:
                # Trials side by side share their time.
                durations.append(result.worked_s / result.lanes)
    if durations:
        return fmean(durations)
    return None


def _optimizer_steps(plan: Plan) -> int | None:
    """Optimizer steps of the whole sweep, at most; None where the rows of a task are unknown."""
    total = 0
    for cell in plan.cells:
        _check_batches(plan.config, cell.task)
        per_trial = steps_at_most(plan.config, cell.task)
        if per_trial is None:
            return None
        total += per_trial * plan.trials_at_most(cell)
    return total


def _check_batches(config: SweepConfig, task: TaskConfig) -> None:
    """Refuse a batch of more rows than there are, as each trial would.

    Raises:
        IncompatibleError: A known number of rows is below a batch size.
    """
    from suite.data.splits import check_batch_fits

    rows = training_examples(task, config.limit, block=config.training.max_length)
    largest = max(config.batch_sizes)
    if rows is not None:
        check_batch_fits(rows, largest, where=f"task {task.name}")


def _lines(cost: dict[str, Any], elsewhere: str) -> list[str]:
    trials = f"{cost['search_trials']} search + {cost['confirm_runs']} confirm runs"
    slots = elsewhere or f"{cost['trials_at_a_time']} at a time"
    at_most = cost["optimizer_steps_at_most"]
    steps = UNREAD
    # A public data set of unknown size leaves the whole sum unknown.
    if at_most:
        steps = f"{render.count(at_most)} optimizer steps at most"
    return [
        f"cells      {cost['cells']}",
        f"trials     {trials}; {cost['trials_done']} done, {cost['trials_left']} left",
        *_rules(cost),
        f"resources  {_workers(cost)}, {slots}",
        f"weights    {_weights(cost['partitioning'])}",
        f"steps      {steps}",
        f"computing  {_computing(cost)}",
        f"time       {_time(cost)}",
    ]


def _workers(cost: dict[str, Any]) -> str:
    sizes = cost["workers_by_backbone"]
    # A large backbone may need more workers than a small one in the same sweep.
    if len(set(sizes.values())) > 1:
        each = [f"{workers} for {name}" for name, workers in sizes.items()]
        return "workers a trial: " + ", ".join(each)
    workers = next(iter(sizes.values()))
    if workers == 1:
        return "1 worker a trial"
    return f"{workers} workers a trial"


def _weights(laid_out: dict[str, Any] | None) -> str:
    if laid_out is None:
        return "the memory of the machines decides what is partitioned"
    frozen = f"frozen weights {laid_out['frozen_weights']}"
    # Below stage 3 every rank holds all weights in any case.
    if laid_out["zero_stage"] < 3:
        frozen = "all weights on every rank"
    return f"ZeRO stage {laid_out['zero_stage']}, {frozen}: {laid_out['why']}"


def _computing(cost: dict[str, Any]) -> str:
    hours = cost["device_hours_at_most"]
    stage = cost["device_hours_pretrain"]
    known = UNREAD
    if hours is not None:
        known = f"at most {_hours(hours)} {cost['device']}-hours"
    if stage:
        known += f"; {_hours(stage)} {cost['device']}-hours to pretrain"
    return f"{known} ({cost['assumption']})"


def _hours(value: float) -> str:
    # Three digits either way: more would claim a precision that an estimate lacks.
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _rules(cost: dict[str, Any]) -> list[str]:
    """The rules that make the number of trials uncertain."""
    lines = []
    if cost["contests"]:
        lines.append(f"contests   {cost['contests']}; the best architecture of each is confirmed")
    # Without the edge guard the number of trials is certain.
    extra = cost["search_trials_at_most"] - cost["search_trials"]
    if extra:
        lines.append(
            f"edge guard at most {extra} search trials more, where the best learning rate lies at "
            "the end of its range"
        )
    return lines


def _time(cost: dict[str, Any]) -> str:
    if not cost["trials_left"]:
        return "nothing is left to run"
    if cost["left_s"] is None:
        return "unknown: none of its trials has run in this home yet"
    left = render.duration(cost["left_s"])
    mean = render.duration(cost["mean_trial_s"])
    return f"about {left} left; a trial took {mean} on average"
