"""Peak memory: the CUDA allocator's own peaks; on a CPU the live tensors and the resident set."""

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

# the only way to see every operation's result; torch documents the class, but has it in this module
from torch.utils._python_dispatch import TorchDispatchMode

from suite.meters.clock import Unavailable


def baseline_bytes(device: torch.device) -> int:
    """Memory that this process holds now: its resident set, and on a GPU also its tensors there."""
    release_memory()
    held = int(psutil.Process().memory_info().rss)
    if device.type == "cuda":
        held += int(torch.cuda.memory_allocated(device))
    return held


def release_memory() -> None:
    """Return unused memory to the system, so that the next trial does not start with it.

    glibc keeps freed pages (1.1 GB after freeing 99.9% of it) until `malloc_trim`.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries (musl, macOS) do not have it
        trim(0)
    # not is_available(): asking an unused GPU would make a CUDA context
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class ResidentPeak:
    """Peak resident set of this process (VmHWM), with its libraries.

    It is reset through /proc/self/clear_refs.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> None:
        """Make the present size the peak.

        Raises:
            Unavailable: The system is not Linux, or does not allow it.
        """
        try:
            # 5 resets the peak and nothing else (proc(5))
            (self._proc / "clear_refs").write_text("5")
        except OSError as error:
            raise Unavailable(f"cannot reset the peak resident set: {error}") from error

    def read_bytes(self) -> int:
        """Largest resident set since the last reset.

        Raises:
            Unavailable: The kernel does not report it.
        """
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # the kernel says kB and means KiB
        raise Unavailable("the kernel does not report VmHWM")


class CudaPeak:
    """Peaks of this process' CUDA caching allocator; a reset resets all peaks of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))


class TensorPeak(TorchDispatchMode):
    """Peak bytes of live CPU tensors while it is entered.

    It counts the tensors that are alive at the start, and every result of an operation. A storage
    counts once, whatever the number of its views, until it is freed. Backward passes run in the
    calling thread on a CPU and are seen. Scratch space inside a kernel and tensors made by other
    threads are not seen. (torch's MemTracker does something similar by module hooks, but refuses
    frozen parameters.)

    Args:
        of: Count these tensors and what is made of them, instead of every tensor that is alive at
            the start.

    Attributes:
        live_bytes: Bytes that are alive now.
        peak_bytes: The most bytes since it was last entered.
        stale: Whether entering looks for tensors made in the meantime, which costs about 0.1 s;
            frees in the meantime are known anyway.
    """

    def __init__(self, of: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
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
        """Count the tensor's storage, or by how much it changed since it was last seen."""
        if tensor.device.type != "cpu":
            return
        storage = _storage(tensor)
        if storage is None:
            return
        # torch keeps one Python object for a storage while any tensor uses it, so its id names it
        key = id(storage)
        size = storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self.live_bytes += size
            return
        reference, known_size = self._known[key]
        if known_size != size:  # resize_ changes a storage in place
            self._known[key] = reference, size
            self.live_bytes += size - known_size

    def _forget(self, key: int) -> None:
        _, size = self._known.pop(key, (None, 0))
        self.live_bytes -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None where it has none of its own (sparse tensors, wrappers)."""
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
    """Every tensor that Python knows of, and the gradients of leaves."""
    objects = gc.get_objects()
    kinds = set(_subclasses(torch.Tensor))
    # map and compress run in C, which counts: there are a million objects
    is_tensor = map(kinds.__contains__, map(type, objects))
    for tensor in compress(objects, is_tensor):
        yield tensor
        # a gradient that nobody has read has no Python object yet
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _subclasses(kind: type) -> Iterable[type]:
    yield kind
    child: type
    for child in type.__subclasses__(kind):
        yield from _subclasses(child)
