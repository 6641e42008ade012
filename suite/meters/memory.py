"""Peak memory: the CUDA allocator's own peaks; on a CPU the bytes of live tensors, and the process' resident set."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from suite.meters.clock import Unavailable


def baseline_bytes(device: torch.device) -> int:
    """What this process holds and uses now: tensors on a GPU, the resident set on a CPU."""
    release_memory()
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def release_memory() -> None:
    """Give back what nothing uses, so that one trial's remains are not the next one's memory.

    glibc keeps freed pages (1.1 GB after freeing 99.9% of it) until `malloc_trim`.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class ResidentPeak:
    """Peak resident set of this process (VmHWM), reset through /proc/self/clear_refs. Whole process: libraries are in it."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> None:
        """The peak becomes the present size.

        Raises:
            Unavailable: Not Linux, or not allowed.
        """
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError as error:
            raise Unavailable(f"cannot reset the peak resident set: {error}") from error

    def read_bytes(self) -> int:
        """Largest resident set since the last reset."""
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise Unavailable("the kernel does not report VmHWM")


class CudaPeak:
    """Peaks of this process' CUDA caching allocator; resetting resets all peaks of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))


class TensorPeak(TorchDispatchMode):
    """Peak bytes of live CPU tensors while it is entered: those that lived at the start, and every result of an operation.

    Counts storages, each once, whatever the number of views; a storage leaves when it is freed. Backward passes run in the calling
    thread on a CPU and are seen. Not seen: scratch space inside a kernel, tensors made by other threads. (torch's MemTracker does the
    like by module hooks, but refuses frozen parameters.)

    Args:
        of: Count these and what is made of them, in place of every tensor that lives when it is entered.

    Attributes:
        live_bytes: Now.
        peak_bytes: Largest since it was last entered.
        stale: Whether entering looks for tensors made in the meantime. That costs about 0.1 s; frees in the meantime are known anyway.
    """

    def __init__(self, of: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.stale = of is None
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for tensor in of or ():
            self._see(tensor)

    def __enter__(self) -> Self:
        if self.stale:
            self.stale = False
            for tensor in _live_tensors():
                self._see(tensor)
        self.peak_bytes = self.live_bytes
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._see(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, or what it has grown or shrunk by since it was last seen."""
        if tensor.device.type != "cpu" or (storage := _storage(tensor)) is None:
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self.live_bytes += size
        elif known[1] != size:
            self._known[key] = known[0], size
            self.live_bytes += size - known[1]

    def _forget(self, key: int) -> None:
        _, size = self._known.pop(key, (None, 0))
        self.live_bytes -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Its storage; None where it has none of its own (sparse tensors, wrappers)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors_in(item)


def _live_tensors() -> Iterator[torch.Tensor]:
    """Every tensor Python knows of, and the gradients of leaves: those nobody has read have no Python object."""
    objects = gc.get_objects()
    kinds = set(_subclasses(torch.Tensor))
    for tensor in compress(
        objects, map(kinds.__contains__, map(type, objects))
    ):  # all in C: there are a million objects
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _subclasses(kind: type) -> Iterable[type]:
    yield kind
    child: type
    for child in type.__subclasses__(kind):
        yield from _subclasses(child)
