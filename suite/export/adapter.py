"""A trained arm as an adapter of the peft library: `adapter_config.json` and `adapter_model.safetensors` beside a plain base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.backbones.heads import Head
from suite.backbones.loading import build
from suite.config.sweep import AttentionChoice
from suite.export.base import base_name, open_base, start_backbone
from suite.export.description import BASE, Description
from suite.train.restore import Restored

WEIGHTS = "adapter_model.safetensors"
KEPT_HEAD = ".modules_to_save.default."


class NotPeftsError(RuntimeError):
    """peft cannot hold this model; says why."""


def peft_config_of(restored: Restored) -> PeftConfig | None:
    """The method in peft's words; None where it has none, or its base is not a plain checkpoint's model."""
    arm = restored.spec.arm
    if arm.attention != AttentionChoice() or arm.pretrain is not None:
        return None
    return restored.method.peft_config(restored.model, restored.resolved.family)


def write_adapter(
    restored: Restored, config: PeftConfig, description: Description, folder: Path
) -> None:
    """The adapter with the trained task head, and the base where it cannot be found by name.

    Raises:
        NotPeftsError: peft's model of this method has tensors that ours does not have.
    """
    base, family = start_backbone(restored), restored.resolved.family
    if description.base == "copy":
        base.save_pretrained(str(folder / BASE))
    _complete(config, base, family, restored.objective.head)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
    _fill(model, restored.model)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in state.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config.inference_mode = True
    config.base_model_name_or_path = (
        BASE if description.base == "copy" else base_name(restored)
    )  # peft has put its own here
    config.revision = description.base_identity.get("commit")
    config.save_pretrained(str(folder))


def load_adapter(description: Description, folder: Path) -> nn.Module:
    """What `write_adapter` wrote, as a `PeftModel`."""
    base = build(open_base(description, folder), description.made_head).to(
        getattr(torch, description.dtype)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        model: PeftModel = PeftModel.from_pretrained(
            base,
            str(folder),
            autocast_adapter_dtype=False,
            local_files_only=True,
            use_safetensors=True,
        )
    return model


def _complete(config: PeftConfig, base: PreTrainedModel, family: Family, head: Head) -> None:
    """Say that the task head is stored with the adapter, and what kind of model this is."""
    heads = list(family.head_names(base))
    known: Any = config
    known.modules_to_save = heads or None
    if config.task_type is None and not heads:
        config.task_type = (
            TaskType.SEQ_2_SEQ_LM if family.kind == "encoder-decoder" else TaskType.CAUSAL_LM
        )


def _fill(model: PeftModel, trained: nn.Module) -> None:
    """Copy every tensor of the trained arm to where peft has it."""
    ours = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".original_module." not in name:
            with torch.no_grad():
                tensor.copy_(_source(name, ours, tensor))


def _source(name: str, ours: dict[str, Tensor], like: Tensor) -> Tensor:
    """Our tensor for one of peft's names: with its prefix or without, the head by its own name, the prompt wherever we keep it."""
    plain = name.replace(KEPT_HEAD, ".")
    for candidate in (
        plain,
        plain.removeprefix("base_model.model."),
        plain.removeprefix("base_model."),
    ):
        if candidate in ours and ours[candidate].shape == like.shape:
            return ours[candidate]
    inside = plain.removeprefix("prompt_encoder.default.")
    prompts = [
        tensor
        for other, tensor in ours.items()
        if inside != plain and other.endswith(f".prompt.{inside}")
    ]
    if len(prompts) != 1 or prompts[0].shape != like.shape:
        raise NotPeftsError(f"peft's model has a tensor {name} that the trained one has not")
    return prompts[0]
