"""Time and memory of repeated calls, with an idle device at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from suite.meters import TensorPeak, release_memory, synchronise

MOST_CALLS = 200


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time one call, in wall-clock seconds."""
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
) -> list[float]:
    """Time as many calls as fit into the budget, after two that are not counted; in seconds."""
    run()
    one_s = seconds_of(run, device)
    # A call may be too short for the clock to see.
    fitting = round(budget_s / max(one_s, 1e-6))
    # A budget of 0 gives exactly `least` calls: `Serving.decoding` relies on this.
    count = min(MOST_CALLS, max(least, fitting))
    return [seconds_of(run, device) for _ in range(count)]


class LiveBytes:
    """Bytes of live tensors on a device: now, and the most since the block was entered.

    Tensors that exist when it is made do not count. On a GPU the allocator is asked; on a CPU
    every operation is watched, which slows it down.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch: TensorPeak | None = None
        self._before = 0
        if device.type == "cuda":
            _fill_cublas_workspace(device)
        else:
            self._watch = TensorPeak()
        # Garbage of an earlier arm would count here, and be missing once it is collected.
        release_memory()
        with self:
            self._before = self.now()

    def __enter__(self) -> LiveBytes:
        if self._watch is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # What was made since the last block is looked for anew: the model, for one.
            self._watch.stale = True
            self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)  # type: ignore[no-untyped-call]

    def now(self) -> int:
        """Bytes that live now. Ask inside the block."""
        if self._watch is None:
            return torch.cuda.memory_allocated(self._device) - self._before
        return self._watch.live_bytes - self._before

    def peak(self) -> int:
        """Most bytes that lived at once since the block was last entered."""
        if self._watch is None:
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._watch.peak_bytes - self._before


def _fill_cublas_workspace(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces now: it keeps one per thread, which is no arm's memory.

    The backward pass runs in a thread of its own, so it needs a product, too.
    """
    one = torch.ones(8, 8, device=device, requires_grad=True)
    (one @ one).sum().backward()
