"""Autocast the forwards of an arm.

Autocast keeps fp32 weights, gradients and optimizer states, and multiplies matrices in bf16. It is
entered in the forward of an arm and of every transformers model inside of it, because generation
calls an encoder by itself. Autograd then runs each backward in the precision of its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention


def autocast_forwards(model: nn.Module, device: str) -> None:
    """Run the forward of `model` and of every transformers model in it under bf16 autocast.

    It holds from now on. peft's model around another one may call the head itself (prefix tuning).

    Args:
        model: Whole, fp32, and not yet under ZeRO.
        device: "cuda" or "cpu".
    """
    for module in model.modules():
        if module is model or isinstance(module, PreTrainedModel):
            entered: list[torch.autocast] = []
            module.register_forward_pre_hook(_enter(entered, device))
            # Always, because a forward that fails must not leave autocast on.
            module.register_forward_hook(_exit(entered), always_call=True)
        elif isinstance(module, DisentangledSelfAttention):
            # DeBERTa fills masked scores by the dtype of its queries, and some of peft's layers
            # return fp32.
            module.query_proj.register_forward_hook(_as_scores)


def _as_scores(_module: nn.Module, _args: Any, queries: Tensor) -> Tensor:
    return queries.to(torch.bfloat16)


def _enter(entered: list[torch.autocast], device: str) -> Any:
    def enter(_module: nn.Module, _args: Any) -> None:
        # No cache of cast weights: under ZeRO-3 a weight's memory holds others a moment later.
        context = torch.autocast(device, torch.bfloat16, cache_enabled=False)
        context.__enter__()
        entered.append(context)

    return enter


def _exit(entered: list[torch.autocast]) -> Any:
    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    return leave
