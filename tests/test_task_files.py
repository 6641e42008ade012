"""Tasks as Python files, and folders of tasks of one's own: found, not run unasked, part of the trial, blamed by file and line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from suite.cluster.session import worker_environment
from suite.config.sweep import LimitConfig
from suite.config.task import TaskConfig, load_task
from suite.config.task_files import code_of, describe, own_score, task_paths
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.data.source import open_source
from suite.errors import ConfigError, DataError, UnknownNameError
from suite.metrics.items import STATISTICS, statistic_of
from suite.registry import shipped_folder, user_folders
from suite.storage.lease import JOB_VARIABLE
from tests.commands import Suite, blocks, suite
from tests.test_cli_run import TINY_SET

__all__ = ["suite"]
TASK = """
TASK = {
    "description": "is a word long",
    "source": "ours",
    "data": {"hub": "toy/words"},
    "inputs": ["text"],
    "text_to_text": "long: {text}",
    "label": {"words": ["short", "long"]},
    "metrics": METRICS,
    "splits": {"rule": "named", "test": "test"},
}
"""
ROWS = """
reads = ["word"]


def rows(row):
    if row["word"].startswith("x"):
        return None
    return {"text": row["word"].upper(), "label": int(len(row["word"]) > 3)}
"""
SCORE = """
def score(predictions, golds):
    return {"hits": 100.0 * sum(p == g for p, g in zip(predictions, golds)) / len(golds)}
"""
PLAIN = TASK.replace("METRICS", '["accuracy"]')
OWN = TASK.replace("METRICS", '["hits"]')
WORDS = ["cat", "horse", "xenon", "dog", "tiger", "ox", "zebra", "ant"] * 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks, named as `--tasks` names it."""
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("SUITE_TASKS", str(tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (data := tmp_path / "data" / "toy" / "words" / "default").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        pq.write_table(pa.table({"word": WORDS}), data / f"{split}.parquet")
    return tmp_path / "data"


def written(folder: Path, text: str, name: str = "long_word.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def prepared(task: TaskConfig, root: Path) -> Any:
    from transformers import ByT5Tokenizer

    settings: Any = {
        "kind": "encoder",
        "tokenizer": ByT5Tokenizer(),
        "training": TrainingConfig(),
        "decoder_objective": "head",
    }
    return prepare(
        task,
        make_objective(task, **settings),
        limit=LimitConfig(),
        data_root=root,
        cache=root.parent / "cache",
    )


# What a file says


def test_a_python_file_is_the_task_of_its_stem_with_hyphens(folder: Path) -> None:
    written(folder, PLAIN)
    task = load_task("long-word")
    assert (task.name, task.kind, task.metrics) == ("long-word", "classification", ["accuracy"])
    assert task.code is not None and not task.code.rows and not task.code.score


def test_the_file_of_a_task_is_answered_with_the_tasks_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "others").mkdir()
    files = (
        (folder, "long_word.py"),
        (tmp_path / "tasks", "a.yaml"),
        (tmp_path / "others", "b.yaml"),
    )
    for where, name in files:
        written(where, PLAIN, name)
    written(tmp_path / "others", PLAIN, "c.py")
    for given, said in (
        ("mine/long_word.py", "write long-word"),
        ("tasks/a.yaml", "write a"),
        (
            "others/b.yaml",
            "write b, and put the file into tasks/ of the working folder or name the folder: "
            "set SUITE_TASKS=others, or give --tasks others to suite run or submit",
        ),
        (
            "others/c.py",
            "write c, and name the folder: set SUITE_TASKS=others, or give --tasks others to suite run or submit",
        ),
    ):
        with pytest.raises(
            UnknownNameError, match=rf"a task is named by its file's stem: {said}\)$"
        ):
            load_task(given)


def test_rows_makes_the_tasks_columns_and_drops_rows(folder: Path, root: Path) -> None:
    written(folder, PLAIN + ROWS)
    task = load_task("long-word")
    source = open_source(task, root)
    table = source.read("train", task.columns)
    assert table.slice(0, 3).to_pylist() == [
        {"text": "CAT", "label": 0},
        {"text": "HORSE", "label": 1},
        {"text": "DOG", "label": 0},
    ]
    assert table.num_rows == 28
    data = prepared(task, root)
    assert data.sizes == {"train": 28, "validation": 28, "test": 28}
    assert data.split("train", confirm=False)[2]["index"] == "train/2", (
        "rows are numbered as they come out of rows()"
    )


def test_own_metrics_are_scored_by_the_file_alone(folder: Path) -> None:
    written(folder, OWN + SCORE)
    task = load_task("long-word")
    score = own_score(task)
    assert score is not None and score([1.0, 0.0, -1.0, 1.0], [1, 0, 0, 0]) == {"hits": 50.0}
    assert task.score_of({"hits": 50.0}) == 50.0
    assert own_score(load_task("rte")) is None


def test_classes_reach_the_file_as_whole_numbers(folder: Path) -> None:
    named = "\ndef score(predictions, golds):\n    return {'hits': 'ab'[predictions[0]] == 'b'}\n"
    written(folder, OWN + named)
    score = own_score(load_task("long-word"))
    assert score is not None and score([1.0], [1]) == {"hits": 1.0}


def test_a_metric_of_ones_own_is_never_taken_for_the_suites(folder: Path) -> None:
    written(folder, PLAIN + SCORE.replace("hits", "accuracy"))
    assert statistic_of(load_task("long-word"), "accuracy") is None
    assert statistic_of(load_task("rte"), "accuracy") is STATISTICS["accuracy"]


def test_a_task_in_python_survives_storing_and_is_found_again(folder: Path) -> None:
    written(folder, OWN + ROWS + SCORE)
    task = load_task("long-word")
    adapter = TypeAdapter[TaskConfig](TaskConfig)
    stored = adapter.validate_json(adapter.dump_json(task))
    assert stored == task
    code = code_of(stored)
    assert code is not None and code.convert({"word": "tree"}, ["label"], where="") == {"label": 1}


def test_tasks_in_yaml_hash_as_if_there_were_no_files_in_python() -> None:
    assert "code" not in load_task("rte").model_dump(mode="json")


# An edited file is another task


def test_an_edited_file_is_another_task_and_other_data(folder: Path, root: Path) -> None:
    path = written(folder, PLAIN + ROWS)
    before = load_task("long-word")
    data = prepared(before, root)
    path.write_text(path.read_text().replace("> 3", "> 4"))
    after = load_task("long-word")
    assert after != before and prepared(after, root).path != data.path
    with pytest.raises(
        ConfigError, match=r"long_word.py .sha256 .* is not the file that this trial was made from"
    ):
        open_source(before, root)


def test_a_worker_without_the_file_says_so(folder: Path, root: Path) -> None:
    path = written(folder, PLAIN + ROWS)
    task = load_task("long-word")
    path.unlink()
    with pytest.raises(
        ConfigError,
        match=r"task long-word: its Python file was not found .*--tasks, SUITE_TASKS or SUITE_PATH",
    ):
        open_source(task, root)


def test_workers_are_told_the_folder(folder: Path) -> None:
    assert worker_environment(1)["SUITE_TASKS"] == str(folder)


def test_workers_with_another_working_folder_find_the_same_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    for name in ("SUITE_PATH", "SUITE_TASKS", "PYTHONPATH"):
        monkeypatch.setenv(name, f"mine:{here}/yours::../ours:/elsewhere")
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    ours = str(tmp_path.parent / "ours")
    monkeypatch.setenv("HF_HOME", "weights")
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    found = worker_environment(1)
    assert found["HF_HOME"] == f"{here}/weights"
    assert found["HF_HUB_CACHE"] == "~/hub", "each machine knows its own"
    for name in ("SUITE_PATH", "SUITE_TASKS", "PYTHONPATH"):
        assert found[name] == f"{here}/mine:{here}/yours::{ours}:/elsewhere"
    # Ray unpacks the working folder of a job on every node, each where it has room.
    job: dict[str, Any] = {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}
    monkeypatch.setenv(JOB_VARIABLE, json.dumps(job))
    assert worker_environment(1)["SUITE_PATH"] == f"mine:yours::{ours}:/elsewhere"
    # A job without one starts where Ray was started, which nobody copies.
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"runtime_env": {}}))
    assert worker_environment(1)["SUITE_PATH"].startswith(f"{here}/mine:")


# Found without being run


def test_listing_never_runs_a_file(folder: Path, suite: Suite) -> None:
    path = written(folder, f"open({str(folder / 'ran')!r}, 'w')\n" + PLAIN)
    assert describe(path) == {"description": "is a word long", "source": "ours"}
    rows = {row["name"]: row for row in json.loads(suite("list", "tasks", "--format", "json")[1])}
    assert rows["long-word"]["description"] == "is a word long" and "rte" in rows
    assert not (folder / "ran").exists()
    load_task("long-word")
    assert (folder / "ran").exists(), "asking by name runs it"


def test_python_is_never_taken_from_the_working_folder_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    written(tmp_path / "tasks", PLAIN)
    (tmp_path / "tasks" / "own.yaml").write_text("any: thing")
    monkeypatch.chdir(tmp_path)
    assert "own" in task_paths() and "long-word" not in task_paths()
    with pytest.raises(
        ConfigError,
        match=r"'long-word': Python is taken from .*tasks only if you name that folder: set SUITE_TASKS=/",
    ):
        load_task("long-word")


def test_a_folder_of_tasks_comes_first(folder: Path) -> None:
    written(folder, PLAIN, "rte.py")
    assert load_task("rte").description == "is a word long"
    assert user_folders("tasks")[0] == folder and task_paths()["sst2"].parent == shipped_folder(
        "tasks"
    )


def test_two_files_of_one_name_in_a_folder_are_refused(folder: Path) -> None:
    written(folder, PLAIN)
    written(folder, "kind: generation", "long-word.yaml")
    with pytest.raises(
        ConfigError, match=r"long_word.py: long-word.yaml beside it is the task 'long-word' too"
    ):
        load_task("rte")


# Mistakes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1 / 0", ":1: cannot be run: ZeroDivisionError: division by zero"),
        ("x = 1\ny = = 2", ":2: cannot be run: SyntaxError"),
        ("import sys\nsys.exit()", ":2: cannot be run: SystemExit"),
        ("x = 1", "TASK is NoneType, expected a dictionary"),
        (
            PLAIN.replace("text_to_text", "txt_to_text"),
            ":7: unknown key 'txt_to_text'; did you mean text_to_text",
        ),
        (
            PLAIN.replace('"named"', '"nmed"'),
            ":10: splits.rule: Input should be 'read', 'named' or 'held-out', got 'nmed'",
        ),
        (
            TASK.replace("METRICS", '["accuracy", "accuracy"]'),
            r"metrics: got .'accuracy', 'accuracy'., expected different ones",
        ),
        (
            PLAIN.replace('["text"]', '["text", "label"]').replace("{text}", "{text}{label}"),
            "'label' is one of the texts that the model reads",
        ),
        (
            PLAIN.replace('"toy/words"', '"toy/words", "columns": {"txt": "review"}'),
            "data.columns: unknown column 'txt'; did you mean text",
        ),
        (
            PLAIN.replace("{text}", "{text"),
            ":7: text_to_text: got .*{text': expected '}' before end of string; write {column}",
        ),
        (OWN, ":9: metrics.0: Input should be .*'accuracy'.*, got 'hits'"),
        (PLAIN.replace('"inputs"', '"code": 1, "inputs"'), "unknown key 'code'"),
        (PLAIN + "score = 3", "score is 3, expected a function"),
        (PLAIN + "reads = ['a']", "give rows.. and reads.* together"),
        (PLAIN + ROWS.replace('["word"]\n\n', "4\n\n"), "reads is 4, expected names of columns"),
        (
            TASK.replace("METRICS", '["hits", "hits"]') + SCORE,
            "metrics: got .'hits', 'hits'., expected distinct names",
        ),
        (
            PLAIN.replace('"inputs"', '"kind": "language-model", "inputs"') + SCORE,
            "cannot have a score",
        ),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_line(folder: Path, text: str, says: str) -> None:
    path = written(folder, text)
    with pytest.raises(ConfigError, match=f"(?s){re.escape(str(path))}.*{says}"):
        load_task("long-word")


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        (
            'row["word"].upper()',
            'row["wrd"].upper()',
            ConfigError,
            r"long_word.py:19: rows\(\), split 'train', row 0: KeyError: 'wrd'",
        ),
        (
            '"text": row',
            '"txt": row',
            ConfigError,
            r"rows\(\), split 'train', row 0: gave \['label', 'txt'\], expected the columns",
        ),
        ("return None", "return 3", ConfigError, r"row 2: gave int, expected"),
        ('["word"]\n\n', '["wort"]\n\n', DataError, "no column 'wort'; the data have .'word'."),
        (
            "int(len",
            "str(len",
            DataError,
            "column 'label': label '.*' in row 0, expected one of label.words",
        ),
        (
            "int(len",
            "(len(row['word']) > 4 and 'a') or int(len",
            DataError,
            "values of a column are not of one type",
        ),
    ],
)
def test_what_rows_does_wrong_is_named(
    folder: Path, root: Path, old: str, new: str, error: type[Exception], says: str
) -> None:
    assert old in ROWS
    written(folder, PLAIN + ROWS.replace(old, new))
    with pytest.raises(error, match=says):
        prepared(load_task("long-word"), root)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (
            "{'hit': 1.0}",
            r"score\(\): gave \['hit'\], expected a number for each of metrics \['hits'\]",
        ),
        ("3", r"score\(\): gave int"),
        ("{'hits': 'many'}", r"score\(\): ValueError: could not convert"),
        ("{'hits': float('nan')}", "gave {'hits': nan}, expected finite numbers"),
        ("{'hits': float('inf')}", "gave {'hits': inf}, expected finite numbers"),
        ("[] [0]", r"long_word.py:14: score\(\): IndexError"),
    ],
)
def test_what_score_does_wrong_is_named(folder: Path, returned: str, says: str) -> None:
    written(folder, OWN + f"\ndef score(predictions, golds):\n    return {returned}\n")
    score = own_score(load_task("long-word"))
    assert score is not None
    with pytest.raises(ConfigError, match=says):
        score([1], [1])


def test_yaml_cannot_claim_to_have_code(folder: Path) -> None:
    written(folder, "code: {sha256: abc}\n", "long-word.yaml")
    with pytest.raises(UnknownNameError, match=r"long-word.yaml:1: unknown key 'code'"):
        load_task("long-word")


# As a user has it


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A data root with a few pairs of captions."""
    (data := tmp_path / "data" / "bentrevett" / "multi30k" / "default").mkdir(parents=True)
    things = ["dog", "old man", "small child", "red bird", "horse"]
    pairs = [
        (f"a {thing} sits near the {n} trees", f"ein {thing} sitzt bei {n} Baeumen")
        for n in range(12)
        for thing in things
    ]
    for split, part in (
        ("train", pairs[:40]),
        ("validation", pairs[40:50]),
        ("test", [*pairs[50:], ("a dog", "ein Hund")]),
    ):
        pq.write_table(
            pa.table({"en": [en for en, _ in part], "de": [de for _, de in part]}),
            data / f"{split}.parquet",
        )
    return tmp_path / "data"


def test_the_tasks_in_the_docs_work_as_they_are_written(
    suite: Suite, tmp_path: Path, captions: Path
) -> None:
    """docs/adding.md, taken literally, in a folder outside the project: checked, then trained and tested."""
    mine = tmp_path / "my-tasks"
    mine.mkdir()
    (text,) = (
        block
        for block in blocks("yaml")
        if "captions-de-en" in block or "kind: generation" in block
    )
    written(mine, text, "captions-de-en.yaml")
    written(
        mine, next(block for block in blocks("python") if "TASK" in block), "caption_language.py"
    )
    for name in ("captions-de-en.yaml", "caption_language.py"):
        code, out, _ = suite("task", "check", mine / name, "--data-root", captions, "--rows", 1)
        assert code == 0 and "fit to compare on" in out, out
    options = [
        *TINY_SET,
        "--tasks",
        mine,
        "--data-root",
        captions,
        "--home",
        tmp_path / "home",
        "--set",
        "training.epochs=1",
    ]
    fast = [
        "--set",
        "training.batch_size=8",
        "--set",
        "training.max_length=64",
        "--set",
        "backbone.tokenizer=bytes",
    ]
    command = [
        "trial",
        "--backbone",
        "bert-base",
        "--method",
        "bitfit",
        "--task",
        "caption-language",
        "--test",
        *options,
        *fast,
    ]
    code, out, err = suite(*command, "--set", "backbone.config.vocab_size=384")
    assert code == 0, err
    result = json.loads(out[out.index("{\n") :])  # libraries log to what stands in for stdout here
    assert (
        set(result["scores"]) == {"right", "german_recall"}
        and result["score"] == result["scores"]["right"]
    )
    assert result["splits"] == {"train": 40, "validation": 10, "test": 10}, (
        "rows() left out the short caption"
    )
    assert "SUITE_TASKS" not in os.environ, "the folder counts for one command only"


def test_a_folder_without_tasks_is_a_mistake(suite: Suite, tmp_path: Path) -> None:
    code, out, err = suite("list", "tasks", "--tasks", tmp_path)
    assert (code, out) == (2, "") and "holds no *.yaml and no *.py" in err
