"""Trials of one study that train side by side in one group: each is a lane.

They have the arm, the task, the data and the seed in common, so they see the same batches and draw
the same dropout masks, and the frozen stacks give each of them the same tensors. These run once for
all lanes (`suite.petl._frozen.FrozenPass`). Each lane has an engine, an optimizer and a folder of
its own, and comes out as if it had trained alone: on a CPU bit for bit, on a GPU up to the order in
which its kernels add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import TypeVar

import torch

from suite.meters import PhaseMeter
from suite.petl._frozen import FrozenPass, GivenPass, random_states, set_random_states
from suite.train.running_trial import RunningTrial

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(
    lanes: Sequence[T], work: Callable[[T], R], given: GivenPass | None = None
) -> list[R]:
    """Call `work` for each lane on the same random streams; frozen stacks run for the first alone.

    Args:
        lanes: At least one; a single one does its work as if there were no lanes.
        work: One or more forward passes, with or without their backward passes; with `given` a
            single forward pass.
        given: What the frozen stacks give, which then run for no lane.

    Raises:
        AssertionError: The lanes drew different numbers, or ran other frozen stacks.
    """
    if len(lanes) == 1 and given is None:
        return [work(lanes[0])]
    shared = FrozenPass()
    before = random_states()
    after: list[torch.Tensor] = []
    found: list[R] = []
    for lane in lanes:
        context: AbstractContextManager[None] = shared.recording()
        if found:
            set_random_states(before)
            context = shared.replaying()
        if given is not None:
            context = given.replaying()
        with context:
            found.append(work(lane))
        if not after:
            after = random_states()
        # What a lane draws behind the frozen stacks must leave the others' streams as they were.
        for now, then in zip(random_states(), after, strict=True):
            assert torch.equal(now, then), "lanes drew different numbers"
    return found


class LanesMeter:
    """Meters what lanes do together, and charges each an equal share.

    A single lane is metered by its own meter, which also sees its memory.

    Args:
        lanes: At least one.
        common: The group's meter.
    """

    def __init__(self, lanes: Sequence[RunningTrial], common: PhaseMeter) -> None:
        self._lanes = lanes
        self._alone = len(lanes) == 1
        self._meter = lanes[0].meter if self._alone else common

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Meter a block as phase `name`."""
        with self._meter.phase(name):
            yield
        self.settle()

    def probe(self, *sizes: int) -> AbstractContextManager[bool]:
        """Watch the memory of a step, as `PhaseMeter.probe` does; of lanes it is not known."""
        if self._alone:
            return self._meter.probe(*sizes)
        return nullcontext(False)

    def settle(self) -> None:
        """Charge the lanes for what was metered so far, also in the middle of a phase."""
        if self._alone:
            return
        share = 1 / len(self._lanes)
        charged = {}
        for name, phase in self._meter.take().items():
            charged[name] = asdict(phase.part(share, f"one of {len(self._lanes)} lanes"))
        for lane in self._lanes:
            lane.meter.load_state(charged)
