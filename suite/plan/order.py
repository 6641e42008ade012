"""Which cell is asked first for the next trial, so that slots stay busy to the end; what a question costs does not grow with what is done.

The trials of a cell follow one another, so a sweep lasts as long as its longest chain of them. A cell whose chain is as long as what is
left for a slot on average is urgent: were it to wait, it would still be going when the others have ended, and then, with slots to spare,
its search would run side by side. (Ours; among chains on equal machines the longest first is optimal: Hu, 1961.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.plan.cell_state import CellState

SPARE_ROUNDS = 1.0
"""A chain is urgent so many trials early: their lengths differ."""


class Order:
    """The cells of a sweep that are not over.

    Args:
        states: Every cell by key in the plan's order, live.
    """

    def __init__(self, states: Mapping[str, CellState]) -> None:
        self.states = states
        self._open = {key: state for key, state in states.items() if not state.status.is_over}
        self._chains = {key: _chain(state) for key, state in self._open.items()}
        self._nothing: set[str] = (
            set()
        )  # no trial to hand out before one of theirs, or of their contest, ends

    def ask(
        self, *, last: str | None, live: int, slots: int
    ) -> tuple[list[CellState], list[CellState]]:
        """Cells that have no trial, then those that have one, in the order to ask them.

        Of the first: urgent ones, the longest chain first; the warm one; begun ones; fresh ones; all in the plan's order.

        Args:
            last: Cell of the trial that ended last: its engine is warm.
            live: Trials that run.
            slots: Trials that run at a time.
        """
        candidates = {key: state for key, state in self._open.items() if key not in self._nothing}
        idle = {key: state for key, state in candidates.items() if not state.live}
        warm = [idle[last]] if last in idle else []
        begun = [s for s in idle.values() if s.search or s.confirm]
        fresh = [s for s in idle.values() if not (s.search or s.confirm)]
        busy = sorted((s for s in candidates.values() if s.live), key=lambda s: len(s.live))
        return [*self._urgent(idle, last, live, slots), *warm, *begun, *fresh], busy

    def has_nothing(self, state: CellState) -> None:
        """The cell was asked in vain."""
        if (
            state.pretrain is None or state.pretrain.ready
        ):  # else another sweep of the home may end the pretrain run
            self._nothing.add(state.cell.key)

    def handed_out(self, state: CellState) -> None:
        """A trial of the cell begins."""
        self._chains[state.cell.key] = _chain(state)

    def ended(self, state: CellState) -> None:
        """A trial of the cell has ended: it may be over, or have another; so may those whose contest that has decided."""
        decided = state.contest is not None and state.contest.winner() is not None
        for member in state.contest.cells if state.contest is not None and decided else (state,):
            key = member.cell.key
            self._nothing.discard(key)
            if self.states[key].status.is_over:
                self._open.pop(key, None)
                self._chains.pop(key, None)
            else:
                self._chains[key] = _chain(self.states[key])

    def _urgent(
        self, idle: Mapping[str, CellState], last: str | None, live: int, slots: int
    ) -> list[CellState]:
        if (
            slots == 1 or len(self._open) <= slots
        ):  # one after another in any case, or none has to wait
            return []
        rounds = (sum(self._chains.values()) + live / 2) / slots
        urgent = [key for key in idle if self._chains[key] >= rounds - SPARE_ROUNDS]
        return [
            idle[key] for key in sorted(urgent, key=lambda key: (-self._chains[key], key != last))
        ]


def _chain(state: CellState) -> int:
    """Trials of a cell that are still to be handed out, as far as is known now."""
    return state.total - len(state.trials)
