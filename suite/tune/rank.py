"""The process of one rank: a Ray actor that hosts the trainer, and what it tells about itself."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from suite.cluster import network
from suite.cluster.host import STACK_SIGNAL, Process, oom_kills
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.report import EpochReport

EXIT_AFTER_SIGTERM = 128 + signal.SIGTERM
"""Exit code of a rank that was told to leave and had nothing to keep."""
STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where the process of a rank is, before it has a number.

    Attributes:
        node: Its host's id in the cluster.
        interface: Network interface of a group that spans nodes; None = whatever the libraries
            find.
        address: The interface's IPv4 address.
        port: A TCP port that is free there.
        gpus: Its own GPUs, as CUDA_VISIBLE_DEVICES names them.
        process: How it is found from outside.
    """

    node: str
    interface: str | None
    address: str
    port: int
    gpus: tuple[str, ...]
    process: Process


class Rank:
    """The process of one rank; a Ray actor that hosts the trainer."""

    def __init__(self) -> None:
        self._trainer: Any = None  # `suite.train.loop.Trainer`, imported in this process only
        self._trials = 0  # those at work
        # Both write to file 2, which `start` makes the log of the trial that runs.
        faulthandler.enable(file=STDERR)
        faulthandler.register(STACK_SIGNAL, file=STDERR)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """The host will be gone soon.

        A trial leaves with a checkpoint; without a trial there is nothing to keep.
        """
        if not self._trials:
            os._exit(EXIT_AFTER_SIGTERM)
        self._trainer.leave()

    def where(self, interface: str | None) -> RankLocation:
        """Where this process is, with an address and a port that is free there now."""
        name, address = network.choose(interface, address=str(ray.util.get_node_ip_address()))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        node = ray.get_runtime_context().get_node_id()
        return RankLocation(
            node=node,
            interface=name,
            address=address,
            port=network.free_port(),
            gpus=tuple(gpu for gpu in visible.split(",") if gpu),
            process=Process(node, os.getpid(), oom_kills()),
        )

    def ping(self) -> None:
        """Answer, which a dead or stopped process does not."""

    def join(
        self,
        trainer: str,
        workspace: Workspace,
        gpus: Sequence[str],
        interface: str | None,
        place: dict[str, Any],
    ) -> None:
        """Make the trainer, which joins the process group.

        Args:
            trainer: `module:Class`.
            workspace: Where the trainer reads and writes.
            gpus: Those of all ranks of this node, because NCCL's peer access needs to see them;
                empty = none.
            interface: As in `RankLocation`.
            place: `rank`, `world_size`, `master_addr` and so on, as `suite.train.loop.Trainer`
                takes them.

        Raises:
            ResourceError: This node does not see what the driver writes.
        """
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if place["master_addr"] == network.LOOPBACK:
            network.use_loopback()
        else:
            network.use(interface)
        # This node may have joined after the driver asked all nodes.
        if workspace.fence is not None:
            workspace.fence.check_seen()
        module, _, name = trainer.partition(":")
        self._trainer = getattr(importlib.import_module(module), name)(workspace, **place)

    def start(self, spec_jsons: Sequence[str], log_path: str) -> int:
        """Begin or take up trials that train side by side.

        From here on the process prints to the log of the first one.
        """
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        # The files themselves, not `sys.stdout`: NCCL and crashes write there, too.
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, STDOUT)
        os.dup2(log, STDERR)
        os.close(log)
        specs = [TrialSpec.model_validate_json(spec_json) for spec_json in spec_jsons]
        self._trials = len(specs)
        return int(self._trainer.start_lanes(specs))

    def epoch(self) -> dict[str, EpochReport]:
        """Train one epoch of every trial; their reports by hash."""
        reports = self._trainer.epoch_of_lanes()
        assert isinstance(reports, dict)
        return reports

    def finish(self, trial: str, pruned: bool) -> TrialResult:
        """End one of the trials, by its hash."""
        result = self._trainer.finish_lane(trial, pruned=pruned)
        self._trials -= 1
        assert isinstance(result, TrialResult)
        return result

    def baseline_bytes(self) -> int:
        return int(self._trainer.baseline_bytes())

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
