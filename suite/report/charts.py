"""The figures of a report that compare arms by what their confirm runs scored and cost.

Each function takes a report and gives a `Chart`, or None where the sweep has nothing to draw yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from statistics import fmean
from typing import Any

from suite.config.reference import MEAN
from suite.report import values
from suite.report.chart import Axis, Bars, Chart, Heat, Points
from suite.report.data import Report, Row
from suite.report.names import listed
from suite.report.table import Table

MOST_LABELS = 14
"""With more points their names would cover each other: only those of the front are written then, and pointing at others tells theirs."""
LEAST_SPAN = 5.0
"""Points (of a score of which less is better, percent) from dark to light at least: otherwise tenths of a point would look like day and
night."""
PHASES = ("train", "eval", "test", "load", "checkpoint")
ARM_COLUMNS = {"arm": "key of the arm", "label": "its short name", "task": "task, or mean over all"}
SCORE_COLUMNS = {
    "score_mean": "test score, mean over seeds, unit of the task's metric",
    "ci_low": "lower end of its 95% interval",
    "ci_high": "upper end of its 95% interval",
    "admitted": "false where a check of validity rejects the row",
}


def score_against_energy(report: Report, task: str) -> Chart | None:
    """Test score over the energy of a run's training phase, with the Pareto front."""
    title = f"Wh per training run{report.energy_note}"
    return _score_against(
        report,
        task,
        "energy_kwh",
        1000.0,
        title,
        "energy_wh",
        "energy of the training phase of a run, Wh",
        "energy",
    )


def score_against_memory(report: Report, task: str) -> Chart | None:
    """Test score over peak memory in training, with the Pareto front."""
    title, meaning = (
        "peak memory in training, MiB",
        "peak allocated memory of the training phase, largest rank, MiB",
    )
    return _score_against(
        report, task, "peak_memory_bytes", 2.0**-20, title, "peak_memory_mib", meaning, "memory"
    )


def _score_against(
    report: Report,
    task: str,
    key: str,
    factor: float,
    title: str,
    name: str,
    meaning: str,
    short: str,
) -> Chart | None:
    rows = [row for row in report.scored(task) if row[key]]
    if not rows:
        return None
    higher = report.higher_is_better(task)
    front = pareto(
        [row for row in rows if row["admitted"] is not False], key, higher_is_better=higher
    )
    names = [report.arms[row["arm"]].label for row in front]
    labelled = {row["arm"] for row in (rows if len(rows) <= MOST_LABELS else front[:MOST_LABELS])}
    marks = [
        Points(
            "Pareto front",
            [r[key] * factor for r in front],
            [r["score_mean"] for r in front],
            line=True,
            marker=False,
        )
    ]
    marks += [_point(report, row, row[key] * factor, named=row["arm"] in labelled) for row in rows]
    rejected = sum(row["admitted"] is False for row in rows)
    said = (
        f"Test score {place(report, task)} against {short} for {len(rows)} arms. On the Pareto front (dotted), where no arm is "
        f"both better and cheaper: {listed(names)}. Bars are 95% intervals."
    )
    said += " Only arms of the front are named." if len(labelled) < len(rows) else ""
    said += f" Hollow: {rejected} rejected by a check of validity, on no front." if rejected else ""
    table = Table(
        f"score-{short}",
        f"Test score and {short}",
        ARM_COLUMNS
        | SCORE_COLUMNS
        | {
            name: meaning,
            "energy_source": "how energy was measured",
            "on_front": "on the Pareto front",
        },
        [
            {
                **row,
                "label": report.arms[row["arm"]].label,
                name: row[key] * factor,
                "on_front": row in front,
            }
            for row in rows
        ],
    )
    heading = f"Score and {short}, {'mean over tasks' if task == MEAN else task}"
    x = _with_margins(title, [row[key] * factor for row in rows])
    return Chart(
        f"score-{short}-{task}",
        heading,
        said,
        x,
        score_axis(report, task),
        marks,
        table,
        400,
        legend=False,
    )


def _with_margins(title: str, values_: Sequence[float]) -> Axis:
    """Room for the names of the outermost points; logarithmic where that is needed to see the cheap ones."""
    low, high = min(values_), max(values_)
    if high > 20 * low:
        return Axis(
            title, log=True, limits=(low * (low / high) ** 0.12, high * (high / low) ** 0.12)
        )
    margin = 0.12 * (high - low) or 0.5 * high
    return Axis(title, limits=(low - margin, high + margin))


def _point(report: Report, row: Row, x: float, *, named: bool) -> Points:
    arm = report.arms[row["arm"]]
    hint = f"{arm.label}: score {values.score(row['score_mean'])}, {energy(row)}, {values.size(row['peak_memory_bytes'])}"
    rejected = row["admitted"] is False
    return Points(
        arm.label + (" (rejected)" if rejected else ""),
        [x],
        [row["score_mean"]],
        arm.style,
        low=[row["ci_low"]],
        high=[row["ci_high"]],
        labels=[arm.label] if named else (),
        details=[hint + (f"; rejected: {'; '.join(row['rejected'])}" if rejected else "")],
        hollow=rejected,
    )


def pareto(rows: Sequence[Row], key: str, *, higher_is_better: bool) -> list[Row]:
    """The rows that no other beats in score without costing more of `key`, by rising cost."""
    front: list[Row] = []
    for row in sorted(
        rows, key=lambda r: (r[key], -r["score_mean"] if higher_is_better else r["score_mean"])
    ):
        best = front[-1]["score_mean"] if front else None
        if best is None or (
            row["score_mean"] > best if higher_is_better else row["score_mean"] < best
        ):
            front.append(row)
    return front


def place(report: Report, task: str) -> str:
    """`on sst2`, or `on the mean over 2 tasks`."""
    return f"on the mean over {len(report.tasks)} tasks" if task == MEAN else f"on {task}"


def score_axis(report: Report, task: str, what: str = "test score") -> Axis:
    where = "" if task == MEAN else f", {task}"
    return Axis(f"{what}{where}{'' if report.higher_is_better(task) else ' (less is better)'}")


def energy(row: Row) -> str:
    """`0.05 Wh`, and whether that was estimated."""
    return values.energy(row["energy_kwh"]) + (
        " (estimate)" if values.ESTIMATE in (row["energy_source"] or "") else ""
    )


def score_heat_map(report: Report) -> Chart | None:
    """Score of every arm on every task; shaded from the worst of a task to its best."""
    tasks = [task for task in (*report.tasks, MEAN) if report.scored(task)]
    scores = {(row["arm"], row["task"]): row for task in tasks for row in report.scored(task)}
    arms = [arm for key, arm in report.arms.items() if any((key, task) in scores for task in tasks)]
    if not arms:
        return None
    ends = {task: _ends(report, task) for task in tasks}
    found = [[scores.get((arm.key, task)) for task in tasks] for arm in arms]
    shade = [
        [None if row is None else _shade(row["score_mean"], *ends[row["task"]]) for row in line]
        for line in found
    ]
    texts = [
        ["" if row is None else values.score(row["score_mean"]) + _star(row) for row in line]
        for line in found
    ]
    best = [_best(report, task) for task in tasks]
    said = (
        f"Test scores of {len(arms)} arms on {listed(tasks)}. Dark is the best of a column, light its worst ({_span_told(report, tasks)} "
        f"it at least): columns cannot be compared by shade. Best: {'; '.join(best)}."
    )
    said += (
        " A star marks rejected rows."
        if any("*" in text for line in texts for text in line)
        else ""
    )
    rows = [
        {**row, "label": report.arms[row["arm"]].label}
        for line in found
        for row in line
        if row is not None
    ]
    table = Table(
        "scores",
        "Test score by arm and task",
        ARM_COLUMNS | SCORE_COLUMNS | {"seeds": "confirm runs"},
        rows,
    )
    names = tuple(arm.label for arm in arms)
    marks = [Heat(tasks, names, shade, texts)]
    axes = Axis("", categories=tuple(tasks)), Axis("", categories=names)
    return Chart(
        "scores", "Score by task", said, *axes, marks, table, 120 + 34 * len(arms), legend=False
    )


def _ends(report: Report, task: str) -> tuple[float, float]:
    """The worst and the best of a task's scores; the worst at least `LEAST_SPAN` away."""
    scores = [row["score_mean"] for row in report.scored(task)]
    if report.higher_is_better(task):
        return min(min(scores), max(scores) - LEAST_SPAN), max(scores)
    return max(max(scores), min(scores) * (1 + LEAST_SPAN / 100)), min(scores)


def _span_told(report: Report, tasks: Sequence[str]) -> str:
    """What `_ends` keeps between the best and the worst."""
    kinds = {report.higher_is_better(task) for task in tasks}
    said = {
        True: f"{LEAST_SPAN:g} points below",
        False: f"where less is better {LEAST_SPAN:g}% above",
    }
    return " or ".join(said[kind] for kind in sorted(kinds, reverse=True))


def _shade(score: float, worst: float, best: float) -> float:
    return 1.0 if best == worst else (score - worst) / (best - worst)


def _star(row: Row) -> str:
    return " *" if row["admitted"] is False else ""


def _best(report: Report, task: str) -> str:
    """`sst2 81.9 (full)`; of equals all."""
    best = _ends(report, task)[1]
    holders = [
        report.arms[row["arm"]].label for row in report.scored(task) if row["score_mean"] == best
    ]
    return f"{task} {values.score(best)} ({listed(holders, most=3)})"


def energy_by_phase(report: Report) -> Chart | None:
    """Where the energy of a confirm run goes."""
    spent: dict[str, dict[str, float]] = {}
    for key, runs in _confirm_runs(report).items():
        measured = [
            run["phases"]
            for run in runs
            if run["phases"] and all(e is not None for _, e in run["phases"].values())
        ]
        if measured:
            spent[key] = {
                p: 1000 * fmean(run.get(p, (0.0, 0.0))[1] for run in measured)
                for p in PHASES
                if any(p in run for run in measured)
            }
    if not spent:
        return None
    labels = tuple(report.arms[key].label for key in spent)
    phases = [phase for phase in PHASES if any(phase in parts for parts in spent.values())]
    marks = [
        Bars(phase, [parts.get(phase, 0.0) for parts in spent.values()], labels, n)
        for n, phase in enumerate(phases)
    ]
    shares = {
        p: fsum(parts.get(p, 0.0) for parts in spent.values())
        / fsum(fsum(parts.values()) for parts in spent.values())
        for p in phases
    }
    said = (
        f"Energy of one confirm run by phase, mean over seeds and tasks, for {len(labels)} arms. "
        f"Over all of them: {', '.join(f'{phase} {100 * share:.0f}%' for phase, share in shares.items())}."
    )
    rows = [
        {"arm": key, "label": report.arms[key].label, "phase": phase, "energy_wh": wh}
        for key, parts in spent.items()
        for phase, wh in parts.items()
    ]
    meanings = {key: ARM_COLUMNS[key] for key in ("arm", "label")}
    meanings |= {
        "phase": "load, train, eval (validation), test or checkpoint",
        "energy_wh": f"mean over confirm runs, Wh{report.energy_note}",
    }
    table = Table("energy-by-phase", "Energy of a confirm run by phase", meanings, rows)
    axes = Axis(f"Wh per confirm run{report.energy_note}"), Axis("", categories=labels)
    return Chart(
        "energy-by-phase", "Energy by phase", said, *axes, marks, table, 130 + 30 * len(labels)
    )


def _confirm_runs(report: Report) -> dict[str, list[Row]]:
    """Confirm runs with a score by arm, in the order of the arms."""
    runs: dict[str, list[Row]] = {key: [] for key in report.arms}
    for trial in report.confirm_runs:
        if trial["test_score"] is not None:
            runs[trial["arm"]].append(trial)
    return {key: found for key, found in runs.items() if found}


def search_cost(report: Report) -> Chart | None:
    """What it took to choose: the search of an arm, that of the architectures it was chosen among, and its confirm runs."""
    rows = _costs_of_choice(report)
    if not rows:
        return None
    whole = [row for row in rows if row["confirm_wh"] is not None]
    labels = tuple(row["label"] + ("" if row in whole else " (confirm: not known)") for row in rows)
    parts = {
        "search_wh": "its own search",
        "others_wh": "search of its other architectures",
        "confirm_wh": "confirm runs",
    }
    marks = [
        Bars(name, [row[key] or 0.0 for row in rows], labels, n)
        for n, (key, name) in enumerate(parts.items())
    ]
    marks = [mark for mark in marks if any(mark.x)]
    meanings = {key: ARM_COLUMNS[key] for key in ("arm", "label")}
    meanings |= {
        key: f"energy of {name}, all phases, Wh{report.energy_note}" for key, name in parts.items()
    } | {"trials": "search trials in all"}
    table = Table("search-cost", "Energy to tune and confirm", meanings, rows)
    axes = Axis(f"Wh over all tasks{report.energy_note}"), Axis("", categories=labels)
    said = _costs_told(report, rows, whole)
    return Chart(
        "search-cost", "Cost of the search", said, *axes, marks, table, 130 + 30 * len(labels)
    )


def _costs_told(report: Report, rows: Sequence[Row], whole: Sequence[Row]) -> str:
    """In words; `whole` are the rows of which everything is known."""
    searching = fsum(row[key] for row in rows for key in ("search_wh", "others_wh")) / 1000
    confirming = fsum(row["confirm_wh"] for row in whole) / 1000 if whole else None
    note = f" ({report.energy_note.removeprefix(', ')})" if report.energy_note else ""
    said = (
        f"Energy spent to tune and confirm each of {len(rows)} arms, over all tasks and phases. Searching took "
        f"{values.energy(searching)} and confirming {'an unknown amount' if confirming is None else values.energy(confirming)}{note}."
    )
    if whole:
        said += f" Dearest: {max(whole, key=_total)['label']}."
    if len(whole) < len(rows):
        said += f" Not known: the confirm runs of {listed(row['label'] for row in rows if row['confirm_wh'] is None)}."
    return said


def _costs_of_choice(report: Report) -> list[dict[str, Any]]:
    """Wh of arms whose search is known whole; `confirm_wh` may be None."""
    confirm = {key: _spent(runs) for key, runs in _confirm_runs(report).items()}
    rows: list[dict[str, Any]] = []
    for arm in report.arms.values():
        cells = [
            row
            for row in report.rows
            if row["arm"] == arm.key and row["task"] != MEAN and row["status"] != "not chosen"
        ]
        own = [row["search_energy_kwh"] for row in cells]
        if not cells or None in own:
            continue
        every = [
            row["search_energy_kwh"]
            if row["selection_energy_kwh"] is None
            else row["selection_energy_kwh"]
            for row in cells
        ]
        wh = {
            "search_wh": 1000 * fsum(own),
            "others_wh": 1000 * (fsum(every) - fsum(own)),
            "confirm_wh": confirm.get(arm.key),
        }
        trials = sum(
            row["search_trials"] if row["selection_trials"] is None else row["selection_trials"]
            for row in cells
        )
        rows.append({"arm": arm.key, "label": arm.label, **wh, "trials": trials})
    return rows


def _total(row: Row) -> float:
    return fsum(row[key] or 0.0 for key in ("search_wh", "others_wh", "confirm_wh"))


def _spent(runs: Sequence[Row]) -> float | None:
    """Wh of all phases of all runs; None where one was not measured."""
    found = [energy_kwh for run in runs for _, energy_kwh in run["phases"].values()]
    return None if not found or None in found else 1000 * fsum(found)


def beside_the_paper(report: Report) -> Chart | None:
    """Ours and the printed score, for sweeps that carry a paper's numbers."""
    rows = [
        row
        for row in report.rows
        if row["reference_score"] is not None and row["status"] != "not chosen"
    ]
    if not rows:
        return None
    names = [f"{report.arms[row['arm']].label} / {row['task']}" for row in rows]
    ours = [
        (name, row) for name, row in zip(names, rows, strict=True) if row["score_mean"] is not None
    ]
    spread = [row["reference_std"] for row in rows]
    printed = [row["reference_score"] for row in rows]
    marks = [
        Points(
            "printed",
            printed,
            names,
            1,
            low=[None if s is None else p - s for p, s in zip(printed, spread, strict=True)],
            high=[None if s is None else p + s for p, s in zip(printed, spread, strict=True)],
            along="x",
            hollow=True,
            shape="diamond",
        ),
        Points(
            "ours",
            [row["score_mean"] for _, row in ours],
            [name for name, _ in ours],
            0,
            low=[row["ci_low"] for _, row in ours],
            high=[row["ci_high"] for _, row in ours],
            along="x",
            shape="circle",
        ),
    ]
    inside = sum(
        row["ci_low"] is not None and row["ci_low"] <= row["reference_score"] <= row["ci_high"]
        for row in rows
    )
    said = (
        f"{len(rows)} printed scores beside ours, of which {len(ours)} are measured so far; "
        f"{inside} printed ones lie inside our 95% interval. Source: {listed(sorted({str(row['reference_source']) for row in rows}))}."
    )
    meanings = ARM_COLUMNS | SCORE_COLUMNS
    meanings |= {
        "reference_score": "as printed",
        "reference_std": "its printed deviation",
        "reference_source": "where",
        "difference": "ours - printed",
    }
    table = Table(
        "paper",
        "Ours beside the paper",
        meanings,
        [{**row, "label": report.arms[row["arm"]].label} for row in rows],
    )
    axes = Axis("score"), Axis("", categories=tuple(names))
    return Chart(
        "paper", "Ours beside the printed numbers", said, *axes, marks, table, 130 + 26 * len(rows)
    )
