"""Confirm trials as they lie on disk after training, without the training: every trained tensor was moved, none was learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from suite.backbones.loading import load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.tokenizer import tokenizer_fingerprint
from suite.petl.arm import full_architecture, trained_state
from suite.record.folder import Home, TrialFolder
from suite.record.provenance import git_state, versions
from suite.record.spec import TrialSpec
from suite.train.build import build_model
from suite.train.engine_config import uses_bf16
from suite.train.fingerprint import frozen_fingerprint
from tests.records import make_result, make_spec
from tests.tiny import tiny_choice
from tests.toy import SMALL, disturb


def trained_spec(
    method: str,
    family: str,
    *,
    text: bool = False,
    attention: AttentionChoice | None = None,
    backbone: BackboneChoice | None = None,
    **changes: Any,
) -> TrialSpec:
    """A confirm trial of a tiny arm; `text` makes a decoder answer in words."""
    arm = Arm(
        backbone=backbone or tiny_choice(family),
        attention=attention or AttentionChoice(),
        method=method,
        architecture=full_architecture(method, SMALL.get(method, {})),
    )
    values: dict[str, Any] = {
        "world_size": 1,
        "decoder_objective": "text" if text else "head",
        "training": TrainingConfig(max_length=48),
    }
    return make_spec("full", seed=1).model_copy(update={"arm": arm, **values, **changes})


def write_trained(
    home: Home, spec: TrialSpec, *, weights: Path | None = None
) -> tuple[TrialFolder, nn.Module]:
    """The folder of a trial that has ended, and its model in memory."""
    resolved = resolve(spec.arm.backbone)
    tokenizer = load_tokenizer(resolved)
    objective = make_objective(
        spec.task,
        kind=resolved.family.kind,
        tokenizer=tokenizer,
        training=spec.training,
        decoder_objective=spec.decoder_objective,
    )
    model, _ = build_model(spec, resolved, objective.head, weights=weights)
    if uses_bf16(spec.training, "cpu"):
        model.to(torch.bfloat16)
    disturb(model, scale=0.2)
    folder = home.trial(spec)
    folder.path.mkdir(parents=True)
    save_file(
        {
            name: tensor.float().clone().contiguous()
            for name, tensor in trained_state(model).items()
        },
        folder.best,
    )
    folder.write_spec(spec)
    provenance = {
        "device": "cpu",
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "versions": versions(),
        "git": git_state(),
    }
    frozen = frozen_fingerprint(model)
    folder.write_result(
        make_result(spec, frozen_sha256=frozen, provenance=provenance, data_hash="0" * 64)
    )
    return folder, model.eval()


def changed(folder: TrialFolder, **fields: Any) -> None:
    """Another record than the trial's own."""
    result = folder.result()
    assert result is not None
    folder.write_result(result.model_copy(update=fields))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    left = dict(one.named_parameters())
    right = dict(other.named_parameters())
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
