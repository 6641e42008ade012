"""The papers' efficiency figures, drawn with matplotlib from a profile or from shapes alone.

They can be read in black and white, too.

READ (arXiv 2305.15348): figure 1, energy and memory against full fine-tuning; figure 4, memory by
backbone size; figure 5, trainable parameters and inference latency by backbone size. MHE (arXiv
2310.07911): figures 1, 3 and 4, attention parameters by heads and by layers, without the output
projection. Shared Attention (arXiv 2407.12866): size of the cache by context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.files import replacing
from suite.meters.record import ESTIMATE
from suite.profiling.record import ArmProfile, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito: most colour-blind readers can tell these apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
# MHE's figures: heads of width 64; its GPT-3 has 96 layers of 96 heads of width 128.
HEADS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
HEAD_DIM = 64
GPT3_HEADS = 96
GPT3_DIM = 128
GIB = 2**30
MIB = 2**20

# MHE, table 4: weights of one sublayer with n heads of width d, without output projection.
ATTENTION_WEIGHTS: dict[str, Callable[[int, int], int]] = {
    "mha": lambda n, d: 3 * d * d * n * n,
    "skv": lambda n, d: 2 * d * d * n * n,
    "mqa": lambda n, d: d * d * n * n + 2 * d * d * n,
    "el": lambda n, d: d * d * n * n,
    "mhe": lambda n, d: 3 * d * d * n + 3 * d * n,
    "sha": lambda n, d: 3 * d * d * n,
}


def draw(found: Profile, folder: Path) -> list[Path]:
    """Write every figure for which the profile has numbers, as PNG.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory_title, memory_of = _memory(found)
    made = {
        "cost-against-full": against_full(found),
        "memory-by-size": by_size(found, memory_of, f"{memory_title}, GiB"),
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
    """A figure with empty panels side by side, without pyplot's global state.

    Args:
        width: Width of a panel in inches.
    """
    # Importing matplotlib takes a second, and most profiles draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, 3.6), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def _memory(found: Profile) -> tuple[str, Callable[[ArmProfile], float | None]]:
    """The title of peak training memory, and its GiB: measured, or else estimated for all arms."""
    # A measurement beside an estimate would compare the two sources, not the arms.
    if any(arm.memory is None and arm.estimate is not None for arm in found.arms):
        return "estimated peak training memory", _estimated_memory_of
    return "peak training memory", _measured_memory_of


def _measured_memory_of(arm: ArmProfile) -> float | None:
    if arm.memory is None:
        return None
    return arm.memory.peak_bytes / GIB


def _estimated_memory_of(arm: ArmProfile) -> float | None:
    if arm.estimate is None:
        return None
    return arm.estimate.memory.peak_bytes / GIB


def latency_of(arm: ArmProfile) -> float | None:
    """Milliseconds of a forward pass of one example."""
    for inference in arm.inference:
        if inference.batch == 1:
            return inference.seconds.median * 1000
    return None


def _step_seconds_of(arm: ArmProfile) -> float | None:
    if arm.time is None:
        return None
    return arm.time.step_s.median


def against_full(found: Profile) -> Figure | None:
    """READ's figure 1: energy of a sample, peak memory and time of a step, in percent.

    100% is full fine-tuning of the same backbone and attention. None where no arm has both.
    """
    full = {}
    for arm in found.arms:
        if arm.method == "full":
            full[arm.backbone, arm.attention] = arm
    pairs = []
    for arm in found.arms:
        base = full.get((arm.backbone, arm.attention))
        if base is not None:
            pairs.append((arm, base))
    energy_title = "energy per sample"
    if any(arm.energy_source == ESTIMATE for arm in found.arms):
        # An estimate must not pass for a measurement.
        energy_title = "estimated energy per sample"
    memory_title, memory_of = _memory(found)
    panels = {
        energy_title: _percent(pairs, lambda arm: arm.energy_kwh_per_1000),
        memory_title: _percent(pairs, memory_of),
        "seconds per step": _percent(pairs, _step_seconds_of),
    }
    drawn = [(title, bars) for title, bars in panels.items() if bars]
    if not drawn:
        return None
    figure, axes = new_figure(len(drawn), width=4.2)
    for each, (title, bars) in zip(axes, drawn, strict=True):
        _bars(each, bars, f"{title}, % of full")
    return figure


def _percent(
    pairs: Iterable[tuple[ArmProfile, ArmProfile]], of: Callable[[ArmProfile], float | None]
) -> list[tuple[str, float]]:
    """A quantity of each arm in percent of its base, where both have it."""
    bars = []
    for arm, base in pairs:
        value = of(arm)
        base_value = of(base)
        if value is not None and base_value:
            bars.append((arm.name, 100 * value / base_value))
    return bars


def _bars(axes: Axes, bars: Sequence[tuple[str, float]], title: str) -> None:
    positions = list(range(len(bars)))
    values = [value for _, value in bars]
    drawn = axes.barh(positions, values, color=COLOURS[0], edgecolor="black", linewidth=0.5)
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.set_yticks(positions, [name for name, _ in bars])
    # Full fine-tuning itself.
    axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()  # the first arm on top
    axes.set_title(title, fontsize=10)
    # Room for the numbers at the ends of the bars.
    axes.margins(x=0.15)


def by_size(
    found: Profile, of: Callable[[ArmProfile], float | None], title: str, *, log: bool = False
) -> Figure | None:
    """READ's figures 4 and 5: a quantity by the number of the backbone's parameters.

    One line for each method and attention; None for a single backbone.
    """
    sizes: dict[str, int] = {}
    # The size of a backbone is that of its plain arm, where the profile has it.
    for arm in sorted(found.arms, key=_distance_from_plain):
        if arm.total_parameters:
            sizes.setdefault(arm.backbone, arm.total_parameters)
    lines: dict[str, list[tuple[float, float]]] = {}
    for arm in found.arms:
        value = of(arm)
        if value is None or arm.backbone not in sizes:
            continue
        name = arm.method
        if arm.attention != "pretrained":
            name = f"{arm.attention}/{arm.method}"
        lines.setdefault(name, []).append((sizes[arm.backbone] / 1e6, value))
    # A line needs two points.
    if len(sizes) < 2 or not lines:
        return None
    for points in lines.values():
        # Arms come in the order of the table; a line needs rising sizes.
        points.sort()
    figure, axes = _line_chart(lines, title)
    axes.set_xscale("log")
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel("parameters of the backbone, millions")
    return figure


def _distance_from_plain(arm: ArmProfile) -> tuple[bool, bool]:
    """A sort key that puts full fine-tuning of the backbone's own attention first."""
    return arm.method != "full", arm.attention != "pretrained"


def cache(found: Profile) -> Figure | None:
    """Bytes of the cache by context, a line for each backbone and attention.

    None where nothing decodes.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    # Full fine-tuning first: a method may cache more than the attention variant does.
    for arm in sorted(found.arms, key=lambda arm: arm.method != "full"):
        name = f"{arm.backbone}, {arm.attention}"
        if arm.decoding and name not in lines:
            lines[name] = [(item.context_tokens, item.kv_bytes / MIB) for item in arm.decoding]
    if not lines:
        return None
    figure, axes = _line_chart(lines, "cache of one sequence, MiB")
    axes.set_xlabel("tokens in the cache")
    axes.set_ylim(bottom=0)
    return figure


def _line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str
) -> tuple[Figure, Axes]:
    """One panel with a line of (x, y) points for each name."""
    figure, (axes,) = new_figure(width=6.4)
    for i, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, **_style(i, name))
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure, axes


def _style(i: int, name: str) -> dict[str, Any]:
    """How line number `i` looks: its marker tells it apart where there are no colours."""
    return {
        "label": name,
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linewidth": 1.2,
    }


def attention_parameters() -> Figure:
    """MHE's figures 1, 3 and 4: weights of attention by the number of heads, and of layers."""
    figure, (by_heads, by_layers) = new_figure(2)
    layers = range(12, 97, 12)
    for i, (name, weights) in enumerate(ATTENTION_WEIGHTS.items()):
        style = _style(i, name)
        of_layer = weights(GPT3_HEADS, GPT3_DIM)
        by_heads.plot(HEADS, [weights(n, HEAD_DIM) / 1e6 for n in HEADS], **style)
        by_layers.plot(layers, [of_layer * count / 1e9 for count in layers], **style)
    by_heads.set_yscale("log")
    by_layers.set_yscale("log")
    by_heads.set_xlabel(f"heads of width {HEAD_DIM}")
    by_layers.set_xlabel(f"layers with {GPT3_HEADS} heads of width {GPT3_DIM} (GPT-3)")
    by_heads.set_title("weights of a sublayer, millions", fontsize=10)
    by_layers.set_title("weights of all sublayers, billions", fontsize=10)
    by_heads.legend(fontsize=8, frameon=False)
    return figure
