"""The model card of an exported model: `README.md` with the front matter that the hub reads. What is not known says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from suite.config.task import HubData
from suite.export.base import base_name
from suite.export.description import BASE, Description
from suite.train.restore import Restored

UNKNOWN = "unknown"
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
        interval_of: What it was found over.
        admitted: Whether the row was; None = not known.
        rejected: Why not.
    """

    seed_scores: dict[str, float] = field(default_factory=dict)
    score_mean: float | None = None
    score_std: float | None = None
    interval: tuple[float, float] | None = None
    interval_of: str = ""
    admitted: bool | None = None
    rejected: Sequence[str] = ()


def write_card(restored: Restored, description: Description, facts: Facts, folder: Path) -> None:
    """`README.md`."""
    front = yaml.safe_dump(front_matter(restored, description), sort_keys=False, allow_unicode=True)
    (folder / "README.md").write_text(
        f"---\n{front}---\n\n" + "\n".join(body(restored, description, facts)) + "\n",
        encoding="utf-8",
    )


def front_matter(restored: Restored, description: Description) -> dict[str, Any]:
    """The hub's fields; a licence is never guessed."""
    arm, task, result = description.arm, restored.spec.task, restored.result
    data = task.data.hub if isinstance(task.data, HubData) else None
    scores = [{"type": name, "value": round(value, 4)} for name, value in result.scores.items()]
    dataset = {"name": task.name, "type": data or task.name, "split": "test"}
    entry = {"task": {"type": task.kind}, "dataset": dataset, "metrics": scores}
    return {
        "license": UNKNOWN,
        "library_name": LIBRARIES[description.format],
        "base_model": base_name(restored),
        "base_model_relation": "finetune" if description.format == "transformers" else "adapter",
        **({"datasets": [data]} if data else {}),
        "pipeline_tag": PIPELINES.get(restored.objective.head.kind, "text-generation"),
        "metrics": list(result.scores),
        "tags": ["petl-suite", arm.method, f"attention:{arm.attention.name}"],
        "model-index": [{"name": folder_name(description), "results": [entry]}],
    }


def folder_name(description: Description) -> str:
    return f"{description.arm.key}-{description.task}-seed{description.seed}"


def body(restored: Restored, description: Description, facts: Facts) -> Iterator[str]:
    """The text, line by line."""
    arm, spec, result = description.arm, restored.spec, restored.result
    yield f"# {arm.backbone.name}, {arm.method}, on {spec.task.name}"
    yield ""
    yield f"{spec.task.description} ({spec.task.source})."
    if facts.admitted is False:
        yield f"\n**Not admitted to the leaderboard**: {'; '.join(facts.rejected)}."
    yield from (
        "",
        "## Scores on test",
        "",
        "| of | " + " | ".join(result.scores) + " |",
        "| --- |" + " --- |" * len(result.scores),
    )
    yield (
        f"| this model (seed {spec.seed}) | "
        + " | ".join(f"{value:.2f}" for value in result.scores.values())
        + " |"
    )
    yield from _row_lines(facts)
    yield from ("", "## Cost and size", "", *_cost_lines(restored))
    yield from ("", "## How it was made", "", *_making_lines(restored, description))
    yield from ("", "## How to load it", "", *loading_lines(restored, description))
    yield from ("", "## Licence", "", *_licence_lines(restored))


def _row_lines(facts: Facts) -> Iterator[str]:
    if facts.score_mean is None:
        return
    spread = "" if facts.score_std is None else f" ± {facts.score_std:.2f} (standard deviation)"
    interval = "interval unknown"
    if facts.interval is not None:
        low, high = facts.interval
        interval = f"95% interval {low:.2f} to {high:.2f}" + (
            f" (over {facts.interval_of})" if facts.interval_of else ""
        )
    seeds = ", ".join(sorted(facts.seed_scores, key=int))
    yield ""
    yield f"Over seeds {seeds}: {facts.score_mean:.2f}{spread}, {interval}. This seed was taken for its validation score, or by hand."


def _cost_lines(restored: Restored) -> Iterator[str]:
    result = restored.result
    train, size = result.phases.get("train"), result.parameters
    if train is None or train.energy_kwh is None:
        yield f"- Energy of training: {UNKNOWN}"
    else:
        yield f"- Energy of training: {1000 * train.energy_kwh:.4g} Wh ({train.energy_source}), {train.seconds:.1f} s"
    if size is not None:
        yield f"- Parameters: {size.total:,}, of which {size.trainable:,} were trained ({size.trainable_head:,} of them in the task's head)"


def _making_lines(restored: Restored, description: Description) -> Iterator[str]:
    spec, result = restored.spec, restored.result
    options = {
        **spec.arm.architecture,
        **({"attention": spec.arm.attention.options} if spec.arm.attention.options else {}),
    }
    yield f"- Base: {base_name(restored)}, " + ", ".join(
        f"{key} {value}" for key, value in description.base_identity.items()
    )
    yield f"- Attention {spec.arm.attention.name}, method {spec.arm.method}" + (
        f", {options}" if options else ""
    )
    yield f"- Learning rate {spec.learning_rate:.4g}, seed {spec.seed}, best of {len(result.epochs)} epochs: {result.best_epoch}"
    yield f"- Data: {_data(restored)}, rows {result.splits}, SHA-256 {result.data_hash[:16] or UNKNOWN}"
    git = result.provenance.get("git") or {}
    dirty = ", edited" if git.get("dirty") else ""
    yield f"- Trial {description.trial}; suite {version('petl-suite')}, revision {git.get('revision') or UNKNOWN}{dirty}"
    kept = {
        k: v
        for k, v in (result.provenance.get("versions") or {}).items()
        if k in ("torch", "transformers", "peft") and v
    }
    yield "- Versions: " + (", ".join(f"{key} {value}" for key, value in kept.items()) or UNKNOWN)
    if description.note:
        yield f"- Note: {description.note}"


def _data(restored: Restored) -> str:
    data, revision = restored.spec.task.data, restored.result.provenance.get("data_revision")
    if not isinstance(data, HubData):
        return f"generated, {restored.spec.task.name}"
    return f"{data.hub} {data.config or ''}".strip() + f", revision {revision or UNKNOWN}"


def loading_lines(restored: Restored, description: Description) -> Iterator[str]:
    """A snippet in the words of the format, and the one that always holds."""
    yield from (
        "```python",
        "import suite",
        "",
        f'model, tokenizer = suite.load("{folder_name(description)}")',
        "```",
    )
    known: Any = restored.model
    name = type(known.get_base_model() if hasattr(known, "get_base_model") else known).__name__
    if restored.objective.head.kind == "choice":
        yield from (
            "",
            "Inputs are (rows, choices, tokens) there. Without the suite, every choice is scored as a text of its own.",
        )
    if description.format == "transformers":
        yield from (
            "",
            "or, without the suite,",
            "",
            "```python",
            f"from transformers import {name}",
            "",
        )
        yield from (f'model = {name}.from_pretrained("{folder_name(description)}")', "```")
    if description.format == "peft":
        files = (
            ["from importlib.resources import files", ""]
            if restored.resolved.origin == "package"
            else []
        )
        yield from (
            "",
            "or, without the suite,",
            "",
            "```python",
            *files,
            "from peft import PeftModel",
            f"from transformers import {name}",
            "",
        )
        yield from _base_lines(restored, description, name)
        yield from (f'model = PeftModel.from_pretrained(base, "{folder_name(description)}")', "```")


def _base_lines(restored: Restored, description: Description, name: str) -> Iterator[str]:
    """How the base is had; the head's size and the padding token are not in a checkpoint that was not made for this task."""
    config: Any = restored.model.config
    head = restored.objective.head
    extra = (
        f", num_labels={head.num_labels}, pad_token_id={config.pad_token_id}"
        if head.kind in ("classification", "regression")
        else ""
    )
    if description.base == "copy":
        yield f'base = {name}.from_pretrained("{folder_name(description)}/{BASE}")'
        return
    where, revision = f'"{base_name(restored)}"', description.base_identity.get("commit")
    if restored.resolved.origin == "package":
        package, _, inside = base_name(restored).removeprefix("package:").partition("/")
        where = f'str(files("{package}") / "{inside}")'
    yield (
        f"base = {name}.from_pretrained({where}"
        + (f', revision="{revision}"' if revision else "")
        + f"{extra})"
    )


def _licence_lines(restored: Restored) -> Iterator[str]:
    yield f"- Of this model: {UNKNOWN}; it depends on those of the base model and of the data"
    yield f"- Of the base model: {UNKNOWN} to the suite; see {base_name(restored)}"
    yield f"- Of the data: {UNKNOWN} to the suite; see {_data(restored)}"
