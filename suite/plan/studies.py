"""What the driver decided, for readers that must not decide by themselves: `sweeps/<name>.studies`, rebuilt at every run.

{"studies": {cell key: {"ended": "budget" | "stopped" | null, "budget": trials with all extensions, "saved_trials": of these,
 "trials": that it has, "low": and "high": the range with all extensions, "extensions": decades, "edge": bool, "pruned": trials,
 "room": points that the stop rule expected yet, or null, "pareto": [...] of a search with two objectives}},
 "chosen": {arm key: bool}} for architectures whose contest is decided
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from suite.plan.second_objective import pareto
from suite.record.folder import Home
from suite.record.result import Status

if TYPE_CHECKING:
    from suite.plan.cell_state import CellState


class StoredStudies:
    """The file of a sweep, and what is in it; a trial's end costs the entry of its own cell.

    Args:
        states: Every cell by key, live.
        home: Where the file is.
        sweep: Its name.
    """

    def __init__(self, states: Mapping[str, CellState], home: Home, sweep: str) -> None:
        self.states, self.path = states, home.studies_path(sweep)
        self._entries: dict[str, str] = {}
        self._text: str | None = None
        with contextlib.suppress(FileNotFoundError):
            self._text = self.path.read_text()

    def store(self, cell: str | None = None) -> None:
        """Write what is decided unless it is what the file says.

        Args:
            cell: The one whose trial ended; None = look at all.
        """
        keys: Iterable[str] = self.states if cell is None else (cell,)
        self._entries |= {
            key: json.dumps(_study(self.states[key]), allow_nan=False) for key in keys
        }
        studies = ",\n  ".join(
            f"{json.dumps(key)}: {entry}" for key, entry in self._entries.items()
        )
        text = f'{{"chosen": {json.dumps(self._chosen())},\n "studies": {{\n  {studies}}}}}\n'
        if text != self._text:
            self._write(text)
            self._text = text

    def _write(self, text: str) -> None:
        """At once, but not synced: of a view nothing is lost."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".studies-new")
        new.write_text(text)
        os.replace(new, self.path)

    def _chosen(self) -> dict[str, bool]:
        competing = (state for state in self.states.values() if state.contest is not None)
        return {state.cell.arm.key: state.chosen for state in competing if state.chosen is not None}


def store_studies(states: Mapping[str, CellState], home: Home, sweep: str) -> None:
    """Write what is decided about every study and contest of a sweep."""
    StoredStudies(states, home, sweep).store()


def _study(state: CellState) -> dict[str, Any]:
    study, second = state.study, state.plan.config.search.second
    entry = {
        "ended": study.ended,
        "budget": study.budget,
        "saved_trials": study.saved_trials,
        "trials": sum(t.result is not None for t in state.searched),
        "low": study.searched.low,
        "high": study.searched.high,
        "extensions": study.extensions,
        "edge": study.ended is not None and study.edge is not None,
        "pruned": sum(
            t.result is not None and t.result.status is Status.PRUNED for t in state.searched
        ),
        "room": study.room,
    }
    return entry if second is None else {**entry, "pareto": pareto(state.searched, second)}
