"""What can be measured: a confirmed run of a home, or what an arm starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from suite.attention import variants
from suite.backbones.loading import Head, ResolvedBackbone, identity, load_tokenizer
from suite.config.arm import Arm
from suite.config.hashing import short_hash
from suite.data.make_objective import objective_of
from suite.data.trained_tokenizer import open_backbone
from suite.errors import IncompatibleError
from suite.evaluation.harness import Opened
from suite.petl import get_method
from suite.petl.arm import build_arm
from suite.petl.own_code import own_code
from suite.plan.plan import Plan, objectives
from suite.record.cells import Cell, Trial
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.train.restore import open_trained, pretrained_weights, restore
from suite.train.warm import check_vocabulary

# The method's name in a row about a model that was not trained.
UNTRAINED = "untrained"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be loaded, and a folder for what is measured on it.

    Attributes:
        folder: Where `lm-eval.json` lies.
        names: Its place in a table: sweep, backbone, attention, method, task and so on, and the
            seed.
        positions: Tokens that it can see; None where it has no bound.
        open: Loads it, on the CPU.
    """

    folder: Path
    names: dict[str, Any]
    positions: int | None
    open: Callable[[], Opened]


def confirmed_run(trial: Trial, home: Home) -> Subject:
    """A finished trial of the confirm phase, with the weights of its best epoch.

    Raises:
        IncompatibleError: Its model does not write text from left to right.
        BackboneError: Its backbone cannot be found.
    """
    spec = trial.spec
    assert trial.result is not None, "finished"
    resolved, tokenizer = open_trained(spec, trial.result, home)
    check_writes(resolved)
    objective = objective_of(spec, kind="decoder", tokenizer=tokenizer)
    check_head(objective.head, spec.arm, spec.task.name)

    def load() -> Opened:
        # Weights wait for their turn: those of all subjects together may not fit into memory.
        restored = restore(trial.folder, home)
        return Opened(restored.model, tokenizer)

    names = {"sweep": spec.sweep, **spec.arm.names, "arm": spec.arm.key}
    names |= {"task": spec.task.name, "seed": spec.seed}
    return Subject(trial.folder.path, names, positions_of(resolved, spec.arm), load)


def start_of(trial: Trial, home: Home, *, data_root: Path | None) -> Subject:
    """What a trial started from: its backbone with its attention variant, before any training."""
    return untrained(trial.spec.arm, home, data_root=data_root, spec=trial.spec)


def untrained(
    arm: Arm, home: Home, *, data_root: Path | None = None, spec: TrialSpec | None = None
) -> Subject:
    """A backbone with an attention variant, as it is after conversion.

    Args:
        arm: Backbone and attention; its method does not matter.
        home: Keeps the result, pretrained weights and trained tokenizers.
        data_root: Local data, for a tokenizer that is yet to be trained.
        spec: The trial whose random start is taken; None = seed 0.

    Raises:
        IncompatibleError: The backbone does not write text from left to right, or the variant
            needs training first.
        BackboneError: The backbone cannot be found.
    """
    resolved = open_backbone(arm.backbone, data_root=data_root, cache=home.cache)
    check_writes(resolved)
    # `full` adds nothing to the backbone, so this is what every method starts from.
    bare = arm.model_copy(update={"method": "full", "architecture": {}})
    seed = 0  # a checkpoint is the same for all seeds
    variant = variants.get(arm.attention.name).configure(arm.attention.options)
    draws = resolved.origin == "random" or (arm.pretrain is None and variant.draws)
    if spec is not None and draws:
        seed = spec.stream("init")

    def load() -> Opened:
        weights = None
        tokenizer = load_tokenizer(resolved)
        if spec is not None and arm.pretrain is not None:
            weights = pretrained_weights(spec, home)
            check_vocabulary(home.pretrained(arm.pretrain), spec, tokenizer)
        torch.manual_seed(seed)
        model, _ = build_arm(resolved, Head("text"), bare, weights=weights)
        return Opened(model, tokenizer)

    # The folder's name follows from all that decides the model, so arms that differ in their
    # method alone share a result.
    parts = arm.model_dump(mode="json", include={"backbone", "attention", "pretrain"})
    # A path says little: other weights may lie there tomorrow, or below another working folder.
    # A hub's commit is left out: not every host of a sweep knows it before it downloads.
    marks = {
        "weights": identity(resolved).get("sha256"),
        "code": own_code(arm.backbone, arm.attention, "full", where=arm.key),
    }
    parts |= {name: mark for name, mark in marks.items() if mark is not None}
    folder = home.path / "lm-eval" / short_hash(parts | {"seed": seed})
    names = arm.names | {
        "method": UNTRAINED,
        "architecture": {},
        "arm": None,
        "sweep": None,
        "task": None,
        "seed": None,
    }
    return Subject(folder, names, positions_of(resolved, bare), load)


def confirmed_trials(cells: Iterable[Cell]) -> list[Trial]:
    """Finished runs at each cell's best learning rate: those that its row counts."""
    trials = []
    for cell in cells:
        for trial in cell.confirmed():
            # A run that failed or diverged left no weights that a row counts.
            if trial.result is not None and trial.result.score is not None:
                trials.append(trial)
    return trials


def check_plan(plan: Plan, *, cache: Path | None = None, data_root: Path | None = None) -> None:
    """Check that lm-eval can ask every model of a sweep.

    Args:
        plan: The sweep.
        cache: As in `objectives`.
        data_root: As in `objectives`.

    Raises:
        IncompatibleError: A cell whose model does not write from left to right.
    """
    arms = {cell.arm.backbone.name: cell.arm for cell in plan.cells}
    tasks = {cell.task.name: cell.task for cell in plan.cells}
    for resolved, objective in objectives(
        plan.config, tasks.values(), where=plan.config.name, cache=cache, data_root=data_root
    ):
        check_writes(resolved)
        check_head(objective.head, arms[resolved.choice.name], objective.task.name)


def check_writes(resolved: ResolvedBackbone) -> None:
    """Check that a backbone writes text from left to right.

    Raises:
        IncompatibleError: It does not, so lm-eval cannot ask it.
    """
    if resolved.family.kind != "decoder":
        raise IncompatibleError(
            "lm-eval needs a model that writes from left to right, but backbone"
            f" {resolved.choice.name} is an {resolved.family.kind};"
            " take one such as gpt2 or llama2-7b"
        )


def check_head(head: Head, arm: Arm, task: str) -> None:
    """Check that a decoder was trained with its language-model head.

    Raises:
        IncompatibleError: It was trained with a task head.
    """
    if head.kind != "text":
        raise IncompatibleError(
            f"lm-eval needs the language-model head, but {arm.key} was trained on {task} with a"
            f" {head.kind} head of its own; run the sweep with decoder_objective: text"
        )


def positions_of(resolved: ResolvedBackbone, arm: Arm) -> int | None:
    """Tokens of a text that a model can see; None where it has no bound.

    The positions that the method puts in front of the text are taken off.
    """
    positions = resolved.family.positions(resolved.config)
    if positions is None:
        return None
    # A prompt's vectors fill the first places of the model's table of positions.
    taken = get_method(arm.method).configure(arm.architecture).extra_positions()
    return positions - taken
