"""Kinds of task: what their files may say, which scores are better, and what a plan refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from suite.config.task import TaskConfig, load_task, make_task
from suite.data.objective import fill
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.record.folder import Home
from suite.record.spec import Phase
from suite.registry import yaml_names
from tests.sweeps import run_all, toy_sweep
from tests.texts import prose_task, toy_translation
from tests.tiny import tiny_choice

TEXT_TASKS = """
kind: {kind}
description: a toy
source: ours
data: {{hub: toy/{kind}}}
splits: {{rule: named, test: test}}
"""
PROSE = TEXT_TASKS.format(kind="language-model") + "inputs: [text]\nstride: 32\n"
PAIRS = (
    TEXT_TASKS.format(kind="generation")
    + 'inputs: [en]\ntarget: de\ntext_to_text: "translate: {en}"\nmetrics: [bleu]\n'
)


@pytest.fixture
def text_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tasks `prose` and `pairs` known."""
    folder = tmp_path / "user" / "tasks"
    folder.mkdir(parents=True)
    (folder / "prose.yaml").write_text(PROSE)
    (folder / "pairs.yaml").write_text(PAIRS)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path / "user"))


def planned(task: str, family: str = "gpt2", **changes: Any) -> Plan:
    training = {"epochs": 1, "batch_size": 8, "max_length": 64, **changes}
    return make_plan(
        toy_sweep(
            tasks=[task], backbones=[tiny_choice(family)], methods=["full"], training=training
        ),
        where="toy.yaml",
    )


def test_the_tasks_of_the_attention_papers_are_there() -> None:
    kinds = {name: load_task(name).kind for name in yaml_names("tasks")}
    assert {name for name, kind in kinds.items() if kind == "language-model"} == {
        "ptb",
        "wikitext2",
        "wikitext103",
    }
    written = {"wmt14-en-de", "wmt14-de-en", "multi30k-en-de", "cnn-dailymail", "multi-news"}
    assert {name for name, kind in kinds.items() if kind == "generation"} >= written


def test_both_directions_of_wmt_read_the_same_columns() -> None:
    there = load_task("wmt14-en-de")
    back = load_task("wmt14-de-en")
    assert there.kind == back.kind == "generation"
    assert (there.inputs, there.target) == ([back.target], back.inputs[0])
    assert there.data == back.data


@pytest.mark.parametrize(
    "task", [prose_task(), toy_translation(), load_task("rte"), load_task("cnn-dailymail")]
)
def test_a_task_of_any_kind_survives_storing(task: TaskConfig) -> None:
    adapter: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
    assert adapter.validate_json(adapter.dump_json(task)) == task


def test_a_file_without_kind_is_classification() -> None:
    fields = load_task("rte").model_dump(mode="json")
    del fields["kind"]
    assert make_task(fields, where="f") == load_task("rte")


@pytest.mark.parametrize(
    ("name", "changes", "error", "says"),
    [
        (
            "ptb",
            {"kind": "language-modell"},
            UnknownNameError,
            "f: kind: unknown kind of task .* did you mean language-model",
        ),
        ("ptb", {"text_to_text": "{sentence}"}, ConfigError, "unknown key 'text_to_text'"),
        ("ptb", {"inputs": ["a", "b"]}, ConfigError, "inputs: .*at most 1 item"),
        ("ptb", {"metrics": ["bleu"]}, ConfigError, "metrics.0: .*'perplexity', got 'bleu'"),
        ("ptb", {"stride": 0}, ConfigError, "stride: .*greater than or equal to 1, got 0"),
        ("rte", {"metrics": ["perplexity"]}, ConfigError, "metrics.0"),
        ("stsb", {"label": {"range": [5.0, 0.0]}}, ConfigError, "range .* from low to high"),
        (
            "stsb",
            {"label": {"range": [0.0, 5.0], "step": 1e-300}},
            ConfigError,
            "at most 100,000 steps of 1e-300",
        ),
        ("multi30k-en-de", {"target": "en"}, ConfigError, "target 'en' is one of the inputs"),
        (
            "multi30k-en-de",
            {"text_to_text": "{de}"},
            ConfigError,
            r"text_to_text uses \['de'\], but inputs are \['en'\]",
        ),
        (
            "multi30k-en-de",
            {"text_to_text": "{en:>300000000}"},
            ConfigError,
            "{en} has a format or conversion, expected the name of a column alone",
        ),
        ("multi30k-en-de", {"text_to_text": "{en:d}"}, ConfigError, "has a format"),
        ("multi30k-en-de", {"text_to_text": "{en!x}"}, ConfigError, "has a format"),
        ("wic", {"pair": ["{word}", "x}"]}, ConfigError, "f: pair.1: got 'x}': Single '}'"),
        ("multi30k-en-de", {"metrics": ["accuracy"]}, ConfigError, "metrics.0"),
        (
            "multi30k-en-de",
            {"headline": "rouge1"},
            ConfigError,
            r"headline 'rouge1' is none of the metrics \['bleu'\]",
        ),
        ("rte", {"name": "mean"}, ConfigError, "'mean' names the mean over tasks"),
    ],
)
def test_mistakes_in_a_file_are_named(
    name: str, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make_task({**load_task(name).model_dump(mode="json"), **changes}, where="f")


def test_a_column_may_have_a_dot_in_its_name() -> None:
    assert fill("{{x}} {a.b}: {c[0]}", {"a.b": ["one"], "c[0]": [2]}) == ["{x} one: 2"]


def test_the_headline_is_one_metric_or_the_mean() -> None:
    scores = {"rouge1": 40.0, "rouge2": 20.0, "rougeL": 30.0}
    task = load_task("cnn-dailymail")
    assert task.score_of(scores) == 40.0
    assert task.model_copy(update={"headline": None}).score_of(scores) == pytest.approx(30.0)


def test_less_perplexity_is_more_utility() -> None:
    task = prose_task()
    assert not task.higher_is_better and task.utility(20.0) > task.utility(30.0)
    assert load_task("rte").higher_is_better and load_task("rte").utility(30.0) > load_task(
        "rte"
    ).utility(20.0)


@pytest.mark.usefixtures("text_tasks")
def test_a_study_looks_for_the_least_perplexity_and_confirms_it(tmp_path: Path) -> None:
    plan = planned("prose")
    home = Home(tmp_path / "home")
    rates = run_all(
        TrialQueue(plan, home, slots=1), home, score=lambda spec: 1e5 * spec.learning_rate
    )
    search = [spec.learning_rate for spec in rates if spec.phase is Phase.SEARCH]
    assert {spec.learning_rate for spec in rates if spec.phase is Phase.CONFIRM} == {min(search)}
    low = plan.cells[0].learning_rate.low
    high = plan.cells[0].learning_rate.high
    assert min(search[3:]) < 1.5 * low < 0.5 * high, (
        "what the sampler proposes after the start goes to the good end"
    )


@pytest.mark.usefixtures("text_tasks")
@pytest.mark.parametrize(
    ("task", "family", "training", "says"),
    [
        ("prose", "bert", {}, "task prose on bert-base: .*an encoder backbone .*decoder-only"),
        ("prose", "t5", {}, "an encoder-decoder backbone"),
        ("prose", "gpt2", {"max_length": 32}, "stride 32 .*training.stride below"),
        ("prose", "gpt2", {"max_length": 129}, "129 tokens exceed the backbone's 128 positions"),
        ("pairs", "bert", {}, "an encoder backbone cannot write text"),
        (
            "pairs",
            "gpt2",
            {"target_max_length": 65},
            "129 tokens exceed the backbone's 128 positions.*target_max_length",
        ),
        ("pairs", "llama", {"target_max_length": 65}, "129 tokens exceed"),
    ],
)
def test_a_plan_refuses_what_a_backbone_cannot_do(
    task: str, family: str, training: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatibleError, match=f"toy.yaml.*{says}"):
        planned(task, family, **training)


@pytest.mark.usefixtures("text_tasks")
def test_a_plan_takes_what_just_fits() -> None:
    assert (
        len(planned("pairs", target_max_length=64).cells)
        == len(planned("pairs", "t5", target_max_length=500).cells)
        == 1
    )


def test_a_plan_needs_neither_network_nor_data_for_the_shipped_tasks() -> None:
    for task in ("ptb", "wikitext103"):
        assert planned(task, stride=32).cells[0].task == load_task(task)
    for task in ("wmt14-en-de", "multi-news"):
        assert planned(task, "t5").cells[0].task == load_task(task)
