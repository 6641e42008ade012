"""`suite params`: how many weights a method trains and how large the attention is.

The counts come from torch's meta device, where a model has shapes and no memory.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from suite.cli import complete, render
from suite.cli.options import (
    AttentionOption,
    BackboneOption,
    Format,
    FormatOption,
    MethodOption,
    SetOption,
    TasksOption,
    TrustOption,
)
from suite.cli.render import column

KEYS = (
    "backbone",
    "attention",
    "method",
    "architecture",
    "total",
    "trainable",
    "method_trainable",
    "head_trainable",
    "trainable_percent",
    "attention.with_output_projection",
    "attention.without_output_projection",
    "attention.extra_over_base",
    "kv_bytes_per_token",
    "kv_tokens",
    "cross_kv_bytes_per_token",
    "kv_fraction",
)
"""The columns of CSV, in their order; numbers of the cache are null for a model without one."""


class Precision(StrEnum):
    """Type of the numbers in the cache."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


def params(
    backbone: BackboneOption,
    method: MethodOption = "full",
    attention: AttentionOption = "pretrained",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="T", autocompletion=complete.tasks, help="Count the head of this task."
        ),
    ] = None,
    num_labels: Annotated[
        int, typer.Option(min=1, help="Classes of the head when no --task is given.")
    ] = 2,
    dtype: Annotated[
        Precision, typer.Option(help="Type of the cached keys and values.")
    ] = Precision.FP16,
    overrides: SetOption = None,
    fmt: FormatOption = Format.TABLE,
    tasks: TasksOption = None,
    trust: TrustOption = None,
) -> None:
    """Count total, trainable and attention parameters, and the size of the KV cache.

    The command reads no weights and needs no network for known backbones. `trainable` is
    everything that trains; `method_trainable`, which papers report, leaves out the task's own head
    (`head_trainable`). `attention.*` counts weights without biases; the KV cache is per token of
    the decoder (cross-attention: of the source). --set takes the method's settings by their bare
    names (rank=8), backbone.config.*, attention.options.*.
    """
    # These import torch, which takes seconds: `suite params --help` must not wait for it.
    from suite.attention.counts import count_attention
    from suite.cli.arms import GROUPS, head_for, make_arm, read_overrides, resolve_backbone
    from suite.config.task import load_task
    from suite.petl.arm import count_arm

    changes = read_overrides({}, overrides or (), method=method, groups=GROUPS)
    arm = make_arm(backbone, method, attention, changes)
    resolved = resolve_backbone(arm, only_shape=True)
    config = None
    if task is not None:
        config = load_task(task, where="--task")
    head = head_for(resolved, config, num_labels=num_labels)
    counted = count_arm(resolved, head, arm, pretrained=True)
    inside = count_attention(resolved, head, arm.attention, dtype=dtype.value)
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
        "attention.with_output_projection": inside.with_output_projection,
        "attention.without_output_projection": inside.without_output_projection,
        "attention.extra_over_base": inside.extra_over_base,
        # The decoder's own keys and values grow with the text that it writes, those of
        # cross-attention with the source: their sum would have no unit.
        "kv_bytes_per_token": inside.kv_bytes_per_token,
        # Null where the cache keeps every token.
        "kv_tokens": inside.kv_tokens,
        "cross_kv_bytes_per_token": inside.cross_kv_bytes_per_token,
        "kv_fraction": inside.kv_fraction,
    }
    if fmt is Format.JSON:
        print(json.dumps(row, indent=2))
        return
    # A table leaves out the architecture, which is what was typed, and the rarer counts.
    shown = [
        column("backbone"),
        column("attention"),
        column("method"),
        column("total", show=render.count),
        column("trainable", show=render.count),
        column("method_trainable", "method trainable", render.count),
        column("head_trainable", "head trainable", render.count),
        column("trainable_percent", "trainable %", render.brief),
        column("attention.with_output_projection", "attention", render.count),
        column("kv_bytes_per_token", "KV/token", render.size),
    ]
    render.render([row], shown, fmt, keys=KEYS)
