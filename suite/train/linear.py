"""The linear map of a weight that ZeRO-3 partitions.

PyTorch's own saves a view of the gathered weight for the backward pass, which keeps the whole
weight alive. DeepSpeed's replacement saves the parameter, which is gathered again, but also the
input of every map, even of those whose weight is frozen and needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_linear: Callable[..., Tensor] = torch.nn.functional.linear
_users = 0


class PartitionedLinear(torch.autograd.Function):
    """x (*, k), weight (n, k), bias (n,) -> (*, n); saves x only if the weight trains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        # Kept, because a backward pass that names none gets the device's default, fp16 on a GPU.
        ctx.dtype = torch.get_autocast_dtype(x.device.type)
        kept = None
        if weight.requires_grad:
            kept = x
        ctx.save_for_backward(kept, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gradient = gradients[0]  # (*, n)
        x, weight = ctx.saved_tensors
        of_x: Tensor | None = None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        # The products of the backward pass have the precision of the forward pass.
        with torch.autocast(gradient.device.type, ctx.dtype, enabled=ctx.autocast):
            if ctx.needs_input_grad[0]:
                of_x = gradient @ weight  # (*, k)
            if ctx.needs_input_grad[1]:
                rows = gradient.reshape(-1, gradient.shape[-1])
                of_weight = rows.t() @ x.reshape(-1, x.shape[-1])  # (n, k)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_x, of_weight, of_bias


def _linear_of_stage_3(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # The names of PyTorch's own parameters, because some of peft's layers call it by keyword.
    # Only partitioned parameters have a `ds_id`; all other weights are there when they are needed.
    if hasattr(weight, "ds_id"):
        product: Tensor = PartitionedLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias
        )
        return product
    return _linear(input, weight, bias)


def use() -> None:
    """Replace `torch.nn.functional.linear` for the whole process, until as many calls of `leave`.

    Modules look the function up there at every call, and DeepSpeed replaces it in the same way.
    """
    global _users
    _users += 1
    torch.nn.functional.linear = _linear_of_stage_3


def leave() -> None:
    """End one use; the last one brings PyTorch's own function back."""
    global _users
    _users -= 1
    if _users == 0:
        torch.nn.functional.linear = _linear
