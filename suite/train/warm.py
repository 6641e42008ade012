"""The engine of the current arm, kept from trial to trial and reset bit for bit in between."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from suite.attention.counts import AttentionCount, count_attention
from suite.backbones.bpe import PREFIX
from suite.backbones.loading import ResolvedBackbone, identity, load_tokenizer
from suite.backbones.weights import cast_weights
from suite.config.precision import precision_of
from suite.config.training import Precision
from suite.data.make_objective import objective_of
from suite.data.objective import Objective
from suite.data.prepare import Prepared, prepare
from suite.data.tokenizer import tokenizer_fingerprint
from suite.data.trained_tokenizer import open_backbone
from suite.errors import CheckpointError, ResourceError
from suite.files import sha256
from suite.meters import PhaseMeter, release_memory
from suite.petl import get_method
from suite.petl._frozen import without_dropout
from suite.petl.arm import task_head
from suite.petl.own_code import check_own_code
from suite.record.folder import TrialFolder
from suite.record.result import LOST_WEIGHTS, PreparationRecord, PretrainRecord
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.engine import Engine
from suite.train.engine_config import uses_bf16
from suite.train.fingerprint import frozen_fingerprint
from suite.train.frozen_states import KeptStates, keep_states
from suite.train.initial import buffer_sums, initial_model
from suite.train.precision import autocast_forwards
from suite.train.probe import Probe, probe, strays
from suite.train.process_group import all_agree, gather_objects
from suite.train.shards import shard_name, stored_buffers, write_whole


@dataclass(slots=True)
class Warm:
    """An engine with all that belongs to its arm and task.

    Attributes:
        key: What the trials of this engine have in common.
        seed: Seed of the trial whose step 0 `initial` holds.
        resolved: The backbone.
        weights: File of the pretrain run's weights; None = the arm names none.
        precision: What the engine computes in.
        attention: Parameters and cache of the converted backbone's attention, before the method.
        pretrain: Where the backbone's weights come from; None = its own checkpoint, or chance.
        preparation: What the method prepared from training data; None = it prepares nothing.
        states: What frozen stacks without dropout give; None = the stacks run in every step.
        kept: What it cost to compute `states`; None = there are none.
        initial: Folder of step 0, in which each rank reads what it wrote.
        initial_digest: Fingerprint of the trained weights at step 0; a reset must reproduce it.
        initial_buffers: `buffer_sums` at step 0.
        start_output: What the model answers at step 0; training must change it.
        strays: Parameters that train and should not, or the other way round.
        pristine: Whether the engine still is at step 0.
        beside: Engines of further lanes over the same frozen tensors.
    """

    key: str
    seed: int
    engine: Engine
    resolved: ResolvedBackbone
    weights: Path | None
    objective: Objective
    data: Prepared
    backbone: dict[str, str]
    head_parameters: int
    precision: Precision
    attention: AttentionCount
    pretrain: PretrainRecord | None
    preparation: PreparationRecord | None
    initial: Path
    initial_digest: str
    initial_buffers: dict[str, int]
    start_output: Probe
    strays: list[str]
    states: KeptStates | None = None
    kept: PreparationRecord | None = None
    pristine: bool = True
    beside: list[Engine] = field(default_factory=list)

    def lane(self, number: int) -> Warm:
        """The same arm and task with the engine of a lane, counted from 0. Collective."""
        if number == 0:
            return self
        while len(self.beside) < number:
            self.beside.append(self.engine.beside())
        # Whatever the lane trained before: `reset` brings it to step 0.
        return replace(self, engine=self.beside[number - 1], pristine=False)

    def keep_lanes(self, count: int) -> None:
        """Free the engines of all lanes but the first `count`. Collective.

        A trial's peak of memory would count the states of lanes that it does not use.
        """
        spare = self.beside[max(0, count - 1) :]
        del self.beside[max(0, count - 1) :]
        for engine in spare:
            engine.release()
        release_memory()

    def training_mode(self) -> None:
        """Put the model into training mode, all but frozen stacks whose states are kept."""
        self.engine.module.train()
        if self.states is not None:
            model = cast(PreTrainedModel, self.engine.module)
            without_dropout(stack.module for stack in self.resolved.family.stacks(model))

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

    def turn_to(self, spec: TrialSpec, workspace: Workspace, meter: PhaseMeter) -> bool:
        """Make ready for a trial of any arm, task and seed. Collective.

        Of another seed only the weights that train are drawn anew: the whole model is built again
        on the CPU, as for a cold start, and its trained weights become the engine's step 0.

        Returns:
            Whether the engine serves the trial. It does not if the arm or the task is another one,
            or if the seed draws frozen weights as well.
        """
        if spec.engine_key != self.key:
            return False
        if spec.seed == self.seed:
            return True
        training = self.engine.training
        # All weights are drawn, so that a second build would find them different.
        if self.weights is None and (self.resolved.origin == "random" or spec.random_start):
            return False
        model, preparation = initial_model(
            spec,
            self.resolved,
            self.objective,
            self.data,
            weights=self.weights,
            cache=workspace.home.cache,
            device=self.engine.device,
            meter=meter,
        )
        if uses_bf16(training, self.engine.device):
            # Rounded as the engine rounded its own, even those that it has kept in fp32 since.
            cast_weights(model, torch.bfloat16)
        # Every rank has built the same model, but they must not part ways here.
        if not all_agree(self._has_frozen_of(model)):
            return False
        # Until the load below has ended, a reset must know that these are not step 0's weights.
        self.pristine = False
        drawn = self.initial.parent / f"drawn-{dist.get_rank()}"
        write_whole(drawn / shard_name(0), model)
        self.engine.load(drawn, written_by=1)
        shutil.rmtree(drawn)
        self._begin(spec)
        self.preparation = preparation
        return True

    def _has_frozen_of(self, model: nn.Module) -> bool:
        """Whether a whole model has the engine's frozen weights, and buffers that nobody stores."""
        if frozen_fingerprint(model) != self.engine.frozen_fingerprint:
            return False
        stored = stored_buffers(model)
        for name, buffer in model.named_buffers():
            # Stored buffers are loaded with the trained weights.
            own = self.engine.module.get_buffer(name)
            if name not in stored and not torch.equal(own.cpu(), buffer.to(own.dtype)):
                return False
        return True

    def _begin(self, spec: TrialSpec) -> None:
        """Take the engine's weights for step 0 of a trial's seed. Collective."""
        self.engine.save(self.initial, alone=True)
        self.initial_digest = self.engine.fingerprint(trained=True)
        self.initial_buffers = buffer_sums(self.engine.module)
        train = self.data.split("train", confirm=False)
        self.start_output = probe(self.engine, self.objective, train)
        self.seed = spec.seed
        self.pristine = True

    def release(self) -> None:
        """Free the engines and their files."""
        for engine in (*self.beside, self.engine):
            engine.release()
        if self.states is not None:
            self.states.close()
        # The ranks of a host share the folder: another one may have removed it.
        shutil.rmtree(self.initial.parent, ignore_errors=True)
        release_memory()


def build_warm(spec: TrialSpec, workspace: Workspace, *, device: str, meter: PhaseMeter) -> Warm:
    """Load, convert, attach, initialise and partition the arm of a trial. Collective.

    Raises:
        OtherCodeError: This host has other files of the user's than the arm was made from.
    """
    # Once for all trials of the engine: this process reads those files once as well.
    check_own_code(spec.arm)
    resolved, objective, data = open_data(spec, workspace)
    attention = count_attention(resolved, objective.head, spec.arm.attention)
    pretrain: PretrainRecord | None = None
    weights: Path | None = None
    if spec.arm.pretrain is not None:
        folder = workspace.home.pretrained(spec.arm.pretrain)
        pretrain = read_pretrain(folder)
        check_vocabulary(folder, spec, objective.tokenizer)
        weights = folder.weights
    model, preparation = initial_model(
        spec,
        resolved,
        objective,
        data,
        weights=weights,
        cache=workspace.home.cache,
        device=device,
        meter=meter,
    )
    if spec.training.gradient_checkpointing:
        # Re-entrant checkpointing wants inputs that need a gradient; a frozen embedding's do not.
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    # Counted before ZeRO cuts the parameters into slices.
    head_parameters = sum(p.numel() for p in task_head(model, resolved))
    precision = _agreed_precision(spec, device)
    if precision == "bf16-autocast":
        autocast_forwards(model, device)
    method = get_method(spec.arm.method).configure(spec.arm.architecture)
    states: KeptStates | None = None
    kept: PreparationRecord | None = None
    if method.keeps_states(spec.training):
        if uses_bf16(spec.training, device):
            # Rounded as the engine rounds them, because the states are those of its weights.
            cast_weights(model, torch.bfloat16)
        # Before the engine, because one process can compute them from a whole model.
        states, kept = keep_states(
            spec,
            model,
            resolved,
            objective,
            data,
            cache=workspace.home.cache,
            most_bytes=workspace.frozen_states_bytes,
            device=device,
            precision=precision,
            meter=meter,
        )
    engine = Engine(
        model,
        workspace.partitioning.applied_to(spec.training),
        world_size=dist.get_world_size(),
        device=device,
        lanes=not method.backward_through_backbone,
        factors=method.learning_rate_factors(model),
    )
    # Rank 0 draws a name that no other group has, and all ranks take it.
    initial = workspace.engines / gather_objects(uuid.uuid4().hex)[0] / "step-0"
    engine.save(initial, alone=True)
    return Warm(
        key=spec.engine_key,
        seed=spec.seed,
        engine=engine,
        resolved=resolved,
        weights=weights,
        objective=objective,
        data=data,
        backbone=identity(resolved),
        head_parameters=head_parameters,
        precision=precision,
        attention=attention,
        pretrain=pretrain,
        preparation=preparation,
        initial=initial,
        initial_digest=engine.fingerprint(trained=True),
        initial_buffers=buffer_sums(engine.module),
        start_output=probe(engine, objective, data.split("train", confirm=False)),
        strays=strays(engine, spec, resolved, objective.head, weights=weights),
        states=states,
        kept=kept,
    )


def open_data(
    spec: TrialSpec, workspace: Workspace
) -> tuple[ResolvedBackbone, Objective, Prepared]:
    """The backbone of a trial, how its task is put to it, and the rows, read and encoded."""
    data_root = workspace.data_root
    cache = workspace.home.cache
    resolved = open_backbone(spec.arm.backbone, data_root=data_root, cache=cache)
    objective = objective_of(spec, kind=resolved.family.kind, tokenizer=load_tokenizer(resolved))
    data = prepare(spec.task, objective, limit=spec.limit, data_root=data_root, cache=cache)
    return resolved, objective, data


def _agreed_precision(spec: TrialSpec, device: str) -> Precision:
    """What all ranks compute in. Collective.

    Raises:
        ResourceError: It is left to the hosts, and they differ.
    """
    precision = precision_of(spec.training, device)
    if len(set(gather_objects(precision))) > 1:
        raise ResourceError(
            f"training.precision: auto is {precision} on this host and another one on others of "
            "this trial, whose processors or GPUs differ; name a precision, and give the sweep "
            "another name"
        )
    return precision


def check_vocabulary(folder: TrialFolder, spec: TrialSpec, used: PreTrainedTokenizerBase) -> None:
    """Check that a trained tokenizer is still the one that the pretrain run had.

    Raises:
        CheckpointError: It is another one: its text, or the library that trained it, has changed.
    """
    tokenizer = spec.arm.backbone.tokenizer
    result = folder.result()
    # All other tokenizers are files of the backbone, whose hash the run's name contains.
    if tokenizer is None or not tokenizer.startswith(PREFIX) or result is None:
        return
    then = result.provenance.get("tokenizer_sha256")
    if then not in (None, tokenizer_fingerprint(used)):
        raise CheckpointError(
            f"{folder.path}: was pretrained with another {tokenizer} than is trained now: its text "
            "or the version of `tokenizers` has changed, and the weights belong to the old "
            "vocabulary; bring these back, or give the corpus's task another version"
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
        raise CheckpointError(f"{folder.weights}: {LOST_WEIGHTS}")
    train = result.phases["train"]
    return PretrainRecord(
        checkpoint=folder.hash,
        steps=result.epochs[-1].step,
        loss=result.score,
        train_s=train.seconds,
        energy_kwh=train.energy_kwh,
        weights_sha256=result.weights_sha256,
    )
