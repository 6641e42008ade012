"""N worker processes that train one trial after another under one process group.

Neither Ray nor DeepSpeed notices a rank that hangs, and a rank that dies leaves its peers in a broken collective:
every wait here has a deadline, and whatever goes wrong on one rank ends all of them. The next use builds new ones.
"""

from __future__ import annotations

import contextlib
import errno
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
from suite.cluster.host import Process, killed_for_memory, look_at, tell
from suite.config.sweep import FailureConfig, TimeoutConfig
from suite.plan.resources import Layout
from suite.record.folder import TrialFolder
from suite.record.result import FailureRecord, TrialResult
from suite.record.spec import TrialSpec
from suite.redact import redact
from suite.storage.workspace import Workspace
from suite.tune.leave_notice import Notice
from suite.tune.rank import Place, Rank, Report

if TYPE_CHECKING:
    from suite.plan.pruning import Pruning

TRAINER = "suite.train.loop:Trainer"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
MAX_TRIALS = 200
GROWTH_FRAC, GROWTH_SLACK_BYTES = 0.10, 64 * 2**20
JOIN_ATTEMPTS = 3
PING_S, CLOSE_S, GRACE_S = 10.0, 10.0, 2.0
POLL_S = 1.0
TAIL_BYTES = 4000
FATAL = re.compile(r"Fatal Python error: (.*)")
MEMORY_REMEDY = "set a smaller training.micro_batch_size, a lower resources.concurrent_trials, or take hosts with more memory"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a group needs beside its trials.

    Attributes:
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

    def __deepcopy__(self, memo: dict[int, object]) -> Settings:
        """Itself, as nothing in it changes: Tune would keep a copy of it for every trial."""
        return self


class GroupFailureError(Exception):
    """The machine ended an attempt, not the trial's mathematics: it may be tried again.

    Args:
        record: Which rank, what and where its log is.
        full_disk: Whether there was no space left; trying again at once would fail again.
    """

    def __init__(self, record: FailureRecord, full_disk: bool = False) -> None:
        super().__init__(record, full_disk)
        self.record, self.full_disk = record, full_disk

    def __str__(self) -> str:
        return f"{self.record.type}: {self.record.message} (log: {self.record.log_path})"


class Group:
    """Ranks in the bundles of a placement group; built at first use, rebuilt after any failure.

    Args:
        settings: What to run and for how long.
        placement: A bundle for each rank, as many as it has; None = the layout's number of ranks, anywhere in the cluster.
        max_trials: Trials after which the processes are replaced, whatever they look like.
        notice: Asked while the ranks are at work whether they are to leave; None = nobody says so.
    """

    def __init__(
        self,
        settings: Settings,
        placement: PlacementGroup | None,
        *,
        max_trials: int = MAX_TRIALS,
        notice: Notice | None = None,
    ) -> None:
        self.settings, self.placement, self.max_trials, self.notice = (
            settings,
            placement,
            max_trials,
            notice,
        )
        self.workers = settings.layout.workers if placement is None else placement.bundle_count
        self._ranks: list[ActorHandle[Rank]] = []
        self._processes: list[Process] = []
        self._warned = False
        self._folder: TrialFolder | None = None
        self._log_starts: list[int] = []
        self._trials = 0
        self._baselines: dict[str, list[int]] = {}
        self._worn = False

    def start(self, spec: TrialSpec) -> int:
        """Begin a trial on warm ranks if they are fit, on new ones else.

        Returns:
            Epochs that an earlier attempt has committed.

        Raises:
            GroupFailureError: A rank failed, died or did not answer in time; no rank is left.
        """
        self._folder = self.settings.workspace.home.trial(spec)
        self._log_starts = [_size(self._log(i)) for i in self._indices()]
        self._retire_unfit()
        if not self._ranks:
            self._build()
        epochs = self._call(
            "start",
            self.settings.timeouts.setup_s,
            [(spec.model_dump_json(), str(self._log(i))) for i in self._indices()],
        )
        if len(set(epochs)) > 1:
            raise self._failed(
                FailureRecord(
                    type="RanksDisagree", message=f"ranks resumed at different epochs: {epochs}"
                )
            )
        self._trials += 1
        self._watch_memory(spec.cell)
        return int(epochs[0])

    def epoch(self) -> Report:
        """Train and validate one epoch. Raises as `start`."""
        report = self._call("epoch", self.settings.timeouts.epoch_s)[0]
        assert isinstance(report, Report)
        return report

    def finish(self, *, pruned: bool = False) -> TrialResult:
        """Test (confirm phase) and write the result, of a trial that is ended early if `pruned`. Raises as `start`."""
        result = self._call(
            "finish", self.settings.timeouts.epoch_s, [(pruned,) for _ in self._indices()]
        )[0]
        assert isinstance(result, TrialResult)
        return result

    def close(self) -> None:
        """End the ranks in order; whoever does not answer is killed."""
        if self._ranks:
            with contextlib.suppress(RayError):
                ray.wait(
                    [r.close.remote() for r in self._ranks],
                    num_returns=len(self._ranks),
                    timeout=CLOSE_S,
                )
        self._kill()

    def _indices(self) -> range:
        return range(self.workers)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder.log(rank)

    def _retire_unfit(self) -> None:
        """Drop ranks that grew, served their time, or died between two trials."""
        if self._ranks and (self._worn or self._trials >= self.max_trials):
            self.close()
        if self._ranks:
            with contextlib.suppress(GroupFailureError):
                self._call("ping", PING_S)

    def _watch_memory(self, kind: str) -> None:
        """Ranks whose memory at the start of a trial grew since the second trial of the same cell are not used again.

        Not since the first: what training fills once (arenas, kernels' caches, buffers of ZeRO) is there from then on.
        """
        seen = self._baselines.setdefault(kind, [])
        seen.append(max(self._call("baseline_bytes", PING_S)))
        self._worn = seen[-1] > seen[:2][-1] * (1 + GROWTH_FRAC) + GROWTH_SLACK_BYTES

    def _build(self) -> None:
        """New processes, joined to one process group; another port is tried if the one picked was taken meanwhile."""
        for attempt in range(1, JOIN_ATTEMPTS + 1):
            self._ranks = [self._spawn(i) for i in self._indices()]
            try:
                self._join()
            except GroupFailureError as failure:
                if (
                    attempt == JOIN_ATTEMPTS
                    or "address already in use" not in failure.record.message.lower()
                ):
                    raise
            else:
                return

    def _spawn(self, bundle: int) -> ActorHandle[Rank]:
        layout = self.settings.layout
        options: dict[str, Any] = {
            "num_cpus": layout.cpus,
            "num_gpus": layout.gpus,
            "max_restarts": 0,
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
        deadline_s, layout = self.settings.timeouts.setup_s, self.settings.layout
        found: list[Place] = self._call(
            "where", deadline_s, [(layout.interface,) for _ in self._indices()]
        )
        order = rank_order(found)
        self._ranks, places = [self._ranks[i] for i in order], [found[i] for i in order]
        self._processes = [place.process for place in places]
        nodes = [place.node for place in places]
        # nothing listens beyond this machine unless it must
        address = network.LOOPBACK if len(set(nodes)) == 1 else places[0].address
        shared = {
            "world_size": len(places),
            "master_addr": address,
            "master_port": places[0].port,
            "device": layout.device,
        }
        arguments = []
        for i, node in enumerate(nodes):
            gpus = (
                [gpu for place in places if place.node == node for gpu in place.gpus[:1]]
                if layout.gpus
                else []
            )
            place = {**shared, "rank": i, "local_rank": nodes[:i].count(node)}
            arguments.append(
                (self.settings.trainer, self.settings.workspace, gpus, places[i].interface, place)
            )
        self._call("join", deadline_s, arguments)

    def _call(
        self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call a method on every rank and wait for all; the first failure or the deadline ends every rank."""
        refs = [
            getattr(r, method).remote(*(arguments[i] if arguments else ()))
            for i, r in enumerate(self._ranks)
        ]
        waiting, end = list(refs), time.monotonic() + deadline_s
        errors: dict[int, Exception] = {}
        while waiting and not errors:
            self._pass_on_notice()
            ready, waiting = ray.wait(
                waiting, timeout=max(0.0, min(POLL_S, end - time.monotonic()))
            )
            errors = _errors(refs, ready)
            if waiting and not errors and time.monotonic() >= end:
                raise self._hung(
                    f"{method}: no answer", deadline_s, silent=[refs.index(ref) for ref in waiting]
                )
        if errors:
            late, _ = (
                ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S)
                if waiting
                else ([], [])
            )
            raise self._blame(method, errors | _errors(refs, late))
        return ray.get(refs)

    def _blame(self, method: str, errors: dict[int, Exception]) -> GroupFailureError:
        """The failure behind the failures: a rank that died, else one with an error of its own, else a broken connection."""
        rank = min(errors, key=lambda i: (_severity(errors[i]), i))
        error = errors[rank]
        cause = (
            error.cause
            if isinstance(error, RayTaskError) and isinstance(error.cause, Exception)
            else error
        )
        full_disk = any(is_full_disk(e) for e in errors.values())
        if isinstance(error, (RayActorError, OutOfMemoryError)):
            record = self._death(method, rank, error)
        else:
            record = FailureRecord(
                type=type(cause).__name__,
                message=f"{method}: rank {rank}: {cause}"[:2000],
                traceback=str(error),
            )
        return self._failed(record, rank=rank, full_disk=full_disk)

    def _death(self, method: str, rank: int, error: RayError) -> FailureRecord:
        """Of what a process died, as far as anyone knows: notice was given, its host lacked memory, it crashed, or no more than that."""
        kind, why = (
            "RankDied",
            "its process is gone without a word, as after SIGKILL; by whom is unknown",
        )
        process = self._processes[rank] if self._processes else None
        if isinstance(error, RayActorError) and error.preempted:
            kind, why = "PreemptedError", "its node was taken away, as announced"
        elif isinstance(error, OutOfMemoryError) or "running low on memory" in str(error):
            kind, why = "HostOutOfMemory", f"Ray's memory monitor killed it; {MEMORY_REMEDY}"
        elif (
            crash := FATAL.search(_tail(self._log(rank), after=self._log_starts[rank]))
        ) is not None:
            why = f"it crashed: {crash[1]}"
        elif process is not None and (counter := killed_for_memory(process)) is not None:
            kind, why = (
                "HostOutOfMemory",
                f"killed for lack of memory, as {counter} counted; {MEMORY_REMEDY}",
            )
        return FailureRecord(
            type=kind, message=f"{method}: rank {rank} died: {why}", traceback=str(error)
        )

    def _pass_on_notice(self) -> None:
        """Have the ranks leave, once, if they are to: they answer with an error when their checkpoint is written."""
        if (
            self.notice is not None
            and self._processes
            and not self._warned
            and self.notice.why(p.node for p in self._processes)
        ):
            self._warned = True
            tell(self._processes, signal.SIGTERM)

    def _hung(self, what: str, deadline_s: float, *, silent: list[int]) -> GroupFailureError:
        """The end of a group that does not answer, with the stacks of all its processes: only the one that hangs shows why."""
        seen = look_at(self._processes, [self._log(i) for i in self._indices()])
        odd = [
            i
            for i, process in enumerate(seen)
            if process.state in ("stopped", "unreachable", "gone")
        ]
        states = "".join(f"; rank {i} is {seen[i].state}" for i in odd)
        stacks = "\n".join(
            f"--- rank {i}, {process.state} ---\n{process.stacks}" for i, process in enumerate(seen)
        )
        record = FailureRecord(
            type="Timeout",
            message=f"{what} from rank {silent} within {deadline_s:g} s{states}",
            traceback=stacks,
        )
        return self._failed(record, rank=(odd or silent)[0])

    def _failed(
        self, record: FailureRecord, *, rank: int = 0, full_disk: bool = False
    ) -> GroupFailureError:
        """End every rank, and complete the record by the log of the one to blame."""
        self._kill()
        path = self._log(rank)
        text = redact(f"{record.traceback}\n--- end of {path.name} ---\n{_tail(path)}".strip())
        return GroupFailureError(
            record.model_copy(update={"log_path": str(path), "traceback": text[-20_000:]}),
            full_disk,
        )

    def _kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank, no_restart=True)
        self._ranks, self._processes, self._trials, self._worn, self._warned = (
            [],
            [],
            0,
            False,
            False,
        )
        self._baselines.clear()


def rank_order(places: Sequence[Place]) -> list[int]:
    """Indices of processes in the order of their ranks: those of a node side by side, by GPU."""
    nodes = [place.node for place in places]
    gpus = [
        [(len(gpu), gpu) for gpu in place.gpus] for place in places
    ]  # as numbers: 10 comes after 9
    return sorted(range(len(places)), key=lambda i: (nodes.index(nodes[i]), gpus[i], i))


def _errors(refs: Sequence[Any], ready: Sequence[Any]) -> dict[int, Exception]:
    """Exceptions of finished calls by rank."""
    found: dict[int, Exception] = {}
    for ref in ready:
        try:
            ray.get(ref)
        except RayError as error:
            found[refs.index(ref)] = error
    return found


def _severity(error: Exception) -> int:
    if isinstance(error, (RayActorError, OutOfMemoryError)):
        return 0
    text = str(getattr(error, "cause", error)).lower()
    return (
        2
        if any(sign in text for sign in ("connection", "gloo", "nccl", "timed out", "broken pipe"))
        else 1
    )


def is_full_disk(error: Exception) -> bool:
    """Whether there was no space left, also where Ray or Tune wrapped the error."""
    cause = getattr(error, "cause", None) or error
    return (
        isinstance(cause, OSError) and cause.errno in FULL_DISK
    ) or "No space left on device" in str(error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, *, after: int = 0) -> str:
    """The end of a file, of what lies `after` so many bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(after, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
