"""A trained arm as an adapter of the peft library, beside a plain base.

peft's files are `adapter_config.json` and `adapter_model.safetensors`. Where the base is copied,
`config.json` and an index of the copy's tensors stand beside them: transformers then finds the base
in this folder, wherever the folder lies. peft itself looks for a base only by the path in
`adapter_config.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, PeftType, TaskType, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.conversion import convert_to_lora
from peft.utils import CONFIG_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.backbones.heads import Head
from suite.backbones.loading import build
from suite.backbones.weights import cast_weights
from suite.config.sweep import AttentionChoice
from suite.errors import CheckpointError, ConfigError, IncompatibleError
from suite.export.base import base_name, open_base, start_backbone
from suite.export.description import BASE, Description
from suite.export.own import assemble
from suite.files import read_json, write_json
from suite.petl import methods
from suite.petl._quiet import without_noise
from suite.petl.peft_method import UNUSABLE, check_shadow, peft_types
from suite.train.restore import Restored

WEIGHTS = "adapter_model.safetensors"
PROMPT = "prompt_embeddings"
"""What peft calls the vectors of a prompt in its file."""
INDEX = "model.safetensors.index.json"
# What peft puts into the name of a head that it trains: the head's name stands around it.
KEPT_HEAD = ".modules_to_save.default."


class PeftCannotHoldError(RuntimeError):
    """peft's format cannot hold this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What peft must know of a trained arm.

    Attributes:
        config: The method's configuration.
        tensors: The trained arm's tensors, by peft's names or our own.
    """

    # Any, because peft declares most fields in the subclasses of PeftConfig alone.
    config: Any
    tensors: Mapping[str, Tensor]


def as_adapter(restored: Restored) -> Adapter | None:
    """The arm as peft knows it.

    None where peft has no such method, and where the base is not a plain checkpoint.
    """
    arm = restored.spec.arm
    # An adapter's file names a plain checkpoint as its base: it cannot say how that is converted.
    if arm.attention != AttentionChoice() or arm.pretrain is not None:
        return None
    config = restored.method.peft_config(restored.model, restored.resolved.family)
    if config is None:
        return None
    return Adapter(config, _tensors(restored.model))


def as_lora(restored: Restored) -> Adapter:
    """The arm as plain LoRA, which also those servers read that know no other method.

    Each map gets as many ranks as its change of weights has.

    Raises:
        IncompatibleError: The method is no such change; the message has peft's reason.
    """
    method = restored.spec.arm.method
    adapter = as_adapter(restored)
    if adapter is None:
        raise IncompatibleError(
            f"--as-lora: {restored.spec.arm.key} is no adapter of peft on a plain checkpoint,"
            " and only such a one can be written as LoRA; leave the option out"
        )
    if _is_plain_lora(restored.model, adapter.config):
        # A start such as PiSSA's would change the base again where the adapter is loaded.
        adapter.config.init_lora_weights = True
        return adapter
    try:
        # A share of 1 keeps every singular value that the precision can tell from 0.
        config, found = convert_to_lora(restored.model, rank=1.0)
    except (TypeError, ValueError) as error:
        raise IncompatibleError(
            f"--as-lora: {method} cannot be expressed as LoRA: {error} Leave the option out"
        ) from error
    tensors = dict(adapter.tensors)
    for name, tensor in found.items():
        for part in (".lora_A.", ".lora_B."):
            name = name.replace(part, f"{part}default.")
        tensors[name] = tensor
    return Adapter(config, tensors)


def _is_plain_lora(model: nn.Module, config: Any) -> bool:
    """Whether peft computes nothing but a low-rank product beside each map (not DoRA, ...)."""
    if config.peft_type != PeftType.LORA:
        return False
    return not any(getattr(module, "lora_variant", None) for module in model.modules())


def write_adapter(
    restored: Restored, adapter: Adapter, description: Description, folder: Path, *, at: str
) -> None:
    """Write the adapter with the trained task head, and the base where no name finds it.

    Args:
        at: Path of the exported folder as others will name it.

    Raises:
        PeftCannotHoldError: peft's model of this method has tensors that ours does not have.
    """
    config = adapter.config
    base = start_backbone(restored)
    where = base_name(restored)
    if description.base == "copy":
        where = f"{at}/{BASE}"
        base.save_pretrained(str(folder / BASE))
        _point_to_base(folder)
    # get_peft_model wraps the head by this, so it comes first.
    _complete(config, base, restored.resolved.family, restored.objective.head)
    with without_noise():
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
    _fill(model, adapter.tensors)
    # By default peft looks the base up on the hub, to see whether the embedding has changed.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    # safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    if methods.digest(type(restored.method)) is not None:
        _check_whole(restored.model, tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.inference_mode = True
    config.base_model_name_or_path = where  # get_peft_model put a path of this machine here
    config.revision = description.base_identity.get("commit")
    config.save_pretrained(str(folder))


def _check_whole(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that the file has all that trained: a user's method may train more than its parent.

    Raises:
        PeftCannotHoldError: A trained tensor is not among those of the file.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not any(torch.equal(parameter.detach(), tensor) for tensor in tensors.values()):
            raise PeftCannotHoldError(f"peft's file has no place for {name}")


def _point_to_base(folder: Path) -> None:
    """Make the folder a checkpoint whose tensors lie in `base/`, without a second copy of them."""
    shutil.copy(folder / BASE / "config.json", folder / "config.json")
    places: dict[str, str] = {}
    for path in sorted((folder / BASE).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), f"{BASE}/{path.name}")
    write_json(folder / INDEX, {"metadata": {}, "weight_map": places})


def load_adapter(description: Description, folder: Path) -> nn.Module:
    """Load what `write_adapter` wrote, as a `PeftModel`.

    Raises:
        ConfigError: The adapter is none that the suite writes.
    """
    opened = open_base(description, folder)
    _check_type(folder / CONFIG_NAME)
    base = build(opened, description.made_head)
    # Before the adapter comes, which takes over the precision of the base.
    cast_weights(base, getattr(torch, description.dtype))
    with without_noise():
        model: PeftModel = PeftModel.from_pretrained(
            base,
            str(folder),
            autocast_adapter_dtype=False,
            local_files_only=True,
            use_safetensors=True,
        )
    return model


def load_prompt(description: Description, folder: Path) -> nn.Module:
    """Load a prompt that `write_adapter` wrote, as the model that was trained.

    peft counts the padding of a batch as positions of a decoder, so its model would answer in
    another way wherever a text is padded on the left.

    Raises:
        CheckpointError: The folder holds no prompt of this model.
    """
    model = assemble(description, folder)
    path = folder / WEIGHTS
    try:
        vectors = load_file(path)[PROMPT]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path}: no prompt can be read from it: {error}") from error
    named = model.named_parameters()
    (own,) = [weight for name, weight in named if name.endswith("prompt.embedding.weight")]
    if own.shape != vectors.shape:
        raise CheckpointError(
            f"{path}: its prompt is {list(vectors.shape)}, expected {list(own.shape)}"
        )
    with torch.no_grad():
        own.copy_(vectors)
    return model


def _check_type(path: Path) -> None:
    """Check that peft makes the adapter from the files beside `path` alone.

    Some types that the suite never writes read others, of any folder or of the hub.
    """
    try:
        described = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise ConfigError(f"{path}: expected a JSON object as peft writes it")
    kind = described.get("peft_type")
    written = set(peft_types().values()) - UNUSABLE.keys()
    if not isinstance(kind, str) or kind not in written:
        raise ConfigError(f"{path}: peft_type: got {kind!r}, which suite export does not write")
    check_shadow(described, where=str(path))


def _complete(config: Any, base: PreTrainedModel, family: Family, head: Head) -> None:
    """Tell peft to store the task head with the adapter, and what kind of model this is."""
    heads = list(family.head_names(base))
    config.modules_to_save = heads or None
    if config.task_type is not None:
        return
    # By this the classes of peft called Auto know which model to make.
    if head.kind in ("classification", "regression"):
        config.task_type = TaskType.SEQ_CLS
    elif not heads and family.kind == "encoder-decoder":
        config.task_type = TaskType.SEQ_2_SEQ_LM
    elif not heads:
        config.task_type = TaskType.CAUSAL_LM


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _fill(model: PeftModel, ours: Mapping[str, Tensor]) -> None:
    """Copy every tensor of the trained arm to its place in peft's model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".original_module." in name:
            continue  # the head before training, which peft keeps beside the trained one
        with torch.no_grad():
            tensor.copy_(_source(name, ours, tensor))


def _source(name: str, ours: Mapping[str, Tensor], like: Tensor) -> Tensor:
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
