"""The answer of a sweep in a few sentences, computed from its rows.

They say who leads, what cannot be told apart from it, and at what cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from suite.config.reference import MEAN
from suite.config.sweep import SearchConfig
from suite.meters.record import ESTIMATE
from suite.plan.cell_state import CellStatus
from suite.plan.plan import Plan
from suite.report import values
from suite.report.charts import energy, place
from suite.report.data import Report, Row
from suite.report.names import listed
from suite.report.table import rows_where, rows_without, values_of
from suite.stats.power import sentence_of

# The costs that are compared, by key: the word for them.
COSTS = {"energy_kwh": "energy", "peak_memory_bytes": "memory"}
# The trials of a study whose learning rate is fixed.
OF_FIXED = "one trial for each architecture and batch size to choose among, if any"
# Arms that a head names; its sentence names more.
MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Sentence:
    """One finding: its point in front, and the rest."""

    head: str
    rest: str


def answer(report: Report) -> list[Sentence]:
    """Say what the sweep shows so far, the most general finding first."""
    found: list[Sentence] = []
    for task in report.places:
        found += _rankings(report, task)
    if not found:
        found.append(_nothing(report))
    return [
        *found,
        *_power(report),
        *_not_shown_to_learn(report),
        *_looked_at_again(report),
        *_rejected(report),
    ]


def verdicts(report: Report) -> list[str]:
    """Say in one sentence for each home and backbone what the sweep shows in its first place."""
    for task in report.places:
        found = _rankings(report, task)
        if found:
            return [said.head for said in found]
    nothing = _nothing(report)
    return [f"{nothing.head} {nothing.rest}"]


def _nothing(report: Report) -> Sentence:
    reason = "no arm has a test score that is neither rejected nor of a failed row."
    if not report.rows:
        reason = "no trial has ended."
    return Sentence("Nothing can be said yet:", reason)


def _rankings(report: Report, task: str) -> list[Sentence]:
    """Say who leads on a task or on the mean, for each backbone with an admitted score."""
    found = []
    # Arms of different backbones are not ranked against each other.
    backbones = sorted(set(values_of(report.scored(task), "backbone")))
    for where, of_home in _admitted(report, task):
        for backbone in backbones:
            rows = rows_where(of_home, "backbone", backbone)
            whose = where
            if len(backbones) > 1:
                whose += f" with {backbone}"
            if not rows:
                continue
            said = _ranking(report, rows, whose, task)
            failed = []
            for row in report.failed(task):
                if (row["home"], row["backbone"]) == (rows[0]["home"], backbone):
                    failed.append(_with_score(report, row))
            if failed:
                rest = f"{said.rest} Not ranked, as a confirm run has no score: {listed(failed)}."
                said = replace(said, rest=rest)
            found.append(said)
    return found


def _admitted(report: Report, task: str) -> list[tuple[str, list[Row]]]:
    """The admitted rows of each home, and where in a sentence: `on sst2 in home 3f2a91c04b7d`."""
    found = []
    # Nothing has compared the rows of one home with those of another.
    for home in report.homes:
        where = place(report, task)
        if len(report.homes) > 1:
            where += f" in home {home}"
        found.append((where, rows_where(report.admitted(task), "home", home)))
    return found


def _ranking(report: Report, rows: Sequence[Row], where: str, task: str) -> Sentence:
    """Say who leads the rows of one task and backbone."""
    higher = report.higher_is_better(task)
    ordered = sorted(rows, key=lambda row: row["score_mean"], reverse=higher)
    ranked = []
    unranked = []
    for row in ordered:
        # Only finished rows are ranked; the others may have a score already.
        if row["rank"]:
            ranked.append(row)
        else:
            unranked.append(_with_score(report, row))
    # A single rank compares with nothing.
    if len(ranked) < 2:
        end = "lowest"
        if higher:
            end = "highest"
        return _unranked(report, ordered, where, end)
    # A row of rank 1 may be one that has since been rejected or lost its score.
    by_place = defaultdict(list)
    for row in ranked:
        by_place[values.rank_bounds(row["rank"])[0]].append(row)
    first = by_place.pop(min(by_place))
    worse = [row for row in ranked if row not in first]
    later = ""
    if unranked:
        later = f" Not ranked yet: {listed(unranked)}."
    if not worse:
        head = (
            f"No test tells the {len(ranked)} ranked arms apart {where} ({values.seeds(ranked)})."
        )
        return Sentence(head, _all_alike(report, ranked) + later)
    # Several arms may share rank 1; the best score of them comes first.
    leader = first[0]
    rivals = []
    for row in first[1:]:
        rivals.append(f"{report.label(row)} ({_score(row)}{_saving(row, leader)})")
    than = "at least one arm"
    if _all_lose_to(leader, worse, ranked):
        than = report.label(leader)
    rest = f"{report.label(leader)}: {described(leader)}."
    if rivals:
        rest += f" Cannot be told apart from it: {listed(rivals)}."
    losers = listed(_with_score(report, row) for row in worse)
    rest += f" Significantly worse than {than}: {losers}.{later}"
    head = f"{report.label(leader)} leads {where} with {_brief(leader)}: "
    if rivals:
        head += f"{_names(report, first[1:])} cannot be told apart from it; "
    verb = "is"
    if len(worse) > 1:
        verb = "are"
    head += f"{_names(report, worse)} {verb} significantly worse than {than}."
    return Sentence(head, rest)


def _names(report: Report, rows: Sequence[Row]) -> str:
    """The names of some arms, for a head."""
    return listed((report.label(row) for row in rows), most=MOST_NAMES)


def _all_lose_to(leader: Row, worse: Sequence[Row], ranked: Sequence[Row]) -> bool:
    """Whether a test shows the leader to be better than each of the worse rows.

    Rows hold no test of a pair, but a rank counts them: of A arms, `1-3` is better than A - 3.
    """
    arms = max(values.rank_bounds(row["rank"])[1] for row in ranked)
    # A row that has left since would be among those that the leader's rank counts.
    is_whole = arms == len(ranked)
    beaten = arms - values.rank_bounds(leader["rank"])[1]
    return is_whole and beaten == len(worse)


def _unranked(report: Report, rows: Sequence[Row], where: str, end: str) -> Sentence:
    """Name the first of some rows that no test has compared."""
    leader = rows[0]
    scored = f"{described(leader)}."
    if len(rows) == 1:
        only = _only(report, leader, where)
        return Sentence(f"{report.label(leader)} is {only}, with {_brief(leader)}.", scored)
    reason = leader["rank_missing"]
    if not reason:
        reason = "there are no ranks"
        if leader["rank"]:
            reason = "no other arm is ranked yet"
    return Sentence(
        f"{report.label(leader)} scores {end} {where} with {_brief(leader)};"
        " no test has compared it with the others.",
        f"{scored} No test says whether that is more than luck: {reason}.",
    )


def _only(report: Report, leader: Row, where: str) -> str:
    """What the single arm with a score that counts is: `the only arm on sst2 so far`."""
    others = []
    for row in rows_where(report.shown, "task", leader["task"]):
        alike = row["home"] == leader["home"] and row["backbone"] == leader["backbone"]
        if alike and row["arm"] != leader["arm"]:
            others.append(row)
    over = {status.value for status in CellStatus if status.is_over}
    is_over = [row["status"] in over for row in others]
    so_far = ""
    # Cells without an ended trial have no row yet.
    if not all(is_over) or report.absent(leader["task"]):
        so_far = " so far"
    # Others that are over were rejected or failed: they are arms as well.
    if any(is_over):
        return f"the only one of {len(others) + 1} arms {where} with a score that counts{so_far}"
    return f"the only arm {where}{so_far}"


def _all_alike(report: Report, rows: Sequence[Row]) -> str:
    """Give the range of scores of arms that no test separates, and say which cost least."""
    by_score = sorted(rows, key=lambda row: row["score_mean"])
    low = values.score_of(by_score[0])
    high = values.score_of(by_score[-1])
    said = f"Scores run from {low} to {high}"
    if low == high:  # as shown
        said = f"All score {low}"
    said += f" ({listed(report.label(row) for row in rows)})."
    cheapest: dict[str, list[str]] = defaultdict(list)
    for key, word in COSTS.items():
        # Only where all costs are known: the missing one might be the least.
        if None not in values_of(rows, key) and comparable(rows, key):
            row = min(rows, key=lambda row: row[key])
            cheapest[report.label(row)].append(f"the least {word} ({_amount(row, key)})")
    takers = []
    for name, least in cheapest.items():
        takers.append(f"{name} takes {listed(least)}")
    if takers:
        said += f" {listed(takers)}."
    return said


def comparable(rows: Sequence[Row], key: str) -> bool:
    """Whether a cost of some rows was found in the same way."""
    return key != "energy_kwh" or values.comparable_energy(rows)


def _amount(row: Row, key: str) -> str:
    if key == "peak_memory_bytes":
        return values.size(row[key])
    shown = values.energy(row["energy_kwh"])
    if values.is_estimate(row):
        shown += ", estimate"
    return shown


def _with_score(report: Report, row: Row) -> str:
    """An arm with its score: `read (61.2, 3 seeds)`."""
    return f"{report.label(row)} ({values.score_of(row)}, {values.seeds([row])})"


def _brief(row: Row) -> str:
    """A score with its seeds, for a sentence: `78.2 (3 seeds)`."""
    return f"{values.score_of(row)} ({values.seeds([row])})"


def _score(row: Row) -> str:
    """A score with its interval: `78.2, 95% interval 74.7 to 81.4, 3 seeds`."""
    shown = values.score_of(row)
    if row["ci_low"] is not None:
        low = values.score_of(row, "ci_low")
        high = values.score_of(row, "ci_high")
        shown += f", 95% interval {low} to {high}"
        if row["ci_of"] == "items":
            shown += f" {values.ITEMS_ONLY}"
    return f"{shown}, {values.seeds([row])}"


def described(row: Row) -> str:
    """A row's score and what a training run of its arm takes."""
    return f"{_score(row)}; {cost(row)}"


def cost(row: Row) -> str:
    """Say what a training run of the arm takes, as far as it was measured."""
    parts = []
    if row["energy_kwh"] is not None:
        parts.append(f"{energy(row)} a run")
    if row["peak_memory_bytes"] is not None:
        parts.append(values.size(row["peak_memory_bytes"]))
    if row["trainable_parameters"] is not None:
        parts.append(f"{values.count(row['trainable_parameters'])} trained parameters")
    return ", ".join(parts)


def _saving(row: Row, leader: Row) -> str:
    """What an arm saves beside the leader: `; 40% less energy, 44% less memory`."""
    parts = []
    for key, word in COSTS.items():
        # A percentage needs both costs, and the leader's above 0.
        if row[key] is None or not leader[key] or not comparable([row, leader], key):
            continue
        percent = 100 * (row[key] / leader[key] - 1)
        if abs(percent) < 0.5:  # would round to 0%
            parts.append(f"the same {word}")
        elif percent > 0:
            parts.append(f"{percent:.0f}% more {word}")
        else:
            parts.append(f"{-percent:.0f}% less {word}")
    if not parts:
        return ""
    return "; " + ", ".join(parts)


def _power(report: Report) -> list[Sentence]:
    """Say by task what the ranks could have told apart with these seeds."""
    said: dict[str, None] = {}
    for task in report.places:
        backbones = set(values_of(report.scored(task), "backbone"))
        for where, rows in _admitted(report, task):
            for row in rows:
                if row["rank"] and row["shown_difference"] is not None:
                    words = sentence_of(row)
                    whose = f"{where} with {row['backbone']}" if len(backbones) > 1 else where
                    said[f"{whose}, {words}"] = None
    if not said:
        return []
    found = "; ".join(said)
    return [Sentence("What the ranks could tell apart in four of five cases:", f"{found}.")]


def _not_shown_to_learn(report: Report) -> list[Sentence]:
    """Name by task the arms that are not significantly better than the baseline."""
    found = []
    for task in report.tasks:
        for where, rows in _admitted(report, task):
            # None means that it was not tested.
            alike = [row for row in rows if row["shown_to_learn"] is False]
            if not alike:
                continue
            who = "these arms are not"
            if len(alike) == len(rows):
                who = "no arm is"
            baseline = values.score(alike[0]["constant_score"])
            head = (
                f"{where[0].upper()}{where[1:]} {who} significantly better than the constant-answer"
                f" baseline ({baseline}):"
            )
            found.append(Sentence(head, f"{listed(_with_score(report, row) for row in alike)}."))
    return found


def _looked_at_again(report: Report) -> list[Sentence]:
    """Name the rows whose test scores were read from several sets of runs."""
    found = []
    for row in report.rows:
        if row["looks_warning"] is not None and row["task"] != MEAN:
            head = f"Test scores of {report.label(row)} on {row['task']} were looked at again:"
            found.append(Sentence(head, f"{row['looks_warning']}."))
    return found


def _rejected(report: Report) -> list[Sentence]:
    """Name by arm the tasks on which a check of validity took it out."""
    by_arm: dict[str, list[str]] = defaultdict(list)
    count = 0
    for row in report.rows:
        # None means that nothing was checked.
        if row["admitted"] is False and row["task"] != MEAN:
            by_arm[report.label(row)].append(row["task"])
            count += 1
    if not count:
        return []
    head = f"{count} rows are rejected and not ranked:"
    if count == 1:
        head = "1 row is rejected and not ranked:"
    said = []
    for name, tasks in by_arm.items():
        said.append(f"{name} on {listed(tasks)}")
    # The page and the document have a table of the rejected rows further down.
    return [Sentence(head, f"{listed(said)} (reasons below).")]


def facts(report: Report) -> list[tuple[str, str]]:
    """List what was run, on what and with which budget, as pairs of name and text."""
    labels = [arm.label for arm in report.arms.values()]
    return [
        *_settings(report),
        ("Arms", f"{len(labels)}: {listed(labels, most=20)}"),
        ("Tasks", listed(report.tasks, most=30)),
        *_spent(report),
        *_machines(report),
    ]


def _settings(report: Report) -> list[tuple[str, str]]:
    """List what the sweep's file asks for."""
    if report.plan is None:
        return [("Sweep", report.sweep)]
    config = report.plan.config
    name = report.sweep
    if config.description:
        name += f": {config.description}"

    budget = _budget(report.plan)
    budget += f"; confirmed with seeds {listed(map(str, config.confirm.seeds), most=20)}"

    steps = _counted(config.training.epochs, "epoch")
    if config.training.epoch_steps:
        steps += f" of {config.training.epoch_steps} steps"
    batches = str(config.training.batch_size)
    if config.search.batch_sizes:
        batches = f"{' or '.join(map(str, config.search.batch_sizes))}, as searched"
    training = (
        f"{steps}, batches of {batches},"
        f" at most {config.training.max_length} tokens, {config.training.precision} precision,"
        f" ZeRO stage {config.training.zero_stage}"
    )
    found = [("Sweep", name), ("Budget", budget), ("Training", training)]
    limits = []
    for split, most in config.limit:
        if most is not None:
            limits.append(f"{split} {most:,}")
    if limits:
        found.append(("Rows", f"at most {', '.join(limits)}"))
    return found


def _budget(plan: Plan) -> str:
    """What a study may try."""
    fixed = {cell.learning_rate.fixed for cell in plan.cells}
    # A second trial with a fixed rate and the same choices would repeat the first.
    if fixed == {True}:
        return f"every learning rate is fixed: {OF_FIXED}"
    search = plan.config.search
    budget = f"{search.trials} trials per {search.per} and task ({_order(search)})"
    decades = search.edge_guard.extensions
    if decades:
        budget += f", up to {_counted(decades, 'decade')} more at an edge"
    if search.stop is not None:
        budget += f", may stop early (tolerance {search.stop.tolerance:g})"
    if True in fixed:
        budget += f"; where the learning rate is fixed, {OF_FIXED}"
    return budget


def _order(search: SearchConfig) -> str:
    """Where a study begins, and what it follows."""
    # A grid is even from its first point to its last.
    if search.sampler == "grid":
        return "a grid over the range"
    first = f"{search.startup_trials} evenly over the range"
    # The one sampler that takes the hint, and with one objective only.
    if search.transfer and search.by_curve:
        first += ", or where finished studies of other tasks were best"
    return f"{first}, then {search.sampler}"


def _counted(count: int, word: str) -> str:
    """A number with its noun: `1 epoch`, `2 epochs`."""
    if count > 1:
        return f"{count} {word}s"
    return f"{count} {word}"


def _spent(report: Report) -> list[tuple[str, str]]:
    """Say what all ended trials took together, and when they ran."""
    ended = rows_without(report.trials, "status", "unfinished")
    if not ended:
        return []
    # A trial that failed has no phases, though it took something.
    told = [trial for trial in ended if trial["phases"]]
    seconds = 0.0
    for trial in told:
        for phase_s, _ in trial["phases"].values():
            seconds += phase_s
    text = f"{len(ended)} trials ended, {values.duration(seconds)} of work"
    text += f", energy {_energy_of(told)}"
    if len(told) < len(ended):
        text += f", and what the {len(ended) - len(told)} took that failed, which is not known"
    found = [("Trials", text)]
    # A damaged record does not say when its trial ran: 0 stands there, which is 1970.
    timed = [trial for trial in ended if trial["started_at"]]
    if timed:
        first = _minute(min(values_of(timed, "started_at")))
        last = _minute(max(values_of(timed, "finished_at")))
        found.append(("Run", f"{first} to {last} UTC"))
    return found


def _energy_of(trials: Sequence[Row]) -> str:
    """The energy of all phases of some trials."""
    measured = []
    estimated = []
    for trial in trials:
        for phase, (_, energy_kwh) in trial["phases"].items():
            # A sum without some of its parts would look like all of it.
            if energy_kwh is None:
                return "not known"
            if trial["sources"].get(phase) == ESTIMATE:
                estimated.append(energy_kwh)
            else:
                measured.append(energy_kwh)
    return values.spent(measured, estimated)


def _minute(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _machines(report: Report) -> list[tuple[str, str]]:
    """List the distinct hardware, versions and revisions of the results, and their meters."""
    # Dictionaries without values keep the order of first sight; sets would not.
    shown: dict[str, dict[str, None]] = {"Hardware": {}, "Versions": {}, "Commit": {}}
    for record in report.provenance:
        versions = sorted(record.get("versions", {}).items())
        shown["Hardware"][_hardware(record)] = None
        shown["Versions"][", ".join(f"{name} {version}" for name, version in versions)] = None
        shown["Commit"][_revision(record.get("git") or {})] = None
    found = []
    for name, texts in shown.items():
        known = [text for text in texts if text]
        if known:
            found.append((name, "; or ".join(known)))
    meters = _meters(report)
    if meters:
        found.append(("Energy", "; or ".join(meters)))
    return found


def _revision(git: dict[str, Any]) -> str:
    revision = str(git.get("revision") or "")[:12]
    if git.get("dirty"):
        revision += " (edited checkout)"
    return revision


def _hardware(record: dict[str, Any]) -> str:
    found = record.get("hardware") or {}
    if not found:
        return ""
    processor = found.get("cpu_model", "an unknown processor")
    parts = [f"{found.get('usable_cores', '?')} cores of {processor}"]
    if found.get("memory_bytes"):
        parts.append(values.size(found["memory_bytes"]))
    # The same board many times over is one entry with a count.
    boards = [str(gpu.get("name", "GPU")) for gpu in found.get("gpus", [])]
    for name in dict.fromkeys(boards):
        parts.append(f"{boards.count(name)} x {name}")
    if not boards:
        parts.append("no GPU")
    ranks = f"{record.get('world_size', '?')} ranks on {record.get('device', '?')}"
    return f"{', '.join(parts)}; {ranks}"


def _meters(report: Report) -> list[str]:
    """Say where the energy comes from: a meter that was there may not have counted a phase."""
    found = []
    measured = sorted(report.energy_sources - {ESTIMATE})
    if measured:
        found.append(f"measured by {listed(measured)}")
    if ESTIMATE not in report.energy_sources:
        return found
    watts: set[float] = set()
    for record in report.provenance:
        meter = record.get("meter") or {}
        if meter.get("watts_per_core"):
            watts.add(meter["watts_per_core"])
    shown = listed(f"{power:g}" for power in sorted(watts))
    if shown:
        return [*found, f"estimated, not measured: processor time x {shown} W per core"]
    return [*found, "estimated from processor time"]
