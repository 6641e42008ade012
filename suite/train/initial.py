"""The weights of a trial's step 0, whole, with what its method prepares from training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from suite.backbones.loading import ResolvedBackbone
from suite.config.hashing import short_hash
from suite.data.objective import Objective
from suite.data.prepare import Prepared
from suite.files import make_once
from suite.petl.arm import trained_state
from suite.record.spec import TrialSpec
from suite.train.build import build_model
from suite.train.fingerprint import frozen_fingerprint

FORMAT = 1
"""Raise this number when a method prepares other weights from the same data."""
PREPARED = "prepared.safetensors"


def initial_model(
    spec: TrialSpec,
    resolved: ResolvedBackbone,
    objective: Objective,
    data: Prepared,
    *,
    weights: Path | None,
    cache: Path,
    device: str,
) -> nn.Module:
    """Build the arm of a trial and initialise all of its weights.

    What a method prepares from training data depends on the arm, its frozen weights and the data,
    and not on the trial's seed. The first process that asks prepares it, and all others, of any
    rank and trial, find it in the cache.

    Args:
        weights: File of the pretrain run that the arm names; None if it names none.
        cache: The home's cache.
        device: Where a method computes what it prepares.
    """
    model, method = build_model(spec, resolved, objective.head, weights=weights)
    if not method.needs_preparation:
        return model
    # Everything that the preparation reads is part of the folder's name.
    parts = [
        FORMAT,
        frozen_fingerprint(model),
        spec.arm.model_dump(mode="json"),
        spec.task.model_dump(mode="json"),
        data.data_hash,
        objective.fingerprint(),
    ]
    folder = cache / "prepared" / f"{spec.arm.method}-{short_hash(parts)}"

    def make(temporary: Path) -> None:
        before = {name: tensor.clone() for name, tensor in trained_state(model).items()}
        model.to(device)
        rows = _single_rows(data, objective, spec, device)
        method.prepare(model, resolved.family, rows, _loss)
        model.to("cpu")
        changed = {}
        for name, tensor in trained_state(model).items():
            # All other weights are drawn by the trial's seed, and must not come from another's.
            if not torch.equal(tensor, before[name]):
                changed[name] = tensor.contiguous()
        save_file(changed, temporary / PREPARED)

    make_once(folder, make)
    with torch.no_grad():
        for name, tensor in load_file(folder / PREPARED).items():
            model.get_parameter(name).copy_(tensor)
    return model


def _single_rows(
    data: Prepared, objective: Objective, spec: TrialSpec, device: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Training examples one by one in a seeded order, the same for every seed of the task.

    One by one, because Fisher importance is per example.
    """
    rows = data.split("train", confirm=False)
    # A generator of its own leaves the global streams alone.
    generator = torch.Generator().manual_seed(spec.preparation_seed)
    order = torch.randperm(len(rows), generator=generator)
    for index in order.tolist():
        yield {name: tensor.to(device) for name, tensor in objective.collate([rows[index]]).items()}


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
