"""One cell in one line: everything a leaderboard row needs, computed from the trial records alone.

What each number means, where there is a choice:

- `score_mean`, `score_std`: test scores of the confirm runs at the chosen learning rate; sample standard deviation
  (n - 1), null for a single seed.
- `energy_kwh`, `train_s`, `samples_per_s`: per run, the mean over these confirm runs, train phase only (no loading,
  evaluation or checkpoints); null if one of the runs could not measure it.
- `peak_memory_bytes`: allocated memory of the train phase, the largest rank of the largest run.
- `search_energy_kwh`, `search_s`: what the search cost, summed over its ended trials and all their phases.
- `attention_parameters`, `kv_bytes_per_token`: of the backbone with its attention variant, before the method; at fp16.
- `pretrain_energy_kwh`, `pretrain_s`, `pretrain_steps`: the train phase of the pretrain run, which cells may share.
- `prr`, `peop`: not of the trials: they compare rows, so they are filled in when the leaderboard is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import stdev
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from suite.config.arm import Arm
from suite.config.hashing import canonical_json, short_hash
from suite.config.reference import MEAN
from suite.config.space import LearningRateRange
from suite.config.sweep import SweepConfig
from suite.config.task import TaskConfig
from suite.errors import TrackingError
from suite.leaderboard.intervals import interval_fields
from suite.leaderboard.validity import judge
from suite.plan.cell_state import read_states
from suite.plan.definition import read_plan
from suite.record.cells import Cell, Trial
from suite.record.folder import Home
from suite.record.lm_eval import as_metrics, over_seeds, read_record
from suite.record.references import printed
from suite.record.spec import Phase, TrialSpec
from suite.tracking.curves import of_tags, progress, study_fields, to_tags
from suite.tracking.encode import is_number
from suite.tracking.measures import mean, pretrain_cost, run_cost, search_cost, sizes
from suite.tracking.store import MAX_TAG_CHARS

NAMES = ("sweep", "backbone", "attention", "method", "task")
OWN_TAGS = ("arm", "architecture", "attention_options")
COMPARED = (
    *("prr", "prr_missing", "peop", "peop_missing"),
    *("rank", "rank_missing"),
    *(
        "selection_trials",
        "selection_s",
        "selection_energy_kwh",
        "energy_to_target_kwh",
        "energy_to_target_missing",
    ),
)
CURVES = ("curve", "progress")
OTHER_TAGS = ("lm_eval",)
ROW = "suite.row"
"""Absent where an earlier version wrote."""
STORED = (
    *NAMES,
    "suite.arm",
    "architecture",
    "attention_options",
    "suite.summary",
    "suite.progress.*",
    "suite.lm_eval",
)
"""The tags that hold the same, in parts."""


class PlannedCell(BaseModel):
    """A cell as the driver planned it."""

    arm: Arm
    task: TaskConfig
    learning_rate: LearningRateRange


class Plan(BaseModel):
    """`sweeps/<name>.cells`: what the names in the definition stood for when it was last run."""

    world_size: int
    cells: list[PlannedCell]


@dataclass(frozen=True, slots=True)
class Definition:
    """What a home stores of a sweep, as far as it decides which trials count and when a cell is done.

    Attributes:
        config: The sweep as given.
        world_size: Workers of a trial whose backbone asks for no other number, None where the plan was not stored.
        cells: Planned cells by key.
        studies: What the driver decided about each cell's study, by cell key (`Home.studies`).
        chosen: By arm key, whether an architecture won its contest; absent where there is none, or not yet.
    """

    config: SweepConfig
    world_size: int | None = None
    cells: dict[str, PlannedCell] = field(default_factory=dict)
    studies: dict[str, dict[str, Any]] = field(default_factory=dict)
    chosen: dict[str, bool] = field(default_factory=dict)

    def includes(self, spec: TrialSpec) -> bool:
        """Whether a trial belongs to the sweep as it now stands: a lowered budget or an edited task leaves others behind."""
        config, planned = self.config, self.cells.get(spec.cell)
        if spec.phase is Phase.SEARCH and spec.number >= self.search_trials(spec.cell):
            return False
        if spec.phase is Phase.CONFIRM and spec.seed not in config.confirm.seeds:
            return False
        if (spec.training, spec.limit, spec.decoder_objective) != (
            config.training,
            config.limit,
            config.decoder_objective,
        ):
            return False
        return (planned is None or spec.task == planned.task) and self.workers(spec.arm) in (
            None,
            spec.world_size,
        )

    def workers(self, arm: Arm) -> int | None:
        """Workers of an arm's trials, None where the plan was not stored."""
        asked = self.config.resources.workers_by_backbone.get(arm.backbone.name)
        return self.world_size if asked is None or self.world_size is None else asked

    def search_trials(self, cell: str) -> int:
        """Search trials that a cell is to have: of its budget with all extensions, those that an early end did not save."""
        study, planned, budget = (
            self.studies.get(cell),
            self.cells.get(cell),
            self.config.search.trials,
        )
        if study is not None:
            return int(study["budget"]) - int(study["saved_trials"])
        return budget if planned is None else planned.learning_rate.trials(budget)

    def searched(self, cell: str) -> LearningRateRange | None:
        """The range that a cell's study searches, with its extensions; None where the plan was not stored."""
        study, planned = self.studies.get(cell), self.cells.get(cell)
        if planned is None or study is None:
            return None if planned is None else planned.learning_rate
        return planned.learning_rate.model_copy(update={"low": study["low"], "high": study["high"]})

    def references(self, arm: Arm, task: str) -> list[dict[str, Any]]:
        """What a paper printed for a cell, and for the mean over its arm's tasks; empty mappings where it printed nothing."""
        return [
            printed(self.config.reference, arm, name, {*self.config.tasks}) for name in (task, MEAN)
        ]

    def asks(self, cell: str) -> str:
        """Changes when this cell's row may change although its trials did not."""
        planned = self.cells.get(cell)
        of_sweep = self.config.model_dump(
            mode="json", include={"search", "confirm", "training", "limit", "decoder_objective"}
        )
        decided = [self.studies.get(cell), self.chosen.get(cell.rpartition("/")[0])]
        if planned is not None and self.config.reference:
            decided += self.references(planned.arm, planned.task.name)
        workers = self.world_size if planned is None else self.workers(planned.arm)
        return short_hash(
            [
                of_sweep,
                workers,
                None if planned is None else planned.model_dump(mode="json"),
                decided,
            ]
        )


@dataclass(frozen=True)
class CellSummary:
    """A row of the leaderboard; None is "not measured" or "not yet".

    Attributes:
        seed_scores: Test score by seed.
        higher_is_better: Of the task's score; None on a mean row over tasks of both directions.
        rivals: The same for all cells that differ in their attention only, and in the pretrain run that it needs.
        conditions: The same for all cells that differ in their method and its architecture only, or in the task.
        curve: `suite.tracking.curves.learning_rate_curve`; `progress` as there. Each has tags of its own.
        learning_rate_low: Of the range that was searched, extensions included; `learning_rate_high` likewise.
        extensions: Decades that the edge guard added.
        saved_trials: Of the budget, by an early end of the study.
        chosen: Whether the architecture won the contest of its method's; None where there was none, or not yet.
        reference: What a paper printed for this cell (`Reference.as_row`), `reference_mean` for the mean over the arm's tasks.
        lm_eval: What lm-eval measured on the confirm runs: `suite.record.lm_eval.over_seeds`. Has a tag of its own.
        ended_at: When the last of its trials ended, seconds since 1970.
        admitted: Whether its runs may be trusted (`suite.leaderboard.validity`); None = not known. `rejected` says why not.
        dirty: Whether one of its runs was made by an edited checkout.
        ci_low: 95% interval of `score_mean` over seeds and items; `ci_high` likewise. Of a mean row, set when the leaderboard is read.
        ci_of: Over what: "seeds x items", or "items" for one seed; `ci_missing`, why there is none.
        constant_score: What the same answer to every test item scores (`suite.stats.constant_baseline`); `constant_missing`, why there is none.
        constant_p: Two-sided, of no difference between that and `score_mean`; None on a mean row.
        rank: `1` or `1-3`, among the finished rows of the sweep, backbone and task; set when the leaderboard is read.
        own_code: Commit of the code that the backbone's checkpoint brought and that ran; None = only that of the libraries.
        selection_trials: Set when the leaderboard is read, as are the fields after it; never stored.
    """

    sweep: str
    backbone: str
    attention: str
    method: str
    architecture: dict[str, Any]
    task: str
    arm: str
    score_mean: float | None = None
    score_std: float | None = None
    seeds: int = 0
    validation_score: float | None = None
    learning_rate: float | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    energy_kwh: float | None = None
    energy_source: str | None = None
    peak_memory_bytes: int | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    search_trials: int = 0
    search_energy_kwh: float | None = None
    status: str = "searching"
    search_s: float | None = None
    edge: bool | None = None
    seed_scores: dict[str, float] = field(default_factory=dict)
    attention_options: dict[str, Any] = field(default_factory=dict)
    attention_parameters: int | None = None
    kv_bytes_per_token: int | None = None
    pretrain_energy_kwh: float | None = None
    pretrain_s: float | None = None
    pretrain_steps: int | None = None
    higher_is_better: bool | None = True
    rivals: str = ""
    conditions: str = ""
    curve: list[list[Any]] = field(default_factory=list)
    lr_sensitivity_decades: float | None = None
    learning_rate_low: float | None = None
    learning_rate_high: float | None = None
    extensions: int | None = None
    saved_trials: int | None = None
    chosen: bool | None = None
    progress: list[list[Any]] = field(default_factory=list)
    reference: dict[str, Any] = field(default_factory=dict)
    reference_mean: dict[str, Any] = field(default_factory=dict)
    lm_eval: dict[str, dict[str, dict[str, float | int | None]]] = field(default_factory=dict)
    ended_at: float | None = None
    admitted: bool | None = None
    rejected: list[str] = field(default_factory=list)
    dirty: bool = False
    ci_low: float | None = None
    ci_high: float | None = None
    ci_of: str | None = None
    ci_missing: str | None = None
    constant_score: float | None = None
    constant_p: float | None = None
    constant_missing: str | None = None
    rank: str | None = None
    rank_missing: str | None = None
    selection_trials: int | None = None
    selection_s: float | None = None
    selection_energy_kwh: float | None = None
    energy_to_target_kwh: float | None = None
    energy_to_target_missing: str | None = None
    prr: float | None = None
    prr_missing: str | None = None
    peop: float | None = None
    peop_missing: str | None = None
    own_code: str | None = None

    def metrics(self) -> dict[str, float]:
        """The numbers, for MLflow's own pages; the leaderboard reads the tags, where a number can become null again."""
        numbers = {key: float(value) for key in FIELDS if is_number(value := getattr(self, key))}
        return numbers | as_metrics(self.lm_eval)

    def tags(self) -> dict[str, str]:
        """All but the cell's names as one JSON text that is replaced as a whole."""
        rest = {
            key: getattr(self, key)
            for key in FIELDS
            if key not in (*NAMES, *OWN_TAGS, *COMPARED, *CURVES, *OTHER_TAGS)
        }
        if len(canonical_json(rest)) > MAX_TAG_CHARS:
            rest["seed_scores"] = {}  # some 300 seeds; only the mean row's spread needs them
        curves = {**to_tags("curve", self.curve), **to_tags("progress", self.progress)}
        measured = canonical_json(self.lm_eval)
        curves["suite.lm_eval"] = (
            measured if len(measured) <= MAX_TAG_CHARS else "{}"
        )  # some 60 metrics: lm-eval.json has them all
        return {"status": self.status, "suite.summary": canonical_json(rest), **curves}

    def row(self, home: str) -> dict[str, str]:
        """All but the curve, and the home, as one tag: what the leaderboard reads, one per cell. Empty where that is too long."""
        text = canonical_json(
            {
                "home": home,
                **{key: getattr(self, key) for key in FIELDS if key not in (*COMPARED, "curve")},
            }
        )
        return {ROW: text if len(text) <= MAX_TAG_CHARS else ""}


FIELDS = tuple(f.name for f in fields(CellSummary))
_KNOWN = frozenset(FIELDS)


def with_values(cell: CellSummary, **values: Any) -> CellSummary:
    """`dataclasses.replace` in a tenth of its time: a leaderboard of ten thousand rows does it four times for each."""
    return _holding({**vars(cell), **values})


def _holding(values: dict[str, Any]) -> CellSummary:
    """A summary of all its fields, without its constructor, which sets one after the other."""
    cell = object.__new__(CellSummary)
    object.__setattr__(cell, "__dict__", values)
    return cell


def from_tags(tags: dict[str, str]) -> CellSummary:
    """A summary from the tags of a cell's run; unknown keys, from a later version, are passed over.

    Raises:
        TrackingError: The tags were not written by this project, or were cut.
    """
    try:
        rest: dict[str, Any] = {
            key: value for key, value in json.loads(tags["suite.summary"]).items() if key in _KNOWN
        }
        names: dict[str, Any] = {key: tags[key] for key in NAMES}
        names |= {"arm": tags["suite.arm"], "architecture": json.loads(tags["architecture"])}
        names |= {name: of_tags(name, tags) for name in CURVES}
        names["lm_eval"] = json.loads(tags.get("suite.lm_eval", "{}"))
        names["attention_options"] = json.loads(
            tags.get("attention_options", "{}")
        )  # absent before there were variants with options
        return CellSummary(**names, **{"rivals": tags["suite.arm"], **rest})
    except (KeyError, ValueError, TypeError) as error:
        raise TrackingError(
            f"cell {tags.get('suite.cell', '?')}: its tags cannot be read ({error}); run: suite sync --verify"
        ) from error


def from_row(tags: Mapping[str, str]) -> tuple[CellSummary, str]:
    """A summary without its curve, and its home, from the tag of `CellSummary.row`.

    Raises:
        TrackingError: As `from_tags`.
    """
    try:
        stored = from_json(tags[ROW])  # in a third of the standard library's time
        home = stored.pop("home")
        values = {**dict.fromkeys(COMPARED), "curve": [], **stored}
        if values.keys() == _KNOWN:
            return _holding(values), home
        return CellSummary(**{key: value for key, value in values.items() if key in _KNOWN}), home
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise TrackingError(
            f"a cell's row cannot be read ({error}); run: suite sync --verify"
        ) from error


def read_definition(home: Home, sweep: str) -> Definition | None:
    """The sweep as it was last run, or None where the home does not hold it.

    Raises:
        TrackingError: A file is not what this version writes.
    """
    path = home.sweep_definition(sweep)
    try:
        config = SweepConfig.model_validate_json(path.read_bytes())
        cells = path.with_suffix(".cells")
        plan = Plan.model_validate_json(cells.read_bytes()) if cells.exists() else None
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise TrackingError(
            f"{path.parent}/{sweep}: not a sweep definition of this version: {error.errors()[0]['msg']}"
        ) from error
    if plan is None:
        return Definition(config)
    planned = {f"{cell.arm.key}/{cell.task.name}": cell for cell in plan.cells}
    studies: dict[str, dict[str, Any]] = {}
    chosen: dict[str, bool] = {}
    for state in read_states(read_plan(home, sweep), home).values():
        study = state.study
        studies[state.cell.key] = {
            "budget": study.budget,
            "saved_trials": study.saved_trials,
            "low": study.searched.low,
            "high": study.searched.high,
            "extensions": study.extensions,
        }
        if state.contest is not None and state.chosen is not None:
            chosen[state.cell.arm.key] = state.chosen
    return Definition(config, plan.world_size, planned, studies, chosen)


def summarise(cell: Cell, definition: Definition | None = None) -> CellSummary:
    """The summary of a cell as far as it has come.

    Args:
        cell: With at least one trial.
        definition: The sweep's; trials that it does not include are left out. None takes what was handed out for what was wanted.
    """
    spec = (cell.search or cell.confirm)[0].spec
    if definition is not None:
        cell = Cell(
            cell.arm,
            cell.task,
            *([t for t in ts if definition.includes(t.spec)] for ts in (cell.search, cell.confirm)),
        )
    best, confirmed = cell.best_search(), cell.confirmed()
    runs = [t.result for t in confirmed if t.result is not None and t.result.score is not None]
    scores = {
        str(t.spec.seed): t.result.score
        for t in confirmed
        if t.result is not None and t.result.score is not None
    }
    ended = [t.result for t in cell.search if t.result is not None]
    reference, reference_mean = (
        ({}, {}) if definition is None else definition.references(cell.arm, cell.task)
    )
    return CellSummary(
        sweep=spec.sweep,
        **_names(cell),
        score_mean=mean(scores.values()),
        score_std=stdev(scores.values()) if len(scores) > 1 else None,
        seeds=len(scores),
        validation_score=None if best is None or best.result is None else best.result.score,
        learning_rate=None if best is None else best.spec.learning_rate,
        higher_is_better=spec.task.higher_is_better,
        own_code=cell.arm.backbone.revision if cell.arm.backbone.trust_remote_code else None,
        **sizes([*runs, *reversed(ended)]),
        ended_at=max((r.finished_at for r in (*runs, *ended)), default=None),
        search_trials=len(ended),
        status=_status(cell, confirmed, definition),
        edge=_edge(cell, definition),
        reference=reference,
        reference_mean=reference_mean,
        **study_fields(cell, definition, higher_is_better=spec.task.higher_is_better),
        progress=progress(confirmed, higher_is_better=spec.task.higher_is_better),
        seed_scores=scores,
        **judge(confirmed, cell.search),
        **interval_fields(confirmed),
        lm_eval=over_seeds(read_record(t.folder.path) for t in confirmed if t.result is not None),
        **pretrain_cost([*runs, *ended]),
        **run_cost(runs),
        **search_cost(ended),
    )


def _names(cell: Cell) -> dict[str, Any]:
    """What the cell is called, and what it is compared with."""
    arm = cell.arm
    return {
        "backbone": arm.backbone.name,
        "attention": arm.attention.name,
        "attention_options": arm.attention.options,
        "method": arm.method,
        "architecture": arm.architecture,
        "task": cell.task,
        "arm": arm.key,
        "rivals": short_hash(arm.model_dump(mode="json", exclude={"attention", "pretrain"})),
        "conditions": short_hash(arm.model_dump(mode="json", exclude={"method", "architecture"})),
    }


def _status(cell: Cell, confirmed: Sequence[Trial], definition: Definition | None) -> str:
    """done: all seeds have a score; failed: none can get one; searching: trials left; not chosen: another one won; else partial."""
    trials = definition.search_trials(cell.key) if definition is not None else len(cell.search)
    seeds = set(
        definition.config.confirm.seeds
        if definition is not None
        else (t.spec.seed for t in confirmed)
    )
    if sum(t.result is not None for t in cell.search) < trials:
        return "searching"
    if definition is not None and definition.chosen.get(cell.arm.key) is False:
        return "not chosen"
    if cell.best_search() is None:
        return "failed"
    ended = {t.spec.seed: t.result for t in confirmed if t.result is not None}
    scored = {seed for seed, result in ended.items() if result.score is not None}
    if seeds and scored >= seeds:
        return "done"
    return "failed" if seeds and not scored and ended.keys() >= seeds else "partial"


def _edge(cell: Cell, definition: Definition | None) -> bool | None:
    """Whether the chosen learning rate lies at the end of its range, all extensions included: the best may lie beyond."""
    searched = definition.searched(cell.key) if definition is not None else None
    if searched is None or searched.fixed or cell.best_search() is None:
        return None
    return cell.edge(searched) is not None
