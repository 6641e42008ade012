"""READ: a recurrent network over a frozen backbone's layers adds a correction to its last state.

Source: Recurrent Adaptation of Large Transformers (arXiv 2305.15348), Algorithm 1, equations 1-8;
    final choice GRU/256: Table 8. Cell input and output (norm on the inputs, projection with bias,
    PyTorch's initialisation, output scale): the authors' code for image captioning
    (github.com/JohnlNguyen/READ); their T5 code is not public.
Deviations:
    Several heads: the paper writes one; the cross-attention probabilities are averaged over heads.
    Algorithm 1's projection of the encoder's state is its network's output map; a third map would
    not give 0.80 %.
    Without recurrence: one complete network per layer, each started from zero, outputs summed (the
    reading that gives 9.6 %). That count has the hidden-to-hidden weights, whose gradient is 0.
    Encoder-only and decoder-only backbones (not in the paper): the one stack they have, corrected
    like the T5 decoder without attention; BERT's blocks end with their norm, so `merge` makes no
    difference there.
    Dropout of the frozen backbone follows the model's train/eval mode, as in any other method; READ
    itself has none.

Shapes: B rows, T tokens (n of a decoder, m of its encoder), d width, h recurrent state, N layers, H
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._route import observe
from suite.backbones._find import override_forward
from suite.backbones.base import Family, Stack
from suite.petl._frozen import Trace, join, replace_states, split, traced, uses_cache
from suite.petl.base import Architecture, Method, freeze

# rows of a cell's weight in units of h, which the parameter formula needs
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class ReadConfig(Architecture):
    """Hyperparameters of READ; defaults from table 8 and Algorithm 1."""

    cell: Literal["gru", "lstm", "rnn"] = Field("gru", description="recurrent cell; Table 8")
    hidden: Annotated[int, Field(ge=1, le=8192)] = Field(
        256, description="width h of the recurrent state; Table 8"
    )
    recurrent: bool = Field(True, description="false: one complete network per layer; Table 2")
    merge: Literal["before", "after"] = Field(
        "before", description="add before the final norm (Algorithm 1) or after it (authors' code)"
    )
    state: Literal["last", "mean"] = Field(
        "last", description="state that is projected: the last (Algorithm 1), or their mean (code)"
    )
    zero_init: bool = Field(
        False, description="start with a correction of exactly 0; authors: false"
    )
    output_scale: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0, description="factor on the correction; authors' code: 1"
    )


class DepthNetwork(nn.Module):
    """A recurrent network that walks through the layers of a stack: RMSNorm(d), cell, Linear(h, d).

    The cell maps d to h. Every token is a sequence of its own, whose steps are the N layers.
    """

    def __init__(
        self, width: int, config: ReadConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.state = config.state
        self.norm = nn.RMSNorm(width, eps=1e-6, device=device, dtype=dtype)
        self.cell = _CELLS[config.cell](width, config.hidden, device=device, dtype=dtype)
        self.out = nn.Linear(config.hidden, width, device=device, dtype=dtype)
        if config.zero_init:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, layers: Tensor) -> Tensor:
        """Map (N, B, T, d) to (B, T, d)."""
        depth, *rows, width = layers.shape
        states = self._walk(self.norm(layers).view(depth, -1, width))  # (N, B·T, h)
        if self.state == "last":
            state = states[-1]  # (B·T, h)
        else:
            state = states.mean(0)
        out: Tensor = self.out(state)  # (B·T, d)
        return out.view(*rows, width)

    def _walk(self, layers: Tensor) -> Tensor:
        """The states of the cell after each of N layers: (N, B·T, d) to (N, B·T, h)."""
        if not (layers.is_cuda and torch.is_autocast_enabled("cuda")):
            states, _ = self.cell(layers)
            return cast(Tensor, states)
        # Under autocast cuDNN's cells compute in fp16, whatever type autocast is told.
        with torch.autocast("cuda", enabled=False):
            states, _ = self.cell(layers.to(self.out.weight.dtype))
        return cast(Tensor, states)


class Correction(nn.Module):
    """What READ adds to a stack: one network over all layers, or one network for each."""

    def __init__(self, stack: Stack, config: ReadConfig) -> None:
        super().__init__()
        like = next(stack.module.parameters())
        # one network walks through all layers, or every layer has one of its own
        count = 1 if config.recurrent else len(stack.blocks)
        self.networks = nn.ModuleList(
            DepthNetwork(stack.width, config, device=like.device, dtype=like.dtype)
            for _ in range(count)
        )
        self.scale = config.output_scale

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Map N states (B, T, d) to one correction (B, T, d)."""
        stacked = torch.stack(tuple(layers))  # (N, B, T, d)
        if len(self.networks) == 1:
            parts = [self.networks[0](stacked)]
        else:
            parts = [network(stacked[i : i + 1]) for i, network in enumerate(self.networks)]
        return torch.stack(parts).sum(0) * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """What the forward of a corrected stack needs to know.

    It is no module, so that torch does not register the stack a second time.

    Attributes:
        stack: The frozen stack.
        merge: Whether the correction is added before or after the final norm.
        crosses: Its cross-attentions; () where the encoder hands over no correction.
    """

    stack: Stack
    merge: Literal["before", "after"]
    crosses: tuple[nn.Module, ...] = ()


class Read(Method[ReadConfig]):
    description = (
        "a recurrent network over the frozen backbone's layers corrects its last state;"
        " no backward pass through the backbone"
    )
    source = "READ, arXiv 2305.15348, Algorithm 1"
    Config = ReadConfig
    backward_through_backbone = False

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        freeze(model)
        *encoders, last = family.stacks(model)
        # the encoder first: the networks' weights are drawn in this order
        for stack in encoders:
            self._wire(stack, _encode)
        crosses = []
        if encoders:
            for site in family.attention_sites(model):
                if site.kind == "cross":
                    observe(site.module)
                    crosses.append(site.module)
        self._wire(last, _correct, tuple(crosses))
        return model

    def _wire(
        self, stack: Stack, forward: Callable[..., Any], crosses: tuple[nn.Module, ...] = ()
    ) -> None:
        module: Any = stack.module
        module.read = Correction(stack, self.config)
        module.read_wiring = Wiring(stack, self.config.merge, crosses)
        override_forward(module, forward)

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """d + g(dh + h² + 2h) + (hd + d) for each stack, with g gates.

        Without recurrence every layer has as many.
        """
        h = self.config.hidden
        g = GATES[self.config.cell]
        total = 0
        for stack in family.stacks(model):
            d = stack.width
            network = d + g * (d * h + h * h + 2 * h) + (h * d + d)
            networks = 1 if self.config.recurrent else len(stack.blocks)
            total += networks * network
        return total


def _encode(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the encoder of an encoder-decoder, and compute its correction cE.

    The decoder sees the uncorrected states; cE travels beside them.
    """
    blocks = module.read_wiring.stack.blocks
    with torch.no_grad(), traced(blocks, cached=uses_cache(kwargs)) as trace:
        output = original(*args, **kwargs)
    output.last_hidden_state = join(output.last_hidden_state, module.read(trace.states))
    return output


def _correct(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the stack that feeds the head, and add the correction to its last state phi_N."""
    wiring: Wiring = module.read_wiring
    received: Tensor | None = None
    if wiring.crosses and kwargs.get("encoder_hidden_states") is not None:
        states, received = split(kwargs["encoder_hidden_states"], wiring.stack.width)
        kwargs["encoder_hidden_states"] = states
    norm = wiring.stack.final_norm if wiring.merge == "before" else None
    with_graph = torch.is_grad_enabled()
    cached = uses_cache(kwargs)
    with torch.no_grad(), traced(wiring.stack.blocks, wiring.crosses, cached=cached) as trace:

        def correction() -> Tensor:
            return cast(Tensor, module.read(cell_inputs(trace, received)))

        if norm is not None:
            with _added_before(norm, correction, with_graph=with_graph):
                return original(*args, **kwargs)
        output = original(*args, **kwargs)
    return replace_states(module, output, output.last_hidden_state + correction())


@contextmanager
def _added_before(
    norm: nn.Module, correction: Callable[[], Tensor], *, with_graph: bool
) -> Iterator[None]:
    """Add a correction to what `norm` receives."""

    def add(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        # from the correction to the end of the stack (norm and dropout) the graph is needed
        torch.set_grad_enabled(with_graph)
        return (args[0] + correction(),)

    with norm.register_forward_pre_hook(add):
        yield


def cell_inputs(trace: Trace, received: Tensor | None) -> list[Tensor]:
    """The inputs x_j of the recurrent cell.

    x_j = phi_j; where the encoder hands over a correction, plus the mean over heads of the
    cross-attention probabilities times the correction.

    Args:
        trace: N states (B, n, d) and, for a decoder that cross-attends, N probabilities (B, H, n,
            m).
        received: The encoder's correction cE, (B, m, d).
    """
    if received is None:
        return trace.states
    inputs = []
    for phi, sigma in zip(trace.states, trace.scores, strict=True):
        inputs.append(phi + sigma.mean(1) @ received)  # (B, n, d)
    return inputs
