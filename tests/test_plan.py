"""Plans, definitions, resources and the order in which trials are handed out; without Ray."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from suite import petl
from suite.backbones.loading import Head, build, resolve
from suite.config.loader import validate
from suite.config.sweep import ResourceConfig, SweepConfig
from suite.errors import (
    ConfigError,
    IncompatibleError,
    ResourceError,
    SweepConflictError,
    UnknownNameError,
)
from suite.plan.cell_state import CellStatus, read_states
from suite.plan.definition import (
    check_definition,
    driver_pid,
    only_driver,
    read_plan,
    store_definition,
    sweeps,
)
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.plan.resources import lay_out
from suite.plan.status import status
from suite.record.attempts import PREEMPTED
from suite.record.folder import Home
from suite.record.result import FailureRecord, Status, TrialResult
from suite.record.spec import ALL_LINEAR, RECIPE, Phase, TrialSpec
from suite.registry import shipped_folder
from tests.fake_trainer import score_of
from tests.sweeps import finish, run_all, toy_roots, toy_sweep
from tests.test_loading import save, with_a_weight_less, with_another_shape
from tests.tiny import tiny_choice

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def planned(**changes: object) -> Plan:
    return make_plan(toy_sweep(**changes), where="toy.yaml")


# ---- plan --------------------------------------------------------------------------------------------------------------


def test_a_plan_is_arms_by_tasks_in_a_fixed_order() -> None:
    plan = planned(tasks=["toy", "toy2"])
    assert [(c.arm.method, c.task.name) for c in plan.cells] == [
        ("full", "toy"),
        ("full", "toy2"),
        ("lora", "toy"),
        ("lora", "toy2"),
    ]
    assert (
        {plan.trials_of(cell) for cell in plan.cells} == {7}
        and plan.total_trials == 28
        and plan.world_size == 2
    )
    assert plan.cells[2].arm.architecture["rank"] > 0, "architectures are complete"


def test_all_architectures_make_an_arm_each() -> None:
    from suite.config.space import load_space

    plan = planned(methods=["lora"], architectures="all")
    assert len(plan.cells) == len(load_space("lora").architectures) > 1


def test_a_number_is_a_fixed_learning_rate_that_is_confirmed_without_a_search(home: Home) -> None:
    plan = planned(
        methods=["full", {"name": "lora", "learning_rate": 0.003}],
        search={"trials": 4},
        confirm={"seeds": [1, 2]},
    )
    assert plan.total_trials == (4 + 2) + 2
    ran = [
        spec for spec in run_all(TrialQueue(plan, home, slots=1), home) if spec.arm.method == "lora"
    ]
    assert [(spec.phase, spec.learning_rate) for spec in ran] == [
        (Phase.CONFIRM, 0.003),
        (Phase.CONFIRM, 0.003),
    ]
    store_definition(plan, home)
    assert read_plan(home, plan.config.name) == plan and all(
        cell.left == 0 for cell in status(home, plan.config.name)
    )


def test_a_whole_number_is_a_learning_rate_too() -> None:
    (cell,) = planned(methods=[{"name": "lora", "learning_rate": 1}]).cells
    assert cell.learning_rate.fixed and cell.learning_rate.low == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            (
                {"methods": [{"name": "lora", "learning_rate": rate}]},
                f"methods.0.learning_rate: got {rate!r}, expected a number in (0, 10], "
                "or {low: ..., high: ...}",
            )
            for rate in (-1, 0.0, 20, 20.0, True, "much", [0.1])
        ),
        (
            {"methods": [{"name": "lora", "learning_rate": "1e-3"}]},
            "methods.0.learning_rate: got the text '1e-3', expected a number; "
            "YAML reads it as text, write 1.0e-3",
        ),
        (
            {"search": {"transfer": "homee"}},
            "search.transfer: Input should be 'home' or a valid boolean, got 'homee'",
        ),
        (
            {"training": {"precision": "fp8"}},
            "training.precision: Input should be 'fp32', 'bf16', 'bf16-autocast' or 'auto', "
            "got 'fp8'",
        ),
        (
            {"training": {"zero_stage": "four"}},
            "training.zero_stage: Input should be a valid integer or 'auto', got 'four'",
        ),
        (
            {"methods": [3]},
            "methods.0: Input should be keys and values, such as {name: ...}, got 3",
        ),
        (
            {"methods": [{"name": "lora", "architecture": 8}]},
            "methods.0.architecture: Input should be keys and values, such as {key: ...}, got 8",
        ),
        (
            {"search": None},
            "search: Input should be keys and values, such as {sampler: ...}, "
            "but the key has nothing below it",
        ),
        (
            {"tasks": None},
            "tasks: Input should be a valid list, but the key has nothing below it",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_all_that_is_allowed(
    changes: dict[str, Any], said: str
) -> None:
    names = {"name": "toy", "backbones": ["minilm"], "methods": ["full"], "tasks": ["toy"]}
    with pytest.raises(ConfigError) as raised:
        validate(SweepConfig, names | changes, where="toy.yaml")
    assert str(raised.value) == f"toy.yaml: {said}"


def test_what_the_sweep_says_of_a_method_hides_its_search_space() -> None:
    choice = {
        "name": "lora",
        "architecture": {"rank": 3},
        "learning_rate": {"low": 0.001, "high": 0.01},
    }
    (cell,) = planned(methods=[choice]).cells
    assert cell.arm.architecture["rank"] == 3 and cell.learning_rate.low == 0.001


def test_specs_differ_by_what_they_are_and_share_an_engine_where_they_can() -> None:
    plan = planned()
    cell = plan.cells[0]
    first = plan.search_spec(cell, 0, 1e-3)
    second = plan.search_spec(cell, 1, 2e-3)
    confirm = plan.confirm_spec(cell, 1e-3, 1)
    assert len({first.hash, second.hash, confirm.hash}) == 3
    assert (
        first.engine_key == second.engine_key != plan.search_spec(plan.cells[1], 0, 1e-3).engine_key
    )
    assert confirm.engine_key == first.engine_key, "another seed only draws new weights"
    assert first.cell == confirm.cell == cell.key
    assert (confirm.phase, confirm.number, confirm.seed) == (Phase.CONFIRM, 0, 1)
    assert planned().search_spec(cell, 0, 1e-3).hash == first.hash


def test_trials_of_another_recipe_are_left_aside(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(methods=["full"], tasks=["toy"])
    run_all(TrialQueue(plan, home, slots=1), home)
    (cell,) = plan.cells
    assert read_states(plan, home)[cell.key].search
    monkeypatch.setattr("suite.record.spec.RECIPE", RECIPE + 1)
    assert not read_states(plan, home)[cell.key].search
    assert TrialQueue(plan, home, slots=1).next() is not None


def test_only_arms_that_wrapped_the_task_head_have_the_recipe_without_it() -> None:
    everywhere = {"name": "peft:lora", "architecture": {"target_modules": "all-linear"}}
    rate = {"learning_rate": 0.003}
    plan = planned(methods=[everywhere | rate, {"name": "peft:lora"} | rate])
    recipes = [plan.confirm_spec(cell, 0.003, 1).recipe for cell in plan.cells]
    assert recipes == [ALL_LINEAR, RECIPE]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"methods": ["lorra"]}, UnknownNameError, "lora"),
        ({"tasks": ["toyy"]}, UnknownNameError, "toy"),
        ({"training": {"batch_size": 9}}, IncompatibleError, "multiple of 2"),
        (
            {"training": {"batch_size": 12, "micro_batch_size": 4}},
            IncompatibleError,
            "micro_batch_size",
        ),
        ({"training": {"batch_size": 8, "max_length": 129}}, IncompatibleError, "128 positions"),
        (
            {"methods": ["prompt"], "training": {"batch_size": 8, "max_length": 120}},
            IncompatibleError,
            "at most 108",
        ),
        (
            {
                "methods": ["peft:prefix-tuning"],
                "training": {"batch_size": 8, "gradient_checkpointing": True},
            },
            IncompatibleError,
            "does not go with training.gradient_checkpointing: transformers then drops the cache",
        ),
        ({"methods": ["full", "full"]}, ConfigError, "twice"),
        ({"methods": [{"name": "lora", "architecture": {"rnk": 3}}]}, ConfigError, "rnk"),
        ({"backbones": ["no-such-backbone"]}, UnknownNameError, "no-such-backbone"),
        ({"attention": ["no-such-variant"]}, ConfigError, "no-such-variant"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    changes: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        planned(**changes)
    assert "toy.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"confirm": {"seeds": [10**23]}}, "confirm.seeds.0"),
        ({"search": {"seed": 10**23}}, "search.seed"),
        ({"search": {"trials": 10**12}}, "search.trials"),
        ({"training": {"epochs": 10**12}}, "training.epochs"),
        ({"training": {"weight_decay": float("inf")}}, "training.weight_decay"),
        ({"timeouts": {"epoch_s": 1e300}}, "timeouts.epoch_s"),
        ({"timeouts": {"setup_s": float("inf")}}, "timeouts.setup_s"),
        ({"failures": {"grace_s": 1e300}}, "failures.grace_s"),
        ({"resources": {"room_wait_s": 1e300}}, "resources.room_wait_s"),
        ({"resources": {"cpus_per_worker": float("inf")}}, "resources.cpus_per_worker"),
        ({"resources": {"cpus_per_worker": 1e300}}, "resources.cpus_per_worker"),
        ({"resources": {"gpus_per_worker": 1e300}}, "resources.gpus_per_worker"),
        ({"resources": {"frozen_states_gib": 1e300}}, "resources.frozen_states_gib"),
        ({"training": {"weight_decay": 1e300}}, "training.weight_decay"),
        ({"training": {"adam_beta1": 1.0}}, "training.adam_beta1"),
        ({"training": {"adam_beta2": 1.0}}, "training.adam_beta2"),
        ({"training": {"gradient_clipping": 1e300}}, "training.gradient_clipping"),
    ],
)
def test_no_plan_takes_an_absurd_number(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        toy_sweep(**changes)


def numbers_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number in a JSON schema: its path, and what the schema says of it."""
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if isinstance(schema, dict):
        if schema.get("type") in ("number", "integer"):
            yield path, schema
        for key, part in schema.items():
            yield from numbers_of(part, f"{path}/{key}")


def test_every_number_of_a_sweep_has_a_least_and_a_most() -> None:
    numbers = dict(numbers_of(SweepConfig.model_json_schema()))
    assert len(numbers) > 50
    for path, number in numbers.items():
        # A paper's numbers are shown as they stand there.
        if not path.startswith("/$defs/Reference/"):
            assert number.keys() & {"minimum", "exclusiveMinimum"}, path
            assert number.keys() & {"maximum", "exclusiveMaximum"}, path


def with_a_head(folder: Path, labels: int = 5) -> None:
    head = Head("classification", labels)
    build(resolve(tiny_choice("bert")), head).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (with_a_head, r"task toy on .*classifier.*the head of this task needs .*without its head"),
        (with_a_weight_less, r"task toy on .*lacks 1 weights of backbone"),
        (with_another_shape, r"task toy on .*shape \(64,\), but the configuration expects \(48,\)"),
    ],
)
def test_weights_of_a_folder_that_do_not_fit_are_found_before_anything_starts(
    spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    save("bert", folder)
    mine = [{"name": str(folder), "tokenizer": "bytes"}]
    assert planned(backbones=mine).cells
    spoil(folder)
    with pytest.raises(ConfigError, match=says):
        planned(backbones=mine)


def test_a_head_that_somebody_has_trained_is_told_and_a_masked_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "mine"
    save("bert", folder)
    mine = [{"name": str(folder), "tokenizer": "bytes"}]
    assert planned(backbones=mine).cells and not caplog.text
    with_a_head(folder, 2)
    assert planned(backbones=mine).cells
    assert f"{folder} brings a task head (classifier.bias, classifier.weight)" in caplog.text
    assert "write the folder again without its head" in caplog.text


def test_a_method_that_does_not_work_on_a_family_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "user" / "petl"
    folder.mkdir()
    (folder / "bert_only.py").write_text(
        "from suite.petl.full import Full\n\nclass BertOnly(Full):\n    name, aliases, families = 'bert-only', (), frozenset({'bert'})\n"
    )
    choice = {
        "name": "bert-only",
        "architecture": {},
        "learning_rate": {"low": 0.001, "high": 0.01},
    }
    assert len(planned(methods=[choice]).cells) == 1
    with pytest.raises(IncompatibleError, match=r"toy\.yaml.*bert-only.*works on bert"):
        planned(methods=[choice], backbones=[tiny_choice("t5")])


# ---- resources -----------------------------------------------------------------------------------------------------------


def test_resources_default_to_a_worker_per_gpu_or_one_cpu_worker() -> None:
    on_gpus = lay_out(ResourceConfig(), [{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}])
    assert (on_gpus.workers, on_gpus.gpus, on_gpus.device, on_gpus.slots) == (8, 1.0, "cuda", 1)
    shared = lay_out(ResourceConfig(gpus_per_worker=0.5), [{"CPU": 8, "GPU": 4}])
    assert (shared.workers, shared.slots) == (1, 8), "ranks of one trial share no GPU"
    assert on_gpus.memory_frac == 1.0 and shared.memory_frac == 0.45
    on_cpus = lay_out(ResourceConfig(), [{"CPU": 5.0}])
    assert (on_cpus.workers, on_cpus.gpus, on_cpus.device, on_cpus.slots) == (1, 0.0, "cpu", 5)
    assert lay_out(ResourceConfig(), [{"CPU": 8.0}], workers=4).workers == 4, (
        "a resumed sweep keeps its world size"
    )


@pytest.mark.parametrize(
    ("asked", "nodes", "workers"),
    [
        ({}, [{"GPU": 8.0}] + [{"CPU": 64.0, "GPU": 8.0}] * 3, 24),
        ({"gpus_per_worker": 2}, [{"CPU": 64.0, "GPU": 8.0}] * 4, 16),
        ({"cpus_per_worker": 16.0}, [{"CPU": 64.0, "GPU": 8.0}], 4),
        ({"gpus_per_worker": 2, "placement": "strict-pack"}, [{"CPU": 8.0, "GPU": 4.0}] * 2, 2),
    ],
)
def test_the_default_number_of_workers_is_what_has_room(
    asked: dict[str, Any], nodes: list[dict[str, float]], workers: int
) -> None:
    layout = lay_out(ResourceConfig.model_validate(asked), nodes)
    assert layout.workers == workers
    assert layout.slots >= 1


@pytest.mark.parametrize(("part", "slots"), [(0.6, 8), (0.4, 16), (0.3, 24), (0.1, 80)])
def test_no_part_of_a_gpu_reaches_over_to_another_one(part: float, slots: int) -> None:
    node = {"CPU": 96.0, "GPU": 8.0}
    layout = lay_out(ResourceConfig(gpus_per_worker=part), [node])
    assert layout.slots == slots
    assert layout.room_on([{"CPU": 96.0, "GPU": 1.0 - part}]).most == slots // 8 - 1


def test_slots_are_bounded_and_counted_node_by_node() -> None:
    assert lay_out(ResourceConfig(workers=2, cpus_per_worker=2.0), [{"CPU": 3.0}] * 4).slots == 2
    assert lay_out(ResourceConfig(workers=1, concurrent_trials=3), [{"CPU": 8.0}]).slots == 3


def test_resources_that_can_never_fit_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"5 workers of 1 CPU each never fit.*holds 4"):
        lay_out(ResourceConfig(workers=5), [{"CPU": 2.0}, {"CPU": 2.0}])
    with pytest.raises(ResourceError, match="never fit"):
        lay_out(ResourceConfig(workers=1, gpus_per_worker=1), [{"CPU": 8.0}])
    with pytest.raises(ResourceError, match="holds 8 on nodes that have both"):
        lay_out(ResourceConfig(workers=16), [{"GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}])
    with pytest.raises(ResourceError, match="expected a whole number, or a part"):
        lay_out(ResourceConfig(workers=1, gpus_per_worker=1.5), [{"CPU": 8.0, "GPU": 8.0}])
    with pytest.raises(ResourceError, match="two ranks on one GPU"):
        lay_out(ResourceConfig(workers=2, gpus_per_worker=0.5), [{"CPU": 8.0, "GPU": 1.0}])
    config = ResourceConfig(workers=1, workers_by_backbone={"minilm": 2}, gpus_per_worker=0.5)
    with pytest.raises(
        ResourceError, match=r"2 workers \(resources\.workers_by_backbone\.minilm\)"
    ):
        lay_out(config, [{"CPU": 8.0, "GPU": 1.0}])


def test_gpus_without_a_number_of_workers_are_refused_where_there_are_none() -> None:
    with pytest.raises(ResourceError, match=r"1 worker of 1 CPU, 1 GPU never fits"):
        lay_out(ResourceConfig(gpus_per_worker=1), [{"CPU": 8.0}])


@pytest.mark.parametrize(
    ("asked", "node", "said"),
    [
        (
            {"workers": 2, "gpus_per_worker": 1},
            {"CPU": 2.0},
            "holds 0 for want of GPUs; set resources.gpus_per_worker: 0 to train on CPUs, or add nodes with GPUs",
        ),
        (
            {"workers": 3, "gpus_per_worker": 1},
            {"CPU": 8.0, "GPU": 2.0},
            "holds 2 for want of GPUs; lower resources.workers, or add nodes",
        ),
        (
            {"workers": 4, "gpus_per_worker": 1},
            {"CPU": 1.0, "GPU": 4.0},
            "holds 1 for want of CPUs; lower resources.workers or resources.cpus_per_worker, or add nodes",
        ),
        (
            {"workers": 1, "cpus_per_worker": 3.0},
            {"CPU": 2.0},
            "holds 0; lower resources.cpus_per_worker, or add larger nodes",
        ),
    ],
)
def test_what_is_short_is_named_with_what_helps(
    asked: dict[str, Any], node: dict[str, float], said: str
) -> None:
    with pytest.raises(ResourceError) as told:
        lay_out(ResourceConfig.model_validate(asked), [node])
    assert str(told.value).endswith(said)


# ---- definition ------------------------------------------------------------------------------------------------------------


def test_a_stored_plan_is_read_back_equal(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    assert read_plan(home, "toy") == plan
    assert sweeps(home) == ["toy"]
    assert SweepConfig.model_validate_json(home.sweep_definition("toy").read_bytes()) == plan.config
    with pytest.raises(ConfigError, match="holds no sweep 'other'; it holds toy"):
        read_plan(home, "other")


@pytest.mark.parametrize(
    "changes",
    [
        {"search": {"trials": 9, "startup_trials": 3}},
        {"confirm": {"seeds": [1, 2, 3]}},
        {"methods": ["lora", "adapter", "full"]},
        {"tasks": ["toy", "toy2"]},
        {"description": "another", "failures": {"retries": 1}, "timeouts": {"setup_s": 5.0}},
        {"resources": {"concurrent_trials": 1}},
    ],
)
def test_budget_resources_and_more_choices_may_change(
    home: Home, changes: dict[str, object]
) -> None:
    store_definition(planned(), home)
    check_definition(planned(**changes), home)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": {"epochs": 4, "batch_size": 8}}, "training.epochs: 3 -> 4"),
        ({"search": {"trials": 5, "startup_trials": 2}}, "search.startup_trials: 3 -> 2"),
        ({"methods": ["full"]}, "lora.*is gone or has changed"),
        (
            {"methods": ["full", {"name": "lora", "learning_rate": {"low": 0.01, "high": 0.1}}]},
            "learning rate of lora: high: .* -> 0.1",
        ),
        ({"resources": {"workers": 1}}, "resources.workers: 2 -> 1"),
        ({"limit": {"train": 5}}, "limit.train: null -> 5"),
    ],
)
def test_another_sweep_of_the_same_name_is_refused(
    home: Home, changes: dict[str, object], says: str
) -> None:
    store_definition(planned(), home)
    with pytest.raises(SweepConflictError, match=says) as raised:
        check_definition(planned(**changes), home)
    assert "another --home" in str(raised.value)


@pytest.mark.parametrize(
    ("was", "now", "key"), [("accuracy", "f1", "metrics"), ("a toy", "ours", "description")]
)
def test_an_edited_task_file_is_another_sweep(
    home: Home, tmp_path: Path, was: str, now: str, key: str
) -> None:
    plan = planned()
    store_definition(plan, home)
    path = tmp_path / "user" / "tasks" / "toy.yaml"
    path.write_text(path.read_text().replace(was, now))
    edited = planned()
    with pytest.raises(SweepConflictError, match=rf"tasks/toy\.yaml: {key}"):
        check_definition(edited, home)
    assert edited.cells[0].task != plan.cells[0].task, "no earlier trial would count"


def test_a_sweep_over_files_that_were_moved_goes_on_where_they_lie_now(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "user"
    rows = "".join(f"text {n},{n % 2}\n" for n in range(60))
    (user / "tasks" / "rows.csv").write_text(f"text,label\n{rows}")
    task = user / "tasks" / "toy.yaml"
    text = task.read_text().replace("hub: toy/words", "files: rows.csv")
    task.write_text(text.replace("splits: {rule: named, test: test}\n", ""))
    plan = planned(methods=["full"])
    store_definition(plan, home)
    queue = TrialQueue(plan, home, slots=2)
    ran = run_all(queue, home, at_most=2)
    begun = queue.next()
    assert begun is not None
    moved = tmp_path / "moved"
    user.rename(moved)
    monkeypatch.setenv("SUITE_PATH", str(moved))
    again = planned(methods=["full"])
    check_definition(again, home)
    store_definition(again, home)
    (report,) = status(home, "toy")
    assert (report.done, report.left_out) == (2, 0)
    queue = TrialQueue(again, home, slots=2)
    taken_up = queue.next()
    assert taken_up is not None and taken_up.hash == begun.hash
    assert f'"{moved}/tasks"' in taken_up.model_dump_json()
    finish(home, taken_up, score_of(taken_up, 3))
    queue.ended(taken_up)
    rest = run_all(queue, home)
    assert len({spec.hash for spec in (*ran, taken_up, *rest)}) == 7
    assert not {spec.hash for spec in ran} & {spec.hash for spec in rest}


RANKS = "architectures:\n" + "".join(f"  - {{rank: {r}, alpha: {r}.0}}\n" for r in (16, 8))


def ranks_space(tmp_path: Path, architectures: str) -> None:
    """Hide LoRA's search space by one with other architectures."""
    shipped = shipped_folder("search_spaces") / "lora.yaml"
    own = tmp_path / "user" / "search_spaces" / "lora.yaml"
    own.parent.mkdir(exist_ok=True)
    own.write_text(shipped.read_text().split("architectures:")[0] + architectures)


def test_a_choice_that_a_search_space_lists_twice_is_a_mistake_of_its_file(tmp_path: Path) -> None:
    ranks_space(tmp_path, RANKS + "  - {rank: 16, alpha: 16.0}\n")
    with pytest.raises(ConfigError, match=r"search_spaces/lora\.yaml.*'rank': 16.* listed twice"):
        planned(methods=["lora"])


def test_near_names_a_method_that_exists_also_one_of_ones_own(tmp_path: Path) -> None:
    def plan_near(method: str) -> Plan:
        ranks_space(tmp_path, RANKS)
        space = tmp_path / "user" / "search_spaces" / "lora.yaml"
        space.write_text(space.read_text().replace("method: full", f"method: {method}"))
        return planned(methods=["lora"])

    with pytest.raises(UnknownNameError, match=r"near .*unknown method 'fulll'; did you mean full"):
        plan_near("fulll")
    own = tmp_path / "user" / "petl"
    own.mkdir()
    shutil.copy(Path(petl.__file__).parent / "bitfit.py", own / "mine.py")
    assert plan_near("mine").cells


@pytest.mark.parametrize("begun", [True, False])
def test_a_contest_that_has_begun_keeps_its_architectures(
    home: Home, tmp_path: Path, begun: bool
) -> None:
    shared = {"methods": ["lora"], "search": {"trials": 5, "startup_trials": 3, "per": "method"}}
    ranks_space(tmp_path, RANKS)
    small = planned(architectures="search", **shared)
    store_definition(small, home)
    if begun:
        run_all(TrialQueue(small, home, slots=1), home, at_most=1)
    ranks_space(tmp_path, f"{RANKS}  - {{rank: 32, alpha: 32.0}}\n")
    larger = planned(architectures="search", **shared)
    first = planned(architectures="first", **shared)
    if not begun:
        check_definition(larger, home)
        check_definition(first, home)
        return
    for plan, says in ((larger, '"rank": 32.* is new'), (first, '"rank": 8.* is gone')):
        with pytest.raises(SweepConflictError, match=f"architectures of lora: .*{says}"):
            check_definition(plan, home)


def test_architectures_with_studies_of_their_own_may_come_late(home: Home) -> None:
    first = planned(methods=["lora"], architectures="first")
    store_definition(first, home)
    run_all(TrialQueue(first, home, slots=1), home, at_most=1)
    check_definition(planned(methods=["lora"], architectures="search"), home)
    check_definition(planned(methods=["lora"], architectures="all"), home)


def test_half_a_definition_is_no_absent_one(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    home.sweep_definition("toy").with_suffix(".cells").unlink()
    for ask in (lambda: read_plan(home, "toy"), lambda: check_definition(plan, home)):
        with pytest.raises(ConfigError, match=r"toy\.cells: is missing beside toy\.json"):
            ask()


def test_a_variant_with_its_defaults_written_out_is_no_second_arm() -> None:
    spelt = {"name": "gqa", "options": {"init": "mean", "kv_heads": None, "sites": None}}
    with pytest.raises(ConfigError, match=r"attention: gqa with .* is the same as gqa with \{\}"):
        planned(methods=["full"], attention=["gqa", spelt])
    plan = planned(methods=["full"], attention=["gqa", {"name": "gqa", "options": {"kv_heads": 1}}])
    assert plan.cells[0].arm.attention.options == {}, "as given: trials are named by it"


@pytest.mark.parametrize("owner", [b"[" * 200_000, b"\xff", b"[1]"])
def test_a_driver_whose_file_cannot_be_read_has_no_name(owner: bytes, home: Home) -> None:
    definition = home.sweep_definition("toy")
    definition.parent.mkdir(parents=True)
    definition.with_suffix(".driver").write_bytes(owner)
    with definition.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert driver_pid(home, "toy") is None


def test_a_driver_is_known_on_a_file_system_without_locks(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre has none unless it is mounted with `flock`; then the lock is that its file exists."""

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    home.path.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with only_driver(home, "toy"):
            assert driver_pid(home, "toy") == os.getpid()
    assert driver_pid(home, "toy") is None


def test_a_sweep_has_one_driver_at_a_time(home: Home) -> None:
    home.path.mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\n"
            "from suite.record.folder import Home; from suite.plan.definition import only_driver\n"
            "with only_driver(Home(Path(sys.argv[1])), 'toy'): print('held', flush=True); time.sleep(60)",
            str(home.path),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert driver_pid(home, "toy") == holder.pid
        with (
            pytest.raises(SweepConflictError, match=f"process {holder.pid}"),
            only_driver(home, "toy"),
        ):
            pass
        elsewhere = str(home.path / "bucket")  # a claim there would not meet the first one
        with (
            pytest.raises(SweepConflictError, match="give the same --storage"),
            only_driver(home, "toy", storage=elsewhere),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert driver_pid(home, "toy") is None
    with only_driver(home, "toy"):
        pass


# ---- schedule --------------------------------------------------------------------------------------------------------------


def test_one_slot_goes_cell_by_cell_search_before_confirm(home: Home) -> None:
    plan = planned()
    ran = run_all(TrialQueue(plan, home, slots=1), home)
    assert [(s.arm.method, s.phase, s.number, s.seed) for s in ran] == [
        (method, phase, number, seed)
        for method in ("full", "lora")
        for phase, number, seed in [
            *((Phase.SEARCH, n, 0) for n in range(5)),
            (Phase.CONFIRM, 0, 1),
            (Phase.CONFIRM, 0, 2),
        ]
    ]
    for cell in plan.cells:
        search = [s for s in ran if s.cell == cell.key and s.phase is Phase.SEARCH]
        best = max(search, key=lambda s: score_of(s, 3))
        assert {
            s.learning_rate for s in ran if s.cell == cell.key and s.phase is Phase.CONFIRM
        } == {best.learning_rate}
    assert all(s.status is CellStatus.DONE for s in read_states(plan, home).values())


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random", "grid"])
def test_a_sweep_stopped_after_any_trial_goes_on_as_if_it_had_not_been(
    tmp_path: Path, sampler: str
) -> None:
    plan = planned(methods=["full"], search={"trials": 4, "startup_trials": 2, "sampler": sampler})
    whole = run_all(TrialQueue(plan, Home(tmp_path / "whole"), slots=1), Home(tmp_path / "whole"))
    for k in range(1, len(whole)):
        home = Home(tmp_path / f"cut-{k}")
        first = TrialQueue(plan, home, slots=1)
        done = run_all(first, home, at_most=k)
        in_flight = first.next()  # handed out, then the driver is killed
        rest = run_all(TrialQueue(plan, home, slots=1), home)
        assert rest[0] == in_flight
        assert done + rest == whole


def lanes_plan(**search: Any) -> Plan:
    """A study of READ, of eight trials in rounds of up to three."""
    return planned(methods=["read"], search={"trials": 8, "startup_trials": 4, "lanes": 3} | search)


def side_by_side(queue: TrialQueue, home: Home, *, at_most: int = 100) -> Iterator[list[TrialSpec]]:
    """Run groups of trials one after another."""
    for _ in range(at_most):
        leader = queue.next()
        if leader is None:
            return
        lanes = [leader, *queue.beside(leader)]
        assert queue.live == 1, "those beside the first one need no room"
        # The last one first: in which order they end must not matter.
        for spec in reversed(lanes):
            finish(home, spec, score_of(spec, 3))
            queue.ended(spec)
        yield lanes


def test_trials_of_a_round_train_side_by_side_and_rounds_end_with_the_quasi_random_start(
    home: Home,
) -> None:
    plan = lanes_plan()
    (cell,) = plan.cells
    queue = TrialQueue(plan, home, slots=1, lanes={cell.arm.key: 3})
    groups = list(side_by_side(queue, home))
    search = [[spec.number for spec in group] for group in groups if group[0].phase is Phase.SEARCH]
    assert search == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert [[spec.seed for spec in group] for group in groups[4:]] == [[1], [2]], "confirm alone"
    assert queue.live == 0 and next(iter(queue.states.values())).status is CellStatus.DONE


@pytest.mark.parametrize("fit", [1, 2])
def test_what_is_proposed_depends_on_the_rounds_and_not_on_how_many_fit(
    tmp_path: Path, fit: int
) -> None:
    plan = lanes_plan()
    ran = []
    for lanes in (3, fit):
        home = Home(tmp_path / str(lanes))
        queue = TrialQueue(plan, home, slots=1, lanes={plan.cells[0].arm.key: lanes})
        ran.append([spec for group in side_by_side(queue, home) for spec in group])
    assert ran[0] == ran[1]


def test_lanes_that_were_cut_go_on_together_and_propose_what_they_would_have(
    tmp_path: Path,
) -> None:
    plan = lanes_plan()
    lanes = {plan.cells[0].arm.key: 3}
    home = Home(tmp_path / "whole")
    whole = list(side_by_side(TrialQueue(plan, home, slots=1, lanes=lanes), home))
    for done in range(len(whole)):
        home = Home(tmp_path / f"cut-{done}")
        first = TrialQueue(plan, home, slots=1, lanes=lanes)
        before = list(side_by_side(first, home, at_most=done))
        leader = first.next()
        assert leader is not None
        cut = [leader, *first.beside(leader)]
        # One of them has ended early, in whatever way, when the driver is killed.
        ended = cut[-1]
        finish(home, ended, score_of(ended, 3))
        rest = list(side_by_side(TrialQueue(plan, home, slots=1, lanes=lanes), home))
        assert [spec for group in [*before, [ended], *rest] for spec in group] == [
            spec
            for group in [*whole[:done], [ended], cut[:-1], *whole[done + 1 :]]
            for spec in group
        ]


def test_lanes_that_came_apart_train_one_by_one(home: Home) -> None:
    plan = lanes_plan()
    (cell,) = plan.cells
    queue = TrialQueue(plan, home, slots=1, lanes={cell.arm.key: 3})
    leader = queue.next()
    assert leader is not None
    queue.apart([leader, *queue.beside(leader)], for_good=False)
    assert queue.live == 0
    groups = list(side_by_side(queue, home))
    assert [len(group) for group in groups] == [1, 1, 1, 1, 3, 1, 1, 1]
    more = lanes_plan(trials=11)
    queue = TrialQueue(more, home, slots=1, lanes={cell.arm.key: 3})
    leader = queue.next()
    assert leader is not None
    queue.apart([leader, *queue.beside(leader)], for_good=True)
    assert all(len(group) == 1 for group in side_by_side(queue, home)), "also the trials after them"


def test_a_trial_that_failed_or_is_further_trains_beside_no_other(home: Home) -> None:
    plan = lanes_plan()
    (cell,) = plan.cells
    lanes = {cell.arm.key: 3}
    queue = TrialQueue(plan, home, slots=1, lanes=lanes)
    leader = queue.next()
    assert leader is not None
    _, failed = queue.beside(leader)
    home.trial(failed).add_failure(FailureRecord(type="RankDied", message="gone"))
    # A notice to leave is no failure.
    home.trial(leader).add_failure(FailureRecord(type="PreemptedError", message="left"))
    groups = list(side_by_side(TrialQueue(plan, home, slots=1, lanes=lanes), home))
    assert [len(group) for group in groups[:3]] == [2, 1, 1]


def test_only_methods_without_gradients_in_the_backbone_and_one_objective_have_rounds() -> None:
    for config in (planned(), lanes_plan(objective=["score", "energy"], stop=None)):
        assert {config.lanes(cell) for cell in config.cells} == {1}


def test_slots_are_shared_one_per_cell_and_more_only_when_cells_run_out(home: Home) -> None:
    schedule = TrialQueue(planned(), home, slots=3)
    first, second, third = (schedule.next() for _ in range(3))
    assert first is not None and second is not None and third is not None
    assert [first.cell != second.cell, third.number] == [True, 1]
    assert schedule.next() is None and schedule.live == 3, "no more than the slots"
    one = TrialQueue(planned(), Home(home.path / "b"), slots=2)
    _ = one.next()
    live = one.next()
    assert live is not None
    finish(Home(home.path / "b"), live, 1.0)
    one.ended(live)
    following = one.next()
    assert following is not None and following.cell == live.cell, "the warm group keeps its cell"


def test_a_larger_budget_only_adds_trials(home: Home) -> None:
    before = run_all(TrialQueue(planned(), home, slots=1), home)
    plan = planned(search={"trials": 7, "startup_trials": 3}, confirm={"seeds": [1, 2, 3]})
    added = run_all(TrialQueue(plan, home, slots=1), home)
    assert not {s.hash for s in before} & {s.hash for s in added}
    assert [s.number for s in added if s.phase is Phase.SEARCH] == [5, 6, 5, 6]
    assert {s.seed for s in added if s.phase is Phase.CONFIRM} >= {3}
    assert all(s.status is CellStatus.DONE for s in read_states(plan, home).values())


def test_a_smaller_budget_counts_the_same_trials_for_every_arm(home: Home) -> None:
    run_all(
        TrialQueue(planned(search={"trials": 6, "startup_trials": 3}), home, slots=1),
        home,
        at_most=8,
    )
    states = read_states(planned(search={"trials": 4, "startup_trials": 3}), home)
    assert all(len(s.search) <= 4 for s in states.values())


def test_a_cell_without_any_score_ends_and_is_reported_with_its_cause(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    while (spec := schedule.next()) is not None:
        if spec.arm.method == "lora":
            record = FailureRecord(
                type="ValueError", message="wrong", log_path="/somewhere/rank0.log"
            )
            failed = TrialResult(
                trial=spec.hash,
                status=Status.FAILED,
                score=None,
                failure=record,
                started_at=0.0,
                finished_at=1.0,
            )
            home.trial(spec).write_result(failed)
        else:
            finish(home, spec, 50.0)
        schedule.ended(spec)
    full, lora = status(home, "toy")
    assert (full.status, full.done, full.left, full.failures) == (CellStatus.DONE, 7, 0, ())
    assert (lora.status, lora.search_done, lora.confirm_done, lora.left) == (
        CellStatus.FAILED,
        5,
        0,
        0,
    )
    assert {(f.type, f.message, f.log_path) for f in lora.failures} == {
        ("ValueError", "wrong", "/somewhere/rank0.log")
    }


def test_a_trial_whose_retries_are_used_up_stops_its_cell_for_this_run_only(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    broken = schedule.next()
    assert broken is not None
    home.trial(broken).add_failure(
        FailureRecord(type="RankDied", message="rank 1 died", log_path="x.log")
    )
    schedule.ended(broken)
    rest = run_all(schedule, home)
    assert {s.cell for s in rest} == {plan.cells[1].key}
    report = status(home, "toy")[0]
    assert (
        report.status,
        report.running,
        report.failures[0].status,
        report.failures[0].type,
    ) == (
        CellStatus.SEARCHING,
        1,
        "interrupted",
        "RankDied",
    )
    assert TrialQueue(plan, home, slots=1).next() == broken


def test_a_confirm_run_that_is_given_up_holds_back_no_search_that_gets_more_trials(
    home: Home,
) -> None:
    plan = planned(methods=["full"])
    *_, confirm = run_all(TrialQueue(plan, home, slots=1), home)
    (home.trial(confirm).path / "result.json").unlink()
    for _ in range(plan.config.failures.retries + 1):
        home.trial(confirm).add_failure(
            FailureRecord(type="RankDied", message="rank 1 died", log_path="x.log")
        )
    assert TrialQueue(plan, home, slots=1).next() is None, "it has used up its retries"
    more = planned(methods=["full"], search={"trials": 7, "startup_trials": 3})
    added = run_all(TrialQueue(more, home, slots=1), home)
    assert [s.number for s in added if s.phase is Phase.SEARCH] == [5, 6]


def test_a_trial_that_left_in_order_is_no_failure_and_goes_on(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    left = TrialQueue(plan, home, slots=1).next()
    assert left is not None
    notice = FailureRecord(type=PREEMPTED, message="as asked", log_path="x.log")
    home.trial(left).add_failure(notice)
    report = status(home, "toy")[0]
    assert (report.failures, report.notes) == ((), ["1 interrupted, to go on"])


def test_trials_of_other_definitions_in_the_home_are_not_of_the_plan(home: Home) -> None:
    run_all(TrialQueue(planned(training={"epochs": 9, "batch_size": 8}), home, slots=1), home)
    assert all(not s.search and not s.confirm for s in read_states(planned(), home).values())


def test_the_order_in_which_results_arrive_does_not_change_the_startup_trials(home: Home) -> None:
    """Two slots, random completion: the trials of the start are those of one slot."""
    plan = planned(search={"trials": 4, "startup_trials": 4})
    alone = {
        (s.cell, s.number): s.learning_rate
        for s in run_all(TrialQueue(plan, home, slots=1), home)
        if s.phase is Phase.SEARCH
    }
    other = Home(home.path / "other")
    live = []
    seen = {}
    schedule = TrialQueue(plan, other, slots=4)
    shuffle = random.Random(0)
    while True:
        while (spec := schedule.next()) is not None:
            live.append(spec)
        if not live:
            break
        ended = live.pop(shuffle.randrange(len(live)))
        finish(other, ended, score_of(ended, 3))
        schedule.ended(ended)
        if ended.phase is Phase.SEARCH:
            seen[ended.cell, ended.number] = ended.learning_rate
    assert seen == alone
