"""What READ and LST share: a frozen stack runs without a graph, and hooks record its blocks.

Nothing here reads a weight, so that ZeRO-3's module hooks stay in charge of fetching parameters.
Shapes: B rows, T tokens, d width of the stack, m tokens of the encoder, e width of a side network.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
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


@dataclass(slots=True)
class _Recorded:
    """A stack's frozen pass: its trace, and what a second run needs to give the same.

    Attributes:
        outputs: What each block returned, the states and T5's position biases.
        before, after: State of the random streams before the first and after the last block.
    """

    trace: Trace
    outputs: list[Any] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StackStates:
    """What the blocks of one frozen stack give for a batch.

    Attributes:
        states, scores: As in `Trace`.
        beside: How many values a block returns beside its state (T5: two position biases), which
            nothing reads once all blocks have run; None = it returns the state alone.
    """

    states: list[Tensor]
    scores: list[Tensor]
    beside: int | None

    @property
    def outputs(self) -> list[Any]:
        """What the blocks return, without position biases."""
        if self.beside is None:
            return list(self.states)
        return [(state, *[None] * self.beside) for state in self.states]


class FrozenPass:
    """What the frozen stacks gave for one batch, so that they run once for several side networks.

    Trials of one search see the same batches and draw the same dropout masks. So the blocks of a
    frozen stack give each of them the same tensors. The first one records them; the others run the
    stack's forward with blocks that return what was recorded and leave the random streams where the
    real blocks left them. Everything behind the blocks (final norm, dropout, head) runs as always.

    >>> shared = FrozenPass()
    >>> with shared.recording():
    ...     loss = first(**batch).loss
    >>> with shared.replaying():
    ...     loss = second(**batch).loss
    """

    def __init__(self) -> None:
        self._stacks: list[_Recorded] = []
        self._next = 0
        self._replays = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the frozen stacks of one forward pass; what was recorded before is forgotten."""
        self._stacks = []
        self._replays = False
        with _taking_part(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the frozen stacks of one forward pass give what was recorded.

        Raises:
            AssertionError: The pass runs other stacks, or its random streams differ.
        """
        self._next = 0
        self._replays = True
        with _taking_part(self):
            yield

    @contextmanager
    def trace(self, blocks: nn.ModuleList, attentions: Sequence[nn.Module]) -> Iterator[Trace]:
        """Record a stack, or replay it."""
        if not self._replays:
            with _hooked(blocks, attentions) as trace:
                recorded = _Recorded(trace)
                self._stacks.append(recorded)
                with _outputs_kept(blocks, recorded):
                    yield trace
            return
        assert self._next < len(self._stacks), "a replayed pass runs a stack that was not recorded"
        recorded = self._stacks[self._next]
        self._next += 1
        cache = recorded.trace.arguments.get("past_key_values")
        assert cache is None, "a frozen pass that fills a KV cache cannot be shared"
        with _replaced(blocks, recorded):
            yield recorded.trace


class GivenPass:
    """What frozen stacks without dropout give for one batch, read from where it is kept.

    The stacks' forward runs with blocks that return what is given. They draw no numbers, so the
    random streams stay where they are.

    Args:
        stacks: In the order in which the model runs them.
    """

    def __init__(self, stacks: Sequence[StackStates]) -> None:
        self._stacks = stacks
        self._next = 0

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the frozen stacks of one forward pass give what is kept.

        Raises:
            AssertionError: The pass runs other stacks, or another batch.
        """
        self._next = 0
        with _taking_part(self):
            yield

    @contextmanager
    def trace(self, blocks: nn.ModuleList, _attentions: Sequence[nn.Module]) -> Iterator[Trace]:
        """Give a stack's states."""
        assert self._next < len(self._stacks), "no states are kept of a stack that runs"
        given = self._stacks[self._next]
        self._next += 1
        outputs = given.outputs
        assert len(outputs) == len(blocks), "states are kept of another number of blocks"
        with _hooked(blocks, ()) as trace:
            trace.scores.extend(given.scores)
            with _forwards(blocks, [functools.partial(_give, output) for output in outputs]):
                yield trace


class _EnoughError(Exception):
    """The last block of the last stack has run: nobody wants what comes behind it."""


class _Recorder:
    """Keeps the states of a model's stacks, and ends its forward behind the last one's blocks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stacks: list[StackStates] = []

    @contextmanager
    def trace(self, blocks: nn.ModuleList, attentions: Sequence[nn.Module]) -> Iterator[Trace]:
        with _hooked(blocks, attentions) as trace:

            def end(_block: nn.Module, _args: Any, output: Any) -> None:
                beside = len(output) - 1 if isinstance(output, tuple) else None
                self.stacks.append(StackStates(trace.states, trace.scores, beside))
                if len(self.stacks) == self.count:
                    raise _EnoughError

            # behind the hook that puts the state into the trace
            with blocks[-1].register_forward_hook(end):
                yield trace


def frozen_states(model: nn.Module, batch: Mapping[str, Tensor], count: int) -> list[StackStates]:
    """Run a model's frozen stacks alone, and return what their blocks give.

    Args:
        model: In evaluation mode, of a method whose stacks are `traced`. It is not under ZeRO,
            whose hooks would miss the end of the forward pass.
        batch: The model's inputs.
        count: Stacks of the model.
    """
    recorder = _Recorder(count)
    with torch.no_grad(), _taking_part(recorder):
        try:
            model(**batch)
        except _EnoughError:
            return recorder.stacks
    raise AssertionError(f"the forward pass ran {len(recorder.stacks)} of {count} frozen stacks")


def without_dropout(stacks: Iterable[nn.Module]) -> None:
    """Put into evaluation mode what is frozen of the modules of some stacks.

    A side network beside a stack's own parts stays as it is.
    """
    for stack in stacks:
        for part in stack.children():
            if not any(parameter.requires_grad for parameter in part.parameters()):
                part.eval()


_active: ContextVar[FrozenPass | GivenPass | _Recorder | None] = ContextVar(
    "frozen_pass", default=None
)


@contextmanager
def _taking_part(frozen: FrozenPass | GivenPass | _Recorder) -> Iterator[None]:
    token = _active.set(frozen)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def traced(
    blocks: nn.ModuleList, attentions: Sequence[nn.Module] = (), *, cached: bool = False
) -> Iterator[Trace]:
    """Record `blocks` (and the last output of `attentions`) while the context lasts.

    Within a `FrozenPass` the blocks may not run at all.

    Args:
        cached: Whether the stack reads or writes a KV cache. Such a pass is one of many of a
            generation, which differ from trial to trial, so it is neither kept nor replayed.
    """
    shared = _active.get()
    if shared is None or cached:
        with _hooked(blocks, attentions) as trace:
            yield trace
    else:
        with shared.trace(blocks, attentions) as trace:
            yield trace


def uses_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a stack that is called with these arguments reads or writes a KV cache."""
    return kwargs.get("past_key_values") is not None or bool(kwargs.get("use_cache"))


@contextmanager
def _hooked(blocks: nn.ModuleList, attentions: Sequence[nn.Module]) -> Iterator[Trace]:
    trace = Trace()
    # its own, because a pass that replays puts another in its place
    forward = blocks[0].forward

    def record_arguments(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.arguments.update(named_arguments(forward, args, kwargs))

    def record_state(_block: nn.Module, _args: Any, output: Any) -> None:
        trace.states.append(hidden_of(output))

    def record_scores(_attention: nn.Module, _args: Any, output: Any) -> None:
        trace.scores.append(output[-1])

    with ExitStack() as hooks:
        hooks.enter_context(blocks[0].register_forward_pre_hook(record_arguments, with_kwargs=True))
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(record_state))
        for attention in attentions:
            hooks.enter_context(attention.register_forward_hook(record_scores))
        yield trace


@contextmanager
def _outputs_kept(blocks: nn.ModuleList, recorded: _Recorded) -> Iterator[None]:
    """Keep what the blocks return, and the random streams around them."""

    def begin(_block: nn.Module, _args: Any) -> None:
        recorded.before = random_states()

    def keep(_block: nn.Module, _args: Any, output: Any) -> None:
        recorded.outputs.append(output)

    def end(_block: nn.Module, _args: Any, _output: Any) -> None:
        recorded.after = random_states()

    with ExitStack() as hooks:
        hooks.enter_context(blocks[0].register_forward_pre_hook(begin))
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(keep))
        hooks.enter_context(blocks[-1].register_forward_hook(end))
        yield


@contextmanager
def _replaced(blocks: nn.ModuleList, recorded: _Recorded) -> Iterator[None]:
    """Let the blocks return what was recorded."""
    last = len(blocks) - 1

    def check(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _check_same(recorded, named_arguments(real, args, kwargs))

    real = blocks[0].forward
    forwards = []
    for i in range(len(blocks)):
        forwards.append(functools.partial(_give_recorded, recorded, i, is_last=i == last))
    checked = blocks[0].register_forward_pre_hook(check, with_kwargs=True)
    with checked, _forwards(blocks, forwards):
        yield


@contextmanager
def _forwards(blocks: nn.ModuleList, forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Give each block another forward."""
    # a variant may have put a forward of its own on a block
    own = [vars(block).get("forward") for block in blocks]
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.forward
            if before is not None:
                block.forward = before


def _give(output: Any, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    assert hidden.shape == hidden_of(output).shape, "the states that are kept are of another batch"
    return output


def _check_same(recorded: _Recorded, arguments: Mapping[str, Any]) -> None:
    for now, then in zip(random_states(), recorded.before, strict=True):
        assert torch.equal(now, then), "trials that share a frozen pass drew different numbers"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            same = torch.equal(value, recorded.trace.arguments[name])
            assert same, f"trials that share a frozen pass have different {name}"


def _give_recorded(recorded: _Recorded, i: int, *_args: Any, is_last: bool, **_kwargs: Any) -> Any:
    if is_last:
        set_random_states(recorded.after)
    return recorded.outputs[i]


def random_states() -> list[Tensor]:
    """The states of torch's generators that dropout draws from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def hidden_of(output: Any) -> Tensor:
    """The hidden state among a block's outputs; T5 returns its position biases beside it."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def named_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by parameter name; those in `**kwargs` keep their names."""
    signature = inspect.signature(forward)
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
