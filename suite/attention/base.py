"""What an attention variant is: surgery on a backbone's projections, before any PETL method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import AttentionSite, Family, Kind, window_of
from suite.config.loader import Strict, validate

C = TypeVar("C", bound=Strict)
Start = Literal["converted", "scratch"]


class Options(Strict):
    """Base of a variant's options; every default cites its source."""


class Variant(ABC, Generic[C]):
    """An attention variant. Each has one file in `suite/attention/`.

    The file's stem is the variant's name (`mhe_add.py` is `mhe-add`).

    Attributes:
        description: One line for `suite list attention`.
        source: Paper and section or equation.
        families: Names of the backbone families that it works on; None = all of its kinds whose
            attention can be changed (`suite.backbones.fit`).
        kinds: Which stacks a family must have.
        families_why: Why it works on no others, as the end of a sentence in errors; "" where it
            works on all.
        start: "converted" = it starts from a checkpoint's weights; "scratch" = its new weights mean
            nothing before they are pre-trained, so it needs random weights
            (`backbones: [{config: ...}]`) or a `pretrain` stage.
        keeps_projections: Whether the attention's projections and its cache stay the checkpoint's
            own; methods that copy them need that.
        across_layers: Whether layers take from one another; two such variants do not go together.
        not_shared: Why layers cannot take from one another over this variant, as the end of a
            sentence in errors; "" where they can.
        is_plain_folded: Whether the folded weights alone are the function; where they are not, no
            export is a plain model of transformers.
        Config: The class of its options.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[frozenset[str] | None] = None
    kinds: ClassVar[frozenset[Kind]] = frozenset({"encoder", "decoder", "encoder-decoder"})
    families_why: ClassVar[str] = ""
    # no ClassVar: a variant over another one starts as that one does
    start: Start = "converted"
    keeps_projections: ClassVar[bool] = False
    across_layers: ClassVar[bool] = False
    not_shared: ClassVar[str] = ""
    is_plain_folded: ClassVar[bool] = True
    Config: ClassVar[type[Any]] = Options

    def __init__(self, config: C) -> None:
        self.config = config

    @property
    def draws(self) -> bool:
        """Whether it draws weights on a checkpoint, so that each seed starts from others."""
        return getattr(self.config, "init", None) == "random"

    @classmethod
    def configure(cls, options: Mapping[str, Any], *, where: str = "") -> Variant[Any]:
        """Check the options and make the variant.

        Raises:
            ConfigError: A key is unknown, or a value out of range.
        """
        return cls(validate(cls.Config, options, where=where or f"options of attention {cls.name}"))

    @abstractmethod
    def convert(self, model: PreTrainedModel, family: Family) -> None:
        """Change `model` in place.

        It works on the meta device too, and draws from torch's global generator only.

        Raises:
            IncompatibleError: This backbone cannot be converted.
        """

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        """Numbers that `generate` keeps per token at one site, once the model is converted.

        The token is one of the decoder's for self-attention, of the source for cross-attention.

        Args:
            site: The site of the backbone before its conversion.
            family: The backbone's family.
        """
        return 2 * site.kv_heads * site.head_dim  # a key and a value

    def cached_tokens(self, site: AttentionSite, family: Family) -> int | None:
        """Most tokens of which `generate` keeps anything at one site; None = all of them."""
        window = window_of(site.module)
        # the next token makes the backbone's own window full (Gemma)
        return None if window is None else window - 1

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        """Parameters of a converted model that the checkpoint lacks; every method trains them."""
        return []

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        """Parameters of a converted model that are in no projection.

        These are MHE's embeddings, WGQA's weights, and all of a token mixer.
        """
        return []

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Prepare a trained model for serving, in place: leave out what only training needs.

        The model computes the same afterwards, in evaluation and up to rounding. Most variants
        have nothing to fold.
        """
