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
from suite.config.sweep import SweepConfig
from suite.config.task import GeneratedData, TaskConfig
from suite.train.folder import Home

if TYPE_CHECKING:
    from suite.tune.plan import Plan
    from suite.tune.resources import Layout


def show_plan(config: SweepConfig, *, where: str, home: Path, address: str | None, fmt: Format) -> None:
    """Print cells (stdout) and resources, trials and cost; JSON holds both under `cells` and `cost`."""
    from suite.tune.definition import known_plan
    from suite.tune.plan import make_plan

    place = Home(home)
    layout = local_layout(config) if address is None else None
    known = known_plan(place, config.name)
    plan = make_plan(config, where=where, world_size=known.world_size if known else layout.workers if layout else None)
    cells, cost = cell_rows(plan), estimate(plan, place, layout)
    if fmt is Format.JSON:
        print(json.dumps({"cells": cells, "cost": cost}, indent=2))
        return
    columns = [column("backbone"), column("attention"), column("method"), Column("architecture", lambda row: _items(row["architecture"]))]
    rates = Column("learning rate", lambda row: "{:g} to {:g}".format(*row["learning_rate"]), right=True)
    render.render(cells, [*columns, column("task"), rates, column("steps_at_most", "steps a trial", render.count)], fmt)
    if fmt in (Format.TABLE, Format.MD):
        print("\n" + "\n".join(_lines(cost, address)))


def local_layout(config: SweepConfig) -> Layout:
    """What one trial would get on this machine.

    Raises:
        ResourceError: It never fits.
    """
    import torch

    from suite.tune.resources import lay_out, local_cpus

    return lay_out(config.resources, [{"CPU": float(local_cpus()), "GPU": float(torch.cuda.device_count())}])


def cell_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per cell, in the order of the plan."""
    return [
        {
            "backbone": cell.arm.backbone.name,
            "attention": cell.arm.attention.name,
            "method": cell.arm.method,
            "architecture": cell.arm.architecture,
            "task": cell.task.name,
            "learning_rate": [cell.learning_rate.low, cell.learning_rate.high],
            "search_trials": plan.config.search.trials,
            "confirm_runs": len(plan.config.confirm.seeds),
            "steps_at_most": steps_at_most(plan.config, cell.task),
        }
        for cell in plan.cells
    ]


def steps_at_most(config: SweepConfig, task: TaskConfig) -> int | None:
    """Optimizer steps of a trial that never stops early; None where the training rows are unknown without reading data."""
    rows = [config.limit.train] if config.limit.train is not None else []
    if isinstance(task.data, GeneratedData):
        rows.append(generated_rows(task.data))
    return config.training.epochs * (min(rows) // config.training.batch_size) if rows else None


def generated_rows(data: GeneratedData) -> int:
    """Training rows that a generator makes."""
    from suite.data.generators import generators

    return int(generators.get(data.generator).configure(data.options).options.train)


def estimate(plan: Plan, home: Home, layout: Layout | None) -> dict[str, Any]:
    """Trials, steps and, from trials of this sweep in this home, time left; null = unknown."""
    from suite.tune.schedule import read_states
    from suite.tune.status import cell_status

    states = read_states(plan, home)
    cells = [cell_status(state) for state in states.values()]
    left = sum(cell.left + cell.running for cell in cells)
    steps = [steps_at_most(plan.config, cell.task) for cell in plan.cells]
    trial_s = _mean(t.result.finished_at - t.result.started_at for s in states.values() for t in s.trials if t.result is not None)
    slots = layout.slots if layout is not None else plan.config.resources.concurrent_trials
    return {
        "cells": len(plan.cells),
        "search_trials": len(plan.cells) * plan.config.search.trials,
        "confirm_runs": len(plan.cells) * len(plan.config.confirm.seeds),
        "trials_done": sum(cell.done for cell in cells),
        "trials_left": left,
        "workers_per_trial": plan.world_size,
        "trials_at_a_time": slots,
        "optimizer_steps_at_most": None if None in steps else plan.trials_per_cell * sum(s for s in steps if s is not None),
        "mean_trial_s": trial_s,
        "left_s": trial_s * left / slots if trial_s is not None and slots else None,
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _items(architecture: dict[str, Any]) -> str:
    return " ".join(f"{key}={render.text(value)}" for key, value in architecture.items()) or render.MISSING


def _lines(cost: dict[str, Any], address: str | None) -> list[str]:
    trials = f"{cost['search_trials']} search + {cost['confirm_runs']} confirm runs"
    slots = f"{cost['trials_at_a_time']} at a time" if cost["trials_at_a_time"] else f"as many at a time as fit on {address}"
    steps = render.count(cost["optimizer_steps_at_most"]) if cost["optimizer_steps_at_most"] else "unknown before the data are read"
    return [
        f"cells      {cost['cells']}",
        f"trials     {trials}; {cost['trials_done']} done, {cost['trials_left']} left",
        f"resources  {cost['workers_per_trial']} workers a trial, {slots}",
        f"steps      {steps} optimizer steps at most",
        f"time       {_time(cost)}",
    ]


def _time(cost: dict[str, Any]) -> str:
    if not cost["trials_left"]:
        return "nothing is left to run"
    if cost["left_s"] is None:
        return "unknown: none of its trials ran in this home yet"
    return f"about {render.duration(cost['left_s'])} left; a trial took {render.duration(cost['mean_trial_s'])} on average"
