"""What an attention variant is: surgery on a backbone's projections, before any PETL method sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import AttentionSite, Family
from suite.config.loader import Strict, validate

C = TypeVar("C", bound=Strict)
ALL_FAMILIES = frozenset({"t5", "bert", "gpt2", "llama"})
Start = Literal["converted", "scratch"]


class Options(Strict):
    """Base of a variant's options; every default cites its source."""


class Variant(ABC, Generic[C]):
    """One file per variant in `suite/attention/`; the file's stem is its name (`mhe_add.py` is `mhe-add`).

    Attributes:
        description: One line for `suite list attention`.
        source: Paper and section or equation.
        families: Names of the backbone families it works on.
        families_why: Why only those, as the end of a sentence in errors; "" where it is all of them.
        start: "converted" = from a checkpoint's weights; "scratch" = its new weights mean nothing before they are
            pre-trained, so it wants random weights (`backbones: [{config: ...}]`) or a `pretrain` stage.
        keeps_projections: Whether q, k and v stay the checkpoint's own (methods that copy them need that).
        across_layers: Whether layers take from one another; two such variants do not go together.
        Config: Its options.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[frozenset[str]] = ALL_FAMILIES
    families_why: ClassVar[str] = ""
    start: Start = "converted"
    keeps_projections: ClassVar[bool] = False
    across_layers: ClassVar[bool] = False
    Config: ClassVar[type[Any]] = Options

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    def configure(cls, options: Mapping[str, Any], *, where: str = "") -> Variant[Any]:
        """The variant with checked options.

        Raises:
            ConfigError: Unknown key or value out of range.
        """
        return cls(validate(cls.Config, options, where=where or f"options of attention {cls.name}"))

    @abstractmethod
    def convert(self, model: PreTrainedModel, family: Family) -> None:
        """Change `model` in place; works on the meta device, and draws from torch's global generator only.

        Raises:
            IncompatibleError: This backbone cannot be converted.
        """

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        """Numbers that `generate` keeps per token at one site of the unconverted backbone, once it is converted.

        The token is one of the decoder's for self-attention, of the source for cross-attention.
        """
        return 2 * site.kv_heads * site.head_dim

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        """Parameters of a converted model that the checkpoint does not have; every PETL method trains them."""
        return []

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        """Parameters of a converted model that are the variant's own and in no projection (MHE's embeddings, WGQA's weights)."""
        return []

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Turn what only training needs into plain projections, in place; the function stays the same. Default: nothing."""
