"""The pieces of parameters that a rank holds: views on fp32 weights and Adam's moments.

ZeRO 3 cuts every parameter into one slice per rank, ZeRO 1 and 2 cut the flattened whole of them,
and ZeRO 0 leaves all of it on every rank (under bf16 beside an fp32 copy). A piece says which
elements of the whole parameter a rank's tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one trained parameter.

    Attributes:
        name: Name of the parameter.
        start, length: Elements of the flattened parameter that it covers.
        whole: Elements of the parameter.
        master: The tensor in which the optimizer keeps fp32 weights, perhaps of several pieces. It
            is the key of the optimizer's state.
        offset: Where the piece begins in `master`.
        everywhere: Whether every rank holds the same.
    """

    name: str
    start: int
    length: int
    whole: int
    master: torch.Tensor
    offset: int
    everywhere: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view (length,) of this piece in a tensor that is laid out like `master`."""
        return tensor.detach().reshape(-1).narrow(0, self.offset, self.length)

    def share(self, rank: int, world_size: int) -> Piece:
        """The part that one rank writes of a piece that all ranks hold."""
        # Rounded up: the last ranks write less, or nothing.
        part = -(-self.length // world_size)
        first = min(rank * part, self.length)
        return replace(
            self,
            start=self.start + first,
            length=min(part, self.length - first),
            offset=self.offset + first,
        )


def pieces_of(module: nn.Module, optimizer: Any, *, rank: int) -> list[Piece]:
    """This rank's pieces of all trained parameters.

    Args:
        module: Under ZeRO.
        optimizer: DeepSpeed's, or the plain one.
        rank: Rank in the group that shares the parameters.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    # DeepSpeed has no public name for its kinds of optimizers; their attributes tell them apart.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        found = _slices(trained, optimizer, rank)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        found = _fragments(trained, optimizer)
    else:
        found = _wholes(trained, optimizer)
    # The last slices of a small parameter may be nothing but filling.
    return [piece for piece in found if piece.length > 0]


def _slices(trained: list[tuple[str, nn.Parameter]], optimizer: Any, rank: int) -> Iterator[Piece]:
    """ZeRO 3: rank r holds the r-th slice of each parameter; the last slices are filled up."""
    for name, parameter in trained:
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole = int(parameter.ds_numel)  # type: ignore[attr-defined]
        start = rank * size
        master = optimizer.fp32_partitioned_groups_flat[group]
        yield Piece(name, start, min(size, whole - start), whole, master, offset)


def _fragments(trained: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Piece]:
    """ZeRO 1 and 2: rank r holds the r-th part of all parameters laid end to end."""
    for name, parameter in trained:
        # Private, but DeepSpeed's public calls return copies of whole tensors, never where a rank's
        # fragment begins. None: this rank holds nothing of the parameter.
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            master = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Piece(name, here.start, here.numel, parameter.numel(), master, there.start)


def _wholes(trained: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Piece]:
    """ZeRO 0: the parameter itself, or its fp32 copy."""
    copies = {id(low): high for low, high in _half_and_full(optimizer)}
    for name, parameter in trained:
        # In fp32 there are no copies: Adam steps the parameter itself.
        master = copies.get(id(parameter), parameter)
        size = parameter.numel()
        yield Piece(name, 0, size, size, master, 0, everywhere=True)


def _half_and_full(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Under ZeRO 0 and bf16, each forward weight with its fp32 copy; else nothing."""
    halves = getattr(optimizer, "fp16_groups", ())
    fulls = getattr(optimizer, "fp32_groups", ())
    for lows, highs in zip(halves, fulls, strict=True):
        yield from zip(lows, highs, strict=True)


def publish(optimizer: Any) -> None:
    """Bring the forward weights up to the fp32 ones after these were written. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        # Private, but what ZeRO 3's own `step` ends with; its public way is to load a whole
        # checkpoint of DeepSpeed's.
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.update_lp_params()
    else:
        for low, high in _half_and_full(optimizer):
            low.data.copy_(high.data)


def undo_first_step(optimizer: Any) -> None:
    """Take back the step that DeepSpeed's optimizer for ZeRO 0 under bf16 takes when it is built.

    Its gradients are zero, but it counts as Adam's first step, and it decays the fp32 weights.
    """
    pairs = list(_half_and_full(optimizer))
    if not pairs:
        return
    adam_of(optimizer).state.clear()
    for low, high in pairs:
        high.data.copy_(low.data)


def masters_of(module: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The tensors that Adam steps on this rank, those with nothing but filling included."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [piece.master for piece in pieces_of(module, optimizer, rank=0)]


def adam_of(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that ZeRO wraps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def held_bytes(
    module: nn.Module, optimizer: Any, kept: Iterable[torch.Tensor] = ()
) -> tuple[int, int]:
    """Bytes on this rank of the forward weights, and of Adam's moments with the fp32 copies.

    The forward weights are whole, or this rank's share. Shared memory counts once.

    Args:
        module: Under ZeRO.
        optimizer: DeepSpeed's, or the plain one.
        kept: Weights that are no parameters.
    """
    weights = set()
    for weight in (*module.parameters(), *kept):
        weights.add(_storage(weight.data))
        # Under ZeRO 3 the rank's share lies here, and `data` may be empty between two steps.
        weights.add(_storage(getattr(weight, "ds_tensor", weight.data)))
    copies = {_storage(tensor) for tensor in masters_of(module, optimizer)}
    for state in adam_of(optimizer).state.values():
        for value in state.values():
            if torch.is_tensor(value):
                copies.add(_storage(value))
    # Where the weights are their own masters, they count as weights.
    weight_bytes = sum(size for _, size in weights)
    return weight_bytes, sum(size for _, size in copies - weights)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and its size in bytes: equal for all its views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def steps_of(adam: torch.optim.Optimizer) -> int:
    """Adam's step count; 0 before the first step, when it has no state."""
    counts = {int(state["step"]) for state in adam.state.values() if "step" in state}
    assert len(counts) <= 1, f"Adam's step counts differ between parameters: {sorted(counts)}"
    return max(counts, default=0)


def set_steps(adam: torch.optim.Optimizer, masters: list[torch.Tensor], steps: int) -> None:
    """Give Adam a state at that step count, into which moments are read; none at step 0."""
    if steps == 0:
        adam.state.clear()
        return
    for master in masters:
        state = adam.state[master]
        for key in MOMENTS:
            # Adam makes its moments at its first step, and a load may come before.
            if key not in state:
                state[key] = torch.zeros_like(master, requires_grad=False)
        # torch's AdamW counts in a tensor, DeepSpeed's CPU Adam in a Python number.
        state["step"] = steps
        if isinstance(adam, torch.optim.AdamW):
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=master.device)
