"""What is to be learnt about the processes of a group from outside of them, on their own hosts: stacks, signals, out-of-memory kills."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")
STACK_SIGNAL = signal.SIGUSR1
"""A rank answers it with the stacks of its threads, in its log, whatever it is doing (faulthandler)."""
DUMP_S = 1.0
ASK_S = 20.0
"""How long a host is waited for; a worker process has to start there first."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a group.

    Attributes:
        node: Its host's id in the cluster.
        oom_kills: `oom_kills()` there when the process began.
    """

    node: str
    pid: int
    oom_kills: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a host says about one of its processes.

    Attributes:
        state: "gone", "stopped", "running", "sleeping", "stuck in the kernel", or what else /proc says.
        stacks: What it wrote when it was asked for its stacks.
    """

    state: str
    stacks: str = ""


def oom_kills() -> dict[str, int]:
    """Kills for lack of memory that were counted so far, by counter: this process's control groups, and the whole host."""
    found = {}
    for path in (*_cgroup_events(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(
                line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) >= 2
            )
            if "oom_kill" in counts:
                found[str(path)] = int(counts["oom_kill"])
    return found


def _cgroup_events() -> list[Path]:
    """Of the control group and its parents: `memory.events` (version 2), `memory.oom_control` (version 1)."""
    paths = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            root = Path(
                "/sys/fs/cgroup/memory" if "memory" in controllers.split(",") else "/sys/fs/cgroup"
            )
            name = "memory.oom_control" if "memory" in controllers.split(",") else "memory.events"
            if controllers in ("", "memory") or "memory" in controllers.split(","):
                inside = root / group.strip("/")
                paths += [
                    folder / name
                    for folder in (inside, *inside.parents)
                    if folder.is_relative_to(root)
                ]
    return paths


def killed_for_memory(process: Process) -> str | None:
    """The counter on a process's host that moved since the process began, or None: none did, or the host does not answer."""
    now = ask_host(process.node, _read_counters, list(process.oom_kills)) or {}
    moved = [path for path, count in process.oom_kills.items() if now.get(path, count) > count]
    return moved[0] if moved else None


def _read_counters(paths: Sequence[str]) -> dict[str, int]:
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found[path] = int(
                dict(line.split()[:2] for line in Path(path).read_text().splitlines())["oom_kill"]
            )
    return found


def look_at(processes: Sequence[Process], logs: Sequence[Path]) -> list[Seen]:
    """The state and the stacks of processes, in their order; "unreachable" where a host does not answer.

    Args:
        processes: Of one group.
        logs: Where each writes, as its own host sees it.
    """
    by_node: dict[str, list[int]] = {}
    for i, process in enumerate(processes):
        by_node.setdefault(process.node, []).append(i)
    seen = [Seen("unreachable")] * len(processes)
    asked = {
        node: _begin(node, _look, [(processes[i].pid, str(logs[i])) for i in indices])
        for node, indices in by_node.items()
    }
    for node, indices in by_node.items():
        for i, answer in zip(indices, _answer(asked[node]) or (), strict=False):
            seen[i] = answer
    return seen


def _look(processes: Sequence[tuple[int, str]]) -> list[Seen]:
    """On the host itself: ask every process for its stacks, wait a moment, and read what came."""
    before = []
    for pid, log in processes:
        before.append(_size(Path(log)))
        with contextlib.suppress(OSError):
            if _state(pid) != "stopped":
                os.kill(pid, STACK_SIGNAL)
    time.sleep(DUMP_S)
    return [
        Seen(_state(pid), _from(Path(log), start))
        for (pid, log), start in zip(processes, before, strict=True)
    ]


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    words = {
        "T": "stopped",
        "t": "stopped",
        "R": "running",
        "S": "sleeping",
        "D": "stuck in the kernel",
        "Z": "gone",
        "X": "gone",
    }
    return words.get(letter, letter)


def tell(processes: Sequence[Process], number: signal.Signals) -> None:
    """Send a signal to processes on their hosts, as far as these can be reached."""
    nodes = {process.node for process in processes}
    asked = [
        _begin(node, _signal, [p.pid for p in processes if p.node == node], int(number))
        for node in nodes
    ]
    for answer in asked:
        _answer(answer)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def ask_host(node: str, function: Callable[..., T], *args: Any) -> T | None:
    """A function's answer from a host of the cluster, None where it does not answer."""
    return _answer(_begin(node, function, *args))


def _begin(node: str, function: Callable[..., T], *args: Any) -> Callable[[float], T]:
    """Begin to ask: here where it is this host, else by a task of its own. The answer is a function of the seconds to wait."""
    if node == ray.get_runtime_context().get_node_id():
        return lambda seconds: function(*args)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    ref = task.options(scheduling_strategy=strategy).remote(*args)

    def answer(seconds: float) -> T:
        try:
            value: T = ray.get(ref, timeout=seconds)
        except BaseException:
            ray.cancel(ref, force=True)
            raise
        return value

    return answer


def _answer(asked: Callable[[float], T]) -> T | None:
    try:
        return asked(ASK_S)
    except (RayError, OSError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _from(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(200_000).decode(errors="replace").strip()
    except OSError:
        return ""
