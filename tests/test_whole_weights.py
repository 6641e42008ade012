"""Evaluations that generate under ZeRO-3: weights are gathered once where they fit, and nothing but the time tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile

from suite.backbones.loading import load_tokenizer, resolve
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.training import Partitioning, TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.prepare import prepare
from suite.meters import PhaseMeter
from suite.plan.plan import make_plan
from suite.train.engine import Engine
from suite.train.evaluate import Evaluation, evaluate, weights_at_hand
from suite.tune import driver
from tests.ranks import on_ranks
from tests.sweeps import toy_roots, toy_sweep
from tests.test_parity import batch_of, model_of
from tests.texts import toy_translation, write_pairs
from tests.tiny import tiny_choice
from tests.toy import disturb

__all__ = ["toy_roots"]

TRAINING = TrainingConfig(
    batch_size=8, max_length=32, target_max_length=6, frozen_weights="partitioned", beams=2
)
T5 = tiny_choice("t5")
METHODS = ("full", "lora")
PLENTY = 2**40


def task(
    folder: Path, backbone: BackboneChoice = T5, training: TrainingConfig = TRAINING
) -> tuple[Objective, Dataset]:
    """The rows to translate that lie under a folder."""
    resolved = resolve(backbone)
    objective = make_objective(
        toy_translation(),
        kind=resolved.family.kind,
        tokenizer=load_tokenizer(resolved),
        training=training,
        decoder_objective="text",
    )
    data = prepare(
        toy_translation(),
        objective,
        limit=LimitConfig(),
        data_root=folder / "data",
        cache=folder / "cache",
    )
    return objective, data.split("test", confirm=True)


def make_engine(method: str) -> Engine:
    model = model_of(method, "t5")
    disturb(model, scale=0.3)
    return Engine(model, TRAINING, world_size=2, device="cpu")


def trained(engine: Engine, rank: int, which: range) -> list[float]:
    engine.module.train()
    losses = []
    for step in which:
        mine = {name: tensor[rank::2].contiguous() for name, tensor in batch_of("t5", step).items()}
        losses.append(float(engine.step([(mine, 1.0)], 1e-2)))
    return losses


def evaluated(
    engine: Engine, rank: int, folder: Path, usable_bytes: int | None, *, watched: bool
) -> tuple[Evaluation, list[str], list[str]]:
    """An evaluation, what was logged, and, if they are watched, the collective operations of its passes."""
    objective, data = task(folder)
    meter = PhaseMeter(torch.device("cpu"))
    said: list[str] = []
    at_hand = weights_at_hand([engine], objective, usable_bytes=usable_bytes, log=said.append)
    with meter.phase("eval"), at_hand, collectives(watched) as seen:
        (found,) = evaluate([engine], objective, data, meter, rank=rank, world_size=2, batch_size=2)
    return found, said, seen


@contextmanager
def collectives(watched: bool) -> Iterator[list[str]]:
    """The names of the collective operations within the block; collecting them takes longer than the block."""
    seen: list[str] = []
    if not watched:
        yield seen
        return
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield seen
    seen += [event.name for event in profiler.events() or () if event.name.startswith("c10d::")]


def hooks(engine: Engine) -> list[list[int]]:
    """The hooks around each module, by number, in their order."""
    found = []
    for module in engine.module.modules():
        found += [list(module._forward_hooks), list(module._forward_pre_hooks)]
    return found


def both_ways(rank: int, method: str, folder: Path) -> dict[str, Any]:
    """Two engines that train and evaluate alike, one with whole weights."""
    found: dict[str, Any] = {}
    for name, usable_bytes in (("gathering", None), ("whole", PLENTY)):
        engine = make_engine(method)
        losses = trained(engine, rank, range(2))
        first, said, seen = evaluated(engine, rank, folder, usable_bytes, watched=True)
        losses += trained(engine, rank, range(2, 4))
        last, _, _ = evaluated(engine, rank, folder, usable_bytes, watched=False)
        losses += trained(engine, rank, range(4, 5))
        found[name] = {
            "predictions": [first.prediction, last.prediction],
            "losses": losses,
            "weights": engine.fingerprint(trained=True),
            "said": said,
            "gathers": sum("allgather" in name for name in seen),
            "collectives": len(seen),
        }
        engine.release()
    return found


def after_an_error(rank: int) -> dict[str, bool]:
    """Whether an engine is as it was after an error with whole weights, on one rank alone."""
    engine = make_engine("full")
    first = trained(engine, rank, range(2))
    before = hooks(engine)
    within = before
    whole = False
    try:
        with engine.whole_weights():
            within = hooks(engine)
            whole = not engine.gathers and all(p.numel() for p in engine.module.parameters())
            if rank == 1:
                raise ValueError("of this rank")
    except ValueError:
        pass
    other = make_engine("full")
    expected = trained(other, rank, range(4))
    other.release()
    return {
        "whole within": whole,
        # DeepSpeed's engine has hooks around the whole model, which comes first; they gather nothing.
        "no hooks within": not any(within[2:]),
        "hooks are back": hooks(engine) == before,
        "partitioned": engine.gathers and not any(p.numel() for p in engine.module.parameters()),
        "trains on": first + trained(engine, rank, range(2, 4)) == expected,
    }


def bytes_told(rank: int) -> tuple[int, int]:
    """What an engine says that it holds with whole weights, and what its parts come to."""
    engine = make_engine("full")
    trained(engine, rank, range(1))
    numel = engine.numel()
    told = engine.whole_bytes()
    engine.release()
    # In fp32: all weights, and of its half weights, gradients, copies and two moments.
    return told, 4 * numel + 4 * 5 * numel // 2


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """All in one pair of processes: starting them costs more than what they do."""
    found: dict[str, Any] = {method: both_ways(rank, method, folder) for method in METHODS}
    found["error"] = after_an_error(rank)
    found["bytes"] = bytes_told(rank)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    # Seven rows, so that the ranks get unequal shares.
    write_pairs(folder / "data", train=8, validation=7, test=7)
    # Encoded here, so that the ranks find it.
    task(folder)
    return on_ranks(everything, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_texts_losses_and_weights_are_those_of_gathering_for_every_token(
    method: str, found: list[dict[str, Any]]
) -> None:
    for on_rank in found:
        gathering = on_rank[method]["gathering"]
        whole = on_rank[method]["whole"]
        for name in ("predictions", "losses", "weights"):
            assert gathering[name] == whole[name]
        assert len(set(whole["predictions"][0])) > 1, "the texts hang on the prompts"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_passes_with_whole_weights_need_no_other_rank(
    method: str, found: list[dict[str, Any]]
) -> None:
    for on_rank in found:
        gathering = on_rank[method]["gathering"]
        whole = on_rank[method]["whole"]
        assert gathering["gathers"] > 100
        # The answers are collected: their sizes, and then they.
        assert whole["collectives"] == whole["gathers"] == 2
        assert gathering["said"][0].startswith("this rank gathers weights for every token: ")
        assert whole["said"][0].startswith("this rank gathers weights once for all texts: ")


@pytest.mark.slow
def test_after_an_error_the_engine_is_as_it_was(found: list[dict[str, Any]]) -> None:
    for on_rank in found:
        assert on_rank["error"] == dict.fromkeys(on_rank["error"], True)


@pytest.mark.slow
def test_what_whole_weights_take_is_what_the_estimate_adds_up(found: list[dict[str, Any]]) -> None:
    for on_rank in found:
        told, expected = on_rank["bytes"]
        # The last slice of each weight is filled up.
        assert told == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("toy_roots")
def test_the_driver_tells_what_states_may_take_at_stage_3() -> None:
    plan = make_plan(toy_sweep(), where="toy", world_size=2)
    assert driver._usable_bytes(plan, lambda: 1000, Partitioning(3)) == 800
    assert driver._usable_bytes(plan, lambda: None, Partitioning(3)) is None
    whole = make_plan(toy_sweep(training={"zero_stage": 0}), where="toy", world_size=2)
    assert driver._usable_bytes(whole, lambda: 1000, Partitioning(3)) is None
