"""Restore a trained model from its trial's folder.

`suite export`, `suite lm-eval` and `suite analyze` start from here. No data are read: whatever a
method prepared on them is part of what it trained, or lies in the home's cache. A hash tells
whether the frozen weights are those of the trial, because they may come from random draws, or from
a name whose files were changed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.backbones.bpe import parse_bpe
from suite.backbones.loading import ResolvedBackbone, load_tokenizer, resolve
from suite.backbones.weights import cast_weights
from suite.config.precision import precision_of
from suite.data.make_objective import objective_of
from suite.data.objective import Objective
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import EVERYWHERE, CheckpointError, ConfigError
from suite.files import sha256
from suite.petl.arm import load_trained_state
from suite.petl.base import Method
from suite.petl.own_code import check_own_code
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.train.build import build_model
from suite.train.fingerprint import frozen_fingerprint
from suite.train.initial import prepared_folder, take_prepared
from suite.train.quiet import quieten_deepspeed
from suite.train.warm import read_pretrain


@dataclass(frozen=True, slots=True)
class Restored:
    """A trained arm, whole, in evaluation mode, in the precision of the trial's weights.

    That is fp32 for a trial under autocast, whose predictions may differ in their last digits.

    Attributes:
        start: The tensors that were asked for by name, as they were before the first step.
    """

    folder: TrialFolder
    spec: TrialSpec
    result: TrialResult
    resolved: ResolvedBackbone
    objective: Objective
    model: nn.Module
    method: Method[Any]
    start: dict[str, torch.Tensor]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.objective.tokenizer


def restore(folder: TrialFolder, home: Home, *, start_of: str | None = None) -> Restored:
    """The model of a confirm trial's best epoch, or of a pretrain run's end, on the processor.

    Args:
        folder: The trial's folder.
        home: The home that holds it, with pretrained weights and trained tokenizers.
        start_of: End of the names of the tensors whose start is kept; None = of no tensor.

    Raises:
        ConfigError: There is no such finished trial.
        BackboneError: The backbone cannot be found or read.
        CheckpointError: Its weights, or the frozen ones beside them, are not those that the trial
            had.
        OtherCodeError: This host has other files of the user's than the arm was made from.
    """
    quieten_deepspeed()
    spec, result, tensors = _ended(folder)
    resolved, tokenizer = open_trained(spec, result, home)
    objective = objective_of(spec, kind=resolved.family.kind, tokenizer=tokenizer)
    pretrained = pretrained_weights(spec, home)
    model, method = build_model(spec, resolved, objective.head, weights=pretrained)
    if result.preparation is not None:
        prepared = prepared_folder(home.cache, result.preparation.key)
        # Without it the trained tensors are enough, unless frozen weights changed: the hash tells.
        with suppress(CheckpointError):
            take_prepared(model, prepared)
    # This host may have no GPU, or another one.
    device = result.provenance.get("device", "cpu")
    if (result.precision or precision_of(spec.training, device)) == "bf16":
        # Before the hash is taken: the trial hashed the weights that it computed with.
        cast_weights(model, torch.bfloat16)
    start = {}
    for name, parameter in model.named_parameters():
        if start_of is not None and name.endswith(start_of):
            # Copied, because the trained tensors are about to be written into this memory.
            start[name] = parameter.detach().clone()
    _check_frozen(model, spec, result, folder)
    try:
        load_trained_state(model, load_file(tensors))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{tensors}: not the trained tensors of this trial: {error}"
        ) from error
    return Restored(folder, spec, result, resolved, objective, model.eval(), method, start)


def pretrained_weights(spec: TrialSpec, home: Home) -> Path | None:
    """The verified weights of the pretrain run that a trial's arm names.

    Raises:
        CheckpointError: They are lost or changed.
    """
    if spec.arm.pretrain is None:
        return None
    folder = home.pretrained(spec.arm.pretrain)
    read_pretrain(folder)
    return folder.weights


def open_trained(
    spec: TrialSpec, result: TrialResult, home: Home
) -> tuple[ResolvedBackbone, PreTrainedTokenizerBase]:
    """The backbone and the tokenizer that a trial had.

    A tokenizer that was trained for the trial lies in the home's cache.

    Raises:
        CheckpointError: The tokenizer is not there, or is another one now.
        OtherCodeError: This host has other files of the user's than the arm was made from.
    """
    check_own_code(spec.arm)
    choice = spec.arm.backbone
    wanted = result.provenance.get("tokenizer_sha256")
    bpe = parse_bpe(choice.tokenizer)
    # None is the tokenizer that the backbone itself comes with.
    folders: list[Path | None] = [None]
    searched = "its files"
    if bpe is not None:
        searched = str(home.cache / "tokenizers")
        # Several of one size and task differ in the data that they were trained on.
        folders = [*sorted(Path(searched).glob(f"bpe-{bpe.size}-{bpe.task}-*"))]
    for folder in folders:
        resolved = resolve(choice, tokenizer=folder)
        tokenizer = load_tokenizer(resolved)
        if wanted is None or tokenizer_fingerprint(tokenizer) == wanted:
            return resolved, tokenizer
    tokenizer_name = choice.tokenizer or f"of {choice.name}"
    raise CheckpointError(
        f"tokenizer {tokenizer_name} is not the one that trial {result.trial} had "
        f"(looked in {searched})"
    )


def _ended(folder: TrialFolder) -> tuple[TrialSpec, TrialResult, Path]:
    """Return the specification, the result and the file of trained tensors of an ended trial."""
    spec, result = folder.spec(), folder.result()
    tensors = folder.best
    if spec is not None and spec.phase is Phase.PRETRAIN:
        tensors = folder.weights
    if spec is None or result is None or not result.status.has_score or not tensors.exists():
        raise ConfigError(
            f"{folder.path}: got {_lacks(spec, result)}, expected a finished trial of the confirm "
            f"phase (spec.json, result.json with a score, and {tensors.name}); search trials keep "
            "no weights: run the sweep to its end, or `suite trial --test`"
        )
    _check_unchanged(tensors, result)
    return spec, result, tensors


def _check_unchanged(tensors: Path, result: TrialResult) -> None:
    """Raise CheckpointError unless the file is the recorded one: a flipped bit would still load."""
    expected = result.weights_sha256
    if expected is None:
        return
    found = sha256(tensors)
    if found != expected:
        raise CheckpointError(
            f"{tensors}: not the trained tensors of this trial: got SHA-256 {found[:16]}..., "
            f"expected {expected[:16]}..., which its result records: damaged or changed since; "
            f"use a copy, or remove {tensors.parent} ({EVERYWHERE}) and run the sweep again"
        )


def _lacks(spec: TrialSpec | None, result: TrialResult | None) -> str:
    if spec is None:
        return "no trial"
    if result is None:
        return f"a {spec.phase} trial that has not ended"
    if result.status.has_score:
        return f"a {spec.phase} trial without weights"
    return f"a trial that ended {result.status}"


def _check_frozen(
    model: nn.Module, spec: TrialSpec, result: TrialResult, folder: TrialFolder
) -> None:
    if result.frozen_sha256 in (None, frozen_fingerprint(model)):
        return
    then = result.provenance.get("versions", {}).get("torch")
    raise CheckpointError(
        f"{folder.path}: the frozen weights of {spec.arm.backbone.name} are not those that the "
        "trial had: its files were changed, its random weights were drawn by another version "
        f"(torch then {then}, now {torch.__version__}), or what {spec.arm.method} prepared from "
        f"data is no longer whole in the home's cache; remove the folder ({EVERYWHERE}) and run "
        "the sweep again"
    )
