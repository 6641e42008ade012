"""`suite task check`: what it shows is what training would see, and what is wrong with the rows is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.backbones.bpe import draft_bpe
from suite.config.task import make_task
from suite.config.training import TrainingConfig
from suite.data.inspection import Finding, TaskRows, inspect_rows, percent
from suite.data.preview import Reader, check_metrics, first_objective
from tests.commands import Suite, suite

__all__ = ["suite"]
BASE = {
    "description": "t",
    "source": "t",
    "data": {"hub": "toy/rows"},
    "splits": {"rule": "named", "test": "test"},
}
LABELS = {
    "inputs": ["text"],
    "text_to_text": "say: {text}",
    "label": {"words": ["no", "yes"]},
    "metrics": ["accuracy"],
}
TEXTS = {
    "kind": "generation",
    "inputs": ["text"],
    "target": "label",
    "text_to_text": "say: {text}",
    "metrics": ["exact_match"],
}
COUNTS = {"train": 300, "validation": 120, "test": 120}
Rows = dict[str, list[Any]]
Change = Callable[[dict[str, Rows]], None]


def splits(label: Callable[[int], Any]) -> dict[str, Rows]:
    """Rows that repeat nowhere."""
    texts = {name: [f"{name} text {n}" for n in range(count)] for name, count in COUNTS.items()}
    return {
        name: {"text": rows, "label": [label(n) for n in range(len(rows))]}
        for name, rows in texts.items()
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a task file and its rows; gives both places."""

    def written(fields: dict[str, Any], rows: dict[str, Rows]) -> tuple[Path, Path]:
        (data := tmp_path / "data" / "toy" / "rows" / "default").mkdir(parents=True, exist_ok=True)
        for split, columns in rows.items():
            pq.write_table(pa.table(columns), data / f"{split}.parquet")
        (tmp_path / "toy.yaml").write_text(json.dumps({**BASE, **fields}))  # JSON is YAML
        return tmp_path / "toy.yaml", tmp_path / "data"

    return written


def findings(write: Any, fields: dict[str, Any], rows: dict[str, Rows]) -> dict[str, Finding]:
    _, root = write(fields, rows)
    task = make_task({"name": "toy", **BASE, **fields}, where="toy")
    return {finding.check: finding for finding in inspect_rows(TaskRows.read(task, root))[1]}


def copied(split: str, count: int, *, into: str) -> Change:
    def change(rows: dict[str, Rows]) -> None:
        for column, values in rows[into].items():
            values[:count] = rows[split][column][:count]

    return change


def relabelled(rows: dict[str, Rows]) -> None:
    """The first five rows of train stand in test too, with the other label."""
    rows["test"]["text"][:5] = rows["train"]["text"][:5]
    rows["test"]["label"][:5] = [1 - label for label in rows["train"]["label"][:5]]


def constant(split: str, label: int) -> Change:
    return lambda rows: rows[split].update(label=[label] * COUNTS[split])


def doubled(rows: dict[str, Rows]) -> None:
    for column in ("text", "label"):
        rows["train"][column][100:200] = rows["train"][column][:100]


def emptied(rows: dict[str, Rows]) -> None:
    rows["train"]["text"][7] = "  "


def test_a_label_that_only_test_has_is_no_task_to_compare_on(write: Any) -> None:
    rows = splits(lambda n: n % 2)
    rows["test"]["label"][:12] = [2] * 12
    three = LABELS | {"label": {"words": ["no", "yes", "Yes"]}}
    found = findings(write, three, rows)["labels"]
    assert (found.level, found.text) == (
        "fail",
        "train has no 'Yes'; validation has no 'Yes'; 10% of test is 'Yes', which nothing can learn",
    )


@pytest.mark.parametrize(
    ("change", "check", "level", "says", "example"),
    [
        (
            copied("train", 3, into="test"),
            "test rows in train",
            "warn",
            "3 of 120 rows (2.5%)",
            "train text 0 -> no",
        ),
        (
            copied("train", 12, into="test"),
            "test rows in train",
            "fail",
            "12 of 120 rows (10%)",
            "train text 0 -> no",
        ),
        (
            copied("validation", 12, into="test"),
            "test rows in validation",
            "fail",
            "12 of 120 rows (10%)",
            "validation text 0 -> no",
        ),
        (
            relabelled,
            "same text, other answer",
            "warn",
            "10 of 540 rows (1.9%)",
            "train text 0 -> no",
        ),
        (doubled, "repeated in train", "warn", "100 of 300 rows (33%)", "train text 0 -> no"),
        (
            constant("train", 1),
            "labels",
            "fail",
            "every row of train is 'yes': there is nothing to learn",
            None,
        ),
        (constant("test", 1), "labels", "warn", "test has no 'no'; 100% of test is 'yes'", None),
        (
            emptied,
            "empty texts",
            "warn",
            "nothing to read, or an empty answer: 1 of 540 rows (0.19%)",
            "   -> yes",
        ),
    ],
)
def test_what_is_wrong_with_rows_is_found(
    write: Any, change: Change, check: str, level: str, says: str, example: str | None
) -> None:
    rows = splits(lambda n: n % 2)
    clean = findings(write, LABELS, rows)
    assert all(finding.level == "ok" for finding in clean.values()), clean
    change(rows)
    found = findings(write, LABELS, rows)[check]
    assert (found.level, found.text) == (level, says)
    assert example is None or example in found.examples


def test_relabelled_rows_are_no_leak_but_a_contradiction(write: Any) -> None:
    rows = splits(lambda n: n % 2)
    relabelled(rows)
    found = findings(write, LABELS, rows)
    assert found["test rows in train"].level == "ok" and found["same text, other answer"].rows == 10


def test_two_texts_for_one_prompt_are_no_mistake(write: Any) -> None:
    rows = splits(lambda n: f"answer {n}")
    rows["test"]["text"][0] = rows["train"]["text"][0]
    assert findings(write, TEXTS, rows)["same text, other answer"].level == "ok"


def test_short_rows_of_running_text_may_repeat(write: Any) -> None:
    fields = {"kind": "language-model", "inputs": ["text"]}
    rows = splits(lambda n: n)
    for split in rows:
        rows[split]["text"][:50] = ["he said"] * 50
    assert {finding.level for finding in findings(write, fields, rows).values()} == {"ok"}
    for split in rows:
        rows[split]["text"][:50] = ["he said " * 20] * 50
    assert findings(write, fields, rows)["test rows in train"].level == "warn", "a warning at most"


def test_few_rows_are_said_to_be_few(write: Any) -> None:
    rows = {
        name: {column: values[:20] for column, values in part.items()}
        for name, part in splits(lambda n: n % 2).items()
    }
    found = findings(write, LABELS, rows)["splits"]
    assert found.level == "warn" and "fewer than 100 rows of validation and test" in found.text


def test_quartiles_of_numbers_and_the_most_common_texts_are_shown(write: Any) -> None:
    _, root = write(LABELS, splits(lambda n: n / 60))
    task = make_task(
        {"name": "toy", **BASE, **LABELS, "label": {"range": [0, 5]}, "metrics": ["pearson"]},
        where="toy",
    )
    train = inspect_rows(TaskRows.read(task, root))[0][0]
    assert train.answers == pytest.approx(
        {"min": 0.0, "25%": 74.75 / 60, "median": 149.5 / 60, "75%": 224.25 / 60, "max": 299 / 60}
    )
    _, root = write(TEXTS, splits(lambda n: "common" if n < 30 else f"answer {n}"))
    task = make_task({"name": "toy", **BASE, **TEXTS}, where="toy")
    train = inspect_rows(TaskRows.read(task, root))[0][0]
    assert (
        train.answers["common"] == 0.1 and train.distinct_answers == 271 and len(train.answers) == 5
    )


@pytest.mark.parametrize(
    ("share", "said"), [(0.00014, "0.014%"), (0.075, "7.5%"), (0.4234, "42%"), (1.0, "100%")]
)
def test_shares_are_written_for_reading(share: float, said: str) -> None:
    assert percent(share) == said


# The command


def checked(suite: Suite, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, err = suite("task", "check", *arguments, "--format", "json")
    assert out, err
    return code, json.loads(out)


def test_each_family_reads_and_answers_in_its_own_way(suite: Suite, write: Any) -> None:
    file, root = write(LABELS, splits(lambda n: n % 2))
    code, found = checked(suite, file, "--data-root", root, "--rows", 2)
    assert (code, found["fit"], found["kind"], found["task"]) == (0, True, "classification", "toy")
    readings = {reading["kind"]: reading for reading in found["readings"]}
    first = {kind: reading["examples"][0] for kind, reading in readings.items()}
    assert {len(reading["examples"]) for reading in readings.values()} == {2}
    assert (
        "train text 0" in first["encoder"]["reads"][0] and "say" not in first["encoder"]["reads"][0]
    )
    assert first["encoder"]["answers"] == first["decoder"]["answers"] == "no (class 0)"
    assert first["encoder-decoder"]["reads"][0].startswith("say: train text 0")
    assert first["encoder-decoder"]["answers"].removesuffix("</s>") == "no"
    assert [split["answers"] for split in found["splits"]] == [{"no": 0.5, "yes": 0.5}] * 3


def test_lengths_and_truncation_are_those_of_training(suite: Suite, write: Any) -> None:
    rows = splits(lambda n: n % 2)
    rows["train"]["text"][0] = "word " * 50
    file, root = write(LABELS, rows)
    choice = ["--data-root", root, "--backbone", "minilm"]
    _, found = checked(suite, file, *choice, "--max-length", 16)
    (lengths,) = found["readings"][0]["lengths"]
    assert not found["readings"][0]["draft"]
    assert lengths["longest"] == 52 and lengths["p50"] == 5 and lengths["at_most"] == 16, (
        "50 words and two special tokens; or three"
    )
    assert lengths["cut_frac"] == pytest.approx(1 / 540)
    _, found = checked(suite, file, *choice, "--max-length", 4)
    (said,) = (finding for finding in found["findings"] if finding["check"] == "length for minilm")
    assert (
        said["level"] == "warn"
        and "100% of inputs are cut by training.max_length 4; 8 would keep 99% whole"
        in said["text"]
    )


def test_a_family_that_cannot_answer_says_why_and_none_is_a_failure(
    suite: Suite, write: Any
) -> None:
    file, root = write(TEXTS, splits(lambda n: f"answer {n}"))
    code, found = checked(suite, file, "--data-root", root)
    assert code == 0 and "encoder cannot" in found["findings"][0]["text"]
    assert "an encoder backbone cannot write text" in found["readings"][0]["refused"]
    code, found = checked(suite, file, "--data-root", root, "--backbone", "minilm")
    assert (code, found["fit"], found["findings"][0]["level"]) == (2, False, "fail")


def test_references_without_an_answer_are_found(suite: Suite, write: Any) -> None:
    file, root = write(
        {**TEXTS, "answer": "#### (.*)"}, splits(lambda n: f"so #### {n}" if n else "so it is")
    )
    _, found = checked(suite, file, "--data-root", root, "--backbone", "gpt2")
    (said,) = (finding for finding in found["findings"] if finding["check"] == "answers")
    assert (said["level"], said["rows"]) == ("warn", 3) and "which no model can match" in said[
        "text"
    ]


SCORED = """
TASK = {fields!r}


def score(predictions, golds):
    return {{"own": {own}}}
"""


def test_test_rows_of_one_label_are_no_fault_of_the_metric(suite: Suite, write: Any) -> None:
    rows = splits(lambda n: n % 2)
    rows["test"]["label"] = [1] * len(rows["test"]["label"])
    file, root = write(LABELS, rows)
    ended, found = checked(suite, file, "--data-root", root, "--backbone", "gpt2")
    (said,) = (finding for finding in found["findings"] if finding["check"] == "metrics")
    assert ended == 2 and said["text"].startswith("every test answer is 'yes': no metric can tell")


@pytest.mark.parametrize(
    ("own", "code", "says"),
    [
        (
            "sum(p == g for p, g in zip(predictions, golds))",
            0,
            "right answers score 120, always 'no' scores 60",
        ),
        (
            "sum(p != g for p, g in zip(predictions, golds))",
            2,
            "right answers score 0, always 'no' scores 60: more must be better",
        ),
        (
            "sum(p == g for p, g in zip(predictions, golds)) / len(golds)",
            0,
            "right answers score 1, always 'no' scores 0.5: right answers should score 100",
        ),
        ("1 / (len(set(predictions)) - 2)", 2, "toy2.py:6: score(): ZeroDivisionError"),
    ],
)
def test_a_score_of_ones_own_is_tried_on_right_answers(
    suite: Suite, write: Any, own: str, code: int, says: str
) -> None:
    file, root = write(LABELS, splits(lambda n: n % 2))
    path = file.with_name("toy2.py")
    path.write_text(SCORED.format(fields={**BASE, **LABELS, "metrics": ["own"]}, own=own))
    ended, found = checked(suite, path, "--data-root", root, "--backbone", "gpt2")
    (said,) = (finding for finding in found["findings"] if finding["check"] == "metrics")
    assert ended == code and says in said["text"]


@pytest.mark.parametrize(
    ("fields", "label", "says"),
    [
        (
            {"metrics": ["rougeL", "bleu"]},
            "кошка",
            "score 0: rougeL and bleu cannot be more than 0",
        ),
        (
            {"metrics": ["bleu", "exact_match"]},
            "yes",
            "score 50: bleu cannot be more than 0 for these",
        ),
        (
            {**LABELS, "label": {"range": [0.0, 5.0]}, "metrics": ["pearson"]},
            2.5,
            "right answers score 0: pearson cannot be more than 0 on a test split with these answers",
        ),
    ],
)
def test_a_metric_that_right_answers_cannot_earn_is_found(
    write: Any, fields: dict[str, Any], label: Any, says: str
) -> None:
    if isinstance(label, str):
        fields = {**TEXTS, **fields}
        rows = splits(label.format)
    else:
        rows = splits(lambda n: label)
    _, root = write(fields, rows)
    task = make_task({"name": "toy", **BASE, **fields}, where="toy")
    found = TaskRows.read(task, root)
    reader = Reader("toy", "encoder-decoder", draft_bpe(), draft=True)
    objective = first_objective([reader], task, TrainingConfig())
    assert objective is not None
    (said,) = check_metrics(found, found, objective)
    assert said.level == "fail" and says in said.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.yaml"], "nothing.yaml: no such file"),
        (["acceptabilty"], "unknown task 'acceptabilty'; did you mean acceptability"),
        (["acceptability", "--backbone", "minilmm"], "unknown backbone 'minilmm'"),
    ],
)
def test_a_mistake_is_one_error_with_exit_code_2(
    suite: Suite, arguments: list[str], says: str
) -> None:
    code, out, err = suite("task", "check", *arguments)
    assert (code, out) == (2, "") and says in err


def test_rows_that_a_task_cannot_use_are_an_error(suite: Suite, write: Any) -> None:
    file, root = write(LABELS, splits(lambda n: n % 3))
    code, _, err = suite("task", "check", file, "--data-root", root)
    assert code == 2 and "label 2 in row 2, expected 0 to 1" in err


def test_the_page_is_for_reading(suite: Suite, write: Any) -> None:
    rows = splits(lambda n: n % 2)
    rows["train"]["text"][0] = "long " * 400
    copied("train", 12, into="test")(rows)
    file, root = write(LABELS, rows)
    code, out, _ = suite("task", "check", file, "--data-root", root)
    assert code == 2 and "\x1b" not in out, "no colours where there is no terminal"
    assert "FAIL  test rows in train" in out and "not fit to compare on: 1 failed" in out
    assert "(2,0" in out and max(map(len, out.splitlines())) <= 130, (
        "long texts are cut and wrapped"
    )


def test_shipped_tasks_without_data_are_checked_by_name(suite: Suite) -> None:
    code, found = checked(suite, "entailment", "--backbone", "minilm")
    assert code == 0 and [split["rows"] for split in found["splits"]] == [768, 200, 400]
