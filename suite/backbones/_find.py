"""Helpers that the families share: find the backbone, narrow its widths, replace a forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from suite.errors import IncompatibleError


def find_backbone(model: nn.Module, model_types: Sequence[str]) -> tuple[str, Any]:
    """Find the outermost transformers model of one of `model_types`.

    Returns:
        Its qualified name in `model` ("" if it is `model` itself), and the model.

    Raises:
        IncompatibleError: There is none.
    """
    # named_modules goes from the outside in, so the first match is the outermost
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in model_types:
            return name, module
    raise IncompatibleError(
        f"{type(model).__name__} holds no model of type {' or '.join(model_types)}"
    )


def base_model(model: nn.Module, model_types: Sequence[str]) -> Any:
    """The backbone without its head: `BertModel`, `GPT2Model`, `LlamaModel`.

    T5 has no separate head, so there it is `T5ForConditionalGeneration` itself.
    """
    _, found = find_backbone(model, model_types)
    return found.base_model


def enumerate_blocks(blocks: nn.ModuleList) -> Iterator[tuple[int, Any]]:
    """Number the blocks; they are `Any` because their parts differ by family."""
    yield from enumerate(blocks)


def modules_of_class(
    model: nn.Module, model_types: Sequence[str], classes: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, nn.Module]]:
    """The backbone's modules of `classes`, with their qualified names in `model`."""
    prefix, inside = find_backbone(model, model_types)
    for name, module in inside.named_modules(prefix=prefix):
        if isinstance(module, classes):
            yield name, module


def names_of_children(
    model: nn.Module, model_types: Sequence[str], names: Sequence[str]
) -> tuple[str, ...]:
    """Those of `names` that are children of the backbone, as qualified names in `model`."""
    prefix, inside = find_backbone(model, model_types)
    present = []
    for name in names:
        if isinstance(getattr(inside, name, None), nn.Module):
            # the prefix is empty where the backbone is the model itself
            present.append(f"{prefix}.{name}".removeprefix("."))
    return tuple(present)


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make `module` run `forward(original, module, *args, **kwargs)` in place of its own forward.

    The visible signature stays, because transformers' `generate` reads it.
    The override is a bound method, so that `copy.deepcopy` of a model binds it to the copy.
    """
    # the class's forward, as the instance's is bound to this module and would survive a deepcopy
    original = type(module).forward
    assert "forward" not in vars(module), f"{type(module).__name__} is overridden already"

    @functools.wraps(original)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(functools.partial(original, self), self, *args, **kwargs)

    module.forward = MethodType(replacement, module)


def divide(config: PreTrainedConfig, names: Sequence[str], factor: int) -> PreTrainedConfig:
    """Copy `config` and divide the numbers called `names` by `factor`.

    Raises:
        IncompatibleError: A number is not divisible.
    """
    scaled = copy.deepcopy(config)
    for name in names:
        value = getattr(config, name)
        # a remainder would change the ratio of the widths, and with it the published shape
        if factor < 1 or value % factor:
            raise IncompatibleError(
                f"{config.model_type}: {name} {value} is not divisible by the reduction factor"
                f" {factor}"
            )
        setattr(scaled, name, value // factor)
    return scaled


def check_heads(config: PreTrainedConfig, *, width: int, heads: int, factor: int) -> None:
    """Check that a width, already divided by `factor`, still splits into the same number of heads.

    Raises:
        IncompatibleError: It does not.
    """
    if width % heads:
        raise IncompatibleError(
            f"{config.model_type}: width {width} (reduction factor {factor}) does not split into"
            f" {heads} heads"
        )
