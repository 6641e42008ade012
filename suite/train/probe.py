"""What the model of a trial answers, and which of its parameters train: asked before the first step, and held against later."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from suite.backbones.heads import Head
from suite.backbones.loading import ResolvedBackbone, weights_folder
from suite.data.objective import Objective
from suite.record.spec import TrialSpec
from suite.train.build import build_model
from suite.train.engine import Engine, whole_numel
from suite.train.process_group import gather_objects

PROBE_ROWS = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """What the model answers to the first training rows.

    Attributes:
        sha256: Over every tensor of the forward's output.
        finite: Whether none of them holds a NaN.
    """

    sha256: str
    finite: bool


def probe(engine: Engine, objective: Objective, data: Dataset) -> Probe:
    """One forward pass in evaluation mode over `PROBE_ROWS` training rows, the same on every rank. Collective.

    Training rows, because only theirs are sure to have labels; random streams stay as they are.

    Returns:
        Rank 0's, on every rank.
    """
    batch = objective.collate([data[i] for i in range(min(PROBE_ROWS, len(data)))])
    model = engine.module.eval()
    with (
        torch.no_grad(),
        torch.random.fork_rng(
            devices=[torch.cuda.current_device()] if engine.device == "cuda" else []
        ),
    ):
        output = model(**{name: tensor.to(engine.device) for name, tensor in batch.items()})
    found: Probe = gather_objects(digest_of(output))[0]
    return found


def digest_of(output: Mapping[str, Any]) -> Probe:
    """The tensors of a forward's output, without caches and layers' states."""
    sha, finite = hashlib.sha256(), True
    for name, tensor in output.items():
        if isinstance(tensor, torch.Tensor):
            values = tensor.detach().float().cpu().contiguous()
            sha.update(name.encode())
            sha.update(values.numpy().tobytes())
            finite = finite and not bool(values.isnan().any())
    return Probe(sha.hexdigest(), finite)


def strays(
    engine: Engine, spec: TrialSpec, resolved: ResolvedBackbone, head: Head, *, weights: Path | None
) -> list[str]:
    """Parameters that train on the engine and not in a fresh build of the arm in shapes, or the other way round, or of another size."""
    if (
        resolved.origin == "hub"
    ):  # in shapes only, a checkpoint of the hub is not looked at: a pooler that it lacks is part of the head
        resolved = replace(resolved, origin="folder", path=str(weights_folder(resolved)))
    shapes, _ = build_model(spec, resolved, head, weights=weights, meta=True)
    wanted = {name: p.numel() for name, p in shapes.named_parameters() if p.requires_grad}
    trained = {
        name: whole_numel(p) for name, p in engine.module.named_parameters() if p.requires_grad
    }
    return sorted(
        name for name in wanted.keys() | trained.keys() if wanted.get(name) != trained.get(name)
    )
