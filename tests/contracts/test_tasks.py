"""What every task file must keep; a new file in tasks/ is tested with no test edited."""

from __future__ import annotations

import math
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from transformers import ByT5Tokenizer

from suite.backbones.base import Kind
from suite.config.sweep import LimitConfig
from suite.config.task import HubData, LabelTask, LanguageModelTask, TaskConfig, load_task
from suite.config.task_files import task_paths
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.prepare import Prepared, prepare
from suite.errors import IncompatibleError
from suite.metrics.items import STATISTICS, Items, statistic_of
from suite.train.arms import head_for
from tests.rows import CODED, GROUP_ROWS, SIZES, write_rows
from tests.toy import resolved_tiny

NAMES = sorted(task_paths())
FAMILIES: list[tuple[Kind, str]] = [
    ("encoder", "head"),
    ("encoder-decoder", "text"),
    ("decoder", "head"),
    ("decoder", "text"),
]
REFUSED: dict[str, set[tuple[Kind, str]]] = {
    "language-model": {("encoder", "head"), ("encoder-decoder", "text")},
    "generation": {("encoder", "head")},
    "instruction": {("encoder", "head")},
}
"""Kinds of task that a kind of backbone cannot answer, beside numbers as a decoder's text."""
TRAINING = TrainingConfig(max_length=128, target_max_length=32, stride=24)
OF_KIND = {"encoder-decoder": "t5", "encoder": "bert", "decoder": "gpt2"}
every_task = pytest.mark.parametrize("name", NAMES)


def shrunk(name: str) -> TaskConfig:
    """The task with as few rows held out as there are; skips one whose file makes its rows from we do not know what."""
    task = load_task(name)
    if task.code is not None and name not in CODED:
        pytest.skip(f"tests/rows.py has no raw rows of {name}")
    return task.model_copy(update={"splits": task.splits.model_copy(update={"held_out": 6})})


def refused(task: TaskConfig, family: tuple[Kind, str]) -> bool:
    number = isinstance(task, LabelTask) and task.is_regression
    return family in REFUSED.get(task.kind, set()) or (number and family == ("decoder", "text"))


def objective(task: TaskConfig, family: tuple[Kind, str]) -> Objective:
    kind, decoder = family
    return make_objective(
        task, kind=kind, tokenizer=ByT5Tokenizer(), training=TRAINING, decoder_objective=decoder
    )  # type: ignore[arg-type]


def some_family(task: TaskConfig) -> tuple[Kind, str]:
    return next(family for family in FAMILIES if not refused(task, family))


def prepared(task: TaskConfig, goal: Objective, folder: Path, **limit: int) -> Prepared:
    root = write_rows(task, folder / "data") if isinstance(task.data, HubData) else None
    return prepare(task, goal, limit=LimitConfig(**limit), data_root=root, cache=folder / "cache")


@every_task
def test_it_says_what_it_is_and_survives_storing(name: str) -> None:
    task = load_task(name)
    assert (task.name, task.kind) == (name, task.kind)
    assert len(task.description) > 10 and len(task.source) > 10
    adapter: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
    assert adapter.validate_json(adapter.dump_json(task)) == task


@every_task
@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_every_family_reads_its_rows_or_says_why_not(
    name: str, family: tuple[Kind, str], tmp_path: Path
) -> None:
    task = shrunk(name)
    if refused(task, family):
        with pytest.raises(IncompatibleError, match=name):
            objective(task, family)
        return
    goal = objective(task, family)
    # `suite params --task` counts with the head that a trial trains.
    if family != ("decoder", "text"):
        assert head_for(resolved_tiny(OF_KIND[family[0]]), task, num_labels=2) == goal.head
    limit = {"train": 12, "validation": 6, "test": 6}
    data = prepared(task, goal, tmp_path, **limit)
    for split in ("train", "validation", "test"):
        rows = list(data.split(split, confirm=True))  # type: ignore[arg-type]
        assert rows and data.sizes[split] == len(rows)
        for batch in (
            [goal.collate(rows[:2])]
            if split == "train"
            else [goal.collate(rows[:2]), goal.collate_eval(rows[:2])]
        ):
            assert 0 < batch["input_ids"].shape[-1] <= goal.positions
            assert batch["attention_mask"].shape == batch["input_ids"].shape


@every_task
def test_the_prompt_holds_every_text_of_the_row(name: str, tmp_path: Path) -> None:
    """What T5 reads is the template with the row's texts in it, and the template's own words in their order."""
    task = shrunk(name)
    family: tuple[Kind, str] = ("encoder-decoder", "text")
    template = getattr(task, "text_to_text", None)
    if template is None:
        assert isinstance(task, LanguageModelTask)
        return
    roomy = TRAINING.model_copy(update={"max_length": 2000, "target_max_length": 1000})
    goal = make_objective(
        task, kind=family[0], tokenizer=ByT5Tokenizer(), training=roomy, decoder_objective="text"
    )
    data = prepared(task, goal, tmp_path, train=8, validation=8, test=8)
    read = ByT5Tokenizer().decode(
        data.split("train", confirm=False)[0]["input_ids"], skip_special_tokens=True
    )
    literals = [
        text.strip() for text, _, _, _ in string.Formatter().parse(template) if text.strip()
    ]
    places = [read.find(text) for text in literals]
    assert -1 not in places and places == sorted(places), f"{read!r} is not {template!r} filled in"
    assert "{" not in read


@every_task
def test_its_splits_follow_its_rule_and_share_no_row(name: str, tmp_path: Path) -> None:
    task = shrunk(name)
    goal = objective(task, some_family(task))
    data = prepared(task, goal, tmp_path)
    index = {
        split: [*dict.fromkeys(data.split(split, confirm=True)["index"])] for split in data.sizes
    }  # type: ignore[arg-type]
    train = data.split("train", confirm=False)
    assert ("group" in train.column_names) == bool(getattr(task, "group", None))
    assert sum(map(len, index.values())) == len({row for rows in index.values() for row in rows})
    if isinstance(task.data, HubData) and not task.in_order:
        assert {split: len(rows) for split, rows in index.items()} == expected_sizes(task)


def expected_sizes(task: TaskConfig) -> dict[str, int]:
    """With fewer rows than READ's border, so that its rule halves validation, whole groups at a time."""
    rows = {split: SIZES.get(split, SIZES["validation"]) for split in task.splits.sources}
    if task.splits.rule == "named":
        return dict(zip(("train", "validation", "test"), rows.values(), strict=True))
    if task.splits.rule == "held-out":
        held_out = task.splits.held_out
        own = rows.get(task.splits.test or "", held_out)
        return {
            "train": rows["train"] - held_out * (1 if task.splits.test else 2),
            "validation": held_out,
            "test": own,
        }
    size = GROUP_ROWS if getattr(task, "group", None) else 1
    half = rows["validation"] // 2 // size * size
    return {"train": rows["train"], "validation": half, "test": rows["validation"] - half}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if getattr(load_task(name), "group", None)]
)
def test_rows_of_a_group_stay_together(name: str, tmp_path: Path) -> None:
    task = shrunk(name)
    data = prepared(task, objective(task, ("encoder", "head")), tmp_path, validation=7)
    groups = [data.split(split, confirm=True)["group"] for split in ("train", "validation", "test")]  # type: ignore[arg-type]
    for here in groups:
        assert all([*here].count(group) == GROUP_ROWS for group in here)
    assert len(groups[1]) == 6, "a limit of 7 rows takes two groups of three"


@every_task
def test_its_metrics_are_sums_over_items_and_full_where_all_is_right(name: str) -> None:
    task = load_task(name)
    if task.code is not None and task.code.score:
        assert not set(task.metrics) & STATISTICS.keys()
        return
    goal = objective(task, some_family(task))
    golds, answers, groups = items_of(task)
    perfect = goal.score(right_answers(task, golds), golds, groups)
    if task.item_score:
        assert perfect == {"perplexity": pytest.approx(1.0)}, "no loss is perplexity 1"
    else:
        assert perfect == dict.fromkeys(task.metrics, pytest.approx(100.0))
    found = goal.score(answers, golds, groups)
    for metric in task.metrics:
        statistic = statistic_of(task, metric)
        assert statistic is not None, f"{metric} has no interval"
        sums = statistic.rows(Items(answers, golds, groups)).sum(axis=0)
        assert float(statistic.score(np.asarray(sums))) == pytest.approx(found[metric], abs=1e-8)
    assert math.isfinite(task.score_of(found)) and task.utility(
        task.score_of(perfect)
    ) >= task.utility(task.score_of(found))


def items_of(task: TaskConfig) -> tuple[list[Any], list[Any], list[str] | None]:
    """Golds, and answers of which some are wrong."""
    draw = random.Random(7)
    groups = [f"q{n // GROUP_ROWS}" for n in range(60)] if getattr(task, "group", None) else None
    if isinstance(task, LabelTask):
        classes = range(task.num_labels)
        if task.is_regression:
            golds: list[Any] = [draw.random() for _ in range(60)]
            wrong: list[Any] = [0.5] * 60
        else:
            golds = [draw.choice(classes) for _ in range(60)]
            wrong = [draw.choice([-1, *classes]) for _ in range(60)]
        pairs = zip(golds, wrong, strict=True)
        answers = [gold if draw.random() < 0.7 else other for gold, other in pairs]
        return golds, answers, groups
    if task.item_score:
        golds = [draw.randint(1, 9) for _ in range(60)]
        return golds, [3.0 * count * draw.random() for count in golds], None
    texts = [f"the cat number {n} saw {draw.choice('abc')} dog #### {n}" for n in range(60)]
    answers = [
        text if draw.random() < 0.7 else f"the cat said nothing of {n} #### 99"
        for n, text in enumerate(texts)
    ]
    return (
        ([[text, "or this"] for text in texts] if task.kind == "question-answering" else texts),
        answers,
        None,
    )


def right_answers(task: TaskConfig, golds: list[Any]) -> list[Any]:
    if task.item_score:
        return [0.0] * len(golds)
    return [gold[0] for gold in golds] if task.kind == "question-answering" else golds
