"""Any method of the `peft` library by name: `peft:ia3`, `peft:vera`, `peft:ln-tuning`, ...

Source: https://github.com/huggingface/peft; the paper of each method stands in peft's
    documentation.
Deviations:
    - peft's own defaults hold, also for the modules it adapts (`target_modules`), as far as it
      knows the backbone.
    - peft's copy of the task head (`modules_to_save`) is taken out again; the suite trains the head
      itself, as for every method.
    - Methods that lengthen the input (p-tuning, prompt-tuning) are refused for classification heads
      on GPT-2 and Llama: peft 0.21 then reads the last position, which is padding in a right-padded
      batch. `prompt` does not have this fault.
    - The trained count is what peft reports; there is no formula of a paper behind it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from pydantic import ConfigDict
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.backbones.heads import has_own_forward
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from suite.petl.base import Architecture, Method, freeze, head_parameters

# fields of peft's configuration that the suite sets itself, or that say nothing about the method
OURS = frozenset(
    {
        "peft_type",
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "modules_to_save",
        "auto_mapping",
        "revision",
        "peft_version",
    }
)
REQUIRED = frozenset({"num_virtual_tokens", "token_indices"})
"""Fields that are empty by default, which peft notices only in training."""
UNUSABLE = {
    "ADALORA": "its ranks are allocated by calls in a training loop of its own",
    "CARTRIDGE": "it starts from the cache of a long text",
    "CPT": "it needs labelled examples as token ids with their types",
    "MULTITASK_PROMPT_TUNING": "it needs task ids in every batch",
    "POLY": "it needs task ids in every batch",
    "XLORA": "it mixes LoRA adapters that have been trained before",
}
REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)
"""What peft raises when a choice does not fit a backbone; it has no exception of its own."""


class PeftArchitecture(Architecture):
    """The fields of one of peft's configuration classes; they are checked against that class."""

    model_config = ConfigDict(extra="allow")


@cache
def peft_types() -> dict[str, str]:
    """The type in peft for each method's name here: `LN_TUNING` for `peft:ln-tuning`."""
    types = {}
    for kind in PEFT_TYPE_TO_CONFIG_MAPPING:
        name = kind.value.lower().replace("_", "-")
        types[f"peft:{name}"] = kind.value
    return types


@cache
def peft_method(name: str, *, where: str = "") -> type[Method[Any]]:
    """The method class of `peft:<type>`.

    Raises:
        UnknownNameError: peft has no such type; near names are offered.
        IncompatibleError: It needs more than a backbone and batches.
    """
    types = peft_types()
    if name not in types:
        raise UnknownNameError("method", name, types, where=where)
    if types[name] in UNUSABLE:
        prefix = f"{where}: " if where else ""
        raise IncompatibleError(f"{prefix}{name} does not fit a sweep: {UNUSABLE[types[name]]}")
    return _define(name, types[name])


def _define(method_name: str, kind: str) -> type[Method[Any]]:
    # PeftType is a str enum, so its members are found by their values
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]  # type: ignore[index]
    why_projections = ""
    if kind == "PREFIX_TUNING":
        why_projections = "its prefix is put into the cache as keys and values of their shape"

    class FromPeft(Method[PeftArchitecture]):
        name = method_name
        description = f"{kind} of the peft library"
        source = f"peft's documentation of {config_class.__name__}"
        Config = PeftArchitecture
        needs_projections = why_projections

        @classmethod
        def configure(cls, architecture: Mapping[str, Any], *, where: str = "") -> Method[Any]:
            where = where or f"architecture of {method_name}"
            complete = _complete_options(config_class, architecture, where=where)
            return cls(PeftArchitecture.model_validate(complete))

        def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
            return _attach(model, family, config_class, self.config.model_dump(), name=method_name)

        def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
            assert isinstance(model, PeftModel)
            return copy.deepcopy(model.peft_config["default"])

        def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
            shapes = _meta_copy(model)  # the model itself must stay unmodified
            head = {id(p) for p in head_parameters(shapes, family)}
            trained = self.attach(shapes, family).parameters()
            return sum(p.numel() for p in trained if p.requires_grad and id(p) not in head)

    return FromPeft


def _complete_options(
    config_class: type[PeftConfig], architecture: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """The options as plain data: what was given, and peft's defaults for the rest.

    Raises:
        ConfigError: The configuration class does not have a key, or refuses a value.
    """
    fields = {field.name for field in dataclasses.fields(config_class)} - OURS
    for key in architecture:
        if key not in fields:
            raise UnknownNameError("key", key, fields, where=where)
    config = _peft_config(config_class, dict(architecture), where=where)
    for key in REQUIRED & fields:
        if not getattr(config, key):
            raise ConfigError(f"{where}: key {key!r} is missing")
    options = {}
    for key in sorted(fields):
        value = _plain(getattr(config, key))
        # defaults may be objects of peft's, which no file can hold; peft makes them again
        if _is_plain(value):
            options[key] = value
    return options


def _peft_config(
    config_class: type[PeftConfig], options: dict[str, Any], *, where: str
) -> PeftConfig:
    try:
        return config_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: peft's {config_class.__name__} refuses it: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set):
        return sorted(value)  # a set's order changes from run to run, and with it a trial's hash
    return value


def _is_plain(value: Any) -> bool:
    """Whether a trial's specification can hold the value: text, numbers, lists and mappings."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _attach(
    model: PreTrainedModel,
    family: Family,
    config_class: type[PeftConfig],
    options: dict[str, Any],
    *,
    name: str,
) -> nn.Module:
    config = _peft_config(config_class, options, where=name)
    if config.is_prompt_learning:
        _set_task(config, model, family, name=name)
    # first, so that only what peft adds or unfreezes trains
    freeze(model)
    try:
        wrapped = _wrap(model, config)
    except REFUSALS as error:
        raise IncompatibleError(
            f"{name}: peft cannot attach it to this {family.name} backbone:"
            f" {type(error).__name__}: {error}"
        ) from error
    for place, module in list(wrapped.named_modules()):
        # peft's trained copy of the head; the suite trains the head itself
        if isinstance(module, ModulesToSaveWrapper):
            wrapped.set_submodule(place, module.original_module)
    _check_folded(wrapped, name=name)
    if not any(parameter.requires_grad for parameter in wrapped.parameters()):
        raise IncompatibleError(
            f"{name}: nothing trains on this {family.name} backbone; it needs something peft does"
            " not get here"
        )
    return wrapped


def _set_task(config: PeftConfig, model: PreTrainedModel, family: Family, *, name: str) -> None:
    """Tell peft what the model answers; its model class for a prompt or prefix depends on it.

    Raises:
        IncompatibleError: peft's class for this answer is wrong, or does not fit.
    """
    if has_own_forward(model):
        raise IncompatibleError(
            f"{name}: peft puts its vectors in front of one text with one answer only; use method"
            " prompt"
        )
    has_head = bool(family.head_names(model))
    # a prefix lengthens the cache and not the input, so the last position stays where it is
    if has_head and family.kind == "decoder" and name != "peft:prefix-tuning":
        raise IncompatibleError(
            f"{name}: with a classification head peft reads the wrong position of {family.name};"
            " use method prompt"
        )
    if has_head:
        config.task_type = TaskType.SEQ_CLS
    elif family.kind == "encoder-decoder":
        config.task_type = TaskType.SEQ_2_SEQ_LM
    else:
        config.task_type = TaskType.CAUSAL_LM


def _check_folded(wrapped: nn.Module, *, name: str) -> None:
    """Check that no peft layer computes with a weight that an attention variant folds.

    Attention variants with learned weights over heads have maps that return fewer features than
    their weight has rows. Only shapes are checked, on the meta device, where every arm is built
    before it runs.

    Raises:
        IncompatibleError: A layer returns as many features as the weight has rows.
    """
    for place, module in wrapped.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer: Any = module
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or not base.weight.is_meta:
            continue
        rows = base.weight.shape[0]
        if rows != base.out_features and not _keeps_width(layer):
            raise IncompatibleError(
                f"{name}: at {place} it computes with a weight of {rows} rows, which are folded to"
                f" {base.out_features} features; use a method that leaves the weight alone"
                " (lora, peft:ia3), or attention gqa"
            )


def _keeps_width(layer: Any) -> bool:
    """Whether a peft layer returns as many features as the map inside of it.

    True where shapes alone do not tell.
    """
    base = layer.get_base_layer()
    try:
        width = layer(torch.empty(1, 1, base.in_features, device="meta")).shape[-1]
    except NotImplementedError:  # the meta device lacks an operation
        return True
    except REFUSALS:
        return False
    return bool(width == base.out_features)


def _wrap(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """peft's model around `model`; on the meta device it is a copy of it."""
    if next(model.parameters()).device.type != "meta":
        return get_peft_model(model, config)
    try:
        with torch.device("meta"):
            return get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    except (NotImplementedError, RuntimeError):
        # some methods compute with the weights (BOFT, FRoD, ...), so give them random ones
        filled = copy.deepcopy(model).to_empty(device="cpu")
        filled.tie_weights()
        for parameter in filled.parameters():
            nn.init.normal_(parameter)
        freeze(filled)
        return get_peft_model(filled, config).to("meta")


def _meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` on the meta device."""
    # deepcopy takes from its memo what it has copied already, so no weight is ever duplicated
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)
