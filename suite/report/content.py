"""What a report has in which order, whatever it is written as."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from suite.config.reference import MEAN
from suite.report import charts, curves
from suite.report.chart import Chart
from suite.report.data import Report
from suite.report.names import Arm

MOST_CURVES = 120
MOST_PLACES = 12
MOST_ARMS = 150
MOST_DRAWN = 100
MOST_TRIAL_ROWS = 6_000
MOST_ROWS = 1_000
"""What a browser still scrolls through with ease; what lies beyond is in the CSV files, and the report says so."""


@dataclass
class Content:
    """The figures of a report by section, and what was left out of it.

    Attributes:
        tradeoffs: By place, score against energy and against memory.
        rates: By task, learning-rate curves; `lost`, those of architectures that were not chosen.
        arms: Those that have a part of their own.
        left_out: In sentences.
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
        """Every figure in the order of reading."""
        single = [chart for chart in (self.heat, self.phases, self.search) if chart is not None]
        pairs = [chart for found in self.tradeoffs.values() for chart in found]
        curves_ = [
            chart
            for by_task in (self.rates, self.lost)
            for found in by_task.values()
            for chart in found
        ]
        return [*([self.paper] if self.paper else []), *pairs, *single, *curves_, *self.training]


def content(report: Report, *, whole: bool = False) -> Content:
    """Draw up a report.

    Args:
        report: As read.
        whole: Leave nothing out, for the files that hold the numbers.
    """
    drawn = report if whole else best_arms(report)
    made = Content(report, heat=charts.score_heat_map(drawn), phases=charts.energy_by_phase(drawn))
    made.search, made.paper = charts.search_cost(drawn), charts.beside_the_paper(drawn)
    places = report.places if whole else report.places[:MOST_PLACES]
    for place in places:
        found = [
            charts.score_against_energy(drawn, place),
            charts.score_against_memory(drawn, place),
        ]
        if there := [chart for chart in found if chart is not None]:
            made.tradeoffs[place] = there
    room = len(report.cells) if whole else MOST_CURVES
    for chosen, kept in ((True, made.rates), (False, made.lost)):
        for task in report.tasks:
            if room > 0 and (
                rates := curves.learning_rate_curves(drawn, task, chosen=chosen)[:room]
            ):
                kept[task] = rates
                room -= len(rates)
    made.training = [
        chart for task in places if task != MEAN for chart in curves.training_curves(drawn, task)
    ]
    made.arms = [*report.arms.values()] if whole else _with_room(report)
    made.left_out = [] if whole else _left_out(made)
    return made


def best_arms(report: Report) -> Report:
    """The report of the arms that figures have room for."""
    if len(report.arms) <= MOST_DRAWN:
        return report
    kept = {*[*report.arms][:MOST_DRAWN]}
    rows, trials = (
        [row for row in found if row["arm"] in kept] for found in (report.rows, report.trials)
    )
    return replace(
        report,
        rows=rows,
        trials=trials,
        cells={key: cell for key, cell in report.cells.items() if key[0] in kept},
    )


def _with_room(report: Report) -> list[Arm]:
    """The first arms, the best first, whose trials fit."""
    counts = {
        key: sum(trial["arm"] == key for trial in report.trials)
        for key in [*report.arms][:MOST_ARMS]
    }
    kept, rows = [], 0
    for key, count in counts.items():
        rows += count
        if rows > MOST_TRIAL_ROWS:
            break
        kept.append(report.arms[key])
    return kept


def _left_out(made: Content) -> list[str]:
    report, where = made.report, "the CSV files have all (suite report --format csv)"
    found = [
        (
            len(report.arms) - MOST_DRAWN,
            f"arms in figures, which draw the {MOST_DRAWN} of the best scores",
        ),
        (
            len(report.places) - MOST_PLACES,
            f"tasks beyond {MOST_PLACES} in figures of trade-offs and training",
        ),
        (
            sum(bool(cell.curve) for cell in report.cells.values()) - MOST_CURVES,
            f"learning-rate curves beyond {MOST_CURVES}",
        ),
        (len(report.arms) - len(made.arms), "arms without a part of their own"),
        (len(report.rows) - MOST_ROWS, f"rows of the leaderboard beyond {MOST_ROWS:,}"),
        (len(report.failures) - MOST_ROWS, f"failures beyond {MOST_ROWS:,}"),
    ]
    return [f"Left out here: {many:,} {what}; {where}." for many, what in found if many > 0]
