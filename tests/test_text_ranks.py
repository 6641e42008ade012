"""Texts, choices, groups and windows through the real engine and trainer: two ranks equal one, the best epoch has the least perplexity."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from suite.backbones.loading import build, load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import LimitConfig
from suite.config.task import TaskConfig, load_task
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.prepare import prepare
from suite.meters import PhaseMeter
from suite.metrics.text import perplexity
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.result import Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.engine import Engine
from suite.train.evaluate import Evaluation, evaluate
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from tests.ranks import in_processes
from tests.rows import write_rows
from tests.texts import prose_task, toy_translation, write_pairs, write_prose
from tests.tiny import tiny_choice
from tests.toy import disturb

TRAINING = TrainingConfig(
    epochs=4,
    patience=None,
    batch_size=4,
    eval_batch_size=3,
    max_length=32,
    target_max_length=12,
    stride=16,
)
CASES: list[tuple[TaskConfig, str]] = [
    (prose_task(), "gpt2"),
    (toy_translation(), "gpt2"),
    (toy_translation(), "t5"),
    *(
        (load_task(name), family)
        for name, family in (
            ("squad2", "bert"),
            ("copa", "bert"),
            ("copa", "gpt2"),
            ("multirc", "bert"),
        )
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pairs and an odd number of windows to evaluate: ranks get unequal shares. What train repeats, validation never says."""
    folder = tmp_path_factory.mktemp("texts")
    other = ["WXYZ " * 43]
    write_prose(folder / "data", train=["ab " * 80] * 4, validation=other, test=other)
    write_pairs(folder / "data", train=8, validation=7, test=7)
    for task, _ in CASES[3:]:
        write_rows(task, folder / "data", {"train": 12, "validation": 18})
    return folder


def ready(task: TaskConfig, family: str, folder: Path) -> tuple[Objective, Dataset, Any]:
    """The task's objective and test rows, and a model with random weights large enough that its answers hang on the prompt."""
    resolved = resolve(tiny_choice(family))
    options: Any = {
        "kind": resolved.family.kind,
        "tokenizer": load_tokenizer(resolved),
        "training": TRAINING,
    }
    objective = make_objective(task, **options, decoder_objective="text")
    data = prepare(
        task, objective, limit=LimitConfig(), data_root=folder / "data", cache=folder / "cache"
    ).split("test", confirm=True)
    torch.manual_seed(5)
    model = build(resolved, objective.head)
    disturb(model, scale=0.3)
    return objective, data, model


def evaluations(rank: int, folder: Path) -> list[Evaluation]:
    """Every case under ZeRO-3 in batches of three: the ranks' shares are uneven, and so are their last batches."""
    found = []
    meter = PhaseMeter(torch.device("cpu"))
    for task, family in CASES:
        objective, data, model = ready(task, family, folder)
        engine = Engine(model, TRAINING, world_size=2, device="cpu")
        with meter.phase("eval"):
            found += evaluate(
                [engine], objective, data, meter, rank=rank, world_size=2, batch_size=3
            )
        engine.release()
    return found


def make_spec(learning_rate: float, **training: Any) -> TrialSpec:
    return TrialSpec(
        sweep="test",
        arm=Arm(
            backbone=tiny_choice("gpt2"), method="full", architecture=full_architecture("full", {})
        ),
        task=prose_task(),
        training=TRAINING.model_copy(update=training),
        world_size=2,
        phase=Phase.CONFIRM,
        learning_rate=learning_rate,
        seed=1,
    )


LEARNS = make_spec(1e-2)
LEAPS = make_spec(1e3, batch_size=30, schedule="constant", warmup_frac=0.0)
"""One step an epoch: the loss of the first is finite, the perplexity after it is not."""


def everything(rank: int, port: int, folder: Path) -> None:
    """All runs on one pair of ranks: starting a process takes longer than they do."""
    torch.set_num_threads(1)
    trainer = Trainer(
        Workspace(Home(folder / "home"), folder / "data"),
        rank=rank,
        world_size=2,
        local_rank=rank,
        master_port=port,
    )
    for spec in (LEARNS, LEAPS):
        trainer.start(spec)
        while not trainer.epoch().done:
            pass
        trainer.finish()
    (folder / f"evaluations-{rank}").write_bytes(pickle.dumps(evaluations(rank, folder)))
    trainer.close()


@pytest.fixture(scope="module")
def ran(folder: Path) -> Path:
    in_processes(everything, free_port(), folder, count=2)
    return folder


def result_of(folder: Path, spec: TrialSpec) -> TrialResult:
    result = Home(folder / "home").trial(spec).result()
    assert result is not None
    return result


@pytest.mark.slow
def test_two_ranks_under_zero_3_say_and_score_what_plain_torch_does(ran: Path) -> None:
    first, second = (pickle.loads((ran / f"evaluations-{rank}").read_bytes()) for rank in (0, 1))
    assert first == second
    for (task, family), found in zip(CASES, first, strict=True):
        objective, data, model = ready(task, family, ran)
        assert len(data) % 2 == 1 and found.index == list(dict.fromkeys(data["index"])), (
            "an item is named once, whatever its rows"
        )
        with torch.no_grad():
            merged = objective.merge(
                data,
                objective.predict(model.eval(), objective.collate_eval(list(data)), synced=False),
            )
        answers = merged.predictions
        expected = objective.score(answers, merged.golds, merged.groups)
        assert found.scores == pytest.approx(expected, rel=1e-5)
        assert found.prediction == (
            pytest.approx(answers, rel=1e-5) if isinstance(answers[0], float) else answers
        )
        assert (found.gold, found.group) == (merged.golds, merged.groups)
        if task.kind not in (
            "classification",
            "multiple-choice",
        ):  # a head at random may well prefer one class throughout
            assert len(set(found.prediction)) > 1, "the answers depend on the prompts"


@pytest.mark.slow
def test_the_best_epoch_is_the_one_of_least_perplexity(ran: Path) -> None:
    result = result_of(ran, LEARNS)
    curve = [epoch.validation_score for epoch in result.epochs]
    assert min(curve) < curve[-1], (
        "the model forgets what it never reads: the last epoch is not the best"
    )
    assert result.best_epoch == curve.index(min(curve)) + 1
    assert result.validation_score == min(curve)
    assert result.test_score == pytest.approx(min(curve)), (
        "the same text, with the best weights brought back"
    )


@pytest.mark.slow
def test_a_perplexity_that_overflows_ends_the_trial_as_diverged(ran: Path) -> None:
    result = result_of(ran, LEAPS)
    assert (result.status, result.score, result.epochs) == (Status.DIVERGED, None, [])
    assert "validation score is not finite" in Home(ran / "home").trial(LEAPS).log(0).read_text()


@pytest.mark.slow
def test_the_file_of_predictions_holds_the_items_that_make_the_score(ran: Path) -> None:
    result = result_of(ran, LEARNS)
    table = pq.read_table(Home(ran / "home").trial(LEARNS).predictions("test")).to_pydict()
    assert set(table) == {"index", "tokens", "nll"}
    assert len(table["index"]) == result.splits["test"] and len(table["index"]) % 2 == 1, (
        "uneven over two ranks"
    )
    assert result.test_score == pytest.approx(perplexity(table["nll"], table["tokens"]))
    assert sum(table["tokens"]) == len("WXYZ " * 43) + 1, (
        "every byte and the end-of-text token once"
    )


@pytest.mark.slow
def test_the_result_says_which_tokenizer_it_counts_in(ran: Path) -> None:
    assert len(result_of(ran, LEARNS).provenance["tokenizer_sha256"]) == 64
