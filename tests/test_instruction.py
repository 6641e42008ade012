"""Instructions: the standard prompts, loss and score on the response alone, packing keeps examples whole; held-out splits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import ByT5Tokenizer

from suite.backbones.base import Kind
from suite.backbones.loading import Head, build, resolve
from suite.config.sweep import LimitConfig
from suite.config.task import InstructionTask, SplitConfig, load_task, make_task
from suite.config.training import TrainingConfig
from suite.data.instruction import _tail, make_instruction
from suite.data.prepare import prepare
from suite.data.splits import plan_splits
from suite.errors import ConfigError, DataError, IncompatibleError
from suite.metrics.items import STATISTICS, Items, unit_rows
from tests.test_objectives import as_rows, read
from tests.tiny import tiny_choice

ROWS = {
    "instruction": ["Name a colour.", "Translate.", "Say nothing."],
    "input": ["", "a cat", " "],
    "output": ["Blue.", "eine Katze", ""],
}
FAMILIES: dict[str, Kind] = {"gpt2": "decoder", "llama": "decoder", "t5": "encoder-decoder"}


def alpaca(**changes: Any) -> InstructionTask:
    task = load_task("alpaca")
    assert isinstance(task, InstructionTask)
    return task.model_copy(update=changes)


def objective(kind: Kind = "decoder", task: InstructionTask | None = None, **training: Any) -> Any:
    settings = TrainingConfig(**{"max_length": 400, "target_max_length": 40, **training})
    return make_instruction(task or alpaca(), ByT5Tokenizer(), settings, kind=kind)


def answer(row: dict[str, Any]) -> str:
    return read([label for label in row["labels"] if label != -100])


# Prompts


def test_the_prompts_are_alpacas() -> None:
    first, second, third = as_rows(objective().encode(ROWS))
    assert read(first["input_ids"]) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName a colour.\n\n### Response:\nBlue."
    )
    assert read(second["input_ids"]) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nTranslate.\n\n### Input:\na cat\n\n### Response:\neine Katze"
    )
    assert "### Input" not in read(third["input_ids"]), "an input of spaces is none"


def test_both_alpacas_have_the_same_prompts() -> None:
    cleaned = load_task("alpaca-cleaned")
    assert isinstance(cleaned, InstructionTask) and cleaned.data != alpaca().data
    assert (cleaned.text_to_text, cleaned.without_input) == (
        alpaca().text_to_text,
        alpaca().without_input,
    )


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_the_loss_is_on_the_response_and_its_end_token(kind: Kind) -> None:
    end = ByT5Tokenizer().eos_token_id
    for row, output in zip(as_rows(objective(kind).encode(ROWS)), ROWS["output"], strict=True):
        labels = [label for label in row["labels"] if label != -100]
        assert answer(row) == output and labels[-1] == end and labels.count(end) == 1
        assert row["gold"] == row["units"] == len(output) + 1


def test_a_long_prompt_keeps_the_call_for_a_response() -> None:
    columns = {"instruction": ["word " * 100], "input": [""], "output": ["yes " * 40]}
    for kind in ("decoder", "encoder-decoder"):
        goal = objective(kind, max_length=160, target_max_length=20)
        (row,) = as_rows(goal.encode(columns))
        start = (
            row["input_ids"]
            if kind == "encoder-decoder"
            else row["input_ids"][: row["labels"].count(-100)]
        )
        assert (
            len(start) == 160
            and read(start).endswith("\n\n### Response:\n")
            and "### Instruction:\nword" in read(start)
        )
        assert len([label for label in row["labels"] if label != -100]) == 20


@pytest.mark.parametrize(
    ("kind", "task", "training", "says"),
    [
        ("encoder", {}, {}, "task alpaca: an encoder backbone cannot write a response"),
        ("encoder-decoder", {"packing": True}, {}, "packing is for decoders"),
        (
            "decoder",
            {},
            {"max_length": 16},
            "training.max_length leaves 15 tokens, no room for a prompt",
        ),
        ("decoder", {}, {"target_max_length": 1}, "target_max_length 1 leaves no room"),
    ],
)
def test_what_cannot_be_is_refused(
    kind: Kind, task: dict[str, Any], training: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatibleError, match=says):
        objective(kind, alpaca(**task), **training)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"without_input": None}, "without_input is given exactly when there are two inputs"),
        (
            {"without_input": "{input}"},
            r"without_input uses \['input'\], but inputs are \['instruction'\]",
        ),
        ({"target": "input"}, "target 'input' is one of the inputs"),
        ({"metrics": ["bleu"]}, "metrics.0: .*'perplexity', got 'bleu'"),
    ],
)
def test_mistakes_in_a_file_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_task({**alpaca().model_dump(mode="json"), **changes}, where="f")


# Scores


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_is_the_perplexity_of_the_responses_tokens(family: str) -> None:
    torch.manual_seed(0)
    goal = objective(FAMILIES[family])
    model: Any = build(
        resolve(tiny_choice(family, **({"n_positions": 512} if family == "gpt2" else {}))),
        Head("text"),
    ).eval()
    rows = as_rows(goal.encode(ROWS))
    with torch.no_grad():
        nll = goal.predict(model, goal.collate(rows), synced=False)
        alone = [goal.predict(model, goal.collate([row]), synced=False)[0] for row in rows]
        mean_loss = model(
            **goal.collate(rows)
        ).loss.item()  # over all label tokens: what is trained
    tokens = [row["gold"] for row in rows]
    assert nll == pytest.approx(alone, rel=1e-4), "padding changes nothing but the order of sums"
    assert math.log(goal.score(nll, tokens)["perplexity"]) == pytest.approx(mean_loss, rel=1e-4)
    assert not goal.task.higher_is_better and goal.task.utility(20.0) > goal.task.utility(30.0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_computes_no_loss_that_a_score_drops(family: str) -> None:
    """The loss is in float32 over a whole batch, which may not fit into memory."""
    longer = {"n_positions": 512} if family == "gpt2" else {}
    model: Any = build(resolve(tiny_choice(family, **longer)), Head("text")).eval()
    goal = objective(FAMILIES[family])
    losses: list[Any] = []
    model.loss_function = lambda *args, **kwargs: losses.append(args)
    with torch.no_grad():
        assert len(goal.predict(model, goal.collate(as_rows(goal.encode(ROWS))), synced=False)) == 3
    assert not losses


def test_a_response_to_nothing_has_every_token_in_its_score() -> None:
    """ByT5's tokenizer has no start token, as GPT-2's has none."""
    goal = objective(
        task=alpaca(inputs=["instruction"], text_to_text="{instruction}", without_input=None)
    )
    rows = as_rows(goal.encode({"instruction": ["", "ab"], "output": ["fine", "fine"]}))
    for row in rows:
        assert sum(label != -100 for label in row["labels"][1:]) == row["gold"] == 5
    assert rows[1]["input_ids"][:2] == ByT5Tokenizer()("ab")["input_ids"][:2], (
        "others are as before"
    )


# Packing


def test_packing_keeps_examples_whole_and_leaves_evaluation_alone() -> None:
    goal = objective(task=alpaca(packing=True))
    plain = objective()
    names = [f"train/{n}" for n in range(6)]
    columns = {name: values * 2 for name, values in ROWS.items()}
    (packed,) = goal.features([(names, columns)], "train")
    rows = as_rows(plain.encode(columns))
    assert packed["index"] == ["train/0+train/1", "train/2+train/3", "train/4+train/5"]
    for number, row in enumerate(as_rows(packed)):
        pair = rows[2 * number : 2 * number + 2]
        assert row["input_ids"] == pair[0]["input_ids"] + pair[1]["input_ids"]
        assert row["labels"] == pair[0]["labels"] + pair[1]["labels"]
        assert (
            row["length"] == len(row["input_ids"]) <= goal.positions
            and row["units"] == pair[0]["units"] + pair[1]["units"]
        )
    (alone,) = goal.features([(names, columns)], "validation")
    assert alone["input_ids"] == [row["input_ids"] for row in rows]


def test_packing_makes_other_data() -> None:
    assert objective(task=alpaca(packing=True)).fingerprint() != objective().fingerprint()


# Splits of data that have only one


@pytest.mark.parametrize("test", [None, "test"])
def test_held_out_splits_are_disjoint_and_cover_train(test: str | None) -> None:
    sizes = {"train": 500} | ({"test": 40} if test else {})
    plan = plan_splits(
        SplitConfig(rule="held-out", held_out=30, test=test), sizes, LimitConfig(), where="t"
    )
    assert {name: len(part.rows) for name, part in plan.items()} == {
        "train": 470 if test else 440,
        "validation": 30,
        "test": 40 if test else 30,
    }
    used = [(part.source, int(row)) for part in plan.values() for row in part.rows]
    assert len(set(used)) == len(used) == sum(sizes.values())
    assert plan["validation"].rows.tolist() != list(range(30))


def test_naming_a_test_split_keeps_the_validation_rows() -> None:
    own, named = (
        plan_splits(
            SplitConfig(rule="held-out", held_out=30, test=test),
            {"train": 500, "test": 9},
            LimitConfig(),
            where="t",
        )
        for test in (None, "test")
    )
    assert own["validation"].rows.tolist() == named["validation"].rows.tolist()


def test_held_out_splits_do_not_change_between_releases() -> None:
    plan = plan_splits(
        SplitConfig(rule="held-out", held_out=3), {"train": 20}, LimitConfig(), where="t"
    )
    assert (plan["validation"].rows.tolist(), plan["test"].rows.tolist()) == (
        [5, 16, 17],
        [8, 13, 14],
    )


def test_holding_out_more_than_there_is_is_refused() -> None:
    with pytest.raises(DataError, match="held_out is 10, but there are 20 training rows"):
        plan_splits(
            SplitConfig(rule="held-out", held_out=10), {"train": 20}, LimitConfig(), where="t"
        )
    with pytest.raises(
        ValueError, match="takes the validation rows from train; leave validation out"
    ):
        SplitConfig(rule="held-out", validation="dev")


def test_alpaca_is_read_from_its_one_split(tmp_path: Path) -> None:
    (data := tmp_path / "tatsu-lab" / "alpaca" / "default").mkdir(parents=True)
    pq.write_table(
        pa.table({name: values * 10 for name, values in ROWS.items()}), data / "train.parquet"
    )
    task = alpaca(splits=SplitConfig(rule="held-out", held_out=5))
    found = prepare(
        task,
        objective(task=task),
        limit=LimitConfig(),
        data_root=tmp_path,
        cache=tmp_path / "cache",
    )
    assert found.sizes == {"train": 20, "validation": 5, "test": 5}
    names = [
        row["index"]
        for name in ("train", "validation", "test")
        for row in found.split(name, confirm=True)
    ]
    assert len(set(names)) == 30 and all(name.startswith("train/") for name in names)


# Statistics


def test_the_items_of_a_response_resample_as_running_text_does() -> None:
    items = Items([3.0, 8.0], [2, 4])
    sums = unit_rows(STATISTICS["perplexity"], items).sum(0)
    assert float(STATISTICS["perplexity"].score(sums)) == pytest.approx(math.exp(11 / 6))


def test_what_stands_after_the_last_column_is_kept_whole_with_braces_in_it() -> None:
    assert _tail('Do {text} and write {{"answer": N}} now:') == ' and write {"answer": N} now:'
    assert _tail("Do {text}") == "" and _tail("{{only}} text") == "{only} text"
