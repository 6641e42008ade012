"""Decide which cell is asked first for the next trial, so that slots stay busy to the end.

The trials of a cell follow one another, so a sweep lasts as long as its longest chain of them. A
cell is urgent if its chain is as long as what is left for a slot on average. If such a cell waits,
it will still be going when the others have ended, and then, with slots to spare, its search would
run side by side. (The rule is ours; among chains on equal machines the longest first is optimal:
Hu, 1961.) The cost of a question does not grow with what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.plan.cell_state import CellState

SPARE_ROUNDS = 1.0
"""How many trials early a chain counts as urgent, because trials take different times."""


class CellOrder:
    """The cells of a sweep that are not over.

    Args:
        states: Every cell by key in the plan's order, live.
    """

    def __init__(self, states: Mapping[str, CellState]) -> None:
        self.states = states
        self._open: dict[str, CellState] = {}
        self._chains: dict[str, int] = {}
        for key, state in states.items():
            if not state.status.is_over:
                self._open[key] = state
                self._chains[key] = _chain(state)
        # Cells that have no trial until one of theirs, or of their contest, ends.
        self._without_trial: set[str] = set()

    def ask(
        self, *, last: str | None, live: int, slots: int
    ) -> tuple[list[CellState], list[CellState]]:
        """Cells without a live trial, then those with one, in the order to ask them.

        The first list has urgent cells, the longest chain first, then the warm one, begun ones and
        fresh ones, otherwise in the plan's order.

        Args:
            last: Cell of the trial that ended last: its engine is warm.
            live: Number of live trials.
            slots: Trials that run at a time.
        """
        idle: dict[str, CellState] = {}
        busy: list[CellState] = []
        begun: list[CellState] = []
        fresh: list[CellState] = []
        for key, state in self._open.items():
            if key in self._without_trial:
                continue
            if state.live:
                busy.append(state)
                continue
            idle[key] = state
            if state.searching.trials or state.confirm:
                begun.append(state)
            else:
                fresh.append(state)
        # The fewer trials a study has under way, the more its next proposal knows.
        busy.sort(key=lambda state: len(state.live))
        # A cell may be listed twice, which is harmless: the caller takes the first trial it gets.
        first = self._urgent(idle, last, live, slots)
        if last in idle:
            first.append(idle[last])
        return [*first, *begun, *fresh], busy

    def has_no_trial(self, state: CellState) -> None:
        """Note that the cell had no trial when it was asked."""
        # A cell that waits for its pretrain run is asked again: another sweep of the home may end
        # that run.
        if state.pretrain is None or state.pretrain.ready:
            self._without_trial.add(state.cell.key)

    def handed_out(self, state: CellState) -> None:
        """Note that a trial of the cell begins."""
        for cell in state.searching.cells:
            if cell.key in self._chains:
                self._chains[cell.key] = _chain(self.states[cell.key])

    def ended(self, state: CellState) -> None:
        """Note that a trial of the cell has ended: the cell may be over, or have another trial.

        The same holds for the cells of its study, and for all of its contest, if the trial has
        decided it.
        """
        members = [cell.key for cell in state.searching.cells]
        if state.contest is not None and state.contest.winner() is not None:
            members = [member.cell.key for member in state.contest.cells]
        for key in members:
            # A cell that had no trial before may have one now.
            self._without_trial.discard(key)
            if self.states[key].status.is_over:
                self._open.pop(key, None)
                self._chains.pop(key, None)
            else:
                self._chains[key] = _chain(self.states[key])

    def _urgent(
        self, idle: Mapping[str, CellState], last: str | None, live: int, slots: int
    ) -> list[CellState]:
        if slots == 1 or len(self._open) <= slots:
            # They run one after another in any case, or none has to wait.
            return []
        # A live trial is half done on average.
        rounds = (sum(self._chains.values()) + live / 2) / slots
        urgent = [key for key in idle if self._chains[key] >= rounds - SPARE_ROUNDS]
        # False sorts before True: of equally long chains the warm cell comes first.
        urgent.sort(key=lambda key: (-self._chains[key], key != last))
        return [idle[key] for key in urgent]


def _chain(state: CellState) -> int:
    """Trials of a cell that are still to be handed out, as far as is known now."""
    return state.total - len(state.trials)
