"""A trained model, taken up again from its trial's folder: what `suite export`, `suite lm-eval` and `suite analyze` start from.

No data are read: whatever a method prepared on them is part of what it trained. Whether the frozen weights are those of the trial
is checked by their hash, as they may come from random draws or from a name whose files were changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import CheckpointError, ConfigError
from suite.files import sha256
from suite.petl.arm import load_trained_state
from suite.petl.base import Method
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.train.build import build_model
from suite.train.engine_config import uses_bf16
from suite.train.warm import read_pretrain


@dataclass(frozen=True, slots=True)
class Restored:
    """A trained arm, whole, in evaluation mode, in the precision that the trial computed in.

    Attributes:
        start: Head weights and whatever else was asked for by name, as they were before the first step.
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


def restore(
    folder: TrialFolder, home: Home, *, device: str = "cpu", start_of: str | None = None
) -> Restored:
    """The model of a confirm trial's best epoch, or of a pretrain run's end.

    Args:
        folder: Of the trial.
        home: Which holds it, for pretrained weights and trained tokenizers.
        device: Where the model is put.
        start_of: End of the names of the tensors whose start is kept.

    Raises:
        ConfigError: There is no such finished trial.
        BackboneError: The backbone cannot be found or read.
        CheckpointError: Its weights, or the frozen ones beside them, are not those that the trial had.
    """
    spec, result, tensors = _ended(folder)
    resolved, tokenizer = open_trained(spec, result, home)
    objective = make_objective(
        spec.task,
        kind=resolved.family.kind,
        tokenizer=tokenizer,
        training=spec.training,
        decoder_objective=spec.decoder_objective,
    )
    model, method = build_model(
        spec, resolved, objective.head, weights=pretrained_weights(spec, home)
    )
    if uses_bf16(spec.training, result.provenance.get("device", "cpu")):
        model.to(torch.bfloat16)
    start = {
        n: p.detach().clone()
        for n, p in model.named_parameters()
        if start_of is not None and n.endswith(start_of)
    }
    _check_frozen(model, spec, result, folder)
    try:
        load_trained_state(model, load_file(tensors))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{tensors}: not the trained tensors of this trial: {error}"
        ) from error
    return Restored(
        folder, spec, result, resolved, objective, model.to(device).eval(), method, start
    )


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
    """The backbone and the tokenizer that a trial had; a tokenizer trained for it is found in the home's cache.

    Raises:
        CheckpointError: The tokenizer is not there, or another one now.
    """
    choice, wanted = spec.arm.backbone, result.provenance.get("tokenizer_sha256")
    bpe = parse_bpe(choice.tokenizer)
    folders = (
        [None]
        if bpe is None
        else sorted((home.cache / "tokenizers").glob(f"bpe-{bpe.size}-{bpe.task}-*"))
    )
    for folder in folders:
        resolved = resolve(choice, tokenizer=folder)
        tokenizer = load_tokenizer(resolved)
        if wanted is None or tokenizer_fingerprint(tokenizer) == wanted:
            return resolved, tokenizer
    what = f"tokenizer {choice.tokenizer or 'of ' + choice.name}"
    raise CheckpointError(
        f"{what} is not the one that trial {result.trial} had (looked in {home.cache / 'tokenizers' if bpe else 'its files'})"
    )


def _ended(folder: TrialFolder) -> tuple[TrialSpec, TrialResult, Path]:
    """Specification, result and trained tensors of a trial that kept them."""
    spec, result = folder.spec(), folder.result()
    tensors = folder.weights if spec is not None and spec.phase is Phase.PRETRAIN else folder.best
    if spec is None or result is None or not result.status.has_score or not tensors.exists():
        raise ConfigError(
            f"{folder.path}: got {_lacks(spec, result)}, expected a finished trial of the confirm phase (spec.json, result.json with a "
            f"score, and {tensors.name}); search trials keep no weights: run the sweep to its end, or `suite trial --test`"
        )
    _check_unchanged(tensors, result)
    return spec, result, tensors


def _check_unchanged(tensors: Path, result: TrialResult) -> None:
    """One flipped bit still loads, and gives another model."""
    if result.weights_sha256 is not None and (found := sha256(tensors)) != result.weights_sha256:
        raise CheckpointError(
            f"{tensors}: not the trained tensors of this trial: got SHA-256 {found[:16]}..., expected {result.weights_sha256[:16]}..., "
            f"which its result records: damaged or changed since; use a copy, or remove {tensors.parent} and run the sweep again"
        )


def _lacks(spec: TrialSpec | None, result: TrialResult | None) -> str:
    if spec is None:
        return "no trial"
    if result is None:
        return f"a {spec.phase} trial that has not ended"
    return (
        f"a {spec.phase} trial without weights"
        if result.status.has_score
        else f"a trial that ended {result.status}"
    )


def _check_frozen(
    model: nn.Module, spec: TrialSpec, result: TrialResult, folder: TrialFolder
) -> None:
    ranks = result.provenance.get("world_size", spec.world_size)  # of the last attempt
    found = frozen_digest(model, parts=ranks if spec.training.zero_stage == 3 else 1, ranks=ranks)
    if result.frozen_sha256 is None or found is None or found == result.frozen_sha256:
        return
    then = result.provenance.get("versions", {})
    raise CheckpointError(
        f"{folder.path}: the frozen weights of {spec.arm.backbone.name} are not those that the trial had: its files were changed, or its "
        f"random weights were drawn by another version (torch then {then.get('torch')}, now {torch.__version__}); train the cell again"
    )


def frozen_digest(model: nn.Module, *, parts: int, ranks: int) -> str | None:
    """What `Engine.digest(trained=False)` gives for a model that lies in `parts` on `ranks`; None where parts are filled up.

    Args:
        model: Whole, in the precision of the engine.
        parts: Pieces that every parameter is cut in: the ranks under ZeRO-3, else 1.
        ranks: Whose hashes are put together.
    """
    if any(p.numel() % parts for p in model.parameters() if not p.requires_grad):
        return None
    hashes = [_part_digest(model, part if parts > 1 else 0, parts) for part in range(ranks)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _part_digest(model: nn.Module, part: int, parts: int) -> str:
    sha = hashlib.sha256()
    for name, flat in _frozen(model):
        size = len(flat) // parts
        sha.update(name.encode())
        sha.update(
            flat[part * size : (part + 1) * size].contiguous().view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


def _frozen(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return (
        (name, p.detach().cpu().reshape(-1))
        for name, p in model.named_parameters()
        if not p.requires_grad
    )
