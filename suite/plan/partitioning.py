"""How ZeRO lays out the weights of a sweep's trials where its file says `auto`.

The driver decides it once, before the first worker starts, and for all arms alike: a comparison of
memory and time is one of methods only if all arms are laid out in the same way. The least
partitioned layout at which the largest arm fits is the fastest one. What is decided here follows
from numbers alone; `suite.profiling.fit` estimates the largest arm where they do not settle it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from suite.config.training import LEAST_STAGE, Partitioning, TrainingConfig
from suite.errors import gib
from suite.plan.cell_state import CellState
from suite.plan.gpus import Gpus
from suite.plan.plan import Plan
from suite.plan.resources import CGROUP, Layout, Node

WHOLE_BYTES = 20
"""Bytes for each parameter of an arm that trains all: weight, gradient, copy, two moments."""
SMALL_FRAC = 0.25
"""Share of a worker's memory below which the layout of the states hardly matters."""
USABLE_FRAC = 0.8
"""The rest is for what the estimate leaves out: libraries, evaluation, fragments, buckets."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How the weights of a sweep are laid out, and why so, in words."""

    partitioning: Partitioning
    why: str


def candidates(training: TrainingConfig) -> list[Partitioning]:
    """The layouts that a sweep's file leaves open, the least partitioned one first."""
    stages: Sequence[int] = range(LEAST_STAGE[training.offload], 4)
    if training.zero_stage != "auto":
        stages = [training.zero_stage]
    found = []
    for stage in stages:
        if training.frozen_weights != "auto":
            found.append(Partitioning(stage, training.frozen_weights))
            continue
        found.append(Partitioning(stage, "resident"))
        # Below stage 3 all weights are whole on every rank in any case.
        if stage == 3:
            found.append(Partitioning(stage, "partitioned"))
    return found


def cuts_nothing(training: TrainingConfig, partitioning: Partitioning, *, workers: int) -> bool:
    """Whether a trial pays for a stage that has nothing to cut, and offloads nothing."""
    return partitioning.zero_stage > 0 and workers == 1 and training.offload == "none"


def settle(
    training: TrainingConfig,
    *,
    device: str,
    worker_bytes: int | None,
    parameters: int,
    recorded: Partitioning | None = None,
) -> Decision | None:
    """Decide what needs no estimate; None where one is needed.

    Args:
        training: The sweep's.
        device: "cuda" or "cpu".
        worker_bytes: Memory of one worker; None = unknown.
        parameters: Of the sweep's largest model.
        recorded: The layout of this sweep's ended trials; None = there are none.
    """
    open_ones = candidates(training)
    if len(open_ones) == 1:
        return Decision(open_ones[0], "as the sweep's file says")
    # All trials of a sweep are laid out alike, also those of a later run on another machine.
    if recorded is not None:
        return Decision(recorded, "as in the trials of this sweep that have ended")
    if device == "cuda" and training.offload == "all":
        return Decision(open_ones[-1], "training.offload keeps the parameters in CPU memory")
    if worker_bytes is None:
        return Decision(open_ones[-1], "the memory of a worker is unknown")
    states = parameters * WHOLE_BYTES
    if states < SMALL_FRAC * worker_bytes:
        why = f"the largest arm's states take at most {gib(states)} of a worker's"
        return Decision(open_ones[0], f"{why} {gib(worker_bytes)}")
    return None


def recorded(states: Iterable[CellState]) -> Partitioning | None:
    """The layout that an ended trial of a sweep recorded; None where none recorded one."""
    for state in states:
        for trial in (*state.search.values(), *state.confirm.values()):
            if trial.result is not None and "partitioning" in trial.result.provenance:
                return Partitioning(**trial.result.provenance["partitioning"])
    return None


def worker_bytes(plan: Plan, layout: Layout, nodes: Sequence[Node], gpus: Gpus) -> int | None:
    """Memory that one worker of a sweep may take; None = unknown.

    Args:
        plan: The sweep.
        layout: What one trial gets on these nodes.
        nodes: As `lay_out` takes them.
        gpus: What torch says of the nodes' GPUs; on CPUs nobody asks.
    """
    if layout.device == "cuda":
        if gpus.least_bytes is None:
            return None
        return int(gpus.least_bytes * layout.memory_frac)
    most_workers = max(plan.workers(cell) for cell in plan.cells)
    return cpu_worker_bytes(layout, nodes, most_workers=most_workers)


def cpu_worker_bytes(layout: Layout, nodes: Sequence[Node], *, most_workers: int) -> int | None:
    """Memory of one worker where the workers of a node share its memory; None = unknown.

    Args:
        layout: What one trial gets on these nodes.
        nodes: As `lay_out` takes them; `memory` in bytes.
        most_workers: Of the sweep's largest trial.
    """
    # No more than these are at work at the same time, however much room there is.
    at_work = layout.slots * most_workers
    least = inf
    for node, room in zip(nodes, layout.capacity.nodes, strict=True):
        if room:
            least = min(least, node.get("memory", 0.0) / min(room, at_work))
    # An autoscaler does not say how much memory its future nodes have.
    if least in (0.0, inf):
        return None
    return int(least)


def local_memory_bytes() -> int:
    """Memory of this host that processes may still take, within the limit of its container."""
    free = psutil.virtual_memory().available
    # `psutil` reports the host's memory, of which a container may have little.
    limit = container_limit(CGROUP)
    if limit is None:
        return free
    most, used = limit
    return max(min(free, most - used), 0)


def container_limit(root: Path = CGROUP) -> tuple[int, int] | None:
    """Return the limit and the use of this process' control group (version 2), in bytes.

    Pages of files do not count as used: the kernel takes them back before it kills a process.
    None = there is no limit.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        charged = int((root / "memory.current").read_text())
        lines = (root / "memory.stat").read_text().splitlines()
    except OSError:
        # No control group of version 2 limits this process: the root group has no such files.
        return None
    if limit == "max":
        return None
    sizes = dict(line.split() for line in lines)
    cached = int(sizes["inactive_file"]) + int(sizes["active_file"])
    # The files are read one after the other, so their numbers need not fit.
    return int(limit), max(charged - cached, 0)
