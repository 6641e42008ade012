"""N worker processes that train one trial after another under one process group.

Neither Ray nor DeepSpeed notices a rank that hangs, and a rank that dies leaves its peers in a
broken collective. So every wait here has a deadline, and whatever goes wrong on one rank ends all
of them. The next use builds new ones.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from suite.cluster import network
from suite.cluster.host import (
    Process,
    inspect_processes,
    killed_for_memory,
    send_signal,
    size_of,
)
from suite.config.sweep import FailureConfig, TimeoutConfig
from suite.disk import fault_of
from suite.errors import end_of
from suite.plan.resources import Layout
from suite.record.attempts import OUT_OF_MEMORY, PREEMPTED, RANK_DIED, TIMEOUT
from suite.record.folder import TrialFolder
from suite.record.result import MESSAGE_CHARS, TRACEBACK_CHARS, FailureRecord, TrialResult
from suite.record.spec import TrialSpec
from suite.redact import redact
from suite.storage.workspace import Workspace
from suite.train.report import EpochReport
from suite.tune.leave_notice import LeaveNotice
from suite.tune.rank import Rank, RankLocation

if TYPE_CHECKING:
    from suite.plan.pruning import Pruning

TRAINER = "suite.train.loop:Trainer"
MAX_TRIALS = 200
"""After so many the processes are replaced: a bound on what slow leaks of libraries add up to."""
GROWTH_FRAC = 0.10
GROWTH_SLACK_BYTES = 64 * 2**20
JOIN_ATTEMPTS = 3
PING_S = 10.0
CLOSE_S = 10.0
GRACE_S = 2.0
"""How long further failures are waited for after the first: one of them may be the cause."""
POLL_S = 1.0
TAIL_BYTES = 4000
FATAL = re.compile(r"Fatal Python error: (.*)")
MEMORY_REMEDY = (
    "lower resources.concurrent_trials, take hosts with more memory, or lower"
    " training.micro_batch_size and give the sweep another name"
)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What every trial of one run of a sweep shares.

    Attributes:
        workspace: Where trials read and write.
        layout: The resources of one worker, and how workers are placed.
        timeouts: How long each step may take.
        trainer: `module:Class` with the interface of `suite.train.loop.Trainer`.
        pruning: Which search trials are ended early; None = none.
        failures: How often a trial is tried again.
    """

    workspace: Workspace
    layout: Layout
    timeouts: TimeoutConfig
    trainer: str = TRAINER
    pruning: Pruning | None = None
    failures: FailureConfig = field(default_factory=FailureConfig)

    def __deepcopy__(self, memo: dict[int, object]) -> RunSettings:
        # Nothing in it changes, and Tune would keep a copy of it for every trial.
        return self


class GroupFailureError(Exception):
    """The machine ended an attempt, not the trial's mathematics: it may be tried again.

    Args:
        record: Which rank failed, how, and where its log is.
        disk: What the home's disk refused; another attempt at once would fail again. "" = nothing.
    """

    def __init__(self, record: FailureRecord, disk: str = "") -> None:
        super().__init__(record, disk)
        self.record = record
        self.disk = disk

    def __str__(self) -> str:
        return f"{self.record.type}: {self.record.message} (log: {self.record.log_path})"


class Group:
    """Ranks in the bundles of a placement group; built at first use, rebuilt after any failure.

    Args:
        settings: What to run and for how long.
        placement: Holds a bundle for each rank; None = the layout's number of ranks, anywhere in
            the cluster.
        notice: Says, while the ranks are at work, whether they are to leave; None = they never are.
    """

    def __init__(
        self,
        settings: RunSettings,
        placement: PlacementGroup | None,
        *,
        notice: LeaveNotice | None = None,
    ) -> None:
        self.settings = settings
        self.placement = placement
        self.notice = notice
        self.workers = settings.layout.workers if placement is None else placement.bundle_count
        self._folder: TrialFolder | None = None
        self._lanes = 1
        self._log_starts: list[int] = []
        self._forget_ranks()

    def _forget_ranks(self) -> None:
        self._ranks: list[ActorHandle[Rank]] = []
        self._processes: list[Process] = []
        self._trials = 0
        self._told_to_leave = False
        self._worn = False
        self._baselines: dict[str, list[int]] = {}  # bytes at the start of each trial, by cell

    # ---- a trial, or several side by side --------------------------------------------------------

    def start(self, specs: Sequence[TrialSpec]) -> int:
        """Begin trials, on warm ranks if they are fit and on new ones else.

        Args:
            specs: One trial, or several of one study; what fails is logged in the first one's
                folder.

        Returns:
            The number of epochs that earlier attempts have committed.

        Raises:
            GroupFailureError: A rank failed, died or did not answer in time; no rank is left.
        """
        self._folder = self.settings.workspace.home.trial(specs[0])
        self._lanes = len(specs)
        self._log_starts = [size_of(self._log(rank)) for rank in self._numbers()]
        self._retire_unfit()
        if not self._ranks:
            self._build()
        spec_jsons = [spec.model_dump_json() for spec in specs]
        arguments = [(spec_jsons, str(self._log(rank))) for rank in self._numbers()]
        epochs = self._call("start", self.settings.timeouts.setup_s, arguments)
        if len(set(epochs)) > 1:
            message = f"ranks resumed at different epochs: {epochs}"
            raise self._failed(FailureRecord(type="RanksDisagree", message=message))
        self._trials += 1
        self._watch_memory(specs[0].cell)
        return int(epochs[0])

    def epoch(self) -> dict[str, EpochReport]:
        """Train and validate one epoch of every trial; reports by hash. Raises as `start`."""
        # The deadline is that of one trial, and they take turns.
        reports = self._call("epoch", self.settings.timeouts.epoch_s * self._lanes)[0]
        assert isinstance(reports, dict)
        return reports

    def finish(self, trial: str, *, pruned: bool = False) -> TrialResult:
        """Test (confirm phase) and write a trial's result; of one that ends early if `pruned`.

        Raises as `start`.
        """
        arguments = [(trial, pruned)] * self.workers
        result = self._call("finish", self.settings.timeouts.epoch_s, arguments)[0]
        assert isinstance(result, TrialResult)
        return result

    def close(self) -> None:
        """End the ranks in order; those that do not answer are killed."""
        if self._ranks:
            closing: list[Any] = [rank.close.remote() for rank in self._ranks]
            with contextlib.suppress(RayError):
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        self._kill()

    def _numbers(self) -> range:
        return range(self.workers)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder.log(rank)

    def _retire_unfit(self) -> None:
        """Drop ranks that grew, served their time, or died between two trials."""
        if self._ranks and (self._worn or self._trials >= MAX_TRIALS):
            self.close()
        if self._ranks:
            with contextlib.suppress(GroupFailureError):  # which has ended them
                self._call("ping", PING_S)

    def _watch_memory(self, cell: str) -> None:
        """Do not use ranks again whose memory at the start of a cell's trials keeps growing."""
        sizes = self._baselines.setdefault(cell, [])
        sizes.append(max(self._call("baseline_bytes", PING_S)))
        # Growth counts from the second trial: what the first one fills (arenas, kernels' caches,
        # buffers of ZeRO) stays.
        reference = sizes[:2][-1]
        self._worn = sizes[-1] > reference * (1 + GROWTH_FRAC) + GROWTH_SLACK_BYTES

    # ---- building the ranks ----------------------------------------------------------------------

    def _build(self) -> None:
        """Start new processes and join them to one process group."""
        for attempt in range(1, JOIN_ATTEMPTS + 1):
            self._ranks = [self._spawn(bundle) for bundle in self._numbers()]
            try:
                self._join()
                return
            except GroupFailureError as failure:
                # Somebody may have taken the port between its choice and its use; another one is
                # chosen then.
                port_taken = "address already in use" in failure.record.message.lower()
                if attempt == JOIN_ATTEMPTS or not port_taken:
                    raise

    def _spawn(self, bundle: int) -> ActorHandle[Rank]:
        layout = self.settings.layout
        options: dict[str, Any] = {
            "num_cpus": layout.cpus,
            "num_gpus": layout.gpus,
            "max_restarts": 0,  # a new process could not join the others' process group
        }
        if self.placement is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.placement, placement_group_bundle_index=bundle
            )
        actor: Any = ray.remote(Rank)
        handle: ActorHandle[Rank] = actor.options(**options).remote()
        return handle

    def _join(self) -> None:
        """Number the ranks, node by node, and let them meet at the first one's address."""
        deadline_s = self.settings.timeouts.setup_s
        layout = self.settings.layout
        found: list[RankLocation] = self._call(
            "where", deadline_s, [(layout.interface,)] * self.workers
        )
        order = rank_order(found)
        self._ranks = [self._ranks[i] for i in order]
        locations = [found[i] for i in order]
        self._processes = [location.process for location in locations]
        nodes = [location.node for location in locations]
        # Nothing listens beyond this machine unless it must.
        address = network.LOOPBACK if len(set(nodes)) == 1 else locations[0].address
        arguments = []
        for rank, location in enumerate(locations):
            place = {
                "rank": rank,
                "local_rank": nodes[:rank].count(location.node),
                "world_size": len(locations),
                "master_addr": address,
                "master_port": locations[0].port,
                "device": layout.device,
            }
            if 0 < layout.gpus < 1:
                # Trials that share a GPU must not take one another's memory.
                place["memory_frac"] = layout.memory_frac
            gpus = _gpus_on(location.node, locations) if layout.gpus else []
            arguments.append(
                (self.settings.trainer, self.settings.workspace, gpus, location.interface, place)
            )
        self._call("join", deadline_s, arguments)

    # ---- calling the ranks -----------------------------------------------------------------------

    def _call(
        self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call a method on every rank and wait for all.

        The first failure, or the deadline, ends every rank.
        """
        refs = []
        for i, rank in enumerate(self._ranks):
            given = arguments[i] if arguments else ()
            refs.append(getattr(rank, method).remote(*given))
        waiting = list(refs)
        end = time.monotonic() + deadline_s
        errors: dict[int, Exception] = {}
        while waiting and not errors:
            self._pass_on_notice()
            left_s = max(0.0, end - time.monotonic())
            # One at a time and in short steps, so that neither a failure nor a notice waits.
            ready, waiting = ray.wait(waiting, timeout=min(POLL_S, left_s))
            errors = _errors(refs, ready)
            if waiting and not errors and time.monotonic() >= end:
                silent = [refs.index(ref) for ref in waiting]
                raise self._hung(f"{method}: no answer", deadline_s, silent=silent)
        if errors and waiting:
            late, _ = ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S)
            errors |= _errors(refs, late)
        if errors:
            raise self._blame(method, errors)
        # No deadline: all have answered, and answers this small lie in this process already.
        return ray.get(refs)

    def _pass_on_notice(self) -> None:
        """Have the ranks leave, once, if they are to.

        They answer with an error when their checkpoint is written.
        """
        if self.notice is None or not self._processes or self._told_to_leave:
            return
        if self.notice.reason(process.node for process in self._processes):
            self._told_to_leave = True
            send_signal(self._processes, signal.SIGTERM)

    # ---- failures --------------------------------------------------------------------------------

    def _blame(self, method: str, errors: dict[int, Exception]) -> GroupFailureError:
        """The failure behind the failures.

        A rank that died comes first, then one with an error of its own, then a broken connection.
        """
        rank = min(errors, key=lambda i: (_severity(errors[i]), i))
        error = errors[rank]
        home = self.settings.workspace.home.path
        faults = [fault_of(each, home) for each in errors.values()]
        if isinstance(error, (RayActorError, OutOfMemoryError)):
            record = self._death(method, rank, error)
        else:
            cause = error
            if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
                cause = error.cause
            record = FailureRecord(
                type=type(cause).__name__,
                message=f"{method}: rank {rank}: {in_words(cause)}"[:MESSAGE_CHARS],
                traceback=str(error),
            )
        return self._failed(record, rank=rank, disk=next(filter(None, faults), ""))

    def _death(self, method: str, rank: int, error: RayError) -> FailureRecord:
        """The record of a process that died, with the cause as far as anyone knows it."""
        kind, why = self._cause_of_death(rank, error)
        message = f"{method}: rank {rank} died: {why}"
        return FailureRecord(type=kind, message=message, traceback=str(error))

    def _cause_of_death(self, rank: int, error: RayError) -> tuple[str, str]:
        """The type of a failure record, and the cause in words; the surest signs come first."""
        if isinstance(error, RayActorError) and error.preempted:
            return PREEMPTED, "its node was taken away, as announced"
        # An actor that the monitor killed raises RayActorError; only its text says why.
        if isinstance(error, OutOfMemoryError) or "running low on memory" in str(error):
            return OUT_OF_MEMORY, f"Ray's memory monitor killed it; {MEMORY_REMEDY}"
        crash = FATAL.search(_tail(self._log(rank), after=self._log_starts[rank]))
        if crash is not None:
            return RANK_DIED, f"it crashed: {crash[1]}"
        counter = killed_for_memory(self._processes[rank]) if self._processes else None
        if counter is not None:
            return (
                OUT_OF_MEMORY,
                f"killed for lack of memory, as {counter} counted; {MEMORY_REMEDY}",
            )
        if self._told_to_leave:
            return PREEMPTED, "it left before the trial had begun, as asked"
        return RANK_DIED, "its process is gone without a word, as after SIGKILL; by whom is unknown"

    def _hung(self, what: str, deadline_s: float, *, silent: list[int]) -> GroupFailureError:
        """The end of a group that does not answer, with the stacks of all its processes.

        Only the process that hangs shows why, and nobody knows which one that is.
        """
        logs = [self._log(rank) for rank in self._numbers()]
        reports = inspect_processes(self._processes, logs)
        odd = []
        states = ""
        stacks = []
        for rank, report in enumerate(reports):
            stacks.append(f"--- rank {rank}, {report.state} ---\n{report.stacks}")
            if report.state in ("stopped", "unreachable", "gone"):
                odd.append(rank)
                states += f"; rank {rank} is {report.state}"
        record = FailureRecord(
            type=TIMEOUT,
            message=f"{what} from rank {silent} within {deadline_s:g} s{states}",
            traceback="\n".join(stacks),
        )
        # A rank that waits for a stopped one is silent, too: the odd ones are the cause.
        return self._failed(record, rank=(odd or silent)[0])

    def _failed(self, record: FailureRecord, *, rank: int = 0, disk: str = "") -> GroupFailureError:
        """End every rank, and add to the record the log of the one to blame."""
        self._kill()
        path = self._log(rank)
        text = redact(f"{record.traceback}\n--- end of {path.name} ---\n{_tail(path)}".strip())
        about = {"log_path": str(path), "traceback": text[-TRACEBACK_CHARS:]}
        return GroupFailureError(record.model_copy(update=about), disk)

    def _kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank, no_restart=True)
        self._forget_ranks()


def rank_order(locations: Sequence[RankLocation]) -> list[int]:
    """Indices of processes in the order of their ranks: those of a node side by side, by GPU."""
    nodes = [location.node for location in locations]

    def key(i: int) -> tuple[int, list[tuple[int, str]], int]:
        # The length first, so that GPU 10 comes after GPU 9.
        gpus = [(len(gpu), gpu) for gpu in locations[i].gpus]
        return nodes.index(nodes[i]), gpus, i

    return sorted(range(len(locations)), key=key)


def _gpus_on(node: str, locations: Sequence[RankLocation]) -> list[str]:
    """The first GPU of each rank of a node."""
    return [place.gpus[0] for place in locations if place.node == node and place.gpus]


def _errors(refs: Sequence[Any], ready: Sequence[Any]) -> dict[int, Exception]:
    """Exceptions of finished calls, by rank."""
    found: dict[int, Exception] = {}
    for ref in ready:
        try:
            ray.get(ref, timeout=PING_S)
        except RayError as error:  # of the trial, or of Ray where the process is gone
            found[refs.index(ref)] = error
    return found


def in_words(error: Exception) -> str:
    """What an error says; of a traceback that Ray quotes in it, the last line."""
    said, _, quoted = str(error).partition("Traceback (most recent call last)")
    if not quoted.strip():
        return said
    return " ".join([*said.split(), end_of(quoted)])


def _severity(error: Exception) -> int:
    """How likely it is that an error caused the others; the least number is the likeliest cause."""
    if isinstance(error, (RayActorError, OutOfMemoryError)):
        return 0
    text = str(getattr(error, "cause", error)).lower()
    # What the peers of a dead or failed rank see of it.
    connection_lost = ("connection", "gloo", "nccl", "timed out", "broken pipe")
    return 2 if any(sign in text for sign in connection_lost) else 1


def _tail(path: Path, *, after: int = 0) -> str:
    """The end of a file; nothing of its first `after` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(after, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
