"""`suite run --dry-run`: what a sweep would do and cost, from its definition and from trials that already ran."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from suite.cli import render
from suite.cli.options import Format
from suite.cli.render import Column, column
from suite.cli.work import device_hours, steps_at_most
from suite.config.sweep import SweepConfig
from suite.config.task import PretrainTask
from suite.errors import ResourceError
from suite.record.folder import Home

if TYPE_CHECKING:
    from suite.plan.plan import Plan
    from suite.plan.resources import Layout


def show_plan(
    config: SweepConfig, *, where: str, home: Path, address: str | None, fmt: Format
) -> None:
    """Print cells (stdout) and resources, trials and cost; JSON holds both under `cells` and `cost`."""
    from suite.plan.definition import known_plan
    from suite.plan.plan import make_plan

    place = Home(home)
    layout, elsewhere = (
        local_layout(config)
        if address is None
        else (None, f"as many at a time as fit on {address}")
    )
    known = known_plan(place, config.name)
    plan = make_plan(
        config,
        where=where,
        world_size=known.world_size if known else layout.workers if layout else None,
    )
    cells, cost, pretrains = (
        cell_rows(plan),
        estimate(plan, place, layout, where=where),
        pretrain_rows(plan, place),
    )
    if fmt is Format.JSON:
        print(json.dumps({"cells": cells, "cost": cost, "pretrain": pretrains}, indent=2))
        return
    columns = [
        column("backbone"),
        Column("attention", render.attention),
        column("method"),
        column("architecture", show=render.settings),
    ]
    rates = Column(
        "learning rate",
        lambda row: " to ".join(f"{rate:g}" for rate in dict.fromkeys(row["learning_rate"])),
        right=True,
    )
    render.render(
        cells,
        [*columns, column("task"), rates, column("steps_at_most", "steps a trial", render.count)],
        fmt,
    )
    if fmt in (Format.TABLE, Format.MD):
        print("\n" + "\n".join([*map(_pretrain_line, pretrains), *_lines(cost, elsewhere)]))


def local_layout(config: SweepConfig) -> tuple[Layout | None, str]:
    """What one trial would get on this machine; None, and why, where it never fits."""
    import torch

    from suite.plan.resources import lay_out, local_cpus

    try:
        return lay_out(
            config.resources,
            [{"CPU": float(local_cpus()), "GPU": float(torch.cuda.device_count())}],
        ), ""
    except ResourceError as error:
        return None, f"not on this machine: {error}"


def cell_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per cell, in the order of the plan."""
    return [
        {
            "backbone": cell.arm.backbone.name,
            "attention": cell.arm.attention.name,
            "attention_options": cell.arm.attention.options,
            "method": cell.arm.method,
            "architecture": cell.arm.architecture,
            "task": cell.task.name,
            "pretrain": cell.arm.pretrain,
            "learning_rate": [cell.learning_rate.low, cell.learning_rate.high],
            "search_trials": plan.search_trials(cell),
            "confirm_runs": plan.confirm_runs(cell),
            "workers": plan.workers(cell),
            "contest": cell.contest,
            "steps_at_most": steps_at_most(plan.config, cell.task),
        }
        for cell in plan.cells
    ]


def pretrain_rows(plan: Plan, home: Home) -> list[dict[str, Any]]:
    """One row per run of the pretrain stage."""
    from suite.plan.cell_state import read_pretrains
    from suite.plan.status import pretrain_status

    rows = []
    for state in read_pretrains(plan, home).values():
        spec, now = state.spec, pretrain_status(state)
        assert isinstance(spec.task, PretrainTask)
        names = {
            "backbone": spec.arm.backbone.name,
            "attention": spec.arm.attention.name,
            "checkpoint": now.checkpoint,
        }
        stage = {
            "corpus": now.corpus,
            "objective": spec.task.objective,
            "start": spec.task.start,
            "steps": now.steps,
            "seed": spec.seed,
        }
        rows.append({**names, **stage, "state": now.state, "steps_done": now.steps_done})
    return rows


def _pretrain_line(row: dict[str, Any]) -> str:
    start = "random weights" if row["start"] == "random" else "the converted checkpoint"
    what = f"{row['attention']} on {row['backbone']}: {row['objective']} on {row['corpus']}, {row['steps']:,} steps from {start}"
    return f"pretrain   {what}; {row['state']} ({row['checkpoint']})"


def estimate(plan: Plan, home: Home, layout: Layout | None, *, where: str) -> dict[str, Any]:
    """Trials, steps, device-hours and, from trials of this sweep in this home, time left; null = unknown."""
    from suite.plan.cell_state import read_states
    from suite.plan.status import cell_status

    states = read_states(plan, home)
    cells = [cell_status(state) for state in states.values()]
    left = sum(cell.left + cell.running for cell in cells)
    steps = [(steps_at_most(plan.config, cell.task), plan.trials_of(cell)) for cell in plan.cells]
    known = [per_trial * trials for per_trial, trials in steps if per_trial is not None]
    trial_s = _mean(
        t.result.finished_at - t.result.started_at
        for s in states.values()
        for t in s.trials
        if t.result is not None
    )
    on_gpus = (
        layout.device == "cuda"
        if layout is not None
        else plan.config.resources.gpus_per_worker != 0
    )
    work = device_hours(
        plan, {key: s.trials for key, s in states.items()}, on_gpus=on_gpus, where=where
    )
    slots = layout.slots if layout is not None else plan.config.resources.concurrent_trials
    return {
        "cells": len(plan.cells),
        "search_trials": sum(plan.search_trials(cell) for cell in plan.cells),
        "confirm_runs": sum(plan.confirm_runs(cell) for cell in plan.cells),
        "search_trials_at_most": sum(
            plan.config.search.most_trials(cell.learning_rate) for cell in plan.cells
        ),
        "contests": len({cell.contest for cell in plan.cells} - {None}),
        "trials_done": sum(cell.done for cell in cells),
        "trials_left": left,
        "workers_per_trial": plan.world_size,
        "workers_by_backbone": {cell.arm.backbone.name: plan.workers(cell) for cell in plan.cells},
        "trials_at_a_time": slots,
        "optimizer_steps_at_most": sum(known) if len(known) == len(steps) else None,
        "mean_trial_s": trial_s,
        "left_s": trial_s * left / slots if trial_s is not None and slots else None,
        **work,
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _lines(cost: dict[str, Any], elsewhere: str) -> list[str]:
    trials = f"{cost['search_trials']} search + {cost['confirm_runs']} confirm runs"
    slots = elsewhere or f"{cost['trials_at_a_time']} at a time"
    at_most = cost["optimizer_steps_at_most"]
    steps = (
        f"{render.count(at_most)} optimizer steps at most"
        if at_most
        else "unknown before the data are read"
    )
    return [
        f"cells      {cost['cells']}",
        f"trials     {trials}; {cost['trials_done']} done, {cost['trials_left']} left",
        *_rules(cost),
        f"resources  {_workers(cost)}, {slots}",
        f"steps      {steps}",
        f"computing  {_computing(cost)}",
        f"time       {_time(cost)}",
    ]


def _workers(cost: dict[str, Any]) -> str:
    sizes = cost["workers_by_backbone"]
    if len(set(sizes.values())) < 2:
        workers = next(iter(sizes.values()))
        return f"{workers} worker{'s' if workers > 1 else ''} a trial"
    return "workers a trial: " + ", ".join(
        f"{workers} for {name}" for name, workers in sizes.items()
    )


def _computing(cost: dict[str, Any]) -> str:
    hours, stage = cost["device_hours_at_most"], cost["device_hours_pretrain"]
    pretrain = f"; {_hours(stage)} {cost['device']}-hours to pretrain" if stage else ""
    known = (
        "unknown before the data are read"
        if hours is None
        else f"at most {_hours(hours)} {cost['device']}-hours"
    )
    return f"{known}{pretrain} ({cost['assumption']})"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rules(cost: dict[str, Any]) -> list[str]:
    """What makes the number of trials uncertain."""
    extra, contests = cost["search_trials_at_most"] - cost["search_trials"], cost["contests"]
    chosen = (
        f"contests   {contests}; the best architecture of each is confirmed" if contests else ""
    )
    guarded = (
        f"edge guard at most {extra} search trials more, where the best learning rate lies at the end of its range"
        if extra
        else ""
    )
    return [line for line in (chosen, guarded) if line]


def _time(cost: dict[str, Any]) -> str:
    if not cost["trials_left"]:
        return "nothing is left to run"
    if cost["left_s"] is None:
        return "unknown: none of its trials ran in this home yet"
    return f"about {render.duration(cost['left_s'])} left; a trial took {render.duration(cost['mean_trial_s'])} on average"
