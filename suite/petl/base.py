"""What a PETL method is: surgery on a backbone, a list of what trains, and a formula for how much that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.config.loader import Strict, validate

if TYPE_CHECKING:
    from peft import PeftConfig

C = TypeVar("C", bound=Strict)
ALL_FAMILIES = frozenset({"t5", "bert", "gpt2", "llama"})
Batch = Mapping[str, torch.Tensor]


class Architecture(Strict):
    """Base of a method's hyperparameters beside the learning rate; every default cites its source."""


class Method(ABC, Generic[C]):
    """One file per method in `suite/petl/`; the file's stem is its name.

    The order of a trial's life: `attach` on a freshly loaded model (before DeepSpeed sees it), then, if
    `needs_preparation`, `prepare` on a few training batches of the same unpartitioned model, then training.

    Attributes:
        description: One line for `suite list methods`.
        source: Paper and section or equation.
        families: Names of the backbone families it works on.
        Config: Its hyperparameters.
        needs_preparation: Whether `prepare` must run (LST's Fisher pruning).
        needs_projections: Why q, k and v must be the checkpoint's own; "" = they need not, any attention variant will do.
        backward_through_backbone: Whether gradients pass through the backbone, so that new parameters inside it can train.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[frozenset[str]] = ALL_FAMILIES
    Config: ClassVar[type[Any]]
    needs_preparation: ClassVar[bool] = False
    needs_projections: ClassVar[str] = ""
    backward_through_backbone: ClassVar[bool] = True

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    def configure(cls, architecture: Mapping[str, Any], *, where: str = "") -> Method[Any]:
        """The method with a checked architecture.

        Raises:
            ConfigError: Unknown key or value out of range.
        """
        return cls(validate(cls.Config, architecture, where=where or f"architecture of {cls.name}"))

    @abstractmethod
    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        """Perform the surgery and set `requires_grad` on every parameter; task heads are set by the caller.

        Must work on the meta device. Draws from torch's global generator only (the caller seeds it).

        Returns:
            The model to train: `model` itself, or a wrapper with the same forward signature and `generate`.

        Raises:
            IncompatibleError: This backbone cannot take this architecture.
        """

    def extra_positions(self) -> int:
        """Positions that the method puts in front of the input, where the backbone has a table of them."""
        return 0

    def prepare(
        self,
        model: nn.Module,
        family: Family,
        batches: Iterable[Batch],
        loss: Callable[[nn.Module, Batch], torch.Tensor],
    ) -> None:
        """Initialise from training data; only called when `needs_preparation` (same batches on every rank)."""

    def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
        """What `model`, made by `attach`, is in peft's own words, without task head; None where peft would compute something else."""
        return None

    @abstractmethod
    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """The paper's formula for the number of trained parameters, without task head, for this unmodified backbone."""


def freeze(model: nn.Module) -> None:
    """No parameter trains."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def head_parameters(model: nn.Module, family: Family) -> list[nn.Parameter]:
    """The parameters of the task head, which every method trains and every count keeps apart.

    Args:
        model: A backbone, or what `attach` made of it.
        family: The backbone's family, which finds it also inside a wrapper.
    """
    prefixes = tuple(f"{name}." for name in family.head_names(cast(PreTrainedModel, model)))
    return (
        [
            parameter
            for name, parameter in model.named_parameters()
            if f"{name}.".startswith(prefixes)
        ]
        if prefixes
        else []
    )
