"""LST (ladder side-tuning): a narrow side network reads the frozen backbone by gated shortcuts.

Source: LST, Ladder Side-Tuning for Parameter and Memory Efficient Transfer Learning (arXiv
    2206.06522), section 3, and its official code (github.com/ylsung/Ladder-Side-Tuning) for every
    default: reduction 8, gates sigmoid(alpha / 0.1) from alpha 0, T5-base without side blocks 0, 4
    and 8 of 12, T5-large without every second, down- and up-projections from N(0, 0.01) with zero
    biases, no distillation.
Deviations:
    T5-3B: the official script gives block 23 alone a side block (`layers: [23]`); here 24 blocks
    lose every second one, as in T5-large.
    The side network reads the embedding under the backbone's own dropout; the official code draws
    dropout once more for it.
    Encoder-only and decoder-only backbones: the same ladder on the one stack they have; the
    up-projection replaces the state that the head (BERT: pooler and head) receives. BERT's side
    blocks end with their norm and get no second one.
    Dropout after the side stack is the rate of the backbone's residual dropout, 0 for Llama.
    Rows are pruned without regard to heads, as in the official code; Llama's rotary angles are
    those of the narrow heads, and Qwen 3's norms of queries and keys start new. Importances are
    multiplied in double precision. `walk: side` is our reading of the paper: only blocks with a
    side block are walked through, the decoder begins at the embedding again, and cross-attention's
    keys and values keep the columns that the side encoder keeps.
    Where layers see windows of the text (Gemma, ModernBERT) it is refused: side blocks share one
    mask.
    Fisher importances are taken in evaluation mode, as in the official code. A task head that the
    checkpoint lacks has weights of their own for them, because the trial's would depend on its
    seed: all trials of a task start from the same side blocks.
    The gates of blocks without side block are counted and stored (the official count has them) and
    change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Family, Stack, has_windows
from suite.errors import DataError, IncompatibleError
from suite.petl._pruning import (
    Walk,
    fixed_head,
    magnitude,
    prune_into_side,
    squared_gradients,
)
from suite.petl._side import SideNetwork, narrow_model, place
from suite.petl.base import Architecture, Batch, Method, freeze

DEEP = 24
"""Blocks from which on every second one is dropped: T5-large's number."""
_POSITION_TABLE = "relative_attention_bias"  # T5 keeps it in the first block of a stack
_RESIDUAL_DROPOUTS = ("dropout_rate", "hidden_dropout_prob", "resid_pdrop")  # T5, BERT, GPT-2


class LstConfig(Architecture):
    """The official code's flags."""

    reduction: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="r: side width is d / r; official code"
    )
    drop_every: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None,
        description="blocks 0, m, 2m, ... get no side block; 0: all do; null: 4, and 2 from 24"
        " blocks on, as the official code has it for T5-base and T5-large",
    )
    layers: list[int] | None = Field(
        None, description="blocks that get a side block, in every stack; overrides drop_every"
    )
    temperature: Annotated[float, Field(gt=0, le=100)] = Field(
        0.1, description="T in the gates sigmoid(alpha / T); official code"
    )
    init: Literal["fisher", "magnitude", "random"] = Field(
        "fisher", description="how side blocks start; official: fisher-v2"
    )
    walk: Walk = Field(
        "all",
        description="blocks through which pruning carries what it keeps: all (official), or those"
        " with a side block (ours)",
    )
    fisher_examples: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        1024, description="examples for the importances; official code"
    )


class Lst(Method[LstConfig]):
    description = (
        "a narrow side network fed by gated shortcuts from the frozen backbone;"
        " no backward pass through the backbone"
    )
    source = "LST, arXiv 2206.06522, section 3; official code"
    Config = LstConfig
    needs_projections = "its side blocks are pruned copies of the backbone's own"
    backward_through_backbone = False

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        if has_windows(model.config):
            raise IncompatibleError(
                f"lst: some layers of this {family.name} backbone see a window of the text, and the"
                " side blocks share one mask; use another method"
            )
        freeze(model)
        stacks = family.stacks(model)
        kept = [self._kept(stack) for stack in stacks]
        narrow = narrow_model(model, family, reduction=self.config.reduction, kept=kept)
        for stack, side, layers in zip(stacks, family.stacks(narrow), kept, strict=True):
            is_last = stack is stacks[-1]
            network = SideNetwork(
                stack,
                side,
                kept=layers,
                to_head=is_last,
                dropout_frac=_residual_dropout(model),
                temperature=self.config.temperature,
            )
            place(stack, network, hands_on=not is_last, receives=is_last and len(stacks) > 1)
            _copy_position_table(stack, network)
        # "fisher" needs batches and waits for `prepare`; the meta device has no numbers to compare
        if self.config.init == "magnitude" and not next(model.parameters()).is_meta:
            prune_into_side(model, family, magnitude, walk=self.config.walk)
        return model

    @property
    def needs_preparation(self) -> bool:
        return self.config.init == "fisher"

    def prepare(
        self,
        model: nn.Module,
        family: Family,
        batches: Iterable[Batch],
        loss: Callable[[nn.Module, Batch], Tensor],
    ) -> None:
        """Prune by the squared gradients of the pre-trained model's own loss of each example.

        Raises:
            DataError: There is no example.
        """
        assert isinstance(model, PreTrainedModel)
        examples = islice(_single_rows(batches), self.config.fisher_examples)
        first = next(examples, None)
        if first is None:
            raise DataError(
                "lst: got no training example, expected at least one for the Fisher importances"
                " (or set init: magnitude)"
            )
        weights = [
            *model.get_input_embeddings().parameters(),
            *_block_weights(family.stacks(model)),
        ]
        weights = list(dict.fromkeys(weights))  # a tied weight counts once
        with _as_pretrained(model, family, weights), fixed_head(model, family):
            losses = (loss(model, example) for example in chain([first], examples))
            importances = squared_gradients(weights, losses)  # one graph at a time
        prune_into_side(model, family, importances.__getitem__, walk=self.config.walk)

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """The sum over stacks of N blocks, n of them kept, with width d and k = d / r.

        A stack has every (a x b) matrix and (a)-vector of a kept block at 1/r in each dimension,
        one relative-position table, the final norm at 1/r, (n + 1)(dk + k) for the down-projections
        and N gates. The last stack also has kd + d for the up-projection.
        """
        r = self.config.reduction
        total = 0
        for stack in family.stacks(model):
            d = stack.width
            k = d // r
            kept = self._kept(stack)
            for name, weight in stack.blocks.named_parameters():
                layer = int(name.partition(".")[0])
                # the table has one column a head, and the heads stay as many
                if _POSITION_TABLE in name:
                    total += weight.numel()
                elif layer in kept:
                    total += _narrow_size(weight, r)
            if stack.final_norm is not None:
                total += sum(_narrow_size(weight, r) for weight in stack.final_norm.parameters())
            total += (len(kept) + 1) * (d * k + k) + len(stack.blocks)
        return total + k * d + d

    def _kept(self, stack: Stack) -> list[int]:
        """Numbers of the blocks that get a side block.

        Raises:
            IncompatibleError: None is left, or a number is not that of a block.
        """
        depth = len(stack.blocks)
        every = self.config.drop_every
        if every is None:
            every = 2 if depth >= DEEP else 4
        if self.config.layers is not None:
            kept = sorted(set(self.config.layers))
            if not kept or kept[0] < 0 or kept[-1] >= depth:
                raise IncompatibleError(
                    f"lst: layers {self.config.layers}: expected numbers from 0 to {depth - 1} for"
                    f" the {stack.role}"
                )
            return kept
        kept = [i for i in range(depth) if every == 0 or i % every]
        if not kept:
            raise IncompatibleError(
                f"lst: drop_every {every} leaves none of the {stack.role}'s {depth} blocks; set"
                " drop_every: 0"
            )
        return kept


def _narrow_size(weight: Tensor, reduction: int) -> int:
    return math.prod(size // reduction for size in weight.shape)


def _residual_dropout(model: PreTrainedModel) -> float:
    for name in _RESIDUAL_DROPOUTS:
        if hasattr(model.config, name):
            return float(getattr(model.config, name))
    return 0.0  # Llama has none


@torch.no_grad()
def _copy_position_table(stack: Stack, side: SideNetwork) -> None:
    """Start T5's relative positions in the first side block as the backbone's.

    They keep their size, because the side blocks have as many heads.
    """
    tables = [w for name, w in stack.blocks.named_parameters() if _POSITION_TABLE in name]
    targets = [w for name, w in side.blocks.named_parameters() if _POSITION_TABLE in name]
    for table, target in zip(tables, targets, strict=True):
        target.copy_(table)


def _block_weights(stacks: Iterable[Stack]) -> Iterator[nn.Parameter]:
    for stack in stacks:
        for weight in stack.blocks.parameters():
            # biases and norms follow the rows of the maps, so nobody ranks them
            if weight.ndim > 1:
                yield weight


def _single_rows(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Split batches into batches of one row.

    The Fisher importance sums the squares of single gradients, not of a batch's summed gradient.
    """
    for batch in batches:
        rows = len(next(iter(batch.values())))
        for i in range(rows):
            yield {name: values[i : i + 1] for name, values in batch.items()}


@contextmanager
def _as_pretrained(
    model: PreTrainedModel, family: Family, weights: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Run the model without its side networks, in evaluation mode, with gradients for `weights`.

    Afterwards everything is as it was.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    wirings: list[Any] = [stack.module.side_wiring for stack in family.stacks(model)]
    training = model.training
    freeze(model)
    for weight in weights:
        weight.requires_grad_(True)
    for wiring in wirings:
        wiring.bypassed = True
    model.train(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(training)
        for wiring in wirings:
            wiring.bypassed = False
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
