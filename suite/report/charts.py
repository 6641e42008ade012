"""The figures of a report that compare arms by what their confirm runs scored and cost.

Each function takes a report and gives a `Chart`, or None where the sweep has nothing to draw yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import Any

from suite.config.reference import MEAN
from suite.leaderboard.measures import join, mixes_energy, total
from suite.meters.record import ESTIMATE
from suite.plan.cell_state import CellStatus
from suite.report import values
from suite.report.chart import Axis, Bars, Chart, Heat, Mark, Points
from suite.report.data import Report, Row
from suite.report.names import listed
from suite.report.table import Table, rows_where, rows_with, rows_without, values_of

# The names of more points would cover each other. Then only the front is named, and a reader points
# at the others.
MOST_LABELS = 14
# A heat map's least range from dark to light: points, or percent where less is better. Otherwise
# tenths of a point would look like day and night.
LEAST_SPAN = 5.0
# The phases of a run, in the order of the stacked bars.
PHASES = ("train", "prepare", "eval", "test", "load", "checkpoint")
LABEL_COLUMNS = {"arm": "key of the arm", "label": "its short name"}
ARM_COLUMNS = LABEL_COLUMNS | {"task": "task, or mean over all"}
SCORE_COLUMNS = {
    "score_mean": "test score, mean over seeds, unit of the task's metric",
    "ci_low": "lower end of its 95% interval",
    "ci_high": "upper end of its 95% interval",
    "admitted": "false where a check of validity rejects the row",
    "status": "failed = a confirm run has no score, and nothing is left to run",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a score is drawn against.

    Attributes:
        word: Its name in a sentence.
        key: Its key in a row.
        unit: The row's unit, of which `suite.report.values` knows larger and smaller ones.
        title: The axis' title without its unit.
        column: Its key in the table.
        factor: From the row's unit to that of the table's column.
        meaning: What the table's column means.
    """

    word: str
    key: str
    unit: str
    title: str
    column: str
    factor: float
    meaning: str

    def of_all(self, rows: Sequence[Row], scale: values.Scale) -> list[float]:
        """The costs of some rows in the drawn unit."""
        return [row[self.key] / scale.size for row in rows]


def score_against_energy(report: Report, task: str) -> Chart | None:
    """Test score over the energy of a training run, with the Pareto front."""
    energy_wh = Cost(
        word="energy",
        key="energy_kwh",
        unit="kWh",
        title=f"energy of a training run{report.energy_note}",
        column="energy_wh",
        factor=1000.0,
        meaning="energy of training and of what the method prepares first, one run, Wh",
    )
    return _score_against(report, task, energy_wh)


def score_against_memory(report: Report, task: str) -> Chart | None:
    """Test score over peak memory in training, with the Pareto front."""
    memory_mib = Cost(
        word="memory",
        key="peak_memory_bytes",
        unit="bytes",
        title="peak memory in training",
        column="peak_memory_mib",
        factor=2.0**-20,
        meaning="peak allocated memory of training and preparation, largest rank, MiB",
    )
    return _score_against(report, task, memory_mib)


def _score_against(report: Report, task: str, cost: Cost) -> Chart | None:
    # A row whose cost is not known has no place on the axis.
    rows = [row for row in report.scored(task) if row[cost.key]]
    if not rows:
        return None
    front, said_of_front = _front(report, task, cost)
    named = rows
    if len(rows) > MOST_LABELS:
        named = front[:MOST_LABELS]
    scale = values.scale_of(cost.unit, values_of(rows, cost.key))
    # The first mark is drawn first, so the line lies behind the points.
    line = Points(
        "Pareto front",
        cost.of_all(front, scale),
        values_of(front, "score_mean"),
        line=True,
        marker=False,
    )
    marks: list[Mark] = [line]
    for row in rows:
        marks.append(_point(report, row, row[cost.key] / scale.size, named=row in named))
    bars = f"Each score is a mean over {values.seeds(rows)}; bars are 95% intervals."
    if "items" in values_of(rows, "ci_of"):
        bars += " Those of a single seed are over items only."
    text = (
        f"Test score {place(report, task)} against {cost.word} for {len(rows)} arms."
        f" {said_of_front} {bars}"
    )
    if len(named) < len(rows):
        # The other points say their names when a reader points at them.
        text += " Only arms of the front are named." if front else " So many are not named."
    absent = [report.label(row) for row in report.scored(task) if row not in rows]
    if absent:
        text += f" Not drawn, as their {cost.word} is not known: {listed(absent)}."
    flawed = _flawed(rows)
    if flawed:
        text += f" Hollow: {flawed}; on no front."

    over = task
    if task == MEAN:
        over = "mean over tasks"
    return Chart(
        key=f"score-{cost.word}-{task}",
        title=f"Score and {cost.word}, {over}",
        text=text,
        x=_axis_with_margins(f"{cost.title}, {scale.unit}", cost.of_all(rows, scale)),
        y=score_axis(report, task),
        marks=marks,
        table=_cost_table(report, rows, cost, front),
        height=320,
        legend=False,
    )


def _front(report: Report, task: str, cost: Cost) -> tuple[list[Row], str]:
    """Rows for which no other scores better at less cost, and the sentence that says so."""
    # A rejected score may be wrong, and a failed one lacks the seeds that went wrong. Neither must
    # keep other arms off the front.
    admitted = [row for row in report.admitted(task) if row[cost.key]]
    if cost.key == "energy_kwh" and admitted and not values.comparable_energy(admitted):
        return [], (
            "No Pareto front: energy was not measured in one way, or not on one machine, for all"
            " arms."
        )
    if not report.on_one_scale(task, admitted):
        return [], (
            "No Pareto front: a score of which less is better, such as a perplexity, says nothing"
            " of another backbone's."
        )
    front = pareto(admitted, cost.key, higher_is_better=report.higher_is_better(task))
    if not front:
        return [], "No Pareto front: no row counts."
    names = listed(report.label(row) for row in front)
    return front, (
        f"On the Pareto front (dotted), where no arm scores better at less cost: {names}."
    )


def _cost_table(report: Report, rows: list[Row], cost: Cost, front: list[Row]) -> Table:
    # Rejected and failed rows stay in the table: `admitted` and `status` say what they are.
    table_rows = []
    for labelled, row in zip(report.labelled(rows), rows, strict=True):
        priced = {cost.column: row[cost.key] * cost.factor, "on_front": row in front}
        table_rows.append(labelled | priced)
    columns = ARM_COLUMNS | SCORE_COLUMNS
    columns[cost.column] = cost.meaning
    columns["energy_source"] = "how energy was measured"
    columns["on_front"] = "on the Pareto front"
    return Table(f"score-{cost.word}", f"Test score and {cost.word}", columns, table_rows)


def _flawed(rows: Sequence[Row]) -> str:
    """How many rows do not count and why, as is said of hollow points; empty for none."""
    flaws = [values.flaw(row) for row in rows]
    said = []
    if values.REJECTED in flaws:
        said.append(f"{flaws.count(values.REJECTED)} rejected by a check of validity")
    if CellStatus.FAILED in flaws:
        said.append(f"{flaws.count(CellStatus.FAILED)} failed, as a confirm run has no score")
    return listed(said)


def _axis_with_margins(title: str, costs: Sequence[float]) -> Axis:
    """An axis with room for the names of the outermost points.

    It is logarithmic where the cheap arms could not be told apart otherwise.
    """
    low = min(costs)
    high = max(costs)
    if high > 20 * low:
        margin = (high / low) ** 0.12
        return Axis(title, log=True, limits=(low / margin, high * margin))
    margin = 0.12 * (high - low) or 0.5 * high  # a single cost lies in the middle
    return Axis(title, limits=(low - margin, high + margin))


def _point(report: Report, row: Row, x: float, *, named: bool) -> Points:
    arm = report.arms[row["arm"]]
    name = arm.label
    details = (
        f"{arm.label}: score {values.score_of(row)} ({values.seeds([row])}),"
        f" {energy(row)}, {values.size(row['peak_memory_bytes'])}"
    )
    flaw = values.flaw(row)
    if flaw:
        name += f" ({flaw})"
        details += f"; {flaw}"
    if flaw == values.REJECTED:
        details += f": {'; '.join(row['rejected'])}"
    labels = []
    if named:
        labels.append(arm.label)
    return Points(
        name,
        [x],
        [row["score_mean"]],
        arm.style,
        low=[row["ci_low"]],
        high=[row["ci_high"]],
        labels=labels,
        details=[details],
        hollow=bool(flaw),
    )


def pareto(rows: Sequence[Row], key: str, *, higher_is_better: bool) -> list[Row]:
    """The rows that no other beats in score without costing more of `key`, by rising cost."""
    sign = -1
    if higher_is_better:
        sign = 1
    front: list[Row] = []
    # Of equal costs the best comes first, so that it keeps the others off the front.
    for row in sorted(rows, key=lambda row: (row[key], -sign * row["score_mean"])):
        if not front or sign * row["score_mean"] > sign * front[-1]["score_mean"]:
            front.append(row)
    return front


def place(report: Report, task: str) -> str:
    """The place in a sentence: `on sst2`, or `on the mean over 2 tasks`."""
    if task == MEAN:
        return f"on the mean over {len(report.tasks)} tasks"
    return f"on {task}"


def score_axis(report: Report, task: str, what: str = "test score") -> Axis:
    """An axis of scores; its title says where less is better."""
    title = what
    if task != MEAN:
        title += f", {task}"
    if not report.higher_is_better(task):
        title += " (less is better)"
    return Axis(title)


def energy(row: Row) -> str:
    """A row's energy: `0.05 Wh`, or `0.05 Wh (estimate)` where it was not measured."""
    shown = values.energy(row["energy_kwh"])
    if values.is_estimate(row):
        shown += " (estimate)"
    return shown


def score_heat_map(report: Report) -> Chart | None:
    """Score of every arm on every task, shaded from the worst of a task to its best."""
    tasks = [task for task in (*report.tasks, MEAN) if report.scored(task)]
    by_cell = {}
    with_score = set()
    ends = {}
    best = []
    divided = False
    for task in tasks:
        for backbone, rows_of_scale in report.by_scale(task).items():
            divided = divided or bool(backbone)
            best.append(_best(report, task, backbone))
            ends_of_scale = _ends(rows_of_scale, higher_is_better=report.higher_is_better(task))
            for row in rows_of_scale:
                by_cell[row["arm"], task] = row
                ends[row["arm"], task] = ends_of_scale
                with_score.add(row["arm"])
    arms = [arm for arm in report.arms.values() if arm.key in with_score]
    if not arms:
        return None
    shade: list[list[float | None]] = []
    texts: list[list[str]] = []
    rows: list[Row] = []
    starred = False
    for arm in arms:
        shade.append([])
        texts.append([])
        for task in tasks:
            cell = by_cell.get((arm.key, task))
            if cell is None:
                shade[-1].append(None)
                texts[-1].append("")
                continue
            rows.append(cell)
            score = values.score_of(cell)
            if values.flaw(cell):
                score += " *"
                starred = True
            # Each task has its own scale: a perplexity and an accuracy share none.
            shade[-1].append(_shade(cell["score_mean"], *ends[arm.key, task]))
            texts[-1].append(score)
    text = (
        f"Test scores of {len(arms)} arms on {listed(tasks)}. Dark is the best of a column, light"
        f" its worst ({_least_span(report, tasks)} it at least): columns cannot be compared by"
        f" shade. Best: {'; '.join(best)}."
    )
    if divided:
        text += " Where less is better, each backbone has shades of its own."
    if starred:
        text += " A star marks rejected or failed rows."
    names = tuple(arm.label for arm in arms)
    columns = ARM_COLUMNS | SCORE_COLUMNS | {"seeds": "confirm runs"}
    return Chart(
        key="scores",
        title="Score by task",
        text=text,
        x=Axis("", categories=tuple(tasks)),
        y=Axis("", categories=names),
        marks=[Heat(tasks, names, shade, texts)],
        table=Table("scores", "Test score by arm and task", columns, report.labelled(rows)),
        height=120 + 34 * len(arms),
        legend=False,
    )


def _ends(rows: Sequence[Row], *, higher_is_better: bool) -> tuple[float, float]:
    """The worst and the best of some scores; the worst is at least `LEAST_SPAN` away."""
    scores = values_of(rows, "score_mean")
    if higher_is_better:
        best = max(scores)
        # Points, since scores in percent have a fixed scale ...
        return min(*scores, best - LEAST_SPAN), best
    best = min(scores)
    # ... and percent of the best, since a perplexity has none.
    return max(*scores, best * (1 + LEAST_SPAN / 100)), best


def _least_span(report: Report, tasks: Sequence[str]) -> str:
    """What `_ends` keeps between the best and the worst, in words."""
    kinds = {report.higher_is_better(task) for task in tasks}
    said = []
    if True in kinds:
        said.append(f"{LEAST_SPAN:g} points below")
    if False in kinds:
        said.append(f"where less is better {LEAST_SPAN:g}% above")
    return " or ".join(said)


def _shade(score: float, worst: float, best: float) -> float:
    if best == worst:
        return 1.0
    return (score - worst) / (best - worst)


def _best(report: Report, task: str, backbone: str) -> str:
    """The best score of a task with all arms that share it: `sst2 81.9 (full)`.

    Of a task whose scores share no scale it is the best of one backbone: `ptb of gpt2 41.2 (full)`.
    """
    admitted = report.admitted(task)
    where = task
    if backbone:
        admitted = rows_where(admitted, "backbone", backbone)
        where += f" of {backbone}"
    if not admitted:
        return f"{where} none admitted"
    # A rejected score may be wrong, and a failed one is of few seeds, so that it is no best one.
    better = max if report.higher_is_better(task) else min
    best = better(admitted, key=lambda row: row["score_mean"])
    holders = rows_where(admitted, "score_mean", best["score_mean"])
    return f"{where} {values.score_of(best)} ({listed(map(report.label, holders), most=3)})"


def energy_by_phase(report: Report) -> Chart | None:
    """Show where the energy of a confirm run goes."""
    runs_by_arm, tasks = _runs_to_compare(report)
    if not runs_by_arm:
        return None
    spent = {key: _mean_by_phase(runs) for key, runs in runs_by_arm.items()}
    labels = tuple(report.arms[key].label for key in spent)
    whole = fsum(fsum(by_phase.values()) for by_phase in spent.values())
    marks: list[Mark] = []
    shares = []
    for phase in PHASES:
        if not any(phase in by_phase for by_phase in spent.values()):
            continue
        # An arm that never entered a phase spent nothing in it.
        used = [by_phase.get(phase, 0.0) for by_phase in spent.values()]
        marks.append(Bars(phase, used, labels, style=len(marks)))
        # A counter that has not moved measured nothing to have a share of.
        if whole:
            shares.append(f"{phase} {100 * fsum(used) / whole:.0f}%")
    rows = []
    for key, by_phase in spent.items():
        for phase, energy_wh in by_phase.items():
            label = report.arms[key].label
            rows.append({"arm": key, "label": label, "phase": phase, "energy_wh": energy_wh})
    text = f"Energy of one confirm run by phase, mean over seeds and tasks, for {len(labels)} arms."
    if not tasks:
        text += " They have no task in common yet, so do not compare their energy."
    elif tasks != set(report.tasks):
        text += f" Only of the tasks that all of these have run: {listed(sorted(tasks))}."
    estimated = _estimated_phases(runs_by_arm)
    # The title of the axis says it where all of it is an estimate.
    if estimated and not report.estimated:
        text += (
            f" Estimated in some run: {listed(estimated)}; measured and estimated do not add up."
        )
    elif shares:
        text += f" Over all of them: {', '.join(shares)}."
    columns = LABEL_COLUMNS | {
        "phase": "load, prepare (in full, also where a run reuses it), train, eval (validation), "
        "test or checkpoint",
        "energy_wh": f"mean over confirm runs, Wh{report.spent_note}",
    }
    return Chart(
        key="energy-by-phase",
        title="Energy by phase",
        text=text,
        x=Axis(f"Wh{report.spent_note}"),
        y=Axis("", categories=labels),
        marks=marks,
        table=Table("energy-by-phase", "Energy of a confirm run by phase", columns, rows),
        height=130 + 30 * len(labels),
    )


def _runs_to_compare(report: Report) -> tuple[dict[str, list[Row]], set[str]]:
    """Confirm runs by arm whose energy is known in all phases, and the tasks that they are of.

    They are of the tasks that all of these arms have run: a short task that one arm alone has run
    would make that arm look cheap. Where there is no such task they are all runs, and no task.
    """
    known = {}
    tasks = set(report.tasks)
    for key, runs in _confirm_runs(report).items():
        measured = [run for run in runs if _phase_energies(run)]
        if measured:
            known[key] = measured
            tasks &= set(values_of(measured, "task"))
    if not tasks:
        return known, tasks
    found = {}
    for key, runs in known.items():
        found[key] = [run for run in runs if run["task"] in tasks]
    return found, tasks


def _estimated_phases(runs_by_arm: Mapping[str, Sequence[Row]]) -> list[str]:
    """The phases whose energy was estimated in some run."""
    found = set()
    for runs in runs_by_arm.values():
        for run in runs:
            for phase, source in (*run["sources"].items(), ("prepare", run["prepare_source"])):
                if ESTIMATE in (source or ""):
                    found.add(phase)
    return [phase for phase in PHASES if phase in found]


def _phase_energies(run: Row) -> dict[str, float]:
    """The energy of each phase of a run, kWh; {} where one of them is not known."""
    energies = {phase: kwh for phase, (_, kwh) in run["phases"].items()}
    # A run from scratch would pay for the preparation, whichever trial did.
    if run["prepare_s"] is not None:
        energies["prepare"] = run["prepare_energy_kwh"]
    if None in energies.values():
        return {}
    return energies


def _mean_by_phase(runs: Sequence[Row]) -> dict[str, float]:
    """Mean Wh of each phase over runs whose energy is known in all phases."""
    measured = [_phase_energies(run) for run in runs]
    found = {}
    for phase in PHASES:
        if any(phase in energies for energies in measured):
            # From kWh to Wh. A run that never entered the phase spent nothing in it.
            found[phase] = 1000 * fmean(energies.get(phase, 0.0) for energies in measured)
    return found


def _confirm_runs(report: Report) -> dict[str, list[Row]]:
    """Confirm runs with a score by arm, in the order of the arms."""
    by_arm: dict[str, list[Row]] = defaultdict(list)
    for trial in rows_with(report.confirm_runs, "test_score"):
        by_arm[trial["arm"]].append(trial)
    runs = {}
    for key in report.arms:
        if key in by_arm:
            runs[key] = by_arm[key]
    return runs


# Parts of the cost of a choice by key, in the order of the stacked bars.
CHOICE_PARTS = {
    "search_wh": "its own search",
    "others_wh": "search of its other architectures",
    "confirm_wh": "confirm runs",
}
# How a part that is not known is called behind an arm's name, and in a sentence.
PART_WORDS = {"search_wh": "search", "others_wh": "others", "confirm_wh": "confirm"}
UNKNOWN_PARTS = {
    "search_wh": "the search",
    "others_wh": "the search of the other architectures",
    "confirm_wh": "the confirm runs",
}


def search_cost(report: Report) -> Chart | None:
    """What it took to choose: the searches and the confirm runs of each arm.

    The searches are the arm's own and those of the architectures that it was chosen among.
    """
    rows = _costs_of_choice(report)
    if not rows:
        return None
    labels = [row["label"] + _unknown_parts(row) for row in rows]
    marks = []
    columns = dict(LABEL_COLUMNS)
    for style, (key, name) in enumerate(CHOICE_PARTS.items()):
        # Bars cannot be unknown: an unknown amount draws nothing, and the label says so.
        used = [row[key] or 0.0 for row in rows]
        if any(used):
            marks.append(Bars(name, used, labels, style))
        columns[key] = f"energy of {name}, all phases, Wh{report.spent_note}"
    columns["trials"] = "search trials in all"
    return Chart(
        key="search-cost",
        title="Energy to tune and confirm, all tasks",
        text=_describe_costs(report, rows),
        x=Axis(f"Wh{report.spent_note}"),
        y=Axis("", categories=tuple(labels)),
        marks=marks,
        table=Table("search-cost", "Energy to tune and confirm", columns, rows),
        height=130 + 30 * len(labels),
    )


def _unknown_parts(row: Row) -> str:
    """What stands behind an arm's name where a part of its cost is not known."""
    unknown = [word for key, word in PART_WORDS.items() if row[key] is None]
    if not unknown:
        return ""
    return f" ({', '.join(unknown)}: not known)"


def _describe_costs(report: Report, rows: Sequence[Row]) -> str:
    text = f"Energy spent to tune and confirm each of {len(rows)} arms, over all tasks and phases."
    # Measured and estimated energy are neither added nor compared.
    of_two_kinds = bool(report.spent_note) and not report.estimated
    if of_two_kinds:
        text += " Of it some was measured and some estimated, which is not added up."
    else:
        searching = _known_sum(values_of(rows, "search_wh") + values_of(rows, "others_wh"))
        confirming = _known_sum(values_of(rows, "confirm_wh"))
        note = ""
        if report.estimated:
            note = " (estimate)"
        text += f" Searching took {searching} and confirming {confirming}{note}."
    # Said of the arms whose whole cost is known; the others are named below.
    known = [row for row in rows if not _unknown_parts(row)]
    if known and not of_two_kinds:
        dearest = max(known, key=lambda row: fsum(row[key] for key in CHOICE_PARTS))
        text += f" Dearest: {dearest['label']}."
    unknown = []
    for key, what in UNKNOWN_PARTS.items():
        whose = values_of(rows_where(rows, key, None), "label")
        if whose:
            unknown.append(f"{what} of {listed(whose)}")
    if unknown:
        text += f" Not known: {'; '.join(unknown)}."
    return text


def _known_sum(parts_wh: Sequence[float | None]) -> str:
    """The sum of the parts that are known, which says so where some are not."""
    known = [part for part in parts_wh if part is not None]
    if not known:
        return "an unknown amount"
    shown = values.energy(fsum(known) / 1000)
    if len(known) < len(parts_wh):
        shown += ", as far as known,"
    return shown


def _costs_of_choice(report: Report) -> list[dict[str, Any]]:
    """Wh of each arm, where anything is known at all; a part that is not known is None."""
    confirm_runs = _confirm_runs(report)
    without_score = set()
    for run in rows_without(report.confirm_runs, "status", "unfinished"):
        if run["test_score"] is None:
            without_score.add(run["arm"])
    rows: list[dict[str, Any]] = []
    for arm in report.arms.values():
        own = []
        others = []
        sources = []
        trials = 0
        failed = False
        for row in report.rows:
            if row["arm"] != arm.key or row["task"] == MEAN:
                continue
            if row["status"] == CellStatus.NOT_CHOSEN:
                continue
            # A confirm run that was given up has no record at all.
            failed = failed or row["status"] == CellStatus.FAILED
            sources.append(row["energy_source"])
            own.append(_of_own(row))
            others.append(_of_others(row))
            trials += row["selection_trials"] or row["search_trials"]
        # An architecture that lost has no bar: its search is in the winner's.
        if own:
            costs = {
                "search_wh": _wh(own),
                "others_wh": _wh(others),
                "confirm_wh": _energy_wh(confirm_runs.get(arm.key, [])),
            }
            # What a run took that ended without a score is not known, and it was not nothing.
            if failed or arm.key in without_score:
                costs["confirm_wh"] = None
            # Measured energy of one task and estimated energy of another are not added.
            if len(own) > 1 and mixes_energy(join(sources)):
                for part in ("search_wh", "others_wh"):
                    # Where nothing was searched, 0 is known.
                    if costs[part]:
                        costs[part] = None
            rows.append({"arm": arm.key, "label": arm.label, **costs, "trials": trials})
    if any(row[key] for row in rows for key in CHOICE_PARTS):
        return rows
    return []


def _of_own(row: Row) -> float | None:
    """The energy of a row's own search, kWh."""
    # With a fixed learning rate nothing is searched.
    if row["search_trials"] == 0:
        return 0.0
    known: float | None = row["search_energy_kwh"]
    return known


def _of_others(row: Row) -> float | None:
    """The energy of the search of the architectures that a row was chosen among, kWh."""
    # Without a contest there are no others, whatever is known of the row's own search.
    if row["selection_trials"] in (None, row["search_trials"]):
        return 0.0
    own = _of_own(row)
    if row["selection_energy_kwh"] is None or own is None:
        return None
    return float(row["selection_energy_kwh"] - own)


def _wh(parts_kwh: Sequence[float | None]) -> float | None:
    """The sum in Wh; None where a part is not known: the rest would look cheaper than it was."""
    whole_kwh = total(parts_kwh)
    if whole_kwh is None:
        return None
    return 1000 * whole_kwh


def _energy_wh(runs: Sequence[Row]) -> float | None:
    """Wh of all phases of all runs; None where one was not measured, or some were estimated."""
    energies = []
    sources = set()
    for run in runs:
        for phase, (_, energy_kwh) in run["phases"].items():
            energies.append(energy_kwh)
            sources.add(run["sources"].get(phase))
    # Measured and estimated energy are not added.
    if mixes_energy(join(sources)):
        return None
    return _wh(energies)


def beside_the_paper(report: Report) -> Chart | None:
    """Our scores and the printed ones, for sweeps that carry a paper's numbers."""
    rows = []
    for row in rows_with(report.shown, "reference_score"):
        # A score without a difference is one that cannot be set beside the printed number.
        if row["score_mean"] is None or row["difference"] is not None:
            rows.append(row)
    if not rows:
        return None
    names = tuple(f"{report.label(row)} / {row['task']}" for row in rows)
    ours = {}
    flawed = {}
    inside = 0
    for name, row in zip(names, rows, strict=True):
        if row["score_mean"] is None:
            continue
        # A rejected score may be wrong, and a failed one lacks seeds: neither is said to agree.
        if values.flaw(row):
            flawed[name] = row
            continue
        ours[name] = row
        # A single seed without items has no interval.
        if row["ci_low"] is not None:
            inside += row["ci_low"] <= row["reference_score"] <= row["ci_high"]
    marks = [_printed_points(rows, names), _our_points("ours", ours)]
    text = (
        f"{len(rows)} printed scores beside ours, of which {len(ours)} are measured so far;"
        f" {inside} printed ones lie inside our 95% interval."
    )
    if flawed:
        marks.append(_our_points("ours (rejected or failed)", flawed, hollow=True))
        text += f" Hollow circles, not counted: {_flawed(list(flawed.values()))}."
    sources = sorted(set(map(str, values_of(rows, "reference_source"))))
    columns = ARM_COLUMNS | SCORE_COLUMNS
    columns |= {
        "reference_score": "as printed",
        "reference_std": "its printed deviation",
        "reference_source": "where",
        "difference": "ours - printed",
    }
    return Chart(
        key="paper",
        title="Ours beside the printed numbers",
        text=f"{text} Source: {listed(sources)}.",
        x=Axis("score"),
        y=Axis("", categories=names),
        # Ours come last, so that they lie on top of the printed ones.
        marks=marks,
        table=Table("paper", "Ours beside the paper", columns, report.labelled(rows)),
        height=130 + 26 * len(rows),
    )


def _our_points(name: str, ours: Mapping[str, Row], *, hollow: bool = False) -> Points:
    """Our scores with their intervals, by their place on the axis."""
    rows = list(ours.values())
    return Points(
        name,
        values_of(rows, "score_mean"),
        list(ours),
        style=0,
        low=values_of(rows, "ci_low"),
        high=values_of(rows, "ci_high"),
        along="x",
        hollow=hollow,
        shape="circle",
    )


def _printed_points(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Points:
    """The printed scores, with their deviation as error bars where it was printed."""
    low: list[float | None] = []
    high: list[float | None] = []
    for row in rows:
        if row["reference_std"] is None:
            low.append(None)
            high.append(None)
        else:
            low.append(row["reference_score"] - row["reference_std"])
            high.append(row["reference_score"] + row["reference_std"])
    return Points(
        "printed",
        values_of(rows, "reference_score"),
        names,
        style=1,
        low=low,
        high=high,
        along="x",
        hollow=True,
        shape="diamond",
    )
