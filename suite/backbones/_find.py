"""Find the backbone inside whatever wraps it, divide its widths, put another forward in place of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from suite.errors import IncompatibleError


def backbone(model: nn.Module, model_types: Sequence[str]) -> tuple[str, Any]:
    """The outermost transformers model of one of `model_types`, with its qualified name in `model` ("" if it is `model`).

    Raises:
        IncompatibleError: There is none.
    """
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in model_types:
            return name, module
    raise IncompatibleError(
        f"{type(model).__name__} holds no model of type {' or '.join(model_types)}"
    )


def base_model(model: nn.Module, model_types: Sequence[str]) -> Any:
    """The backbone without its head: `T5ForConditionalGeneration` itself, or the `BertModel`, `GPT2Model`, `LlamaModel` inside."""
    return backbone(model, model_types)[1].base_model


def numbered(blocks: nn.ModuleList) -> Iterator[tuple[int, Any]]:
    """Blocks with their numbers; their parts differ by family, hence `Any`."""
    yield from enumerate(blocks)


def modules_of(
    model: nn.Module, model_types: Sequence[str], classes: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules of `classes` inside the backbone, by their qualified names in `model`."""
    prefix, inside = backbone(model, model_types)
    for name, module in inside.named_modules(prefix=prefix):
        if isinstance(module, classes):
            yield name, module


def present_names(
    model: nn.Module, model_types: Sequence[str], names: Sequence[str]
) -> tuple[str, ...]:
    """Those of `names` that are children of the backbone, qualified by its name in `model`."""
    prefix, inside = backbone(model, model_types)
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for name in names
        if isinstance(getattr(inside, name, None), nn.Module)
    )


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `module` run `forward(original, module, *args, **kwargs)`; the visible signature stays (generate reads it).

    The override is a bound method, so that `copy.deepcopy` of a model binds it to the copy.
    """
    original = type(module).forward
    assert "forward" not in vars(module), f"{type(module).__name__} is overridden already"

    @functools.wraps(original)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(functools.partial(original, self), self, *args, **kwargs)

    module.forward = MethodType(replacement, module)


def divide(config: PreTrainedConfig, names: Sequence[str], factor: int) -> PreTrainedConfig:
    """A copy of `config` with the numbers of `names` divided by `factor`.

    Raises:
        IncompatibleError: A number is not divisible.
    """
    scaled = copy.deepcopy(config)
    for name in names:
        value = getattr(config, name)
        if factor < 1 or value % factor:
            raise IncompatibleError(
                f"{config.model_type}: {name} {value} is not divisible by the reduction factor {factor}"
            )
        setattr(scaled, name, value // factor)
    return scaled


def check_heads(config: PreTrainedConfig, *, width: int, heads: int, factor: int) -> None:
    """Raise IncompatibleError unless a width divided by `factor` still splits into the same number of heads."""
    if width % heads:
        raise IncompatibleError(
            f"{config.model_type}: width {width} (reduction factor {factor}) does not split into {heads} heads"
        )
