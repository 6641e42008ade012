"""Where the ranks of a trial find its home, its data and room for scratch files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from suite.config.sweep import ResourceConfig
from suite.config.training import Partitioning
from suite.record.folder import Home
from suite.storage.base import PATIENCE_S
from suite.storage.fence import Fence


@dataclass(frozen=True, slots=True)
class Workspace:
    """Places of files, and what a driver decided. They are no part of a trial's identity.

    Attributes:
        home: The sweep's home.
        data_root: Local data root that replaces the hub, or None.
        collective_timeout_s: Deadline of every collective operation.
        scratch: Folder that the ranks of a host share, for files that no later process wants.
            Whoever starts the ranks removes it.
        storage: URL below which the home is mirrored if hosts share no disk
            (`suite.storage.mirror`); None = they share the home.
        patience_s: For how long the storage is asked again when it is away.
        fence: The claim of the driver that this process works for; None = no other driver can take
            the sweep over.
        partitioning: How trials lay out their weights where their specification says `auto`.
        frozen_states_bytes: Most bytes of the home's cache for states of frozen stacks.
        usable_bytes: What the states of a trial may take of a worker's memory, the rest being for
            what no estimate counts; None = unknown.
    """

    home: Home
    data_root: Path | None = None
    collective_timeout_s: float = 600.0
    scratch: Path | None = None
    storage: str | None = None
    patience_s: float = PATIENCE_S
    fence: Fence | None = None
    partitioning: Partitioning = field(default_factory=Partitioning)
    frozen_states_bytes: int = ResourceConfig().frozen_states_bytes
    usable_bytes: int | None = None

    @property
    def engines(self) -> Path:
        """The folder in which warm engines keep their step 0."""
        scratch = self.scratch or self.home.path / ".tune"
        return scratch / "engines"
