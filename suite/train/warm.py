"""The engine of the current arm, kept from trial to trial and reset bit for bit in between."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from suite.attention.counts import AttentionCount, count_attention
from suite.backbones.loading import identity, load_tokenizer
from suite.config.training import Precision
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.prepare import Prepared, prepare
from suite.data.trained_tokenizer import open_backbone
from suite.errors import CheckpointError, IncompatibleError
from suite.files import sha256
from suite.meters import release_memory
from suite.petl.arm import task_head
from suite.record.folder import TrialFolder
from suite.record.result import PretrainRecord
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.build import build_model
from suite.train.engine import Engine
from suite.train.precision import autocast_forwards, precision_of
from suite.train.probe import Probe, probe, strays
from suite.train.process_group import gather_objects


@dataclass(slots=True)
class Warm:
    """An engine with all that belongs to its arm and task.

    Attributes:
        precision: What the engine computes in.
        attention: Parameters and cache of the converted backbone's attention, before the method.
        pretrain: Where the backbone's weights come from; None = its own checkpoint, or chance.
        initial: Folder of step 0, in which each rank reads what it wrote.
        initial_digest: Fingerprint of the trained weights at step 0; a reset must reproduce it.
        start_output: What the model answers at step 0; training must change it.
        strays: Parameters that train and should not, or the other way round.
        pristine: Whether the engine still is at step 0.
    """

    key: str
    engine: Engine
    objective: Objective
    data: Prepared
    backbone: dict[str, str]
    head_parameters: int
    precision: Precision
    attention: AttentionCount
    pretrain: PretrainRecord | None
    initial: Path
    initial_digest: str
    start_output: Probe
    strays: list[str]
    pristine: bool = True

    def reset(self) -> None:
        """Go back to step 0. Collective.

        Raises:
            AssertionError: The weights are not those of step 0: a result would be contaminated.
        """
        if not self.pristine:
            self.engine.load(self.initial, alone=True)
            if self.engine.fingerprint(trained=True) != self.initial_digest:
                raise AssertionError("the engine's reset did not bring back the weights of step 0")
            self.pristine = True

    def release(self) -> None:
        """Free the engine and its files."""
        self.engine.release()
        # The ranks of a host share the folder: another one may have removed it.
        shutil.rmtree(self.initial.parent, ignore_errors=True)
        release_memory()


def build_warm(spec: TrialSpec, workspace: Workspace, *, device: str) -> Warm:
    """Load, convert, attach, initialise and partition the arm of a trial. Collective."""
    resolved = open_backbone(
        spec.arm.backbone, data_root=workspace.data_root, cache=workspace.home.cache
    )
    objective = make_objective(
        spec.task,
        kind=resolved.family.kind,
        tokenizer=load_tokenizer(resolved),
        training=spec.training,
        decoder_objective=spec.decoder_objective,
    )
    data = prepare(
        spec.task,
        objective,
        limit=spec.limit,
        data_root=workspace.data_root,
        cache=workspace.home.cache,
    )
    attention = count_attention(resolved, objective.head, spec.arm.attention)
    pretrain: PretrainRecord | None = None
    weights: Path | None = None
    if spec.arm.pretrain is not None:
        folder = workspace.home.pretrained(spec.arm.pretrain)
        pretrain = read_pretrain(folder)
        weights = folder.weights
    model, method = build_model(spec, resolved, objective.head, weights=weights)
    if method.needs_preparation:
        model.to(device)
        method.prepare(model, resolved.family, _single_rows(data, objective, spec, device), _loss)
    if spec.training.gradient_checkpointing:
        # Re-entrant checkpointing wants inputs that need a gradient; a frozen embedding's do not.
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    # Counted before ZeRO cuts the parameters into slices.
    head_parameters = sum(p.numel() for p in task_head(model, resolved))
    precision = precision_of(spec.training, device)
    if len(set(gather_objects(precision))) > 1:
        raise IncompatibleError(
            f"training.precision: auto is {precision} on this host and another one on others of "
            "this trial, whose processors differ; name a precision"
        )
    if precision == "bf16-autocast":
        autocast_forwards(model, device)
    engine = Engine(model, spec.training, world_size=dist.get_world_size(), device=device)
    # Rank 0 draws a name that no other group has, and all ranks take it.
    initial = workspace.engines / gather_objects(uuid.uuid4().hex)[0] / "step-0"
    engine.save(initial, alone=True)
    return Warm(
        key=spec.engine_key,
        engine=engine,
        objective=objective,
        data=data,
        backbone=identity(resolved),
        head_parameters=head_parameters,
        precision=precision,
        attention=attention,
        pretrain=pretrain,
        initial=initial,
        initial_digest=engine.fingerprint(trained=True),
        start_output=probe(engine, objective, data.split("train", confirm=False)),
        strays=strays(engine, spec, resolved, objective.head, weights=weights),
    )


def read_pretrain(folder: TrialFolder) -> PretrainRecord:
    """What a finished pretrain run says about itself. Its weights are verified.

    Raises:
        CheckpointError: It has not finished, or its weights are not those that it wrote.
    """
    result = folder.result()
    if result is None or result.weights_sha256 is None:
        raise CheckpointError(
            f"{folder.path}: this pretrain run has no weights; "
            "suite run trains them before its cells"
        )
    if not folder.weights.is_file() or sha256(folder.weights) != result.weights_sha256:
        raise CheckpointError(
            f"{folder.weights}: lost or changed since it was written; "
            f"remove {folder.path} to train it again"
        )
    train = result.phases["train"]
    return PretrainRecord(
        checkpoint=folder.hash,
        steps=result.epochs[-1].step,
        loss=result.score,
        train_s=train.seconds,
        energy_kwh=train.energy_kwh,
        weights_sha256=result.weights_sha256,
    )


def _single_rows(
    data: Prepared, objective: Objective, spec: TrialSpec, device: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Training examples one by one in a seeded order, the same on every rank.

    One by one, because Fisher importance is per example.
    """
    rows = data.split("train", confirm=False)
    # A generator of its own leaves the global streams alone.
    generator = torch.Generator().manual_seed(spec.stream("preparation"))
    order = torch.randperm(len(rows), generator=generator)
    for index in order.tolist():
        yield {name: tensor.to(device) for name, tensor in objective.collate([rows[index]]).items()}


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
