"""The model card of an exported model: `README.md` with the front matter that the hub reads.

Where a fact is not known, the card says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from suite.config.task import FileData, HubData
from suite.export.base import base_name
from suite.export.description import Description
from suite.export.snippets import loading_lines
from suite.train.restore import Restored

UNKNOWN = "unknown"
# The hub's pipeline tag by kind of head; all other heads generate text.
PIPELINES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "masked": "fill-mask",
    "choice": "multiple-choice",
    "span": "question-answering",
}
LIBRARIES = {"transformers": "transformers", "peft": "peft", "suite": "petl-suite"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the cell's row knows beside the exported run.

    Attributes:
        seed_scores: Test score by seed.
        interval: 95% interval of the mean test score, or None.
        interval_of: What the interval was found over.
        admitted: Whether the leaderboard admits the row; None = not known.
        rejected: Why it does not.
    """

    seed_scores: dict[str, float] = field(default_factory=dict)
    score_mean: float | None = None
    score_std: float | None = None
    interval: tuple[float, float] | None = None
    interval_of: str = ""
    admitted: bool | None = None
    rejected: Sequence[str] = ()


def write_card(
    restored: Restored, description: Description, facts: Facts, folder: Path, *, name: str
) -> None:
    """Write `README.md`.

    Args:
        name: What the lines of Python call the folder.
    """
    # The hub shows the fields to people, so they keep the order in which they were written.
    front = yaml.safe_dump(front_matter(restored, description), sort_keys=False, allow_unicode=True)
    text = "\n".join(body(restored, description, facts, name))
    (folder / "README.md").write_text(f"---\n{front}---\n\n{text}\n", encoding="utf-8")


def front_matter(restored: Restored, description: Description) -> dict[str, Any]:
    """The hub's fields; a licence is never guessed."""
    arm = description.arm
    task = restored.spec.task
    scores = restored.result.scores
    metrics = [{"type": name, "value": round(value, 4)} for name, value in scores.items()]
    front: dict[str, Any] = {
        "license": UNKNOWN,
        "library_name": LIBRARIES[description.format],
    }
    # Of weights that began at random no checkpoint is the base.
    if restored.resolved.origin != "random":
        relation = "finetune" if description.format == "transformers" else "adapter"
        front |= {"base_model": base_name(restored), "base_model_relation": relation}
    dataset = task.name
    if isinstance(task.data, HubData):
        dataset = task.data.hub
        front["datasets"] = [dataset]
    entry = {
        "task": {"type": task.kind},
        "dataset": {"name": task.name, "type": dataset, "split": "test"},
        "metrics": metrics,
    }
    front["pipeline_tag"] = PIPELINES.get(restored.objective.head.kind, "text-generation")
    front["metrics"] = list(scores)
    front["tags"] = ["petl-suite", arm.method, f"attention:{arm.attention.name}"]
    title = f"{arm.key}-{description.task}-seed{description.seed}"
    front["model-index"] = [{"name": title, "results": [entry]}]
    return front


def body(restored: Restored, description: Description, facts: Facts, name: str) -> Iterator[str]:
    """Yield the card's text, line by line."""
    arm = description.arm
    spec = restored.spec
    scores = restored.result.scores
    yield f"# {arm.backbone.name}, {arm.method}, on {spec.task.name}"
    yield ""
    yield f"{spec.task.description} ({spec.task.source})."
    # None means that nothing was checked, which is no verdict.
    if facts.admitted is False:
        yield f"\n**Not admitted to the leaderboard**: {'; '.join(facts.rejected)}."
    values = [f"{value:.2f}" for value in scores.values()]
    yield from _heading("Scores on test")
    yield "| of | " + " | ".join(scores) + " |"
    yield "| --- |" + " --- |" * len(scores)
    yield f"| this model (seed {spec.seed}) | " + " | ".join(values) + " |"
    yield from _row_lines(facts)
    yield from _heading("Cost and size")
    yield from _cost_lines(restored)
    yield from _heading("How it was made")
    yield from _making_lines(restored, description)
    yield from _heading("How to load it")
    yield from loading_lines(restored, description, name)
    yield from _heading("Licence")
    yield from _licence_lines(restored)


def _heading(text: str) -> tuple[str, ...]:
    return "", f"## {text}", ""


def _row_lines(facts: Facts) -> Iterator[str]:
    """Yield what the leaderboard says about all seeds of the cell."""
    if facts.score_mean is None:
        return
    spread = ""
    if facts.score_std is not None:
        spread = f" ± {facts.score_std:.2f} (standard deviation)"
    interval = "interval unknown"
    if facts.interval is not None:
        low, high = facts.interval
        interval = f"95% interval {low:.2f} to {high:.2f}"
        if facts.interval_of:
            interval += f" (over {facts.interval_of})"
    # JSON keys are texts: without `key`, seed 10 would come before 2.
    seeds = ", ".join(sorted(facts.seed_scores, key=int))
    yield ""
    yield (
        f"Over seeds {seeds}: {facts.score_mean:.2f}{spread}, {interval}."
        " This seed was chosen by its validation score, or by hand."
    )


def _cost_lines(restored: Restored) -> Iterator[str]:
    train = restored.result.phases.get("train")
    size = restored.result.parameters
    if train is None or train.energy_kwh is None:
        yield f"- Energy of training: {UNKNOWN}"
    else:
        energy_wh = 1000 * train.energy_kwh
        yield (
            f"- Energy of training: {energy_wh:.4g} Wh ({train.energy_source}),"
            f" {train.seconds:.1f} s"
        )
    for made in restored.result.made_before:
        if made.cost is None:
            continue
        spent = UNKNOWN
        if made.cost.energy_kwh is not None:
            spent = f"{1000 * made.cost.energy_kwh:.4g} Wh ({made.cost.energy_source})"
        yield f"- Energy of preparing it from training data: {spent}, {made.cost.seconds:.1f} s"
    if size is not None:
        yield (
            f"- Parameters: {size.total:,}, of which {size.trainable:,} were trained"
            f" ({size.trainable_head:,} of them in the task's head)"
        )


def _making_lines(restored: Restored, description: Description) -> Iterator[str]:
    spec = restored.spec
    result = restored.result
    identity = ", ".join(f"{key} {value}" for key, value in description.base_identity.items())
    yield f"- Base: {base_name(restored)}, {identity}"
    options = dict(spec.arm.architecture)
    if spec.arm.attention.options:
        options["attention"] = spec.arm.attention.options
    arm = f"- Attention {spec.arm.attention.name}, method {spec.arm.method}"
    if options:
        arm += f", {options}"
    yield arm
    kept = f"best of {len(result.epochs)} epochs: {result.best_epoch}"
    if spec.training.keep == "last":
        kept = f"last of {len(result.epochs)} epochs"
    yield f"- Learning rate {spec.learning_rate:.4g}, seed {spec.seed}, {kept}"
    if result.precision is not None:
        scored = f"- Scored in {result.precision}"
        if result.precision.endswith("autocast"):
            scored += "; the weights are fp32, and answers of them may differ in close cases"
        yield scored
    # The first digits are enough to compare by eye.
    data_hash = result.data_hash[:16] or UNKNOWN
    yield f"- Data: {_data(restored)}, rows {result.splits}, SHA-256 {data_hash}"
    git = result.provenance.get("git") or {}
    revision = git.get("revision") or UNKNOWN
    if git.get("dirty"):
        revision += ", with uncommitted changes"
    yield f"- Trial {description.trial}; suite {version('petl-suite')}, revision {revision}"
    known = result.provenance.get("versions") or {}
    versions = []
    for package in ("torch", "transformers", "peft"):
        if known.get(package):
            versions.append(f"{package} {known[package]}")
    yield "- Versions: " + (", ".join(versions) or UNKNOWN)
    if description.note:
        yield f"- Note: {description.note}"


def _data(restored: Restored) -> str:
    data = restored.spec.task.data
    if isinstance(data, FileData):
        return f"files {', '.join(data.paths.values())}"
    if not isinstance(data, HubData):
        return f"generated, {restored.spec.task.name}"
    name = f"{data.hub} {data.config or ''}".strip()
    return f"{name}, revision {restored.result.provenance.get('data_revision') or UNKNOWN}"


def _licence_lines(restored: Restored) -> Iterator[str]:
    yield f"- Of this model: {UNKNOWN}; it depends on those of the base model and of the data"
    yield f"- Of the base model: {UNKNOWN} to the suite; see {base_name(restored)}"
    yield f"- Of the data: {UNKNOWN} to the suite; see {_data(restored)}"
