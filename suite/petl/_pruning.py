"""Start LST's side blocks from the backbone's own weights by structural pruning.

Source: LST, arXiv 2206.06522, section 3.4, in the form of the official code ("fisher-v2",
    seq2seq/pruning/pruning_methods.py). One walk goes through all blocks of the encoder and then of
    the decoder, with and without a side block, and carries the kept coordinates along, beginning
    with those of the embedding: of q, k and v together, then o, of the feed-forward input maps
    together, then its output map, it keeps the rows whose importance, restricted to the columns
    kept so far, has the largest L1 norm. What is kept together is ranked by the elementwise product
    of its importances. Norms are sliced by the coordinates of the stream where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family, Stack
from suite.petl.base import head_parameters

Importance = Callable[[nn.Parameter], Tensor]
Walk = Literal["all", "side"]


@dataclass(frozen=True, slots=True)
class Part:
    """A projection in a block: a whole module, or one of the equal parts of a fused one.

    Attributes:
        name: The module's name in the block.
        index: Number of the part, from 0.
        count: Number of parts that the module is fused of.
    """

    name: str
    index: int = 0
    count: int = 1

    def rows(self, matrix: Tensor) -> slice:
        """Where this part's rows are in the module's (out, in) matrix."""
        size = matrix.shape[0] // self.count
        return slice(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True, slots=True)
class SublayerMaps:
    """The maps and the norm of one sublayer.

    Attributes:
        kind: What the sublayer computes.
        inputs: Its input maps; of an attention q, k and v.
        output: Its output map.
        norm: Name of its norm in the block.
    """

    kind: Literal["self", "cross", "feed-forward"]
    inputs: tuple[Part, ...]
    output: Part
    norm: str


def magnitude(parameter: nn.Parameter) -> Tensor:
    """|w|: the importance that needs no data."""
    return parameter.detach().abs()


@torch.no_grad()
def prune_into_side(
    model: PreTrainedModel, family: Family, importance: Importance, *, walk: Walk = "all"
) -> None:
    """Overwrite the side blocks and side norms of an attached model with pruned weights.

    Args:
        model: A backbone whose stacks have a `side` network.
        family: Its family.
        importance: Returns a non-negative tensor of a parameter's own shape.
        walk: Which blocks it goes through.
    """
    embedding: Any = model.get_input_embeddings()
    columns = importance(embedding.weight).double().sum(0)  # (d,)
    stream: Tensor | None = None
    memory: Tensor | None = None
    for stack in family.stacks(model):
        side: Any = stack.module.side
        width = side.down[0].out_features
        # The official walk goes on in the decoder with what it kept last of the encoder.
        if stream is None or walk == "side":
            stream = top(columns, width)  # (k,)
        norm_first = stack.final_norm is not None
        narrow = dict(zip(side.kept, side.blocks, strict=True))
        for layer, block in enumerate(stack.blocks):
            if walk == "side" and layer not in narrow:
                continue
            pair = BlockPair(block, narrow.get(layer), stack.width // width, importance, walk)
            for maps in sublayer_maps(model, family, stack, layer):
                stream = pair.prune(maps, stream, memory, norm_first=norm_first)
        if stack.final_norm is not None:
            slice_vectors(stack.final_norm, side.norm, stream)
        # The official walk cuts all of a cross-attention to the decoder's stream.
        if walk == "side":
            memory = stream


def sublayer_maps(
    model: PreTrainedModel, family: Family, stack: Stack, layer: int
) -> list[SublayerMaps]:
    """The sublayers of one block, in the order of the forward pass."""
    block = stack.blocks[layer]
    names = {module: name for name, module in block.named_modules()}
    attention: dict[str, tuple[Part, ...]] = {}
    taken: set[str] = set()
    for site in family.attention_sites(model):
        if (site.role, site.layer) != (stack.role, layer):
            continue
        parts = []
        for i, name in enumerate((site.q, site.k, site.v)):
            place = f"{names[site.module]}.{name}"
            parts.append(Part(place, i, 3) if site.fused else Part(place))
            taken.add(place)
        attention[site.kind] = tuple(parts)
        # these act on heads, which the kept rows no longer are
        for name in (site.q_norm, site.k_norm):
            taken.add(f"{names[site.module]}.{name}")
    sublayers = [s for s in family.sublayers(model) if (s.role, s.layer) == (stack.role, layer)]
    for sublayer in sublayers:
        taken.add(names[sublayer.output])
    # what is left are the feed-forward's input maps: one, or two where it is gated
    feed_forward = []
    for module, name in names.items():
        if isinstance(module, (nn.Linear, Conv1D)) and name not in taken:
            feed_forward.append(Part(name))
    # in every family a block's norms come in the order of its sublayers
    norms = []
    for _, norm in family.norms(model):
        if norm in names and names[norm] not in taken:
            norms.append(names[norm])
    found = []
    for sublayer, norm in zip(sublayers, norms, strict=True):
        if sublayer.kind == "feed-forward":
            inputs = tuple(feed_forward)
        else:
            inputs = attention[sublayer.kind]
        found.append(SublayerMaps(sublayer.kind, inputs, Part(names[sublayer.output]), norm))
    return found


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block of the backbone and the side block of the same class.

    Attributes:
        block: The backbone's block.
        narrow: The side block, whose weights are overwritten; None where the block has none.
        reduction: How many times as wide the block is.
        importance: How much each weight of the backbone counts.
        walk: The walk that it is part of.
    """

    block: nn.Module
    narrow: nn.Module | None
    reduction: int
    importance: Importance
    walk: Walk

    def prune(
        self, maps: SublayerMaps, stream: Tensor, memory: Tensor | None, *, norm_first: bool
    ) -> Tensor:
        """Prune one sublayer.

        Args:
            maps: The sublayer.
            stream: Kept coordinates of the residual stream before it, (k,).
            memory: Kept coordinates of the encoder's states, for cross-attention's k and v; None =
                those of the stream.
            norm_first: Whether the norm reads the stream (T5, GPT-2, Llama) or follows the residual
                sum (BERT).

        Returns:
            Kept coordinates of the stream after it, (k,).
        """
        inputs = []
        for i, part in enumerate(maps.inputs):
            # cross-attention projects queries (i = 0) from the stream, keys and values from memory
            reads_memory = maps.kind == "cross" and i > 0 and memory is not None
            inputs.append((part, cast(Tensor, memory) if reads_memory else stream))
        inner = self._prune_together(inputs)
        after = self._prune_together([(maps.output, inner)])
        if self.narrow is not None:
            slice_vectors(
                self.block.get_submodule(maps.norm),
                self.narrow.get_submodule(maps.norm),
                stream if norm_first else after,
            )
        return after

    def _prune_together(self, parts: Sequence[tuple[Part, Tensor]]) -> Tensor:
        """Keep the same rows in all maps of the same height.

        Grouped keys and values have fewer rows than queries, so they keep rows of their own.

        Returns:
            The kept rows of the first map.
        """
        groups: dict[int, list[tuple[Part, Tensor]]] = {}
        for part, columns in parts:
            groups.setdefault(self._height(part), []).append((part, columns))
        kept_by_group = []
        for height, group in groups.items():
            kept = top(self._scores(group), height // self.reduction)
            if self.narrow is not None:
                for part, columns in group:
                    self._copy(self.narrow, part, kept, columns)
            kept_by_group.append(kept)
        return kept_by_group[0]

    def _height(self, part: Part) -> int:
        return matrix(self.block, part).shape[0] // part.count

    def _scores(self, group: Sequence[tuple[Part, Tensor]]) -> Tensor:
        """How much every row of a group of maps counts, over the kept columns."""
        product: Tensor | None = None
        for part, columns in group:
            found = self._importance(part, columns)
            # Rows of two streams have no elements in common, so their sums are multiplied.
            if self.walk == "side":
                found = found.sum(1, keepdim=True)
            product = found if product is None else product * found
        return cast(Tensor, product).sum(1)

    def _importance(self, part: Part, columns: Tensor) -> Tensor:
        weight = matrix(self.block, part)
        importance = self.importance(cast(nn.Parameter, self.block.get_submodule(part.name).weight))
        if _is_transposed(self.block, part):
            importance = importance.t()
        # double, because products of squares of small gradients would underflow
        return importance[part.rows(weight)][:, columns].double()

    def _copy(self, narrow: nn.Module, part: Part, rows: Tensor, columns: Tensor) -> None:
        source = matrix(self.block, part)
        target = matrix(narrow, part)  # a view: writing to it writes to the side block
        target[part.rows(target)] = source[part.rows(source)][rows][:, columns]
        bias = self.block.get_submodule(part.name).bias
        narrow_bias = narrow.get_submodule(part.name).bias
        if isinstance(bias, Tensor) and isinstance(narrow_bias, Tensor):
            narrow_bias[part.rows(narrow_bias)] = bias[part.rows(bias)][rows]


def _is_transposed(block: nn.Module, part: Part) -> bool:
    return isinstance(block.get_submodule(part.name), Conv1D)


def matrix(block: nn.Module, part: Part) -> Tensor:
    """A view of a projection's weight as (out, in); GPT-2's `Conv1D` keeps (in, out)."""
    weight = cast(Tensor, block.get_submodule(part.name).weight).detach()
    if _is_transposed(block, part):
        return weight.t()
    return weight


def slice_vectors(norm: nn.Module, narrow: nn.Module, kept: Tensor) -> None:
    """Copy the kept entries of a norm's weight and, if it has one, bias."""
    for parameter, target in zip(norm.parameters(), narrow.parameters(), strict=True):
        target.copy_(parameter[kept])


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, in ascending order."""
    # ascending, so that the kept coordinates stay in the backbone's order
    return scores.topk(count).indices.sort().values


def squared_gradients(
    parameters: Sequence[nn.Parameter], losses: Iterable[Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Fisher importance: the sum over examples of the squared gradient of each one's loss, in fp32.

    Args:
        parameters: The parameters to score; one that no loss depends on scores 0.
        losses: One scalar per example, made one at a time.
    """
    # fp32 also for a bf16 model: squares of small gradients lose their digits
    totals = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                totals[parameter] += gradient.float().square()
    return totals


@contextmanager
def fixed_head(model: PreTrainedModel, family: Family) -> Iterator[None]:
    """Give the matrices of a task head weights that are always the same, and then its own back.

    Its vectors start as zeros or ones for every seed.
    """
    # A generator of its own leaves the trial's streams alone.
    generator = torch.Generator().manual_seed(0)
    # Of the families' configurations only T5's lacks it, and T5 answers in words without a head.
    deviation = getattr(model.config, "initializer_range", 0.02)
    own = []
    with torch.no_grad():
        for parameter in head_parameters(model, family):
            if parameter.ndim > 1:
                own.append((parameter, parameter.clone()))
                parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in own:
                parameter.copy_(values)
