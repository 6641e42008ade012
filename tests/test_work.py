"""What a sweep may cost before it runs: sizes, steps and device-hours, by hand; and the papers' sweeps planned without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from suite.cli.estimate import estimate
from suite.cli.sizes import ROWS, TOKENS_PER_WORD, WORDS, published_tokens
from suite.cli.work import CPU_TFLOPS, GPU_TFLOPS, Work, arm_work, device_hours, steps_at_most
from suite.config.sweep import LimitConfig, SweepConfig
from suite.config.task import HubData, load_task
from suite.config.training import TrainingConfig
from suite.plan.plan import make_plan
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.registry import yaml_names
from tests.commands import Suite, suite
from tests.sweeps import toy_roots, toy_sweep
from tests.test_curves import epochs
from tests.tiny import tiny_choice

__all__ = ["suite", "toy_roots"]


def config(**changes: Any) -> SweepConfig:
    values = {
        "name": "x",
        "backbones": ["t5-base"],
        "methods": ["full"],
        "tasks": ["cola"],
        "training": {"epochs": 2, "batch_size": 100},
    }
    return SweepConfig.model_validate(values | changes)


def test_steps_follow_the_published_rows_the_limit_and_the_epochs() -> None:
    assert steps_at_most(config(), load_task("cola")) == 2 * (8551 // 100)
    assert steps_at_most(config(limit={"train": 500}), load_task("cola")) == 10
    assert steps_at_most(config(limit={"train": 50_000}), load_task("cola")) == 170, (
        "a limit beyond the rows changes nothing"
    )
    assert (
        steps_at_most(
            config(training={"epochs": 3, "epoch_steps": 7, "batch_size": 8}), load_task("cola")
        )
        == 21
    )


def test_running_text_is_counted_in_blocks() -> None:
    task = load_task("wikitext2")
    training = {"epochs": 1, "batch_size": 10, "max_length": 1000}
    assert (
        steps_at_most(config(training=training), task)
        == int(2_088_628 * TOKENS_PER_WORD) // 1000 // 10
    )
    assert steps_at_most(config(training=training, limit={"train": 50}), task) is None, (
        "rows of a limit have unknown lengths"
    )


def test_the_tokens_of_running_text_are_a_bound() -> None:
    data = load_task("ptb").data
    assert isinstance(data, HubData)
    tokens = published_tokens(data)
    assert tokens is not None
    assert tokens >= 1_245_310, "what a byte-level BPE of 4,000 makes of Penn Treebank"


def test_a_data_set_that_is_not_listed_has_an_unknown_size() -> None:
    task = load_task("cola").model_copy(update={"data": HubData(hub="some/where")})
    assert steps_at_most(config(), task) is None
    assert steps_at_most(config(limit=LimitConfig(train=200)), task) == 4


def test_every_listed_size_is_of_a_shipped_task() -> None:
    """A line that no task uses is a misspelt one; SuperGLUE's wsc has two names."""
    data = [load_task(name).data for name in (*yaml_names("tasks"), "wsc")]
    used = {(d.hub, d.config) for d in data if isinstance(d, HubData)}
    assert {*ROWS, *WORDS} <= used | {("aps/super_glue", "wsc")}


def test_a_step_costs_two_flops_a_parameter_and_token_for_each_way_it_is_passed() -> None:
    training = TrainingConfig(batch_size=10, max_length=100, target_max_length=20)
    assert (
        Work(total=1000, trainable=1000, passed=1000, encoder_decoder=False).flops(training)
        == 6 * 1000 * 100 * 10
    )
    frozen = Work(1000, 10, 1000, encoder_decoder=False)
    beside = Work(1000, 10, 10, encoder_decoder=False)
    assert frozen.flops(training) == (4 * 1000 + 2 * 10) * 1000
    assert beside.flops(training) == (2 * 1000 + 4 * 10) * 1000
    assert Work(1000, 1000, 1000, encoder_decoder=True).flops(training) == 6 * 1000 * 60 * 10


@pytest.mark.parametrize(
    ("family", "tokens"),
    [("bert", (64, 2 * 64)), ("llama", (64 + 32, 2 * 64)), ("t5", (64, 64))],
)
def test_a_decoders_target_and_every_choice_are_counted(
    family: str, tokens: tuple[int, int]
) -> None:
    named = ["cola" if family == "bert" else "multi30k-en-de", "copa"]
    training = {"batch_size": 10, "max_length": 64, "target_max_length": 32, "max_new_tokens": 40}
    plan = make_plan(
        toy_sweep(
            backbones=[tiny_choice(family)], methods=["full"], tasks=named, training=training
        ),
        where="toy.yaml",
    )
    (work,) = arm_work(plan, where="toy.yaml").values()
    assert work.tokens == dict(zip(named, tokens, strict=True))
    assert work.encoder_decoder == (family == "t5")
    if family != "t5":
        assert work.flops(plan.config.training, "copa") == 6 * work.total * tokens[1] * 10


def test_methods_without_a_backward_pass_through_the_backbone_cost_less(toy_roots: Path) -> None:
    plan = make_plan(toy_sweep(methods=["full", "lora", "read"]), where="toy.yaml")
    work = arm_work(plan, where="toy.yaml")
    full, lora, read = (work[cell.arm.key] for cell in plan.cells)
    assert full.passed == full.total == full.trainable
    assert lora.passed == lora.total > lora.trainable
    assert read.passed == read.trainable < read.total


def test_hours_are_trials_times_steps_times_the_assumed_time_of_a_step(toy_roots: Path) -> None:
    plan = make_plan(toy_sweep(methods=["full"], limit={"train": 16}), where="toy.yaml")
    (cell,) = plan.cells
    work = arm_work(plan, where="toy.yaml")
    flops = work[cell.arm.key].flops(plan.config.training)
    trials = 5 + 2
    steps = 3 * (16 // 8)
    for on_gpus, tflops in ((True, GPU_TFLOPS), (False, CPU_TFLOPS)):
        cost = device_hours(plan, work, trials={}, on_gpus=on_gpus)
        assert cost["device_hours_at_most"] == pytest.approx(
            trials * steps * flops / (tflops * 1e12) / 3600, rel=1e-12
        )
        assert f"achieves {tflops:g} TFLOP/s" in cost["assumption"]
    unknown = make_plan(toy_sweep(methods=["full"]), where="toy.yaml")
    hours = device_hours(unknown, work, trials={}, on_gpus=True)
    assert hours["device_hours_at_most"] is None


def test_trials_of_any_searched_batch_size_cost_what_their_examples_do(
    toy_roots: Path, tmp_path: Path
) -> None:
    from tests.records import make_result

    def hours(batch_size: Any, *, measured: bool = False, **training: Any) -> float:
        given = {"epochs": 3, "batch_size": batch_size, **training}
        search = {"trials": 5, "startup_trials": 3}
        sweep = toy_sweep(methods=["full"], limit={"train": 18}, training=given, search=search)
        plan = make_plan(sweep, where="toy.yaml")
        (cell,) = plan.cells
        ran = []
        for size in plan.config.batch_sizes if measured else []:
            spec = plan.search_spec(cell, 0, 1e-3, batch_size=size)
            result = make_result(spec, score=50.0, epochs=epochs(40.0, 50.0))
            ran.append(Trial(Home(tmp_path).trial(spec), spec, result))
        work = arm_work(plan, where="toy.yaml")
        cost = device_hours(plan, work, trials={cell.key: ran}, on_gpus=False)
        return float(cost["device_hours_at_most"]) / plan.trials_at_most(cell)

    # a batch of 4 leaves out two examples of 18, one of 6 none
    assert hours([4, 6]) == pytest.approx(hours(6), rel=1e-9)
    # steps that are given are most work with the largest batch
    assert hours([2, 8], epoch_steps=7) == pytest.approx(hours(8, epoch_steps=7), rel=1e-9)
    # two trials of two steps each, of 20 s on two workers
    example_s = 2 * 20.0 * 2 / (2 * (2 + 6))
    found = hours([2, 6], measured=True)
    assert found == pytest.approx(3 * 18 * example_s / 3600, rel=1e-9)


def test_the_bound_has_the_trials_that_the_edge_guard_may_add_once_for_each_study(
    toy_roots: Path,
) -> None:
    for architectures in ("first", "all"):
        bounds = []
        for extensions in (0, 2):
            guard = {"extensions": extensions, "trials": 3}
            search = {"trials": 5, "startup_trials": 3, "per": "method", "edge_guard": guard}
            config = toy_sweep(
                methods=["lora"], limit={"train": 16}, architectures=architectures, search=search
            )
            plan = make_plan(config, where="toy.yaml")
            cost = estimate(plan, arm_work(plan, where="toy.yaml"), states={}, layout=None)
            bounds.append((cost["device_hours_at_most"], cost["optimizer_steps_at_most"]))
        # One study of five trials and two seeds gets a trial at the end and three more, twice.
        for certain, most in zip(*bounds, strict=True):
            assert most == pytest.approx(certain * (5 + 2 + 2 * (1 + 3)) / (5 + 2), rel=1e-9)


def test_measured_steps_replace_the_assumption_and_scale_the_cells_that_have_none(
    toy_roots: Path, tmp_path: Path
) -> None:
    plan = make_plan(toy_sweep(methods=["full", "lora"], limit={"train": 16}), where="toy.yaml")
    full, lora = plan.cells
    spec = plan.search_spec(full, 0, 1e-3)
    from tests.records import make_result

    result = make_result(
        spec, score=50.0, epochs=epochs(40.0, 50.0)
    )  # 20 s of training on two workers, two steps
    ran = {full.key: [Trial(Home(tmp_path).trial(spec), spec, result)]}
    work = arm_work(plan, where="toy.yaml")
    cost = device_hours(plan, work, trials=ran, on_gpus=False)
    share = work[lora.arm.key].flops(plan.config.training) / work[full.arm.key].flops(
        plan.config.training
    )
    assert cost["device_hours_at_most"] == pytest.approx(
        (5 + 2) * 6 * 20.0 * (1 + share) / 3600, rel=1e-9
    )
    assert "measured steps of 1 of 2 cells" in cost["assumption"]


@pytest.mark.parametrize(
    ("sweep", "cells", "search", "confirm"),
    [
        ("read-glue-t5-large", 3 * 7, 3 * 7 * 32, 7 * 3),
        ("mhe-squad", 7 * 2, 0, 7 * 2 * 5),
        ("wgqa-t5", 15, 0, 15 * 3),
    ],
)
def test_a_papers_sweep_is_planned_and_estimated_without_network(
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sweep: str,
    cells: int,
    search: int,
    confirm: int,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, out, _ = suite("run", sweep, "--dry-run", "--home", tmp_path / "h", "--format", "json")
    cost = json.loads(out)["cost"]
    assert code == 0
    assert (cost["cells"], cost["search_trials"], cost["confirm_runs"]) == (cells, search, confirm)
    assert (
        cost["device"] == "GPU"
        and cost["device_hours_at_most"] > 10
        and "if a GPU achieves 40 TFLOP/s, which is a guess" in cost["assumption"]
    )
    assert (cost["device_hours_pretrain"] > 100) == sweep.startswith("mhe")
