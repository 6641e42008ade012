"""`suite params`: how many weights a method trains and how large the attention is.

The counts come from torch's meta device, where a model has shapes and no memory.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

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

Precision = Literal["fp16", "bf16", "fp32"]


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
    dtype: Annotated[Precision, typer.Option(help="Type of the cached keys and values.")] = "fp16",
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
    from suite import api

    row = api.params(
        backbone,
        method,
        attention=attention,
        task=task,
        num_labels=num_labels,
        dtype=dtype,
        changes=overrides or (),
    )
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
    render.render([row], shown, fmt)
