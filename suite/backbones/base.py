"""What every backbone family answers: where its stacks, blocks, projections, norms and head are.

Methods and variants do their surgery through these answers and never look at a model's class.
Shapes: B rows, L tokens, d width of the residual stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Kind = Literal["encoder", "decoder", "encoder-decoder"]
Role = Literal["encoder", "decoder"]
AttentionKind = Literal["self", "cross"]
SelfSite = Literal["encoder-self", "decoder-self"]
SiteName = Literal[SelfSite, "decoder-cross"]
"""Where an attention stands, as options name it: its role and kind."""


# eq=False on the three classes below: comparing modules by value makes no sense, identity does
@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A run of blocks over one residual stream.

    Attributes:
        role: "encoder" (bidirectional) or "decoder" (causal).
        module: The module whose forward embeds tokens (or takes embeddings), runs the blocks and
            applies `final_norm`.
        blocks: The blocks in order.
        final_norm: The norm after the last block, inside `module.forward`; None where each block
            ends with a norm of its own (BERT).
        width: d, the size of the residual stream.
    """

    role: Role
    module: nn.Module
    blocks: nn.ModuleList
    final_norm: nn.Module | None
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSite:
    """One attention sublayer and the names of its projections.

    GPT-2 fuses q, k and v: there `q == k == v == "c_attn"` and `fused` is True. An attention
    variant may split them (`SplitProjection`); then they are `c_attn.q`, `c_attn.k`, `c_attn.v`.
    Read the names with `get_submodule`.

    Attributes:
        role: The stack that the sublayer belongs to.
        kind: Self-attention, or cross-attention to the encoder's output.
        layer: Number of the block in its stack, from 0.
        module: The attention module; `q`, `k` and `v` are names in it.
        q, k, v: Names of the query, key and value projections.
        owner: The module that holds `o`; BERT keeps it beside the attention, in `BertSelfOutput`.
        o: Name of the output projection in `owner`.
        heads: Query heads.
        kv_heads: Key-value heads of the checkpoint, whatever a variant has made of them.
        head_dim: Width of one head.
        fused: Whether one module projects q, k and v together.
        q_norm, k_norm: Names in `module` of the norms of queries and keys; "" = there are none.
    """

    role: Role
    kind: AttentionKind
    layer: int
    module: nn.Module
    q: str
    k: str
    v: str
    owner: nn.Module
    o: str
    heads: int
    kv_heads: int
    head_dim: int
    fused: bool = False
    q_norm: str = ""
    k_norm: str = ""

    @property
    def site(self) -> str:
        """How users name the site: `encoder-self`, `decoder-self` or `decoder-cross`."""
        return f"{self.role}-{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class Sublayer:
    """An attention or feed-forward sublayer, known by its last linear map.

    Attributes:
        role: The stack that it belongs to.
        kind: What it computes.
        layer: Number of the block in its stack, from 0.
        output: Its last linear map, before dropout, residual sum and (BERT) norm: adapters go here.
    """

    role: Role
    kind: Literal["self", "cross", "feed-forward"]
    layer: int
    output: nn.Module


class Absent(nn.Module):
    """Takes the place of a projection that an attention variant does without; methods skip it.

    It returns zeros of `out_features` per token, because the attention's code reshapes something.
    All of them share one element of memory.
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1).expand(*x.shape[:-1], self.out_features)  # (B, L, out_features)


class SplitProjection(nn.Module):
    """GPT-2's fused projection, split in three; it returns q, k and v side by side."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q = q
        self.k = k
        self.v = v

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)  # (B, L, d_q + d_k + d_v)


class Family(ABC):
    """A family of backbones. Each has one file, and `name` is the file's stem.

    Attributes:
        kind: Which stacks the family has.
        model_types: The values of `config.model_type` that it serves.
        description: One line for `suite list backbones`.
        rotates: Whether queries and keys are rotated by their position after the projection and
            before the cache (rotary positions).
        position_bias: Whether every head adds a position bias of its own to its scores.
        implementation: The attention implementation of transformers that computes what the family
            defines.
        fixed_attention: Why no attention variant can change its attention, as the end of a
            sentence; "" = variants can.
        refused_methods: Methods that do not work on it, with the reason as the end of a sentence.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    model_types: ClassVar[tuple[str, ...]]
    description: ClassVar[str]
    rotates: ClassVar[bool] = False
    position_bias: ClassVar[bool] = False
    implementation: ClassVar[Literal["sdpa", "eager"]] = "sdpa"
    fixed_attention: ClassVar[str] = ""
    refused_methods: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        """All stacks, the encoder before the decoder."""

    @abstractmethod
    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        """Every attention sublayer, in the order of the forward pass."""

    @abstractmethod
    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        """Every attention and feed-forward sublayer, in the order of the forward pass."""

    @abstractmethod
    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Every normalisation module with its qualified name."""

    @abstractmethod
    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Qualified name prefixes of the *task head*: new weights that every method trains.

        T5 has none, because it answers in text.
        """

    @abstractmethod
    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        """Copy the configuration with widths divided by `factor` and as many heads.

        LST builds its side blocks from it.

        Raises:
            IncompatibleError: A width is not divisible.
        """

    def positions(self, config: PreTrainedConfig) -> int | None:
        """Number of tokens that the backbone has positions for; None = there is no limit (T5)."""
        return getattr(config, "max_position_embeddings", None)


def has_windows(config: PreTrainedConfig) -> bool:
    """Whether some layer sees a window of the text only (Gemma, ModernBERT, early Mistral)."""
    known: Any = config
    layer_types = getattr(known, "layer_types", None)
    if layer_types is not None:
        return "sliding_attention" in layer_types
    return getattr(known, "sliding_window", None) is not None


def window_of(attention: nn.Module) -> int | None:
    """Tokens that a layer's own window shows to either side, its query's among them.

    None where the layer sees the whole text.
    """
    window: int | None = getattr(attention, "sliding_window", None)
    config: Any = getattr(attention, "config", None)
    # Mistral's window is that of all layers, and stands in the configuration alone.
    if window is None and getattr(config, "layer_types", None) is None:
        window = getattr(config, "sliding_window", None)
    return window
