"""Trials, as `suite trial` puts them, of the tasks with heads and items of their own: from parquet files to the file of predictions."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from suite.config.task import load_task
from suite.metrics.items import Items, statistic_of
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.by_hand import build_spec
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from tests.ranks import in_processes
from tests.rows import write_rows
from tests.tiny import tiny_choice

TRAINING = {"epochs": 1, "batch_size": 8, "max_length": 96}
CASES = [
    ("copa", "bert", 33),
    ("copa", "t5", 0),
    ("copa", "gpt2", 32),
    ("squad2", "bert", 66),
    ("multirc", "bert", 66),
    ("wsc", "bert", 66),
]
"""Task, family, and parameters of the new head: d = 32, with a bias on an encoder."""


def make_spec(task: str, family: str) -> TrialSpec:
    choice = tiny_choice(family)
    settings = [f"training.{key}={value}" for key, value in TRAINING.items()]
    settings += [
        f"backbone.config.{key}={value}" for key, value in (choice.config or {}).items()
    ] + ["backbone.tokenizer=bytes"]
    return build_spec(choice.name, "lora", task, overrides=settings, test=True)


def run_all(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    workspace = Workspace(Home(folder / "home"), folder / "data", usable_bytes=2**30)
    trainer = Trainer(workspace, master_port=port)
    for task, family, _ in CASES:
        trainer.start(make_spec(task, family))
        while not trainer.epoch().done:
            pass
        trainer.finish()
    trainer.close()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """All trials in one process of their own: a process joins one group in its life, and starting it takes longer than they do."""
    folder = tmp_path_factory.mktemp("trials")
    for name in {task for task, _, _ in CASES}:
        write_rows(load_task(name), folder / "data", {"train": 16, "validation": 12})
    in_processes(run_all, free_port(), folder)
    return Home(folder / "home")


@pytest.mark.parametrize(("task", "family", "head"), CASES)
def test_a_trial_runs_and_its_items_make_its_score(
    task: str, family: str, head: int, ran: Home
) -> None:
    folder = ran.trial(make_spec(task, family))
    made = load_task(task)
    result = folder.result()
    assert result is not None and result.status.has_score
    assert result.parameters is not None and result.parameters.trainable_head == head
    table = pq.read_table(folder.predictions("test")).to_pydict()
    assert len(table["index"]) == len(set(table["index"])) == 6, (
        "half of the validation rows; an item is there once, whatever its windows"
    )
    items = Items(table["prediction"], table["gold"], table.get("group"))
    assert (items.groups is not None) == (task == "multirc")
    for metric in made.metrics:
        statistic = statistic_of(made, metric)
        assert statistic is not None
        assert float(statistic.score(statistic.rows(items).sum(axis=0))) == pytest.approx(
            result.scores[metric], abs=1e-8
        )


def test_a_trial_that_writes_its_answers_says_that_it_gathers_weights_once(ran: Home) -> None:
    for task, family, _ in CASES:
        said = ran.trial(make_spec(task, family)).log(0).read_text()
        # In the validation, and in the test; the others answer with a head, or by likelihood.
        assert said.count("gathers weights once for all texts") == 2 * (family == "t5")
        assert "for every token" not in said
