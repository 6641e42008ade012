"""What READ and LST share: a frozen stack that runs without a graph while somebody watches what its blocks compute.

Nothing here reads a weight, so that ZeRO-3's module hooks stay in charge of fetching parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Trace:
    """What was seen during one run of a stack.

    Attributes:
        arguments: What the first block was called with, by parameter name; `hidden_states` is the (dropped-out) embedding.
        states: Output of every block, (B, T, d) each, after both residual sums and before the stack's final norm.
        scores: What every watched attention returned last: its probabilities, (B, H, n, m).
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@contextmanager
def traced(blocks: nn.ModuleList, attentions: Sequence[nn.Module] = ()) -> Iterator[Trace]:
    """Watch `blocks` (and the last output of `attentions`) while the context lasts."""
    trace = Trace()

    def first_call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.arguments.update(named_arguments(block, args, kwargs))

    handles = [blocks[0].register_forward_pre_hook(first_call, with_kwargs=True)]
    handles += [
        b.register_forward_hook(lambda _m, _a, output: trace.states.append(hidden_of(output)))
        for b in blocks
    ]
    handles += [
        a.register_forward_hook(lambda _m, _a, output: trace.scores.append(output[-1]))
        for a in attentions
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def hidden_of(output: Any) -> Tensor:
    """The hidden state among a block's outputs (T5 hands its position biases on beside it)."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def named_arguments(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by parameter name; those of `**kwargs` keep theirs."""
    signature = inspect.signature(block.forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def replace_states(module: nn.Module, output: Any, states: Tensor) -> Any:
    """Put `states` (B, T, d) in place of the stack's last hidden state and run BERT's pooler on them again."""
    output.last_hidden_state = states
    if getattr(output, "pooler_output", None) is not None:
        assert isinstance(module.pooler, nn.Module)
        output.pooler_output = module.pooler(states)
    return output


def join(states: Tensor, extra: Tensor) -> Tensor:
    """Encoder states (B, m, d) with what a side network hands to the decoder (B, m, e) behind them on the feature axis.

    Travelling inside `last_hidden_state`, `extra` is expanded and repeated with it wherever beam search does that.
    """
    return torch.cat([states, extra.to(states.dtype)], dim=-1)  # (B, m, d + e)


def split(joined: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The encoder's own states (B, m, d), without a graph, and what was joined to them (B, m, e).

    Contiguous, because products over strided memory may differ in the last bit from the untouched backbone's.
    """
    return joined[..., :width].detach().contiguous(), joined[..., width:].contiguous()
