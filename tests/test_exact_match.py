"""Exact match of the answer inside a text: GSM8K's final number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from suite.config.task import GenerationTask, load_task, make_task
from suite.errors import ConfigError
from suite.metrics.items import Items, statistic_of, unit_rows
from suite.metrics.text import exact_matches, score_texts
from tests.test_generation import learnt
from tests.test_objectives import objective


def gsm8k() -> GenerationTask:
    task = load_task("gsm8k")
    assert isinstance(task, GenerationTask) and task.answer is not None
    return task


@pytest.mark.parametrize(
    ("written", "gold", "right"),
    [
        ("so 6 x 12 = 72\n#### 72", "16 + 56\n#### 72", True),
        ("#### 1,000", "#### 1000", True),
        ("#### 1000.", "#### 1,000", True),
        ("#### $18", "#### 18", True),
        ("#### -5", "#### 5", False),
        ("#### 72.5", "#### 72", False),
        ("#### 7 and then #### 8", "#### 7", True),
        ("#### 7 and then #### 8", "#### 8", False),
        ("the answer is 72", "#### 72", False),
        ("", "#### 72", False),
        ("####", "#### 72", False),
        ("#### 72", "no number", False),
        ("no number", "no number", False),
    ],
)
def test_only_the_number_behind_the_mark_counts(written: str, gold: str, right: bool) -> None:
    assert exact_matches([written], [gold], answer=gsm8k().answer).tolist() == [float(right)]


def test_without_a_pattern_whole_texts_are_compared() -> None:
    assert exact_matches([" yes ", "yes.", "1,0"], ["yes", "yes", "10"]).tolist() == [1.0, 0.0, 0.0]


def test_the_score_is_in_percent_and_stands_beside_others() -> None:
    scores = score_texts(
        ["exact_match", "rouge1"], ["#### 3", "#### 4"], ["#### 3", "#### 5"], answer=gsm8k().answer
    )
    assert scores["exact_match"] == 50.0 and set(scores) == {"exact_match", "rouge1"}


def test_its_statistic_knows_the_tasks_pattern() -> None:
    draw = np.random.default_rng(0)
    golds = [f"text {n}\n#### {n % 7:,}" for n in range(60)]
    written = [f"other\n#### {draw.integers(0, 3) + n % 7}" for n in range(60)]
    statistic = statistic_of(gsm8k(), "exact_match")
    assert statistic is not None
    rows = unit_rows(statistic, Items(written, golds))
    for _ in range(5):
        chosen = draw.integers(0, 60, 60)
        expected = (
            100.0
            * exact_matches(
                [written[i] for i in chosen], [golds[i] for i in chosen], answer=gsm8k().answer
            ).mean()
        )
        assert float(statistic.score(rows[chosen].sum(0))) == pytest.approx(expected)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_model_that_has_learnt_the_solutions_is_right(family: str) -> None:
    columns = {"question": ["2 and 3?", "4 and 4?"], "answer": ["2+3=5\n#### 5", "4+4=8\n#### 8"]}
    goal: Any = objective(
        "decoder" if family == "gpt2" else "encoder-decoder",
        "gsm8k",
        max_length=64,
        target_max_length=24,
    )
    model = learnt(goal, family, columns)
    rows = [
        dict(zip(("input_ids", "labels", "length"), values, strict=True))
        for values in _columns(goal, columns)
    ]
    with torch.no_grad():
        written = goal.predict(model, goal.collate(rows), synced=False)
    assert goal.scores(written, columns["answer"]) == {"exact_match": 100.0}
    assert goal.scores(written[::-1], columns["answer"]) == {"exact_match": 0.0}


def _columns(goal: Any, columns: dict[str, list[str]]) -> Any:
    features = goal.encode(columns)
    return zip(features["input_ids"], features["labels"], features["length"], strict=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer": "#### (.*"}, "answer: '#### ...' is not a regular expression: missing"),
        ({"answer": "#### .*"}, "has 0 groups, expected one"),
        ({"answer": "(a)(b)"}, "has 2 groups, expected one"),
        ({"metrics": ["bleu"]}, r"answer is what exact_match compares, but metrics are \['bleu'\]"),
    ],
)
def test_mistakes_in_the_pattern_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_task({**gsm8k().model_dump(mode="json"), **changes}, where="f")
