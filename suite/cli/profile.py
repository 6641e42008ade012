"""`suite profile`: what every arm costs, in minutes and without training it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from suite.cli import render
from suite.cli.options import Format, FormatOption, split_names
from suite.cli.render import Column, column, put
from suite.config.training import FrozenWeights
from suite.errors import ConfigError, UnknownNameError
from suite.meters.record import ESTIMATE
from suite.signals import STOPPED

if TYPE_CHECKING:
    from suite.profiling import ArmProfile, Profile

SHAPE = "backbone"
"""First word of the `--set` keys that change the backbone's configuration."""


Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


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
    frozen_weights: Annotated[
        FrozenWeights,
        typer.Option(help="Whether each rank keeps all frozen weights, or ZeRO-3 gathers them."),
    ] = "resident",
    dtype: Annotated[
        Precision, typer.Option(help="auto: bf16 on a GPU that has it, else fp32.")
    ] = "auto",
    device: Annotated[Device, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Visits to every arm, in alternating order; ratios are taken within a round.",
        ),
    ] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Seconds of timed training steps per arm and round, at least 5 steps. "
            "(default: 10 on a GPU, 3 on a CPU)",
        ),
    ] = None,
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
            help="Two methods or variants: print also A's costs divided by B's, with intervals.",
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Only count and estimate: run nothing, for any size on any machine."
        ),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a method (lora.rank=8) or all backbones (backbone.num_layers=2); may be "
            "given often.",
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
    """Measure what arms cost: step time, energy, memory, latency, decoding and cache.

    Weights are random, so nothing is downloaded. Every arm runs in rounds of alternating order on
    the engine that sweeps train with. Beside the measured memory stands an estimate, made before
    anything runs; an arm that would not fit is not tried. Formulas and units: docs/profile.md.
    """
    # torch and DeepSpeed take seconds to import, and `--help` must not wait for them.
    from suite.profiling import choose, estimate_only, measure
    from suite.profiling.setting import make_setting

    # Everything is checked before the first arm runs: a profile takes minutes.
    setting = make_setting(
        {
            "batch": batch,
            "micro_batch": micro_batch,
            "seq": seq,
            "target": target,
            "ranks": ranks,
            "zero": zero,
            "frozen_weights": frozen_weights,
            "rounds": rounds,
            "dtype": dtype,
            "device": device,
            "seconds": seconds,
            "inference_batches": numbers(infer_batch, "--infer-batch"),
            "contexts": numbers(context, "--context"),
        }
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
    if compare is None:
        pair = None
    else:
        # Unmeasured arms have the names, which is all that this check reads.
        pair = compared(compare, [arm.unmeasured() for arm in arms], fmt)
    check_targets(out, figures)
    with render.stdout_for_result():
        found = (estimate_only if estimate else measure)(
            arms, setting, on_progress=lambda line: put(line, err=True)
        )
    if out is not None:
        write_json(found, out)
    show(found, pair, fmt)
    if figures is not None:
        from suite.profiling.figures import draw

        # Paths go to stderr: stdout may be piped as JSON.
        for path in draw(found, figures):
            put(f"wrote {path}", err=True)
    if found.stopped:
        put("stopped; what was measured until then is above", err=True)
        raise typer.Exit(STOPPED)
    # An arm that is too large to be tried is a finding, not a failure.
    if any(arm.status in ("oom", "failed") for arm in found.arms):
        raise typer.Exit(1)


def check_targets(out: Path | None, figures: Path | None) -> None:
    """Check that the results can be written, because minutes of measuring come before.

    Raises:
        ConfigError: A file or folder cannot be written.
    """
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
        # mkdir succeeds on a read-only folder that exists.
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{option}: {folder} cannot be written")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out}: got a folder, expected a file")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers in a text such as `1,32`.

    Raises:
        ConfigError: Anything else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers with commas between them, as 1,32"
        ) from None


def method_names(text: str) -> list[str]:
    """The methods asked for; `all` is every one that the suite has by name."""
    from suite.petl import methods

    # peft's own types are not among them: there are dozens.
    if text == "all":
        return methods.names()
    return split_names(text)


def read_changes(overrides: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `--set` changes: `lora.rank=8` by method, and `backbone.num_layers=2`.

    Raises:
        ConfigError: A key names neither a method nor the backbone.
        UnknownNameError: The key's method is not profiled.
    """
    from suite.config.loader import apply_overrides

    for item in overrides:
        key = item.partition("=")[0]
        if "." not in key:
            raise ConfigError(
                f"--set {item}: expected METHOD.KEY=VALUE or backbone.KEY=VALUE, as lora.rank=8"
            )
        owner = key.split(".")[0]
        # A change of a method that is not profiled would be of no use and never seen.
        if owner not in (SHAPE, *names):
            raise UnknownNameError("method", owner, [*names, SHAPE], where="--set")
    return apply_overrides({}, overrides)


def compared(text: str, arms: Sequence[ArmProfile], fmt: Format) -> tuple[str, str]:
    """The two names of `--compare`; at least one couple of arms differs in them.

    Raises:
        ConfigError: There are not two names, no couple of arms differs in them alone, or the
            format holds one table only.
        UnknownNameError: No arm has one of the names.
    """
    pair = split_names(text)
    if len(pair) != 2:
        raise ConfigError(
            f"--compare {text!r}: expected two different names with a comma between them, "
            "as full,read"
        )
    known: dict[str, None] = {}  # a set that keeps the order of the arms
    for arm in arms:
        known[arm.method] = None
        known[arm.attention] = None
    for name in pair:
        if name not in known:
            raise UnknownNameError("method or attention variant", name, known, where="--compare")
    if not couples(arms, (pair[0], pair[1])):
        raise ConfigError(
            f"--compare {text}: no two arms differ in this alone; name two methods, or two "
            "attention variants"
        )
    if fmt is Format.CSV:
        raise ConfigError(
            "--compare with --format csv: a CSV file holds one table; use table, md or json"
        )
    return pair[0], pair[1]


# ---- tables ----


def show(found: Profile, pair: tuple[str, str] | None, fmt: Format) -> None:
    """Print the tables for training and for use, and the ratios.

    JSON is one document, CSV has a line per arm.
    """
    couples_shown = []
    if pair is not None:
        couples_shown = couples(found.arms, pair)
    if fmt is Format.JSON:
        _show_json(found, pair, couples_shown)
        return
    rows = [row_of(arm) for arm in found.arms]
    if fmt is Format.CSV:
        render.render(rows, [], fmt)
        return
    render.render(rows, training_columns(found), fmt, title="Training")
    # An arm that did not fit, or an estimate, has no second table.
    used = [row for row in rows if row["inference"] or row["decoding"]]
    if used:
        put()
        render.render(used, use_columns(found), fmt, title="Use")
    put("\n" + "\n".join(notes(found)))
    for first, second in couples_shown:
        put()
        show_ratios(first, second, ratio_rows(first, second), fmt)


def _show_json(
    found: Profile, pair: tuple[str, str] | None, shown: Sequence[tuple[ArmProfile, ArmProfile]]
) -> None:
    document = found.model_dump(mode="json")
    if pair is not None:
        document["compared"] = []
        for first, second in shown:
            rows = ratio_rows(first, second)
            entry = {"first": first.name, "second": second.name, "ratios": rows}
            document["compared"].append(entry)
    print(json.dumps(document, indent=2, allow_nan=False))


def row_of(arm: ArmProfile) -> dict[str, Any]:
    """An arm as plain values; nested values get dotted keys."""
    row: dict[str, Any] = {"arm": arm.name, **arm.model_dump(mode="json", exclude={"rounds"})}
    for part in ("time", "memory"):
        values = row.pop(part) or {}
        for key, value in values.items():
            # A timed quantity has a median and quartiles; a table shows the median.
            if isinstance(value, dict):
                value = value["median"]
            row[f"{part}.{key}"] = value
    # An arm that failed early has no estimate; its cells stay empty.
    expected = row.pop("estimate") or {"memory": {}}
    for key, value in expected["memory"].items():
        row[f"estimate.{key}"] = value
    for key in ("forward_flops", "step_flops"):
        row[key] = expected.get(key)
    return row


def training_columns(found: Profile) -> list[Column]:
    """Columns of the first table; a column of estimates says so in its title."""
    measured = any(arm.time is not None for arm in found.arms)
    columns = [column("arm"), column("trainable_parameters", "trains", render.count)]
    if measured:
        energy_title = "Wh/1000"
        if any(arm.energy_source == ESTIMATE for arm in found.arms):
            energy_title = "est. Wh/1000"
        columns += [
            column("time.step_s", "step", seconds_text),
            Column("fwd + bwd + update", parts_text, right=True, rank=2),
            column("time.samples_per_s", "samples/s", render.brief),
            column("energy_kwh_per_1000", energy_title, _watt_hours_text),
            column("memory.peak_bytes", "peak", render.size),
        ]
    columns.append(column("estimate.peak_bytes", "estimate", render.size))
    # Without a measurement the parts of the memory are the estimate's.
    source = "memory" if measured else "estimate"
    for name in ("parameters", "optimizer", "gradients", "activations"):
        columns.append(column(f"{source}.{name}_bytes", name, render.size, rank=1))
    columns.append(column("step_flops", "FLOPs", render.brief, rank=3))
    if measured:
        columns.append(column("flops_utilisation", "of peak", _percent_text, rank=2))
    columns.append(column("status", "", _problem_text))
    return columns


def use_columns(found: Profile) -> list[Column]:
    """Columns of the second table: two for each batch size, and two for each context."""
    columns = [column("arm")]
    for batch in found.setting["inference_batches"]:
        where = ("inference", "batch", batch)
        columns.append(_picked(where, f"forward, batch {batch}", _median_of("seconds")))
        columns.append(_picked(where, f"peak, batch {batch}", _size_of("peak_bytes")))
    # Encoders do not decode: empty columns would only take room.
    if not any(arm.decoding for arm in found.arms):
        return columns
    for context in found.setting["contexts"]:
        where = ("decoding", "context_tokens", context)
        columns.append(_picked(where, f"token at {context}", _median_of("token_s")))
        columns.append(_picked(where, f"cache at {context}", _size_of("kv_bytes")))
    return columns


def _watt_hours_text(kwh: float | None) -> str:
    if kwh is None:
        return render.MISSING
    # Watt-hours, because a thousand examples take far less than a kWh.
    return f"{kwh * 1000:.3g}"


def _percent_text(share: float | None) -> str:
    return render.number(share, ".0%")


def _problem_text(status: str) -> str:
    """The status of an arm without numbers; empty where all is well."""
    if status in ("ok", "estimated"):
        return ""
    return status


def _picked(place: tuple[str, str, int], head: str, show_item: Callable[[Any], str]) -> Column:
    """A column of the item in `row[place[0]]` whose `place[1]` has the value `place[2]`."""
    key, by, value = place

    def text(row: Mapping[str, Any]) -> str:
        for item in row[key]:
            if item[by] == value:
                return show_item(item)
        return render.MISSING

    return Column(head, text, right=True)


def _median_of(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: seconds_text(item[name]["median"])


def _size_of(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: render.size(item[name])


def seconds_text(value: float | None) -> str:
    """Seconds or milliseconds, three digits."""
    if value is None:
        return render.MISSING
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1000:.3g} ms"


def parts_text(row: Mapping[str, Any]) -> str:
    """The times of forward, backward and update, with + between them."""
    parts = [seconds_text(row.get(f"time.{part}_s")) for part in ("forward", "backward", "update")]
    return " + ".join(parts)


def notes(found: Profile) -> list[str]:
    """Lines below the tables: how the numbers were taken, and why an arm has none."""
    from suite.profiling.record import NO_DECODING

    setting = found.setting
    how = "estimates, nothing was run"
    if any(arm.time is not None for arm in found.arms):
        how = f"medians of {setting['rounds']} round(s)"
    lines = [
        f"{found.device_name}; {setting['ranks']} rank(s), ZeRO {setting['zero']}, "
        f"{setting['dtype']}; batch {setting['batch']} x {setting['seq']} tokens; {how}; "
        "sizes on the fullest rank"
    ]
    if any(arm.energy_source == ESTIMATE for arm in found.arms):
        lines.append(
            "energy: processor seconds x watts per core, an estimate: no counter can be read here"
        )
    if found.peak_flops is not None:
        lines.append(f"of peak: of {found.peak_flops:.3g} FLOP/s a rank, {found.peak_flops_source}")
    if found.idle_watts is not None:
        # Stated, because some papers subtract it and some do not.
        lines.append(f"idle power: {found.idle_watts:.0f} W (not subtracted)")
    for arm in found.arms:
        if arm.reason:
            lines.append(f"{arm.name}: {arm.status}: {arm.reason}")
    for arm in found.arms:
        for key, why in arm.missing.items():
            # An encoder does not decode; that it lacks these numbers is no news.
            if why != NO_DECODING:
                lines.append(f"{arm.name}: no {key}: {why}")
    return lines


def show_ratios(
    first: ArmProfile, second: ArmProfile, rows: Sequence[dict[str, Any]], fmt: Format
) -> None:
    """Print the ratios `first / second`, or a sentence where one of them has no numbers."""
    title = f"{first.name} / {second.name}"
    if not rows:
        put(
            f"{title}: nothing to compare, {first.name} is {first.status}, "
            f"{second.name} is {second.status}"
        )
        return
    columns = [
        column("quantity"),
        column("first", first.name, render.brief),
        column("second", second.name, render.brief),
        column("ratio", show=render.brief),
        Column("95% interval", _interval),
        column("estimated", "by the estimate", render.brief),
    ]
    render.render(rows, columns, fmt, title=title)


def couples(
    arms: Sequence[ArmProfile], pair: tuple[str, str]
) -> list[tuple[ArmProfile, ArmProfile]]:
    """Arms of the first name with those of the second that are equal in everything else."""

    def rest(arm: ArmProfile, name: str) -> tuple[str, str] | None:
        if arm.method == name:
            return arm.backbone, arm.attention
        if arm.attention == name:
            return arm.backbone, arm.method
        return None

    found = []
    for first in arms:
        for second in arms:
            of_first = rest(first, pair[0])
            of_second = rest(second, pair[1])
            # Equal in the rest: two changes at once would leave the ratio without a cause.
            if first is not second and of_first is not None and of_first == of_second:
                found.append((first, second))
    return found


def ratio_rows(first: ArmProfile, second: ArmProfile) -> list[dict[str, Any]]:
    from suite.profiling import ratios

    return [asdict(each) for each in ratios(first, second)]


def _interval(row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        # Counts have no spread; a single round shows none.
        if row["exact"]:
            return "exact"
        return "one round"
    return f"{row['low']:.3g} - {row['high']:.3g}"


def write_json(found: Profile, path: Path) -> None:
    """Write the whole profile as JSON; a reader never sees half a file, even after Ctrl-C."""
    from suite.files import json_bytes, write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_bytes(found.model_dump(mode="json")))
    put(f"wrote {path}", err=True)
