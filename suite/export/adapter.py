"""A trained arm as an adapter of the peft library, beside a plain base.

peft's files are `adapter_config.json` and `adapter_model.safetensors`.
"""

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
# What peft puts into the name of a head that it trains: the head's name stands around it.
KEPT_HEAD = ".modules_to_save.default."


class PeftCannotHoldError(RuntimeError):
    """peft's format cannot hold this model; the message says why."""


def peft_config_of(restored: Restored) -> PeftConfig | None:
    """Give peft's configuration of the method.

    None where peft has no such method, and where the base is not a plain checkpoint.
    """
    arm = restored.spec.arm
    # An adapter's file names a plain checkpoint as its base: it cannot say how that is converted.
    if arm.attention != AttentionChoice() or arm.pretrain is not None:
        return None
    return restored.method.peft_config(restored.model, restored.resolved.family)


def write_adapter(
    restored: Restored, config: PeftConfig, description: Description, folder: Path
) -> None:
    """Write the adapter with the trained task head, and the base where no name finds it.

    Raises:
        PeftCannotHoldError: peft's model of this method has tensors that ours does not have.
    """
    base = start_backbone(restored)
    where = base_name(restored)
    if description.base == "copy":
        where = BASE
        base.save_pretrained(str(folder / BASE))
    # get_peft_model wraps the head by this, so it comes first.
    _complete(config, base, restored.resolved.family, restored.objective.head)
    with warnings.catch_warnings():
        # GPT-2's maps are stored transposed; peft corrects the option and says so each time.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
    _fill(model, restored.model)
    # By default peft looks the base up on the hub, to see whether the embedding has changed.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    # safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.inference_mode = True
    config.base_model_name_or_path = where  # get_peft_model put a path of this machine here
    config.revision = description.base_identity.get("commit")
    config.save_pretrained(str(folder))


def load_adapter(description: Description, folder: Path) -> nn.Module:
    """Load what `write_adapter` wrote, as a `PeftModel`."""
    base = build(open_base(description, folder), description.made_head)
    # Before the adapter comes, which takes over the precision of the base.
    base.to(getattr(torch, description.dtype))
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
    """Tell peft to store the task head with the adapter, and what kind of model this is."""
    heads = list(family.head_names(base))
    # PeftConfig declares modules_to_save in its subclasses alone.
    known: Any = config
    known.modules_to_save = heads or None
    if config.task_type is None and not heads:
        if family.kind == "encoder-decoder":
            config.task_type = TaskType.SEQ_2_SEQ_LM
        else:
            config.task_type = TaskType.CAUSAL_LM


def _fill(model: PeftModel, trained: nn.Module) -> None:
    """Copy every tensor of the trained arm to its place in peft's model."""
    ours = dict(trained.named_parameters()) | dict(trained.named_buffers())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".original_module." in name:
            continue  # the head before training, which peft keeps beside the trained one
        with torch.no_grad():
            tensor.copy_(_source(name, ours, tensor))


def _source(name: str, ours: dict[str, Tensor], like: Tensor) -> Tensor:
    """Find our tensor for one of peft's names.

    peft's prefix may be missing in ours, the head has its own name, and a prompt lies wherever
    our method keeps it.
    """
    plain = name.replace(KEPT_HEAD, ".")
    for prefix in ("", "base_model.model.", "base_model."):
        # A name without its prefix may be that of another tensor: the shape shows it.
        found = ours.get(plain.removeprefix(prefix))
        if found is not None and found.shape == like.shape:
            return found
    in_prompt = plain.removeprefix("prompt_encoder.default.")
    prompts = []
    if in_prompt != plain:
        prompts = [ours[other] for other in ours if other.endswith(f".prompt.{in_prompt}")]
    if len(prompts) != 1 or prompts[0].shape != like.shape:
        raise PeftCannotHoldError(
            f"peft's model has a tensor {name}, which the trained model does not have"
        )
    return prompts[0]
