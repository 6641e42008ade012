"""What one trial gets and how many fit; no Ray here, only numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isclose

from suite.config.sweep import ResourceConfig
from suite.errors import ResourceError

DEFAULT_CPU_WORKERS = 2
FIT_EPS = 1e-6
Node = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """The resources of a sweep's trials.

    Attributes:
        workers: Ranks per trial (the world size).
        cpus, gpus: Per worker.
        slots: Trials at a time.
    """

    workers: int
    cpus: float
    gpus: float
    slots: int

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one worker."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def threads(self) -> int:
        """CPU threads per worker."""
        return max(1, floor(self.cpus))


def local_cpus() -> int:
    """Cores this process may use, at least two: the default trial has two workers, and two share one core well enough."""
    return max(DEFAULT_CPU_WORKERS, len(os.sched_getaffinity(0)))


def lay_out(config: ResourceConfig, nodes: Sequence[Node], *, workers: int | None = None) -> Layout:
    """Resolve a sweep's resources on the nodes of a cluster.

    Args:
        config: What the sweep says.
        nodes: `{"CPU": 8.0, "GPU": 1.0, ...}` of every node, at the size the cluster can grow to.
        workers: World size of an earlier run of this sweep, used where the sweep leaves it open.

    Raises:
        ResourceError: A trial can never fit, or GPUs are shared by ranks.
    """
    total_gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    gpus = (1.0 if total_gpus else 0.0) if config.gpus_per_worker is None else config.gpus_per_worker
    workers = config.workers or workers or (total_gpus if gpus else DEFAULT_CPU_WORKERS)
    if gpus and not isclose(gpus, round(gpus)) and workers > 1:
        raise ResourceError(
            f"resources.gpus_per_worker: got {gpus:g} with {workers} workers, expected a whole number; NCCL refuses two ranks on one GPU"
        )
    layout = Layout(workers, config.cpus_per_worker, float(gpus), slots=1)
    fits = sum(_count(node, layout.bundle) for node in nodes)
    if fits < workers:
        need = ", ".join(f"{amount:g} {name}" for name, amount in layout.bundle.items())
        have = " + ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in layout.bundle) for node in nodes) or "nothing"
        raise ResourceError(
            f"resources: {workers} workers of {need} each never fit: the cluster ({have}) holds {fits}; "
            f"lower resources.workers or resources.cpus_per_worker, or add nodes"
        )
    slots = fits // workers
    if config.concurrent_trials is not None:
        slots = min(slots, config.concurrent_trials)
    return Layout(workers, layout.cpus, layout.gpus, slots)


def _count(node: Node, bundle: Mapping[str, float]) -> int:
    return min(int(node.get(name, 0.0) / amount + FIT_EPS) for name, amount in bundle.items())
