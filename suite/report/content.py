"""The content of a report and its order, the same for every form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from suite.config.reference import MEAN
from suite.report import charts, curves
from suite.report.chart import Chart
from suite.report.data import Report
from suite.report.names import Arm

# As much as a browser scrolls through with ease. The CSV files have the rest, and the report says
# so.
MOST_CURVES = 120
MOST_PLACES = 12
MOST_ARMS = 150
MOST_DRAWN = 100
MOST_TRIAL_ROWS = 6_000
MOST_ROWS = 1_000


@dataclass
class Content:
    """The figures of a report by section, and what was left out of it.

    Attributes:
        tradeoffs: By task or mean, score against energy and against memory.
        rates: By task, learning-rate curves.
        lost: By task, learning-rate curves of architectures that were not chosen.
        arms: The arms that have a part of their own.
        left_out: Sentences that say what was left out.
    """

    report: Report
    tradeoffs: dict[str, list[Chart]] = field(default_factory=dict)
    rates: dict[str, list[Chart]] = field(default_factory=dict)
    lost: dict[str, list[Chart]] = field(default_factory=dict)
    heat: Chart | None = None
    phases: Chart | None = None
    search: Chart | None = None
    training: list[Chart] = field(default_factory=list)
    paper: Chart | None = None
    arms: list[Arm] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def figures(self) -> list[Chart]:
        """Every figure, in the order of reading."""
        found: list[Chart | None] = [self.paper]
        for by_place in self.tradeoffs.values():
            found += by_place
        found += [self.heat, self.phases, self.search]
        for by_task in (*self.rates.values(), *self.lost.values()):
            found += by_task
        found += self.training
        return [chart for chart in found if chart is not None]


def content(report: Report, *, whole: bool = False) -> Content:
    """Draw up a report.

    Args:
        report: What `suite.report.read` returned.
        whole: Leave nothing out, for the files that hold the numbers.
    """
    drawn = report
    places = report.places
    room = len(report.cells)
    if not whole:
        drawn = best_arms(report)
        places = places[:MOST_PLACES]
        room = MOST_CURVES
    made = Content(report)
    made.heat = charts.score_heat_map(drawn)
    made.phases = charts.energy_by_phase(drawn)
    made.search = charts.search_cost(drawn)
    made.paper = charts.beside_the_paper(drawn)
    for place in places:
        for chart in (
            charts.score_against_energy(drawn, place),
            charts.score_against_memory(drawn, place),
        ):
            if chart is not None:
                made.tradeoffs.setdefault(place, []).append(chart)
        # Epochs are those of runs on one task; the mean has none.
        if place != MEAN:
            made.training += curves.training_curves(drawn, place)
    # The curves of the chosen architectures come first, so that they get the room.
    for chosen, kept in ((True, made.rates), (False, made.lost)):
        for task in report.tasks:
            rates = curves.learning_rate_curves(drawn, task, chosen=chosen)[:room]
            if rates:
                kept[task] = rates
                room -= len(rates)
    if whole:
        made.arms = list(report.arms.values())
    else:
        made.arms = _arms_with_room(report)
        made.left_out = _left_out(made)
    return made


def best_arms(report: Report) -> Report:
    """Reduce a report to the arms that figures have room for."""
    if len(report.arms) <= MOST_DRAWN:
        return report
    # Arms are in the order of their scores, the best first.
    kept = set(list(report.arms)[:MOST_DRAWN])
    # Everything else, as the definition, stays whole.
    return replace(
        report,
        rows=[row for row in report.rows if row["arm"] in kept],
        trials=[trial for trial in report.trials if trial["arm"] in kept],
        cells={key: cell for key, cell in report.cells.items() if key[0] in kept},
    )


def _arms_with_room(report: Report) -> list[Arm]:
    """The best arms, as many as have room for their trials."""
    counts = Counter(trial["arm"] for trial in report.trials)
    kept = []
    rows = 0
    for arm in list(report.arms.values())[:MOST_ARMS]:
        rows += counts[arm.key]
        # No smaller arm is taken instead: the parts are those of the best arms, without gaps.
        if rows > MOST_TRIAL_ROWS:
            break
        kept.append(arm)
    return kept


def _left_out(made: Content) -> list[str]:
    report = made.report
    # A cell of a fixed learning rate has no curve.
    searched = [cell for cell in report.cells.values() if cell.curve]
    counts = {
        f"arms in figures, which draw the {MOST_DRAWN} of the best scores": (
            len(report.arms) - MOST_DRAWN
        ),
        f"tasks beyond {MOST_PLACES} in figures of trade-offs and training": (
            len(report.places) - MOST_PLACES
        ),
        f"learning-rate curves beyond {MOST_CURVES}": len(searched) - MOST_CURVES,
        "arms without a part of their own": len(report.arms) - len(made.arms),
        f"rows of the leaderboard beyond {MOST_ROWS:,}": len(report.rows) - MOST_ROWS,
        f"failures beyond {MOST_ROWS:,}": len(report.failures) - MOST_ROWS,
    }
    sentences = []
    for what, count in counts.items():
        if count > 0:
            sentences.append(
                f"Left out here: {count:,} {what};"
                " the CSV files have all (suite report --format csv)."
            )
    if made.search is None and report.rows:
        sentences.append(
            "Not drawn: the energy to tune and confirm, as it is known of no arm. A part was not"
            " measured, or one part was measured and another estimated."
        )
    return sentences
