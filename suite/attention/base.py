"""What an attention variant is: surgery on a backbone's projections, before any PETL method sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.config.loader import Strict, validate

C = TypeVar("C", bound=Strict)


class Variant(ABC, Generic[C]):
    """One file per variant in `suite/attention/`; the file's stem is its name.

    Attributes:
        description: One line for `suite list attention`.
        source: Paper and section or equation.
        families: Names of the backbone families it works on.
        Config: Its options.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[frozenset[str]]
    Config: ClassVar[type[Any]]

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
        """Change `model` in place; works on the meta device.

        Raises:
            IncompatibleError: This backbone cannot be converted.
        """
