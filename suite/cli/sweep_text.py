"""The text of a first sweep file: every key that matters, with a comment on what it does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

WIDTH = 42
"""Column at which comments start, where the text before them is short enough."""


class Budget(StrEnum):
    """How much is spent on each cell."""

    QUICK = "quick"
    STANDARD = "standard"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Preset:
    """What a budget means.

    Attributes:
        limit: Rows at most by split; None = all.
        workers: Workers of a trial; None = as the suite decides.
        per: What the trials count for.
        choose: Which learning rate is confirmed.
    """

    trials: int
    startup_trials: int
    edge_guard: dict[str, int]
    stop: dict[str, float] | None
    epochs: int
    batch_size: int
    limit: dict[str, int] | None = None
    architectures: str = "search"
    workers: int | None = None
    per: str = "method"
    choose: str = "curve"


PRESETS = {
    # Minutes for a cell on two CPU cores. One worker, because two trials side by side take
    # less time there than one trial that is split over both cores.
    Budget.QUICK: Preset(
        trials=5,
        startup_trials=3,
        edge_guard={"extensions": 1, "trials": 2},
        stop={"tolerance": 0.1},
        epochs=4,
        batch_size=16,
        limit={"train": 512, "validation": 200, "test": 300},
        architectures="first",
        workers=1,
    ),
    Budget.STANDARD: Preset(
        trials=8,
        startup_trials=3,
        edge_guard={"extensions": 2},
        stop={"tolerance": 0.1},
        epochs=10,
        batch_size=96,
    ),
    Budget.PAPER: Preset(
        trials=32,
        startup_trials=8,
        edge_guard={"extensions": 0},
        stop=None,
        epochs=30,
        batch_size=96,
        per="architecture",
        choose="best",
    ),
}
"""Source of the paper budget: READ, arXiv 2305.15348, appendix D; the others are ours."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the person wants.

    None means the budget's value; where the budget has none, the suite decides when the sweep
    starts.
    """

    backbones: Sequence[str]
    attention: Sequence[str]
    methods: Sequence[str]
    tasks: Sequence[str]
    budget: Budget
    trials: int | None = None
    seeds: int = 5
    workers: int | None = None
    gpus_per_worker: float | None = None


def sweep_text(name: str, answers: Answers, kinds: Collection[str] = ()) -> str:
    """A commented sweep file; the loader checks later whether its names exist.

    Args:
        name: Of the sweep.
        answers: What the person wants.
        kinds: The kinds of its tasks, which decide what lengths it names.
    """
    preset = PRESETS[answers.budget]
    if answers.workers is None:
        workers = preset.workers
    else:
        workers = answers.workers
    lines = [
        "# Made by `suite init`. What it would do and cost: suite run FILE --dry-run. "
        "Any value can also be changed on the command",
        "# line: --set search.trials=16. "
        "All keys, with ranges: suite/config/, sweep.py and training.py first.",
        line(f"name: {plain(name)}", "on the leaderboard; one sweep of a name in a --home"),
        "",
        "# Backbone x attention x method is an arm, arm x task a cell: "
        "the leaderboard has a row for each cell.",
        line(
            f"backbones: {plain(answers.backbones)}",
            "suite list backbones; or a hub id, a folder, package:NAME/FOLDER",
        ),
        line(
            f"attention: {plain(answers.attention)}",
            "suite list attention; pretrained = the backbone's own",
        ),
        line(
            f"methods: {plain(answers.methods)}",
            "suite list methods; or {name: lora, architecture: {rank: 8}}",
        ),
        line(
            f"tasks: {plain(answers.tasks)}",
            "suite list tasks; or the name of a file in tasks/ of the working folder",
        ),
        line(
            f"architectures: {preset.architectures}",
            "search = of a method's choices the best over all tasks; first, all",
        ),
        "",
        *_search(preset, answers.trials),
        "",
        "confirm: # the best learning rate again, with fresh seeds; only these runs see test data",
        line(
            f"  seeds: {plain(list(range(1, answers.seeds + 1)))}",
            "one gives no rank; a dry run says what more would show",
        ),
        "",
        *_limit(preset),
        "training: # the same for every arm",
        line(f"  epochs: {preset.epochs}", "at most; the best one on validation counts"),
        line("  patience: 3", "epochs without improvement before a run ends; null = never"),
        line(
            f"  batch_size: {preset.batch_size}",
            "examples per step over all workers; a multiple of their number",
        ),
        line("  max_length: 128", "tokens kept of an input; suite task check shows what that cuts"),
        *_lengths(kinds),
        line(
            "  zero_stage: 3",
            "DeepSpeed ZeRO: 3 partitions parameters too; less is faster where the model fits",
        ),
        "",
        "resources: # of one trial; as many trials run at a time as fit",
        line(
            f"  workers: {plain(workers)}",
            "null = as many as there are GPUs, else one on CPUs",
        ),
        line(
            f"  gpus_per_worker: {plain(answers.gpus_per_worker)}", "null = 1 where there are GPUs"
        ),
    ]
    return "\n".join(lines) + "\n"


def _lengths(kinds: Collection[str]) -> list[str]:
    """The lengths that only some kinds of tasks have."""
    lines = []
    if {"generation", "instruction"} & set(kinds):
        lines.append(
            line(
                "  target_max_length: 256",
                "tokens kept of an answer, and written at most; suite task check shows the cuts",
            )
        )
    if "language-model" in kinds:
        lines.append(
            line("  stride: 64", "tokens that each window of text adds; those before are context")
        )
    return lines


def _search(preset: Preset, trials: int | None) -> list[str]:
    if trials is None:
        budget = preset.trials
    else:
        budget = trials
    return [
        "search: # learning rates tried, scored on validation data; "
        "the budget is equal for every arm",
        line(
            "  sampler: gp", "a Gaussian process, one trial after the other; or tpe, random, grid"
        ),
        # The same number for every arm, or arms with more trials would look better.
        line(f"  trials: {budget}", "for each task and each of what `per` names"),
        line(f"  per: {preset.per}", "method: its architectures share them; or architecture"),
        line(
            f"  choose: {preset.choose}",
            "confirm where the model of the curve is highest; best = the best score tried",
        ),
        line(
            "  transfer: false",
            "true: begin where finished searches of other tasks were best, if any have ended",
        ),
        line(
            # The loader refuses more start-up trials than trials.
            f"  startup_trials: {min(preset.startup_trials, budget)}",
            "of them evenly over the range, before the sampler has a model",
        ),
        line(
            f"  edge_guard: {plain(preset.edge_guard)}",
            "widen an end of the range by a decade where the best rate lies, at most so often",
        ),
        line(
            f"  stop: {plain(preset.stop)}",
            "end a search that can gain no more points than this; null = never",
        ),
    ]


def _limit(preset: Preset) -> list[str]:
    # A key that limits nothing would only raise questions: leave it out.
    if preset.limit is None:
        return []
    return [
        line(
            f"limit: {plain(preset.limit)}",
            "rows at most, drawn by seed; leave it out for real results",
        ),
        "",
    ]


def line(text: str, comment: str) -> str:
    return f"{text:<{WIDTH}} # {comment}"


def plain(value: Any) -> str:
    """A value as YAML on one line, in quotes where it needs them."""
    text = yaml.safe_dump(
        # The width keeps a long list on one line, where its comment can follow.
        value,
        default_flow_style=True,
        sort_keys=False,
        width=10_000,
        allow_unicode=True,
    )
    # YAML ends a document of one bare value with "...", which is no part of the value.
    return text.removesuffix("\n").removesuffix("\n...")
