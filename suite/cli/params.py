"""`suite params`: how much a method trains, counted on the meta device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from suite.cli import render
from suite.cli.options import AttentionOption, BackboneOption, Format, FormatOption, MethodOption, SetOption
from suite.cli.render import column

KEYS = ("backbone", "attention", "method", "architecture", "total", "trainable", "method_trainable", "head_trainable", "trainable_percent")


def params(
    backbone: BackboneOption,
    method: MethodOption,
    attention: AttentionOption = "pretrained",
    task: Annotated[str | None, typer.Option(metavar="T", help="Count the head of this task.")] = None,
    num_labels: Annotated[int, typer.Option(min=1, help="Classes of the head, where there is no --task.")] = 2,
    overrides: SetOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Count total and trainable parameters; reads no weights and needs no network for known backbones.

    `trainable` is everything that trains; `method_trainable`, what papers report, leaves out the task's own head (`head_trainable`).
    --set takes the method's settings by their bare names (rank=8), backbone.config.*, attention.options.*.
    """
    from suite.cli.arms import GROUPS, head_for, make_arm, read_overrides, resolve_backbone
    from suite.config.task import load_task
    from suite.petl.arm import count_arm

    arm = make_arm(backbone, method, attention, read_overrides({}, overrides or (), method=method, groups=GROUPS))
    resolved = resolve_backbone(arm)
    head = head_for(resolved, load_task(task, where="--task") if task else None, num_labels=num_labels)
    counted = count_arm(resolved, head, attention=arm.attention, method=method, architecture=arm.architecture)
    row = {
        "backbone": backbone,
        "attention": attention,
        "method": method,
        "architecture": arm.architecture,
        "total": counted.total,
        "trainable": counted.trainable,
        "method_trainable": counted.method,
        "head_trainable": counted.head,
        "trainable_percent": 100 * counted.trainable / counted.total,
    }
    if fmt is Format.JSON:
        print(json.dumps(row, indent=2))
        return
    shown = [column(key) for key in KEYS[:3]] + [column(key, key.replace("_", " "), render.count) for key in KEYS[4:8]]
    render.render([row], [*shown, column("trainable_percent", "trainable %", render.brief)], fmt, keys=KEYS)
