"""What a rank holds of every trained parameter, whatever ZeRO made of it: views on the fp32 weights and on Adam's moments.

ZeRO 3 cuts every parameter into one slice per rank, ZeRO 1 and 2 cut the flattened whole of them, ZeRO 0 leaves all of it on every
rank (under bf16 beside an fp32 copy). A piece says which elements of the whole parameter a rank's tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one trained parameter.

    Attributes:
        name: Of the parameter.
        start, length: Elements of the flattened parameter that it covers.
        whole: Elements of the parameter.
        master: The tensor in which the optimizer keeps fp32 weights, several pieces perhaps; the key of its state.
        offset: Where the piece begins in it.
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
        """The piece's view of a tensor that lies as `master` does: (length,)."""
        return tensor.detach().reshape(-1).narrow(0, self.offset, self.length)

    def share(self, rank: int, world_size: int) -> Piece:
        """What a rank is to write of a piece that all ranks hold."""
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
        rank: In the group that shares the parameters.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        found = _slices(trained, optimizer, rank)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        found = _fragments(trained, optimizer)
    else:
        found = _wholes(trained, optimizer)
    return [piece for piece in found if piece.length > 0]


def _slices(trained: list[tuple[str, nn.Parameter]], optimizer: Any, rank: int) -> Iterator[Piece]:
    """ZeRO 3: rank r holds the r-th slice of each, the last ones filled up."""
    for name, parameter in trained:
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole, start = int(parameter.ds_numel), rank * size  # type: ignore[attr-defined]
        yield Piece(
            name,
            start,
            min(size, whole - start),
            whole,
            optimizer.fp32_partitioned_groups_flat[group],
            offset,
        )


def _fragments(trained: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Piece]:
    """ZeRO 1 and 2: rank r holds the r-th part of all of them laid end to end."""
    for name, parameter in trained:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            master = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Piece(name, here.start, here.numel, parameter.numel(), master, there.start)


def _wholes(trained: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Piece]:
    """ZeRO 0: the parameter itself, or its fp32 copy."""
    groups = zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
    )
    copies = {
        id(low): high for lows, highs in groups for low, high in zip(lows, highs, strict=True)
    }
    for name, parameter in trained:
        yield Piece(
            name,
            0,
            parameter.numel(),
            parameter.numel(),
            copies.get(id(parameter), parameter),
            0,
            everywhere=True,
        )


def publish(optimizer: Any) -> None:
    """Bring the forward weights up to the fp32 ones after these were written. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.update_lp_params()
    else:
        for lows, highs in zip(
            getattr(optimizer, "fp16_groups", ()),
            getattr(optimizer, "fp32_groups", ()),
            strict=True,
        ):
            for low, high in zip(lows, highs, strict=True):
                low.data.copy_(high.data)


def masters_of(module: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The tensors that Adam steps on this rank, also those that only fill up."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [piece.master for piece in pieces_of(module, optimizer, rank=0)]


def adam_of(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that ZeRO wraps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def held_bytes(module: nn.Module, optimizer: Any) -> tuple[int, int]:
    """Bytes on this rank of the forward weights, whole or its share, and of Adam's moments with the fp32 copies; shared memory once."""
    weights = {
        _storage(tensor)
        for p in module.parameters()
        for tensor in (p.data, getattr(p, "ds_tensor", p.data))
    }
    moments = [
        tensor
        for state in adam_of(optimizer).state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor)
    ]
    copies = {_storage(tensor) for tensor in (*moments, *masters_of(module, optimizer))} - weights
    return sum(size for _, size in weights), sum(size for _, size in copies)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and its size in bytes: equal for all its views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def steps_of(adam: torch.optim.Optimizer) -> int:
    """Adam's step count; 0 before the first step, when it has no state."""
    counts = {int(state["step"]) for state in adam.state.values() if "step" in state}
    assert len(counts) <= 1, (
        f"Adam counts its steps differently for different parameters: {sorted(counts)}"
    )
    return counts.pop() if counts else 0


def set_steps(adam: torch.optim.Optimizer, masters: list[torch.Tensor], steps: int) -> None:
    """Give Adam a state at that step count, its moments to be written, or none at step 0."""
    if steps == 0:
        adam.state.clear()
        return
    for master in masters:
        state = adam.state[master]
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(master, requires_grad=False)
        plain = not isinstance(adam, torch.optim.AdamW)  # DeepSpeed's CPU Adam counts in Python
        state["step"] = (
            steps
            if plain
            else torch.tensor(float(steps), dtype=torch.float32, device=master.device)
        )
