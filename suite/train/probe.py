"""What the model of a trial answers, and which of its parameters train.

Both are asked before the first step. The end of the trial is compared with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers.utils.generic import ModelOutput

from suite.backbones.heads import Head
from suite.backbones.loading import ResolvedBackbone, weights_folder
from suite.data.objective import Objective
from suite.errors import OwnCodeError
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
    """Make one forward pass in evaluation mode over `PROBE_ROWS` training rows. Collective.

    The rows are training rows, because only these are sure to have labels. They are the same on
    every rank. Random streams stay as they are.

    Returns:
        Rank 0's probe, on every rank.
    """
    batch = objective.collate([data[i] for i in range(min(PROBE_ROWS, len(data)))])
    inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    devices = []
    if engine.device == "cuda":
        devices.append(torch.cuda.current_device())
    model = engine.module.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        output = model(**inputs)
    if not isinstance(output, ModelOutput) or output.get("loss") is None:
        raise OwnCodeError(
            f"forward of {type(model).__name__} returns a {type(output).__name__}, expected an"
            " output of transformers with `loss`, as the model gives that was handed to attach"
        )
    found: Probe = gather_objects(digest_of(output))[0]
    return found


def digest_of(output: Mapping[str, Any]) -> Probe:
    """Digest of the tensors in a forward's output, without caches and layers' states."""
    sha = hashlib.sha256()
    finite = True
    for name, tensor in output.items():
        if isinstance(tensor, torch.Tensor):
            # As fp32, because numpy has no bfloat16.
            values = tensor.detach().float().cpu().contiguous()
            sha.update(name.encode())
            sha.update(values.numpy().tobytes())
            finite = finite and not bool(values.isnan().any())
    return Probe(sha.hexdigest(), finite)


def strays(
    engine: Engine, spec: TrialSpec, resolved: ResolvedBackbone, head: Head, *, weights: Path | None
) -> list[str]:
    """Return the names of parameters that a fresh build of the arm trains or sizes otherwise.

    The fresh build has shapes only.
    """
    # In shapes only, nobody looks into a checkpoint of the hub. But a pooler that the checkpoint
    # lacks is part of the head, so the files must be looked at.
    if resolved.origin == "hub":
        resolved = replace(resolved, origin="folder", path=str(weights_folder(resolved)))
    shapes, _ = build_model(spec, resolved, head, weights=weights, meta=True)
    wanted = _trained_sizes(shapes)
    trained = _trained_sizes(engine.module)
    names = wanted.keys() | trained.keys()
    return sorted(name for name in names if wanted.get(name) != trained.get(name))


def _trained_sizes(model: nn.Module) -> dict[str, int]:
    sizes = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes[name] = whole_numel(parameter)
    return sizes
