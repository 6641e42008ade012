"""What READ and LST share: a frozen stack runs without a graph, and hooks record its blocks.

Nothing here reads a weight, so that ZeRO-3's module hooks stay in charge of fetching parameters.
Shapes: B rows, T tokens, d width of the stack, m tokens of the encoder, e width of a side network.
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
    """What the hooks recorded during one run of a stack.

    Attributes:
        arguments: The arguments of the first block, by parameter name; `hidden_states` is the
            embedding after dropout.
        states: Output of every block, (B, T, d) each, after both residual sums and before the
            stack's final norm.
        scores: The probabilities (B, H, n, m) of every watched attention, which it returns last.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@contextmanager
def traced(blocks: nn.ModuleList, attentions: Sequence[nn.Module] = ()) -> Iterator[Trace]:
    """Record `blocks` (and the last output of `attentions`) while the context lasts."""
    trace = Trace()

    def record_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.arguments.update(named_arguments(block, args, kwargs))

    def record_state(_block: nn.Module, _args: Any, output: Any) -> None:
        trace.states.append(hidden_of(output))

    def record_scores(_attention: nn.Module, _args: Any, output: Any) -> None:
        trace.scores.append(output[-1])

    handles = [blocks[0].register_forward_pre_hook(record_arguments, with_kwargs=True)]
    for block in blocks:
        handles.append(block.register_forward_hook(record_state))
    for attention in attentions:
        handles.append(attention.register_forward_hook(record_scores))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def hidden_of(output: Any) -> Tensor:
    """The hidden state among a block's outputs; T5 returns its position biases beside it."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def named_arguments(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by parameter name; those in `**kwargs` keep their names."""
    signature = inspect.signature(block.forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            # bind() puts them into one dictionary under the name of `**kwargs`
            named.update(named.pop(name, {}))
    return named


def replace_states(module: nn.Module, output: Any, states: Tensor) -> Any:
    """Replace the stack's last hidden state by `states` (B, T, d), and run BERT's pooler again."""
    output.last_hidden_state = states
    # the pooler is inside BERT's stack, so it has already seen the old states
    if getattr(output, "pooler_output", None) is not None:
        assert isinstance(module.pooler, nn.Module)
        output.pooler_output = module.pooler(states)
    return output


def join(states: Tensor, extra: Tensor) -> Tensor:
    """Append what a side network hands to the decoder (B, m, e) to encoder states (B, m, d).

    `extra` stands behind the states on the feature axis. Inside `last_hidden_state`, beam search
    expands and repeats it together with the states.
    """
    return torch.cat([states, extra.to(states.dtype)], dim=-1)  # (B, m, d + e)


def split(joined: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Undo `join`: the encoder's own states (B, m, d), without a graph, and the rest (B, m, e).

    Both are contiguous, because products over strided memory may differ in the last bit from the
    untouched backbone's.
    """
    states = joined[..., :width].detach().contiguous()  # (B, m, d)
    extra = joined[..., width:].contiguous()  # (B, m, e)
    return states, extra
