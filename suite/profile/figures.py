"""The papers' efficiency figures, from a profile or from shapes alone, in matplotlib: readable in black and white, too.

READ (arXiv 2305.15348): figure 1, energy and memory against full fine-tuning; figure 4, memory by backbone size; figure 5, trainable
parameters and inference latency by backbone size. MHE (arXiv 2310.07911): figures 1, 3 and 4, attention parameters by heads and by
layers, without the output projection. Shared Attention (arXiv 2407.12866): what the cache holds by context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.files import replacing
from suite.profile.record import ArmProfile, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, told apart by most colour-blind readers."""
MARKERS = "osD^vPX*"
HEADS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
"""Of MHE's figures, at 64 numbers a head; layers of its GPT-3 are 96."""
HEAD_DIM, GPT3_HEADS, GPT3_DIM = 64, 96, 128
GIB, MIB = 2**30, 2**20

ATTENTION_WEIGHTS: dict[str, Callable[[int, int], int]] = {
    "mha": lambda n, d: 3 * d * d * n * n,
    "skv": lambda n, d: 2 * d * d * n * n,
    "mqa": lambda n, d: d * d * n * n + 2 * d * d * n,
    "el": lambda n, d: d * d * n * n,
    "mhe": lambda n, d: 3 * d * d * n + 3 * d * n,
    "sha": lambda n, d: 3 * d * d * n,
}
"""MHE, table 4: weights of one sublayer with n heads of width d, without output projection."""


def draw(found: Profile, folder: Path) -> list[Path]:
    """Write every figure for which the profile has numbers, as PNG.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "cost-against-full": against_full(found),
        "memory-by-size": by_size(found, memory_of, "peak training memory, GiB"),
        "trainable-by-size": by_size(
            found, lambda arm: arm.trainable_parameters, "trainable parameters", log=True
        ),
        "latency-by-size": by_size(found, latency_of, "forward pass, batch 1, ms"),
        "cache-by-context": cache(found),
        "attention-parameters": attention_parameters(),
    }
    written = []
    for name, figure in made.items():
        if figure is not None:
            path = folder / f"{name}.png"
            with replacing(path) as temporary:
                figure.savefig(temporary, format="png", dpi=150)
            written.append(path)
    return written


def new_figure(panels: int = 1, *, width: float = 4.8) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, 3.6), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def memory_of(arm: ArmProfile) -> float | None:
    """Peak training memory in GiB: measured, else estimated."""
    if arm.memory is not None:
        return arm.memory.peak_bytes / GIB
    return None if arm.estimate is None else arm.estimate.memory.peak_bytes / GIB


def latency_of(arm: ArmProfile) -> float | None:
    """Milliseconds of a forward pass of one example."""
    return next((item.seconds.median * 1000 for item in arm.inference if item.batch == 1), None)


def against_full(found: Profile) -> Figure | None:
    """READ's figure 1: energy of a sample and peak memory, each over full fine-tuning of the same backbone and attention, in percent."""
    full = {(arm.backbone, arm.attention): arm for arm in found.arms if arm.method == "full"}
    rows = [
        (arm, base)
        for arm in found.arms
        if (base := full.get((arm.backbone, arm.attention))) is not None
    ]
    estimated = any(arm.energy_source == "cpu-time-estimate" for arm in found.arms)
    panels = [
        (
            "estimated energy per sample" if estimated else "energy per sample",
            lambda arm: arm.energy_kwh_per_1000,
        ),
        ("peak training memory", memory_of),
        ("seconds per step", lambda arm: None if arm.time is None else arm.time.step_s.median),
    ]
    drawn = [(title, _percent(rows, of)) for title, of in panels]
    drawn = [(title, bars) for title, bars in drawn if bars]
    if not drawn:
        return None
    figure, axes = new_figure(len(drawn), width=4.2)
    for each, (title, bars) in zip(axes, drawn, strict=True):
        _bars(each, bars, f"{title}, % of full")
    return figure


def _percent(
    rows: Iterable[tuple[ArmProfile, ArmProfile]], of: Callable[[ArmProfile], float | None]
) -> list[tuple[str, float]]:
    found = [(arm.name, of(arm), of(base)) for arm, base in rows]
    return [(name, 100 * value / base) for name, value, base in found if value is not None and base]


def _bars(axes: Axes, bars: Sequence[tuple[str, float]], title: str) -> None:
    positions = range(len(bars))
    drawn = axes.barh(
        list(positions),
        [value for _, value in bars],
        color=COLOURS[0],
        edgecolor="black",
        linewidth=0.5,
    )
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.set_yticks(list(positions), [name for name, _ in bars])
    axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)


def by_size(
    found: Profile, of: Callable[[ArmProfile], float | None], title: str, *, log: bool = False
) -> Figure | None:
    """READ's figures 4 and 5: a quantity by the backbone's parameters, a line for each method and attention; None for one backbone."""
    lines: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}
    for arm in sorted(
        found.arms, key=lambda arm: (arm.method != "full", arm.attention != "pretrained")
    ):
        if arm.total_parameters:
            sizes.setdefault(arm.backbone, arm.total_parameters)
    for arm in found.arms:
        value, size = of(arm), sizes.get(arm.backbone)
        if value is not None and size:
            lines.setdefault(
                arm.method if arm.attention == "pretrained" else f"{arm.attention}/{arm.method}", []
            ).append((size / 1e6, value))
    if len(sizes) < 2 or not lines:
        return None
    figure, (axes,) = new_figure(width=6.4)
    for i, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(
            xs,
            ys,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linewidth=1.2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel("parameters of the backbone, millions")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure


def cache(found: Profile) -> Figure | None:
    """Bytes of the cache by context, a line for each backbone and attention; None where nothing decodes."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for arm in sorted(
        found.arms, key=lambda arm: arm.method != "full"
    ):  # a method may cache more than the variant does
        name = f"{arm.backbone}, {arm.attention}"
        if arm.decoding and name not in lines:
            lines[name] = [(item.context_tokens, item.kv_bytes / MIB) for item in arm.decoding]
    if not lines:
        return None
    figure, (axes,) = new_figure(width=6.4)
    for i, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs,
            ys,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linewidth=1.2,
        )
    axes.set_xlabel("tokens in the cache")
    axes.set_title("cache of one sequence, MiB", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.set_ylim(bottom=0)
    return figure


def attention_parameters() -> Figure:
    """MHE's figures 1, 3 and 4: weights of an attention sublayer by its number of heads, and of all layers of GPT-3 by their number."""
    figure, (by_heads, by_layers) = new_figure(2)
    layers = range(12, 97, 12)
    for i, (name, weights) in enumerate(ATTENTION_WEIGHTS.items()):
        style: dict[str, Any] = {
            "label": name,
            "color": COLOURS[i],
            "marker": MARKERS[i],
            "linewidth": 1.2,
        }
        by_heads.plot(HEADS, [weights(n, HEAD_DIM) / 1e6 for n in HEADS], **style)
        by_layers.plot(
            layers, [weights(GPT3_HEADS, GPT3_DIM) * count / 1e9 for count in layers], **style
        )
    by_heads.set_yscale("log")
    by_layers.set_yscale("log")
    by_heads.set_xlabel(f"heads of width {HEAD_DIM}")
    by_layers.set_xlabel(f"layers with {GPT3_HEADS} heads of width {GPT3_DIM} (GPT-3)")
    by_heads.set_title("weights of a sublayer, millions", fontsize=10)
    by_layers.set_title("weights of all sublayers, billions", fontsize=10)
    by_heads.legend(fontsize=8, frameon=False)
    return figure
