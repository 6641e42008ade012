"""What every backbone family answers: where its stacks, blocks, projections, norms and head are.

Methods and variants do their surgery through these answers and never look at a model's class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Kind = Literal["encoder", "decoder", "encoder-decoder"]
Role = Literal["encoder", "decoder"]
AttentionKind = Literal["self", "cross"]


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A run of blocks over one residual stream.

    Attributes:
        role: "encoder" (bidirectional) or "decoder" (causal).
        module: The module whose forward embeds (or takes embeddings), runs the blocks and applies `final_norm`.
        blocks: The blocks in order.
        final_norm: Norm after the last block inside `module.forward`; None where blocks end with their own (BERT).
        width: d, the size of the residual stream.
    """

    role: Role
    module: nn.Module
    blocks: nn.ModuleList
    final_norm: nn.Module | None
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSite:
    """One attention sublayer and the names of its projections on `module`.

    GPT-2 fuses q, k and v: there `q == k == v == "c_attn"` and `fused` is True, until an attention variant cuts them apart
    (`SplitProjection`): then they are `c_attn.q`, `c_attn.k`, `c_attn.v`. Names are to be read with `get_submodule`.
    `owner` is the module that holds `o` (BERT keeps it beside the attention, in `BertSelfOutput`); `kv_heads` are the
    checkpoint's, whatever a variant has made of them.
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

    @property
    def site(self) -> str:
        """`encoder-self`, `decoder-self` or `decoder-cross`: how users name sites."""
        return f"{self.role}-{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class Sublayer:
    """The last linear map of a sublayer, before dropout, residual sum and (BERT) norm: where adapters go."""

    role: Role
    kind: Literal["self", "cross", "feed-forward"]
    layer: int
    output: nn.Module


class Absent(nn.Module):
    """Stands where a projection was that an attention variant does without; methods pass over it.

    Gives zeros of `out_features` per token, without memory of their own, as the attention's code wants something to reshape.
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1).expand(*x.shape[:-1], self.out_features)


class SplitProjection(nn.Module):
    """GPT-2's fused projection in three parts; gives them side by side, (B, L, d_q + d_k + d_v)."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


class Family(ABC):
    """One file per family; `name` is the file's stem.

    Attributes:
        kind: What the family is.
        model_types: `config.model_type` values it serves.
        description: One line for `suite list backbones`.
        rotates: Whether queries and keys are turned by their position between projection and cache (rotary positions).
        position_bias: Whether every head adds a position bias of its own to its scores.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    model_types: ClassVar[tuple[str, ...]]
    description: ClassVar[str]
    rotates: ClassVar[bool] = False
    position_bias: ClassVar[bool] = False

    @abstractmethod
    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        """Encoder before decoder."""

    @abstractmethod
    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        """Every attention sublayer, in the order of the forward pass."""

    @abstractmethod
    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        """Every sublayer's output map, in the order of the forward pass."""

    @abstractmethod
    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Every normalisation module with its qualified name."""

    @abstractmethod
    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Qualified name prefixes of the *task head*: new weights that every method trains (none for T5 text-to-text)."""

    @abstractmethod
    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        """A copy of the configuration with widths divided by `factor` and the same number of heads (LST's side blocks).

        Raises:
            IncompatibleError: A width is not divisible.
        """
