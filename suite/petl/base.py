"""What a PETL method is: surgery on a backbone, and a formula for how many parameters train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.config.loader import Strict, validate
from suite.config.training import TrainingConfig

if TYPE_CHECKING:
    from peft import PeftConfig  # at run time it would cost seconds

C = TypeVar("C", bound=Strict)
Batch = Mapping[str, torch.Tensor]


class Architecture(Strict):
    """Base of a method's hyperparameters other than the learning rate; defaults cite a source."""


class Method(ABC, Generic[C]):
    """A PETL method. Each has one file in `suite/petl/`, and the file's stem is its name.

    A trial calls `attach` on a freshly loaded model, before DeepSpeed sees it. Then, if
    `needs_preparation`, it calls `prepare` with a few training batches on the same model, which is
    not partitioned yet. Then it trains.

    Attributes:
        description: One line for `suite list methods`.
        source: Paper and section or equation.
        families: Names of the backbone families that it works on; None = all that do not refuse it.
        Config: The class of its hyperparameters.
        needs_projections: Why q, k and v must be the checkpoint's own; "" = they need not be, so
            any attention variant will do.
        not_recomputed: Why activations cannot be recomputed in the backward pass; "" = they can.
        backward_through_backbone: Whether gradients pass through the backbone, so that new
            parameters inside it can train.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[frozenset[str] | None] = None
    Config: ClassVar[type[Any]]
    needs_projections: ClassVar[str] = ""
    not_recomputed: ClassVar[str] = ""
    backward_through_backbone: ClassVar[bool] = True

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    def keeps_states(cls, training: TrainingConfig) -> bool:
        """Whether frozen stacks run without dropout, so that what they give can be kept."""
        return not (training.frozen_dropout or cls.backward_through_backbone)

    @classmethod
    def configure(cls, architecture: Mapping[str, Any], *, where: str = "") -> Method[Any]:
        """Check the architecture and make the method.

        Raises:
            ConfigError: A key is unknown, or a value out of range.
        """
        return cls(validate(cls.Config, architecture, where=where or f"architecture of {cls.name}"))

    @abstractmethod
    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        """Perform the surgery and set `requires_grad` on every parameter but the task head's.

        The caller sets that of task heads. The method must work on the meta device, and draw from
        torch's global generator only, which the caller seeds.

        Returns:
            The model to train: `model` itself, or a wrapper with the same forward signature and
            `generate`.

        Raises:
            IncompatibleError: This backbone cannot take this architecture.
        """

    def extra_positions(self) -> int:
        """Number of positions that the method puts in front of the input.

        They count where the backbone has a table of positions, which ends somewhere.
        """
        return 0

    @property
    def needs_preparation(self) -> bool:
        """Whether `prepare` must run, as for LST's Fisher pruning."""
        return False

    def prepare(
        self,
        model: nn.Module,
        family: Family,
        batches: Iterable[Batch],
        loss: Callable[[nn.Module, Batch], torch.Tensor],
    ) -> None:
        """Initialise from training data; called only if `needs_preparation`.

        Every rank gets the same batches. Frozen weights may change, too: the task head's may not.
        """

    def learning_rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """By what the learning rate is multiplied for a parameter of what `attach` made.

        Parameters that are left out take the rate as it is.
        """
        return {}

    def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
        """The peft configuration of what `attach` made, without task head.

        None where peft would compute something else.
        """
        return None

    @abstractmethod
    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """The number of trained parameters without task head, by the paper's formula.

        Args:
            model: The backbone, as it is before `attach`.
            family: Its family.
        """


def freeze(model: nn.Module) -> None:
    """Make no parameter train."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def surplus(module: nn.Module) -> int:
    """How many features a map returns for which it has no row: zeros, which nothing reads.

    What a method adds to them (MLA's rotated keys) is dropped.
    """
    if not isinstance(module, nn.Linear):
        return 0
    return max(module.out_features - len(module.weight), 0)


def backbone_norms(model: PreTrainedModel, family: Family) -> Iterator[nn.Module]:
    """The norms that are no part of the task head (ModernBERT's has one)."""
    head = tuple(f"{name}." for name in family.head_names(model))
    for name, norm in family.norms(model):
        if not f"{name}.".startswith(head):
            yield norm


def head_parameters(model: nn.Module, family: Family) -> list[nn.Parameter]:
    """The parameters of the task head.

    Every method trains them, and every count keeps them apart.

    Args:
        model: A backbone, or what `attach` made of it.
        family: The backbone's family; it also finds the backbone inside a wrapper.
    """
    prefixes = tuple(f"{name}." for name in family.head_names(cast(PreTrainedModel, model)))
    found = []
    for name, parameter in model.named_parameters():
        # the dot: `classifier` must not match `classifier2`
        if f"{name}.".startswith(prefixes):
            found.append(parameter)
    return found
