"""Start LST's side blocks from the backbone's own weights by structural pruning.

Source: LST, arXiv 2206.06522, section 3.4, in the form of the official code ("fisher-v2").
    Walk through the kept blocks in order and carry the kept coordinates of the residual stream along, beginning with
    those of the embedding: of q, k and v together (product of their row norms), then o, of the feed-forward input maps
    together, then its output map, keep the rows whose importance, restricted to the columns kept so far, has the
    largest L1 norm. Norms are sliced by the coordinates of the stream where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family, Stack

Importance = Callable[[nn.Parameter], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A projection in a block: all rows of the module `name`, or the `index`-th of `of` equal parts of a fused one."""

    name: str
    index: int = 0
    of: int = 1

    def rows(self, matrix: Tensor) -> slice:
        """Where this part's rows are in the module's (out, in) matrix."""
        size = matrix.shape[0] // self.of
        return slice(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True, slots=True)
class Plan:
    """One sublayer: its input maps (attention: q, k, v), its output map and its norm, by their names in the block."""

    kind: Literal["self", "cross", "feed-forward"]
    inputs: tuple[Part, ...]
    output: Part
    norm: str


def magnitude(parameter: nn.Parameter) -> Tensor:
    """|w|: the importance that needs no data."""
    return parameter.detach().abs()


@torch.no_grad()
def prune_into_side(model: PreTrainedModel, family: Family, importance: Importance) -> None:
    """Overwrite the side blocks and side norms of an attached model with pruned copies of the backbone's.

    Args:
        model: A backbone whose stacks have a `side` network.
        family: Its family.
        importance: Gives every parameter a non-negative tensor of its own shape.
    """
    embedding: Any = model.get_input_embeddings()
    columns = importance(embedding.weight).double().sum(0)  # (d,)
    memory: Tensor | None = None
    for stack in family.stacks(model):
        side: Any = stack.module.side
        stream = top(columns, side.down[0].out_features)
        for layer, narrow in zip(side.kept, side.blocks, strict=True):
            pair = BlockPair(stack.blocks[layer], narrow, importance)
            for plan in plans(model, family, stack, layer):
                stream = pair.prune(plan, stream, memory, norm_first=stack.final_norm is not None)
        if stack.final_norm is not None:
            slice_vectors(stack.final_norm, side.norm, stream)
        memory = stream


def plans(model: PreTrainedModel, family: Family, stack: Stack, layer: int) -> list[Plan]:
    """The sublayers of one block in the order of the forward pass; their norms come in the same order in every family."""
    block = stack.blocks[layer]
    names = {module: name for name, module in block.named_modules()}
    sites = {
        site.kind: site
        for site in family.attention_sites(model)
        if (site.role, site.layer) == (stack.role, layer)
    }
    sublayers = [s for s in family.sublayers(model) if (s.role, s.layer) == (stack.role, layer)]
    norms = [names[norm] for _, norm in family.norms(model) if norm in names]
    attention: dict[str, tuple[Part, ...]] = {}
    for kind, site in sites.items():
        inside = names[site.module]
        attention[kind] = tuple(
            Part(f"{inside}.{name}", i, 3) if site.fused else Part(f"{inside}.{name}")
            for i, name in enumerate((site.q, site.k, site.v))
        )
    taken = {part.name for parts in attention.values() for part in parts} | {
        names[s.output] for s in sublayers
    }
    rest = tuple(
        Part(name)
        for module, name in names.items()
        if isinstance(module, (nn.Linear, Conv1D)) and name not in taken
    )
    return [
        Plan(
            s.kind,
            rest if s.kind == "feed-forward" else attention[s.kind],
            Part(names[s.output]),
            norm,
        )
        for s, norm in zip(sublayers, norms, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block of the backbone, the side block of the same class, and how much each weight counts."""

    block: nn.Module
    narrow: nn.Module
    importance: Importance

    def prune(
        self, plan: Plan, stream: Tensor, memory: Tensor | None, *, norm_first: bool
    ) -> Tensor:
        """Prune one sublayer.

        Args:
            plan: The sublayer.
            stream: Kept coordinates of the residual stream before it, (k,).
            memory: Kept coordinates of the encoder's states, for cross-attention's k and v.
            norm_first: Whether the norm reads the stream (T5, GPT-2, Llama) or follows the residual sum (BERT).

        Returns:
            Kept coordinates of the stream after it, (k,).
        """
        columns = [
            memory if plan.kind == "cross" and i > 0 and memory is not None else stream
            for i in range(len(plan.inputs))
        ]
        inner = self._prune_together(list(zip(plan.inputs, columns, strict=True)))
        after = self._prune_together([(plan.output, inner)])
        slice_vectors(
            self.block.get_submodule(plan.norm),
            self.narrow.get_submodule(plan.norm),
            stream if norm_first else after,
        )
        return after

    def _prune_together(self, parts: Sequence[tuple[Part, Tensor]]) -> Tensor:
        """Choose the same rows in all maps of the same height (grouped keys and values are lower than queries); the first's rows."""
        groups: dict[int, list[tuple[Part, Tensor]]] = {}
        for part, columns in parts:
            groups.setdefault(self._height(self.block, part), []).append((part, columns))
        chosen = []
        for group in groups.values():
            scores = math.prod(
                (self._scores(part, columns) for part, columns in group[1:]),
                start=self._scores(*group[0]),
            )
            chosen.append(top(scores, self._height(self.narrow, group[0][0])))
            for part, columns in group:
                self._copy(part, chosen[-1], columns)
        return chosen[0]

    def _height(self, block: nn.Module, part: Part) -> int:
        return matrix(block, part).shape[0] // part.of

    def _scores(self, part: Part, columns: Tensor) -> Tensor:
        """L1 norm of the importance of every row, over the kept columns; double, for products of squares of small gradients."""
        weight = matrix(self.block, part)
        importance = self.importance(cast(nn.Parameter, self.block.get_submodule(part.name).weight))
        oriented = importance.t() if _transposed(self.block, part) else importance
        return oriented[part.rows(weight)][:, columns].double().sum(1)

    def _copy(self, part: Part, rows: Tensor, columns: Tensor) -> None:
        source, target = matrix(self.block, part), matrix(self.narrow, part)
        target[part.rows(target)] = source[part.rows(source)][rows][:, columns]
        bias, narrow_bias = (
            self.block.get_submodule(part.name).bias,
            self.narrow.get_submodule(part.name).bias,
        )
        if isinstance(bias, Tensor) and isinstance(narrow_bias, Tensor):
            narrow_bias[part.rows(narrow_bias)] = bias[part.rows(bias)][rows]


def _transposed(block: nn.Module, part: Part) -> bool:
    return isinstance(block.get_submodule(part.name), Conv1D)


def matrix(block: nn.Module, part: Part) -> Tensor:
    """A view of a projection's weight as (out, in); GPT-2's `Conv1D` keeps (in, out)."""
    weight = cast(Tensor, block.get_submodule(part.name).weight).detach()
    return weight.t() if _transposed(block, part) else weight


def slice_vectors(norm: nn.Module, narrow: nn.Module, kept: Tensor) -> None:
    """Copy the kept entries of a norm's weight and, if it has one, bias."""
    for parameter, target in zip(norm.parameters(), narrow.parameters(), strict=True):
        target.copy_(parameter[kept])


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, in ascending order."""
    return scores.topk(count).indices.sort().values


def squared_gradients(
    parameters: Sequence[nn.Parameter], losses: Iterable[Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Fisher importance: the sum over examples of the squared gradient of each example's loss, in fp32.

    Args:
        parameters: What is asked about; a parameter that a loss does not depend on counts 0.
        losses: One scalar an example, made one at a time.
    """
    totals = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                totals[parameter] += gradient.float().square()
    return totals
