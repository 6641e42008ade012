"""The answer of a sweep in a few sentences, computed from its rows: who leads, what cannot be told apart from it, and at what cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from suite.config.reference import MEAN
from suite.report import values
from suite.report.charts import energy, place
from suite.report.data import Report, Row
from suite.report.names import listed
from suite.stats.constant_baseline import beats_constant


@dataclass(frozen=True, slots=True)
class Sentence:
    """One finding: what it says, with what is its point in front."""

    head: str
    rest: str


def answer(report: Report) -> list[Sentence]:
    """What the sweep says so far, the most general first."""
    found: list[Sentence] = []
    for task in report.places:
        backbones = sorted({row["backbone"] for row in report.scored(task)})
        for backbone in backbones:
            rows = [
                row
                for row in report.scored(task)
                if row["backbone"] == backbone and row["admitted"] is not False
            ]
            where = place(report, task) + (f" with {backbone}" if len(backbones) > 1 else "")
            found += [_ranking(report, rows, where, task)] if rows else []
    if not found:
        left = "no arm has a test score that was admitted" if report.rows else "no trial has ended"
        found.append(Sentence("Nothing can be said yet:", f"{left}."))
    return [*found, *_like_a_constant(report), *_rejected(report)]


def _ranking(report: Report, rows: Sequence[Row], where: str, task: str) -> Sentence:
    higher = report.higher_is_better(task)
    ordered = sorted(rows, key=lambda row: -row["score_mean"] if higher else row["score_mean"])
    leader, ranked = ordered[0], [row for row in ordered if row["rank"]]
    if len(ranked) < 2:
        return _unranked(report, rows, leader, where, "highest" if higher else "lowest")
    best = min(
        _rank(row)[0] for row in ranked
    )  # a row of rank 1 may be one that has since been rejected or lost its score
    first = [row for row in ranked if _rank(row)[0] == best]
    later = _not_ranked(report, ordered)
    if len(first) == len(ranked):
        return Sentence(
            f"Nothing separates the {len(ranked)} ranked arms {where}:",
            _all_alike(report, ranked) + later,
        )
    leader, rivals, behind = first[0], first[1:], [row for row in ranked if row not in first]
    rest = f"{_scored(leader)}; {cost(leader)}."
    if rivals:
        rest += f" Cannot be told apart from it: {listed(f'{_named(report, r)} ({_scored(r)}{_saving(r, leader)})' for r in rivals)}."
    shown = [f"{_named(report, row)} ({values.score(row['score_mean'])})" for row in behind]
    return Sentence(
        f"{_named(report, leader)} leads {where}:",
        f"{rest} Shown to be worse than some arm: {listed(shown)}.{later}",
    )


def _not_ranked(report: Report, rows: Sequence[Row]) -> str:
    """` Not ranked yet: read (61.2).`: arms with a score of their own that no test has compared with the others."""
    left = [
        f"{_named(report, row)} ({values.score(row['score_mean'])})"
        for row in rows
        if not row["rank"]
    ]
    return f" Not ranked yet: {listed(left)}." if left else ""


def _unranked(report: Report, rows: Sequence[Row], leader: Row, where: str, end: str) -> Sentence:
    if len(rows) == 1:
        return Sentence(
            f"{_named(report, leader)} is the only arm {where} so far:",
            f"{_scored(leader)}; {cost(leader)}.",
        )
    why = leader["rank_missing"] or (
        "no other arm is ranked yet" if leader["rank"] else "there are no ranks"
    )
    untested = (
        f"{_scored(leader)}; {cost(leader)}. No test says whether that is more than luck: {why}."
    )
    return Sentence(f"{_named(report, leader)} scores {end} {where}:", untested)


def _all_alike(report: Report, rows: Sequence[Row]) -> str:
    """Scores from here to there; so cost decides."""
    scores = [row["score_mean"] for row in rows]
    low, high = values.score(min(scores)), values.score(max(scores))
    said = f"all score {low}" if low == high else f"scores from {low} to {high}"
    said += f" ({listed(_named(report, row) for row in rows)})."
    costs = (("energy_kwh", "energy"), ("peak_memory_bytes", "memory"))
    cheapest = {
        what: _least(rows, key) for key, what in costs if all(row[key] is not None for row in rows)
    }
    takers: dict[str, list[str]] = defaultdict(list)
    for what, row in cheapest.items():
        takers[_named(report, row)].append(f"the least {what} ({_amount(row, what)})")
    return said + (
        f" {listed(f'{name} takes {listed(least)}' for name, least in takers.items())}."
        if takers
        else ""
    )


def _amount(row: Row, what: str) -> str:
    if what == "memory":
        return values.size(row["peak_memory_bytes"])
    return values.energy(row["energy_kwh"]) + (
        ", estimate" if values.ESTIMATE in (row["energy_source"] or "") else ""
    )


def _least(rows: Sequence[Row], key: str) -> Row:
    return min(rows, key=lambda row: row[key])


def _rank(row: Row) -> tuple[int, int]:
    low, _, high = str(row["rank"]).partition("-")
    return int(low), int(high or low)


def _named(report: Report, row: Row) -> str:
    return report.arms[row["arm"]].label


def _scored(row: Row) -> str:
    """`78.2, 95% interval 74.7 to 81.4`."""
    shown = values.score(row["score_mean"])
    return (
        shown
        if row["ci_low"] is None
        else f"{shown}, 95% interval {values.score(row['ci_low'])} to {values.score(row['ci_high'])}"
    )


def cost(row: Row) -> str:
    """What a training run of the arm takes, as far as it was measured."""
    parts = [
        f"{energy(row)} a run" if row["energy_kwh"] is not None else "",
        values.size(row["peak_memory_bytes"]),
    ]
    parts += [
        f"{values.count(row['trainable_parameters'])} trained parameters"
        if row["trainable_parameters"] is not None
        else ""
    ]
    return ", ".join(part for part in parts if part not in ("", values.MISSING))


def _saving(row: Row, leader: Row) -> str:
    """`, 40% less energy, 44% less memory` than the leader."""
    parts = []
    for key, what in (("energy_kwh", "energy"), ("peak_memory_bytes", "memory")):
        if row[key] is not None and leader[key]:
            change = 100 * (row[key] / leader[key] - 1)
            parts.append(
                f"the same {what}"
                if abs(change) < 0.5
                else f"{abs(change):.0f}% {'more' if change > 0 else 'less'} {what}"
            )
    return "; " + ", ".join(parts) if parts else ""


def _like_a_constant(report: Report) -> list[Sentence]:
    """Arms whose score, by task, could be had by one answer to everything."""
    found = []
    for task in report.tasks:
        rows = [row for row in report.scored(task) if row["admitted"] is not False]
        alike = [row for row in rows if beats_constant(row) is False]
        if alike:
            same = values.score(alike[0]["constant_score"])
            who = "no arm is" if len(alike) == len(rows) else "not"
            said = listed(
                f"{_named(report, row)} ({values.score(row['score_mean'])})" for row in alike
            )
            found.append(
                Sentence(
                    f"On {task} {who} shown to do better than one answer for everything, which scores {same}:",
                    f"{said}.",
                )
            )
    return found


def _rejected(report: Report) -> list[Sentence]:
    """Arms that a check of validity took out, by task."""
    by_arm: dict[str, list[str]] = defaultdict(list)
    for row in report.rows:
        if row["admitted"] is False and row["task"] != MEAN:
            by_arm[_named(report, row)].append(row["task"])
    if not by_arm:
        return []
    cells = sum(map(len, by_arm.values()))
    said = listed(f"{name} on {listed(tasks)}" for name, tasks in by_arm.items())
    return [
        Sentence(
            f"{cells} {'row is' if cells == 1 else 'rows are'} rejected and not ranked:",
            f"{said} (reasons below).",
        )
    ]


def facts(report: Report) -> list[tuple[str, str]]:
    """What was run, on what, with which budget: name and text."""
    config = None if report.plan is None else report.plan.config
    found = [
        (
            "Sweep",
            report.sweep
            + (f": {config.description}" if config is not None and config.description else ""),
        )
    ]
    if config is not None:
        search, training, limit = config.search, config.training, config.limit
        decades = search.edge_guard.extensions
        guard = (
            f", up to {decades} decade{'s' if decades > 1 else ''} more at an edge"
            if decades
            else ""
        )
        stop = (
            f", may stop early (tolerance {search.stop.tolerance:g})"
            if search.stop is not None
            else ""
        )
        budget = f"{search.trials} trials per cell ({search.startup_trials} quasi-random, then {search.sampler}){guard}{stop}; "
        found.append(
            (
                "Budget",
                budget + f"confirmed with seeds {listed(map(str, config.confirm.seeds), most=20)}",
            )
        )
        steps = f"{training.epochs} epoch{'s' if training.epochs > 1 else ''}" + (
            f" of {training.epoch_steps} steps" if training.epoch_steps else ""
        )
        shape = f"batches of {training.batch_size}, at most {training.max_length} tokens"
        found.append(
            (
                "Training",
                f"{steps}, {shape}, {training.precision} precision, ZeRO stage {training.zero_stage}",
            )
        )
        rows = [
            f"{name} {value:,}" for name, value in limit.model_dump().items() if value is not None
        ]
        found += [("Rows", f"at most {', '.join(rows)}")] if rows else []
    found.append(
        ("Arms", f"{len(report.arms)}: {listed((a.label for a in report.arms.values()), most=20)}")
    )
    found.append(("Tasks", listed(report.tasks, most=30)))
    return [*found, *_spent(report), *_machines(report)]


def _spent(report: Report) -> list[tuple[str, str]]:
    ended = [t for t in report.trials if t["status"] != "unfinished"]
    if not ended:
        return []
    phases = [cost for trial in ended for cost in trial["phases"].values()]
    kwh = None if any(e is None for _, e in phases) else sum(e for _, e in phases if e is not None)
    note = f" of energy{report.energy_note}" if kwh is not None else ""
    said = f"{len(ended)} trials ended, {values.duration(sum(s for s, _ in phases))} of work, {values.energy(kwh)}{note}"
    return [
        ("Trials", said),
        (
            "Run",
            f"{_day(min(t['started_at'] for t in ended))} to {_day(max(t['finished_at'] for t in ended))} UTC",
        ),
    ]


def _day(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _machines(report: Report) -> list[tuple[str, str]]:
    """Distinct hardware, versions, revisions and meters of the results."""
    shown: dict[str, dict[str, None]] = {"Hardware": {}, "Versions": {}, "Commit": {}, "Energy": {}}
    for record in report.provenance:
        shown["Hardware"][_hardware(record)] = None
        shown["Versions"][
            ", ".join(
                f"{name} {version}" for name, version in sorted(record.get("versions", {}).items())
            )
        ] = None
        git = record.get("git") or {}
        shown["Commit"][
            str(git.get("revision") or "")[:12] + (" (edited checkout)" if git.get("dirty") else "")
        ] = None
        shown["Energy"][_meter(record.get("meter") or {})] = None
    return [
        (name, "; or ".join(filter(None, texts))) for name, texts in shown.items() if any(texts)
    ]


def _hardware(record: dict[str, Any]) -> str:
    found = record.get("hardware") or {}
    if not found:
        return ""
    boards = [str(gpu.get("name", "GPU")) for gpu in found.get("gpus", [])]
    parts = [
        f"{found.get('usable_cores', '?')} cores of {found.get('cpu_model', 'an unknown processor')}"
    ]
    parts += [values.size(found["memory_bytes"])] if found.get("memory_bytes") else []
    parts += [f"{boards.count(name)} x {name}" for name in dict.fromkeys(boards)] or ["no GPU"]
    return (
        f"{', '.join(parts)}; {record.get('world_size', '?')} ranks on {record.get('device', '?')}"
    )


def _meter(meter: dict[str, Any]) -> str:
    sources = [str(source) for source in meter.get("energy_sources", [])]
    if sources == [values.ESTIMATE]:
        watts = meter.get("watts_per_core")
        return (
            f"estimated, not measured: processor time x {watts:g} W per core"
            if watts
            else "estimated from processor time"
        )
    return f"measured by {listed(sources)}" if sources else ""
