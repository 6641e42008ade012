"""Timing with an idle device at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from suite.meters import TensorPeak, release_memory, synchronise


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Wall clock of one call."""
    synchronise(device)
    began_s = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - began_s


def repeated(
    run: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    least: int = 5,
    most: int = 200,
) -> list[float]:
    """Seconds of as many calls as fit into the budget, after two that are not counted."""
    run()
    one_s = seconds_of(run, device)
    return [
        seconds_of(run, device)
        for _ in range(min(most, max(least, round(budget_s / max(one_s, 1e-6)))))
    ]


class LiveBytes:
    """Bytes of live tensors on a device: now, and the most since it was entered; whatever was there when it was made does not count.

    On a GPU the allocator knows; on a CPU every operation is watched, which slows it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = None if device.type == "cuda" else TensorPeak()
        self._before = 0
        if device.type == "cuda":
            one = torch.ones(8, 8, device=device, requires_grad=True)
            (
                one @ one
            ).sum().backward()  # cuBLAS keeps a workspace for each thread, which is no arm's
            del one
        release_memory()  # what an earlier arm leaves to the collector would count here, and be missing later
        with self:
            self._before = self.now()

    def __enter__(self) -> LiveBytes:
        if self._watch is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._watch.stale = True
            self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)  # type: ignore[no-untyped-call]

    def now(self) -> int:
        """To be asked inside the block."""
        held = (
            torch.cuda.memory_allocated(self._device)
            if self._watch is None
            else self._watch.live_bytes
        )
        return held - self._before

    def peak(self) -> int:
        """Since it was last entered."""
        most = (
            torch.cuda.max_memory_allocated(self._device)
            if self._watch is None
            else self._watch.peak_bytes
        )
        return most - self._before
