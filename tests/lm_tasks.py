"""Two tasks for lm-eval with rows of their own, and the same question as a task of the suite."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.record.lm_eval import Evaluation, LmEvalRecord

WORDS = ("stone", "river", "cloud", "field", "light", "storm")
SUITE_TASK = """
description: whether the first letter is an a
source: ours
data: {hub: toy/first}
inputs: [text]
label: {column: label, words: ["no", "yes"]}
text_to_text: "first: {text}"
metrics: [accuracy]
splits: {rule: named, test: test}
"""
CHOOSE = """
task: first_choose
tag: [first_letter]
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "first: {{{{text}}}} answer:"
doc_to_target: label
doc_to_choice: ["no", "yes"]
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""
WRITE = """
task: first_write
tag: [first_letter]
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
output_type: generate_until
test_split: test
fewshot_split: test
doc_to_text: "first: {{{{text}}}} answer:"
doc_to_target: "{{{{ ['no', 'yes'][label] }}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5, do_sample: false}}
filter_list: [{{name: plain, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


def rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """`a stone river` with label 1, `b stone river` with label 0, as many of each."""
    draw = random.Random(seed)
    return [
        {"text": f"{'ba'[i % 2]} {draw.choice(WORDS)} {draw.choice(WORDS)}", "label": i % 2}
        for i in range(count)
    ]


def write_lm_tasks(folder: Path, *, count: int = 24) -> Path:
    """A folder for `--include-path`: `first_choose` and `first_write`, under one tag `first_letter`."""
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed=9)))
    for name, text in {"first_choose": CHOOSE, "first_write": WRITE}.items():
        (folder / f"{name}.yaml").write_text(text.format(rows=path))
    return folder


def write_suite_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the suite's task `first` known; returns the data root with its rows."""
    tasks = folder / "user" / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "first.yaml").write_text(SUITE_TASK)
    monkeypatch.setenv("SUITE_PATH", str(folder / "user"))
    root = folder / "data" / "toy" / "first" / "default"
    root.mkdir(parents=True)
    for number, (split, count) in enumerate({"train": 128, "validation": 32, "test": 32}.items()):
        pq.write_table(pa.Table.from_pylist(rows(count, seed=number)), root / f"{split}.parquet")
    return folder / "data"


def keep_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` makes of files goes to a temporary folder, and the hub is out of reach."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def by_name(record: LmEvalRecord) -> dict[str, Evaluation]:
    """The evaluations of a record by their names; of two with one name, the one that ended last."""
    ended = sorted(record.evaluations.values(), key=lambda evaluation: evaluation.finished_at)
    return {evaluation.settings.name: evaluation for evaluation in ended}
