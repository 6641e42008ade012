"""`suite profile`: what every arm costs, in minutes and without training it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import render
from suite.cli.options import Format, FormatOption
from suite.cli.render import Column, column

if TYPE_CHECKING:
    from suite.profile import ArmProfile, Profile, Setting

ESTIMATED = ("cpu-time-estimate",)
SHAPE = "backbone"
"""In `--set`: what changes the backbone's configuration."""


class Device(StrEnum):
    """Where to measure."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """Of forward weights and activations."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


def profile(
    backbone: Annotated[
        str,
        typer.Option(
            "--backbone",
            "--sizes",
            metavar="B,...",
            help="Known names or folders; only shapes are read.",
        ),
    ] = "t5-small",
    methods: Annotated[str, typer.Option(metavar="M,...", help="PETL methods, or all.")] = "all",
    attention: Annotated[
        str, typer.Option(metavar="V,...", help="Attention variants.")
    ] = "pretrained",
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples per step over all ranks. (default: 96 on a GPU, 8 on a CPU)"
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per rank and forward pass. (default: batch / ranks)"),
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of an example.")] = 128,
    target: Annotated[
        int, typer.Option(min=1, help="Tokens of a text target (encoder-decoders).")
    ] = 8,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes that train together on this machine, a GPU each.")
    ] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="DeepSpeed ZeRO stage.")] = 3,
    dtype: Annotated[
        Precision, typer.Option(help="auto: bf16 on a GPU, fp32 on a CPU.")
    ] = Precision.AUTO,
    device: Annotated[Device, typer.Option(help="auto: the GPU where there is one.")] = Device.AUTO,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Visits to every arm, in alternating order; ratios are taken within a round.",
        ),
    ] = 3,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.01, help="Of timed training steps per arm and round (at least 5 steps)."
        ),
    ] = 3.0,
    infer_batch: Annotated[
        str, typer.Option(metavar="N,...", help="Examples of a forward pass without gradients.")
    ] = "1,32",
    context: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens in the cache when decoding is timed.")
    ] = "128,512",
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Two methods or variants: also print A's costs over B's, with intervals.",
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Counts and estimates alone: runs nothing, any size on any machine."
        ),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="lora.rank=8 of a method, backbone.num_layers=2 of all backbones; may be given often.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write everything as JSON.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also draw the papers' efficiency figures, as PNG."),
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Measure what arms cost: step time, energy, memory and its parts, latency, decoding and cache, on random weights (no download).

    Every arm runs in rounds of alternating order on the engine that sweeps train with. Beside the measured memory stands an estimate, made
    before anything runs; an arm that would not fit is not tried. Formulas and units: docs/profile.md.
    """
    from suite.cli.options import split_names
    from suite.profile import choose, estimate_only, measure

    setting = make_setting(
        {
            "batch": batch,
            "micro_batch": micro_batch,
            "seq": seq,
            "target": target,
            "ranks": ranks,
            "zero": zero,
            "rounds": rounds,
        },
        dtype=dtype,
        device=device,
        seconds=seconds,
        inference_batches=numbers(infer_batch, "--infer-batch"),
        contexts=numbers(context, "--context"),
    )
    names = method_names(methods)
    changes = read_changes(overrides or (), names)
    arms = choose(
        split_names(backbone),
        names,
        split_names(attention),
        shape=changes.pop(SHAPE, {}),
        architectures=changes,
    )
    pair = None if compare is None else compared(compare, [arm.named() for arm in arms], fmt)
    check_targets(out, figures)
    with render.stdout_for_result():
        found = (estimate_only if estimate else measure)(
            arms, setting, tell=lambda line: print(line, file=sys.stderr, flush=True)
        )
    if out is not None:
        write_json(found, out)
    show(found, pair, fmt)
    if figures is not None:
        from suite.profile.figures import draw

        for path in draw(found, figures):
            print(f"wrote {path}", file=sys.stderr)
    if found.stopped:
        print("stopped; what was measured until then is above", file=sys.stderr)
        raise typer.Exit(130)
    if any(arm.status in ("oom", "failed") for arm in found.arms):
        raise typer.Exit(1)


def check_targets(out: Path | None, figures: Path | None) -> None:
    """Raise ConfigError where a result could not be written: minutes of measuring come before it."""
    from suite.errors import ConfigError

    folders = {f"--out {out}": None if out is None else out.parent, f"--figures {figures}": figures}
    for option, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # also where it is a file
            raise ConfigError(
                f"{option}: {error.strerror}; expected a folder that can be made or written"
            ) from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{option}: {folder} cannot be written")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out}: got a folder, expected a file")


def make_setting(
    shapes: dict[str, Any], *, dtype: Precision, device: Device, **rest: Any
) -> Setting:
    """The setting with what was left open filled in for this machine.

    Raises:
        ConfigError: Numbers that do not go together.
    """
    import torch

    from suite.config.loader import validate
    from suite.profile import Setting

    where = (
        ("cuda" if torch.cuda.is_available() else "cpu") if device is Device.AUTO else device.value
    )
    precision = ("bf16" if where == "cuda" else "fp32") if dtype is Precision.AUTO else dtype.value
    batch = shapes["batch"] or (96 if where == "cuda" else 8)
    return validate(
        Setting,
        {**shapes, "batch": batch, "dtype": precision, "device": where, **rest},
        where="suite profile",
    )


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`1,32` as numbers.

    Raises:
        ConfigError: Anything else.
    """
    from suite.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers with commas between them, as 1,32"
        ) from None


def method_names(text: str) -> list[str]:
    """The methods asked for; `all` is every one that the suite has by name."""
    from suite.cli.options import split_names
    from suite.petl import methods

    return methods.names() if text == "all" else split_names(text)


def read_changes(overrides: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`lora.rank=8` by method, and `backbone.num_layers=2`.

    Raises:
        ConfigError: No key of a method or of the backbone.
        UnknownNameError: Of a method that is not profiled.
    """
    from suite.config.loader import apply_overrides
    from suite.errors import ConfigError, UnknownNameError

    for item in overrides:
        if "." not in item.partition("=")[0]:
            raise ConfigError(
                f"--set {item}: expected METHOD.KEY=VALUE or backbone.KEY=VALUE, as lora.rank=8"
            )
        if (first := item.partition("=")[0].split(".")[0]) not in (SHAPE, *names):
            raise UnknownNameError("method", first, [*names, SHAPE], where="--set")
    return apply_overrides({}, overrides)


def compared(text: str, arms: Sequence[ArmProfile], fmt: Format) -> tuple[str, str]:
    """The two names of `--compare`, which some couple of arms has.

    Raises:
        ConfigError: Not two names, two that no couple differs in, or a format for one table.
        UnknownNameError: A name that no arm has.
    """
    from suite.cli.options import split_names
    from suite.errors import ConfigError, UnknownNameError

    pair = split_names(text)
    if len(pair) != 2:
        raise ConfigError(
            f"--compare {text!r}: expected two different names with a comma between them, as full,read"
        )
    known = list(dict.fromkeys(name for arm in arms for name in (arm.method, arm.attention)))
    for name in pair:
        if name not in known:
            raise UnknownNameError("method or attention variant", name, known, where="--compare")
    if not couples(arms, (pair[0], pair[1])):
        raise ConfigError(
            f"--compare {text}: no two arms differ in this alone; name two methods, or two attention variants"
        )
    if fmt is Format.CSV:
        raise ConfigError(
            "--compare with --format csv: a CSV file holds one table; use table, md or json"
        )
    return pair[0], pair[1]


# ---- tables -----------------------------------------------------------------------------------------------------------


def show(found: Profile, pair: tuple[str, str] | None, fmt: Format) -> None:
    """Two tables, training and use, and the ratios; JSON is one document with all of it, CSV a line per arm."""
    compared_rows = (
        [] if pair is None else [(a, b, ratio_rows(a, b)) for a, b in couples(found.arms, pair)]
    )
    if fmt is Format.JSON:
        ratios = [
            {"first": a.name, "second": b.name, "ratios": rows} for a, b, rows in compared_rows
        ]
        print(
            json.dumps(
                {**found.model_dump(mode="json"), **({} if pair is None else {"compared": ratios})},
                indent=2,
                allow_nan=False,
            )
        )
        return
    rows = [row_of(arm) for arm in found.arms]
    if fmt is Format.CSV:
        render.render(rows, [], fmt)
        return
    render.render(rows, training_columns(found), fmt, title="Training")
    if used := [row for row in rows if row["inference"] or row["decoding"]]:
        print()
        render.render(used, use_columns(found), fmt, title="Use")
    print("\n" + "\n".join(notes(found)))
    for first, second, ratios_ in compared_rows:
        print()
        show_ratios(first, second, ratios_, fmt)


def row_of(arm: ArmProfile) -> dict[str, Any]:
    """An arm in plain values; nested ones by dotted keys."""
    row: dict[str, Any] = {"arm": arm.name, **arm.model_dump(mode="json", exclude={"rounds"})}
    for part in ("time", "memory"):
        values = row.pop(part) or {}
        row |= {
            f"{part}.{key}": value["median"] if isinstance(value, dict) else value
            for key, value in values.items()
        }
    expected = row.pop("estimate") or {"memory": {}}
    row |= {f"estimate.{key}": value for key, value in expected["memory"].items()}
    return row | {key: expected.get(key) for key in ("forward_flops", "step_flops")}


def training_columns(found: Profile) -> list[Column]:
    """Columns of the first table; what is estimated says so."""
    estimated = any(arm.energy_source in ESTIMATED for arm in found.arms)
    measured = any(arm.time is not None for arm in found.arms)
    timed = [
        column("time.step_s", "step", seconds_text),
        Column("fwd + bwd + update", parts_text, right=True, rank=2),
        column("time.samples_per_s", "samples/s", render.brief),
        column(
            "energy_kwh_per_1000",
            "est. Wh/1000" if estimated else "Wh/1000",
            lambda v: "-" if v is None else f"{v * 1000:.3g}",
        ),
        column("memory.peak_bytes", "peak", render.size),
    ]
    kept = ("parameters", "optimizer", "gradients", "activations")
    shown = "memory" if measured else "estimate"
    return [
        column("arm"),
        column("trainable_parameters", "trains", render.count),
        *(timed if measured else []),
        column("estimate.peak_bytes", "estimate", render.size),
        *(column(f"{shown}.{name}_bytes", name, render.size, rank=1) for name in kept),
        column("step_flops", "FLOPs", lambda v: "-" if v is None else f"{v:.3g}", rank=3),
        *(
            [
                column(
                    "flops_utilisation",
                    "of peak",
                    lambda v: "-" if v is None else f"{v:.0%}",
                    rank=2,
                )
            ]
            if measured
            else []
        ),
        column("status", "", lambda v: "" if v in ("ok", "estimated") else str(v)),
    ]


def use_columns(found: Profile) -> list[Column]:
    """Columns of the second table: by batch size and context."""
    batches, contexts = found.setting["inference_batches"], found.setting["contexts"]
    columns = [column("arm")]
    for batch in batches:
        columns += [
            _picked(
                "inference",
                "batch",
                batch,
                f"forward, batch {batch}",
                lambda item: seconds_text(item["seconds"]["median"]),
            )
        ]
        columns += [
            _picked(
                "inference",
                "batch",
                batch,
                f"peak, batch {batch}",
                lambda item: render.size(item["peak_bytes"]),
            )
        ]
    if any(arm.decoding for arm in found.arms):
        for context in contexts:
            columns += [
                _picked(
                    "decoding",
                    "context_tokens",
                    context,
                    f"token at {context}",
                    lambda item: seconds_text(item["token_s"]["median"]),
                )
            ]
            columns += [
                _picked(
                    "decoding",
                    "context_tokens",
                    context,
                    f"cache at {context}",
                    lambda item: render.size(item["kv_bytes"]),
                )
            ]
    return columns


def _picked(key: str, by: str, value: int, head: str, show_item: Any) -> Column:
    def text(row: Mapping[str, Any]) -> str:
        found = [item for item in row[key] if item[by] == value]
        return str(show_item(found[0])) if found else render.MISSING

    return Column(head, text, right=True)


def seconds_text(value: float | None) -> str:
    """Seconds or milliseconds, three digits."""
    if value is None:
        return render.MISSING
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def parts_text(row: Mapping[str, Any]) -> str:
    """Forward, backward and update, beside one another."""
    return " + ".join(
        seconds_text(row.get(f"time.{part}_s")) for part in ("forward", "backward", "update")
    )


def notes(found: Profile) -> list[str]:
    """What the tables rest on, and why an arm has no numbers."""
    from suite.profile.record import NO_DECODING

    setting, measured = found.setting, any(arm.time is not None for arm in found.arms)
    how = f"medians of {setting['rounds']} round(s)" if measured else "estimates, nothing was run"
    lines = [
        f"{found.device_name}; {setting['ranks']} rank(s), ZeRO {setting['zero']}, {setting['dtype']}; "
        f"batch {setting['batch']} x {setting['seq']} tokens; {how}; sizes on the fullest rank"
    ]
    if any(arm.energy_source in ESTIMATED for arm in found.arms):
        lines.append(
            "energy: processor seconds x watts per core, an estimate: no counter can be read here"
        )
    if found.peak_flops is not None:
        lines.append(f"of peak: of {found.peak_flops:.3g} FLOP/s a rank, {found.peak_flops_source}")
    if found.idle_watts is not None:
        lines.append(f"idle power: {found.idle_watts:.0f} W (not subtracted)")
    lines += [f"{arm.name}: {arm.status}: {arm.reason}" for arm in found.arms if arm.reason]
    lost = [
        (arm.name, key, why)
        for arm in found.arms
        for key, why in arm.missing.items()
        if why != NO_DECODING
    ]
    return lines + [f"{name}: no {key}: {why}" for name, key, why in lost]


def show_ratios(
    first: ArmProfile, second: ArmProfile, rows: Sequence[dict[str, Any]], fmt: Format
) -> None:
    """`first / second`; a sentence where one of them has no numbers."""
    if not rows:
        print(
            f"{first.name} / {second.name}: nothing to compare, {first.name} is {first.status}, {second.name} is {second.status}"
        )
        return
    shown = [
        column("quantity"),
        column("first", first.name, render.brief),
        column("second", second.name, render.brief),
    ]
    shown += [
        column("ratio", show=render.brief),
        Column("95% interval", _interval),
        column("estimated", "by the estimate", render.brief),
    ]
    render.render(rows, shown, fmt, title=f"{first.name} / {second.name}")


def couples(
    arms: Sequence[ArmProfile], pair: tuple[str, str]
) -> list[tuple[ArmProfile, ArmProfile]]:
    """Arms of the first name beside those of the second with the same backbone and the same other choice."""

    def rest(arm: ArmProfile, name: str) -> tuple[str, str] | None:
        if arm.method == name:
            return arm.backbone, arm.attention
        return (arm.backbone, arm.method) if arm.attention == name else None

    return [
        (a, b)
        for a in arms
        for b in arms
        if a is not b and rest(a, pair[0]) is not None and rest(a, pair[0]) == rest(b, pair[1])
    ]


def ratio_rows(first: ArmProfile, second: ArmProfile) -> list[dict[str, Any]]:
    from suite.profile import ratios

    return [asdict(each) for each in ratios(first, second)]


def _interval(row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return "exact" if row["exact"] else "one round"
    return f"{row['low']:.3g} - {row['high']:.3g}"


def write_json(found: Profile, path: Path) -> None:
    """Everything, in one piece or not at all."""
    from suite.files import json_bytes, write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_bytes(found.model_dump(mode="json")))
    print(f"wrote {path}", file=sys.stderr)
