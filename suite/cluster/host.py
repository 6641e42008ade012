"""Stacks, signals and out-of-memory kills of a group's processes, asked for on their own hosts."""

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
"""A rank answers it by writing its threads' stacks to its log, whatever it is doing."""
DUMP_S = 1.0
ASK_S = 20.0
"""How long a host is waited for; a worker process has to start there first."""
STACK_BYTES = 200_000
STATES = {
    "T": "stopped",
    "t": "stopped",
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "Z": "gone",
    "X": "gone",
}
"""The letters of /proc/PID/stat (man 5 proc)."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a group.

    Attributes:
        node: Its host's id in the cluster.
        pid: Its number on that host.
        oom_kills: `oom_kills()` there when the process began.
    """

    node: str
    pid: int
    oom_kills: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a host says about one of its processes.

    Attributes:
        state: A word of `STATES`, "unreachable", or another letter that /proc gives.
        stacks: What the process wrote when it was asked for its stacks.
    """

    state: str
    stacks: str = ""


# ---- kills for lack of memory --------------------------------------------------------------------


def oom_kills() -> dict[str, int]:
    """Kills for lack of memory so far, by the file that counts them.

    The files are those of this process's control groups and of the whole host.
    """
    return _read_counters([*map(str, _cgroup_counters()), "/proc/vmstat"])


def killed_for_memory(process: Process) -> str | None:
    """The counter on a process's host that has moved since the process began.

    None: no counter moved, or the host does not answer.
    """
    now = ask_host(process.node, _read_counters, list(process.oom_kills)) or {}
    for path, count in process.oom_kills.items():
        if now.get(path, count) > count:
            return path
    return None


def _read_counters(paths: Sequence[str]) -> dict[str, int]:
    """The count of each file that has one. Runs on the host itself."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                name, _, count = line.partition(" ")  # the kernel writes one counter a line
                if name == "oom_kill":
                    found[path] = int(count)
    return found


def _cgroup_counters() -> list[Path]:
    """The files that count kills in this process's memory control group and its parents."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                root = Path("/sys/fs/cgroup")
                name = "memory.events"
            elif "memory" in controllers.split(","):  # version 1
                root = Path("/sys/fs/cgroup/memory")
                name = "memory.oom_control"
            else:
                continue
            folder = root / group.strip("/")
            while folder.is_relative_to(root):
                found.append(folder / name)
                folder = folder.parent
    return found


# ---- stacks and signals --------------------------------------------------------------------------


def inspect_processes(processes: Sequence[Process], logs: Sequence[Path]) -> list[ProcessReport]:
    """The state and the stacks of processes, in their order.

    Args:
        processes: Those of one group.
        logs: The file that each writes to, as its own host sees it.
    """
    ranks_by_node: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        ranks_by_node.setdefault(process.node, []).append(rank)
    answers = {}  # all hosts are asked before the first one's answer is waited for
    for node, ranks in ranks_by_node.items():
        wanted = [(processes[rank].pid, str(logs[rank])) for rank in ranks]
        answers[node] = _begin(node, _dump_stacks, wanted)
    reports = [ProcessReport("unreachable")] * len(processes)
    for node, ranks in ranks_by_node.items():
        found = _wait_for(answers[node])
        if found is not None:
            for rank, report in zip(ranks, found, strict=True):
                reports[rank] = report
    return reports


def _dump_stacks(processes: Sequence[tuple[int, str]]) -> list[ProcessReport]:
    """Ask processes for their stacks, wait a moment, and read what came.

    Runs on the host itself.
    """
    before = []
    for pid, log in processes:
        before.append(size_of(Path(log)))
        with contextlib.suppress(OSError):
            if (
                _state(pid) != "stopped"
            ):  # it would write them, or die of the signal, when it goes on
                os.kill(pid, STACK_SIGNAL)
    time.sleep(DUMP_S)
    reports = []
    for (pid, log), start in zip(processes, before, strict=True):
        reports.append(ProcessReport(_state(pid), _read_from(Path(log), start)))
    return reports


def _state(pid: int) -> str:
    try:
        # After the name, which stands in parentheses and may hold anything.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return STATES.get(letter, letter)


def send_signal(processes: Sequence[Process], number: signal.Signals) -> None:
    """Send a signal to processes on their hosts, as far as these can be reached."""
    pids_by_node: dict[str, list[int]] = {}
    for process in processes:
        pids_by_node.setdefault(process.node, []).append(process.pid)
    answers = [_begin(node, _kill, pids, int(number)) for node, pids in pids_by_node.items()]
    for answer in answers:
        _wait_for(answer)


def _kill(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


# ---- asking a host -------------------------------------------------------------------------------


def ask_host(node: str, function: Callable[..., T], *arguments: Any) -> T | None:
    """A function's answer from a host of the cluster; None if the host does not answer."""
    return _wait_for(_begin(node, function, *arguments))


def _begin(node: str, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
    """Begin to ask a host. The returned function waits for the answer."""
    if node == ray.get_runtime_context().get_node_id():
        return lambda: function(*arguments)  # no other process is needed
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    reference = task.options(scheduling_strategy=strategy).remote(*arguments)

    def wait() -> T:
        try:
            answer: T = ray.get(reference, timeout=ASK_S)
        except BaseException:
            ray.cancel(reference, force=True)
            raise
        return answer

    return wait


def _wait_for(answer: Callable[[], T]) -> T | None:
    try:
        return answer()
    except (RayError, OSError):
        return None


# ---- files ---------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(STACK_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
