"""`training.frozen_dropout: off`: a trial comes out bit for bit the same whether its states were kept, computed or read."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from suite.config.hashing import short_hash
from suite.config.training import TrainingConfig
from suite.errors import IncompatibleError, ResourceError
from suite.meters import PhaseMeter
from suite.plan.plan import make_plan
from suite.plan.preflight import check_data
from suite.record.folder import Home
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train import frozen_states, warm
from suite.train.batches import read_rows
from suite.train.build import build_model
from suite.train.initial import COST
from suite.train.loop import Trainer
from suite.train.process_group import free_port, init_process_group
from suite.train.states_cache import MANIFEST, STATES, damage, make_room, states_folder
from tests.ranks import asked_for, in_processes, on_ranks
from tests.sweeps import toy_sweep
from tests.test_lanes import RATES, alone, numbers, together, trainer_in
from tests.test_lanes import spec_of as lane_spec
from tests.test_loop import make_spec
from tests.tiny import tiny_choice

Case = tuple[str, str]
"""Method and family."""
FIRST: Case = ("read", "bert")
CASES = (FIRST, ("lst", "t5"), ("lst", "llama"))


def spec_of(method: str, family: str, rate: float = RATES[0], **training: Any) -> TrialSpec:
    # More than one block of states, and rows of an epoch's end that fill no batch.
    spec = lane_spec(method, family, rate, micro_batch_size=4, frozen_dropout=False, **training)
    limit = spec.limit.model_copy(update={"train": 50, "validation": 21})
    # A confirm run also keeps its weights and reads the test split.
    return spec.model_copy(update={"limit": limit, "phase": Phase.CONFIRM})


def everything(result: TrialResult) -> dict[str, Any]:
    return {**numbers(result), "weights": result.weights_sha256, "test": result.test_score}


def without_cache(
    spec: TrialSpec, model: Any, resolved: Any, objective: Any, data: Any, **given: Any
) -> Any:
    """The states of a trial that reads nothing: a row's block is computed whenever the row is wanted."""
    own = copy.deepcopy(model).eval()
    states, record = KEEP(spec, model, resolved, objective, data, **given)

    def computed(start: int, size: int) -> bytearray:
        for split, places in states.places.items():
            if start >= places.end:
                continue
            place = next(i for i, row in enumerate(places.order) if places.starts[row] == start)
            first = place - place % frozen_states.BLOCK_ROWS
            rows = places.order[first : first + frozen_states.BLOCK_ROWS]
            batch = objective.collate(read_rows(data.split(split, confirm=False), rows))
            found = frozen_states.frozen_states(own, batch, len(states.layouts))
            data_of = list(frozen_states._row_data(found, places.lengths[rows].tolist()))
            return bytearray(data_of[place - first])
        raise AssertionError("no row begins here")

    states._read = computed
    return states, record


KEEP = frozen_states.keep_states


def cold_warm_and_off(
    rank: int, folder: Path, cases: Sequence[Case], ranks: int
) -> dict[Case, dict[str, Any]]:
    found: dict[Case, dict[str, Any]] = {}
    for i, (method, family) in enumerate(cases):
        specs = [spec_of(method, family, rate) for rate in RATES]
        home = Home(folder / f"{i}")
        one: dict[str, Any] = {}

        trainer = trainer_in(home.path, rank, ranks)
        results = [alone(trainer, spec) for spec in specs]
        trainer.close()
        one["cold"] = [everything(result) for result in results]
        one["records"] = [(r.frozen_dropout, r.frozen_states, sorted(r.phases)) for r in results]
        one["entries"] = entries(home)

        # What tells a trial from its copy is its folder; the cache stays.
        if rank == 0:
            shutil.rmtree(home.path / "trials")
        trainer = trainer_in(home.path, rank, ranks)
        one["warm"] = [everything(result) for result in together(trainer, specs)]
        trainer.close()
        one["entries afterwards"] = entries(home)

        trainer = trainer_in(folder / f"{i}-off", rank, ranks)
        warm.keep_states = without_cache
        one["off"] = everything(alone(trainer, specs[0]))
        warm.keep_states = KEEP
        on = specs[0].model_copy(update={"training": with_dropout(specs[0].training)})
        one["on"] = everything(alone(trainer, on))
        trainer.close()
        found[method, family] = one
    return found


def with_dropout(training: TrainingConfig) -> TrainingConfig:
    return training.model_copy(update={"frozen_dropout": True})


def entries(home: Home) -> list[tuple[str, int]]:
    """The folders of states, and what says whether one was written anew."""
    folders = states_folder(home.cache).glob(f"*/{MANIFEST}")
    return sorted((path.parent.name, path.stat().st_mtime_ns) for path in folders)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("states")
    cases = list(dict.fromkeys([FIRST, *asked_for(request, "case")]))
    return in_processes(cold_warm_and_off, folder, cases, 2, count=2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_cold_a_warm_and_no_cache_give_the_same_on_two_ranks(case: Case, found: Any) -> None:
    one = found[case]
    assert one["cold"] == one["warm"], "warm, and side by side"
    assert one["cold"][0] == one["off"] and one["off"]["weights"] is not None
    assert one["cold"][0]["weights"] != one["cold"][1]["weights"]
    assert one["off"]["curve"] != one["on"]["curve"], "dropout is felt"


@pytest.mark.slow
def test_one_trial_computes_the_states_and_every_record_says_what_that_cost(found: Any) -> None:
    (dropout, made, phases), (other_dropout, other, other_phases) = found[FIRST]["records"]
    assert found[FIRST]["entries"] == found[FIRST]["entries afterwards"]
    assert len(found[FIRST]["entries"]) == 1
    assert (dropout, other_dropout) == ("off", "off")
    assert made.made_by == other.made_by == spec_of(*FIRST).hash
    assert (made.reused, other.reused) == (False, True)
    assert made.cost == other.cost and made.cost.seconds > 0 and made.world_size == 2
    assert made.cost.memory.allocated_max_bytes > 0
    assert "states" in phases and "states" not in other_phases


def opened(home: Home, case: Case = FIRST, *, code: str | None = None) -> Any:
    """The record of the states that a trial opens, and a hash of a row of them."""
    spec = spec_of(*case)
    spec = spec.model_copy(update={"arm": spec.arm.model_copy(update={"code": code})})
    resolved, objective, data = warm.open_data(spec, Workspace(home))
    model, _ = build_model(spec, resolved, objective.head, weights=None)
    meter = PhaseMeter(torch.device("cpu"))
    with meter.phase("load"):
        states, record = KEEP(
            spec,
            model,
            resolved,
            objective,
            data,
            cache=home.cache,
            most_bytes=2**30,
            device="cpu",
            precision="fp32",
            meter=meter,
        )
    batch = objective.collate(read_rows(data.split("train", confirm=False), [3]))
    (stack,) = states.given("train", [3], batch)._stacks
    states.close()
    return record, short_hash([state.tolist() for state in stack.states])


def own_code_changes(_number: int, folder: Path) -> list[str]:
    """Names of the states of a user's own variant: twice the same, then edited."""
    return [opened(Home(folder), code=code)[0].key for code in ("a" * 64, "a" * 64, "b" * 64)]


def test_states_of_a_users_own_code_are_not_those_of_the_file_before_an_edit(
    tmp_path: Path,
) -> None:
    ((first, again, edited),) = on_ranks(own_code_changes, tmp_path, world_size=1)
    assert first == again != edited


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


DAMAGES = [
    (STATES, flipped, "has another SHA-256"),
    (STATES, shortened, "bytes, and"),
    (STATES, Path.unlink, "states.bin is missing"),
    (MANIFEST, Path.unlink, "states.json is missing"),
    (MANIFEST, lambda path: path.write_bytes(path.read_bytes()[:-20]), "cannot be read"),
    (COST, lambda path: path.write_text("{}"), "cannot be read"),
]


def test_signs_of_whole_states_that_are_nested_too_deep_are_damage(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 200_000)
    assert "nested too deep" in str(damage(tmp_path, 8))


class Killed(BaseException):
    pass


def damages(_number: int, folder: Path) -> list[Any]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("suite.train.states_cache").addHandler(handler)
    home = Home(folder)

    real = frozen_states._row_data
    calls = []

    def killed(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return real(*given)

    frozen_states._row_data = killed
    with pytest.raises(Killed):
        opened(home)
    frozen_states._row_data = real
    left = [path.name for path in states_folder(home.cache).glob("*") if path.suffix != ".lock"]
    assert all(".tmp-" in name for name in left)

    first, expected = opened(home)
    (kept,) = [path.parent for path in states_folder(home.cache).glob(f"*/{STATES}")]
    written = (kept / STATES).read_bytes()
    assert not messages and list(kept.parent.glob("*.tmp-*")) == []
    found = []
    for name, spoil, _ in DAMAGES:
        spoil(kept / name)
        record, row = opened(home)
        same = row == expected and (kept / STATES).read_bytes() == written
        found.append((same, record.made_by == first.made_by, messages.pop()))
        assert not messages
    assert opened(home)[1] == expected and not messages
    other, row = opened(home, ("lst", "bert"))
    assert (other.key, row) == (first.key, expected), "methods share what they can"
    assert len(list(states_folder(home.cache).glob(f"*/{STATES}"))) == 1
    return found


@pytest.mark.slow
def test_damage_is_found_and_said_and_a_kill_leaves_nothing_half(tmp_path: Path) -> None:
    (found,) = on_ranks(damages, tmp_path, world_size=1)
    for (same, made_by, message), (name, _, why) in zip(found, DAMAGES, strict=True):
        assert same and made_by, name
        assert why in message and message.endswith("the states are computed again"), message


def one_of_two(_number: int, folder: Path) -> Any:
    init_process_group(
        rank=0,
        world_size=1,
        local_rank=0,
        address="127.0.0.1",
        port=free_port(),
        device="cpu",
        timeout_s=60.0,
    )
    return opened(Home(folder))


def test_two_processes_at_once_compute_the_states_once(tmp_path: Path) -> None:
    (first, row), (second, other) = in_processes(one_of_two, tmp_path, count=2)
    assert (first, row) == (second, other), "also the same record of the cost"


def refused(_number: int, folder: Path) -> str:
    trainer = Trainer(Workspace(Home(folder), frozen_states_bytes=1000), master_port=free_port())
    with pytest.raises(ResourceError) as raised:
        trainer.start(spec_of(*FIRST))
    # The limit may be raised between two runs, and then the trial trains.
    assert Home(folder).trial(spec_of(*FIRST)).result() is None
    through_backbone = spec_of(*FIRST, epochs=1).model_copy(update={"arm": make_spec().arm})
    result = alone(trainer, through_backbone)
    trainer.close()
    assert (result.frozen_dropout, result.frozen_states) == ("no effect", None)
    return str(raised.value)


def test_too_little_room_ends_an_attempt_and_methods_through_the_backbone_need_none(
    tmp_path: Path,
) -> None:
    (message,) = in_processes(refused, tmp_path)
    assert "resources.frozen_states_gib allows" in message


# ---- room ------------------------------------------------------------------------------------------------------------------


def entry(cache: Path, name: str, size: int, used: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / STATES).write_bytes(bytes(size))
    os.utime(folder / STATES, (used, used))
    return folder


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    folders = {used: entry(tmp_path, f"rte-{used}", 100, used) for used in (3.0, 1.0, 2.0)}
    make_room(tmp_path, 100, 400)
    assert all(folder.exists() for folder in folders.values())
    make_room(tmp_path, 150, 400)
    assert [folders[used].exists() for used in (1.0, 2.0, 3.0)] == [False, True, True]
    with pytest.raises(ResourceError, match=r"frozen_states_gib allows 3\.73e-07 GiB; raise it"):
        make_room(tmp_path, 401, 400)
    assert folders[2.0].exists(), "a demand that nothing can meet costs nobody else anything"


def test_leavings_of_the_killed_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    gone = entry(tmp_path, ".rte-a.gone-17", 100, 1.0)
    dead = entry(tmp_path, "rte-b.tmp-17", 100, 1.0)
    alive = entry(tmp_path, "rte-c.tmp-18", 100, 1.0)
    locked = threading.Event()
    ended = threading.Event()

    def write() -> None:
        with FileLock(tmp_path / "rte-c.lock"):
            locked.set()
            ended.wait()

    thread = threading.Thread(target=write)
    thread.start()
    locked.wait()
    make_room(tmp_path, 100, 100)
    ended.set()
    thread.join()
    assert [path.exists() for path in (gone, dead, alive)] == [False, False, True]


# ---- before the first worker -----------------------------------------------------------------------------------------------


def test_the_setting_is_part_of_a_hash_only_where_it_is_off() -> None:
    spec = make_spec()
    off = spec.model_copy(update={"training": TrainingConfig(frozen_dropout=False)})
    assert "frozen_dropout" not in spec.model_dump(mode="json")["training"]
    assert off.model_dump(mode="json")["training"]["frozen_dropout"] is False


def test_a_task_whose_rows_cannot_be_kept_is_refused_for_frozen_stacks_alone() -> None:
    def plan(*methods: str) -> Any:
        sweep = toy_sweep(
            backbones=[tiny_choice("bert")],
            methods=list(methods),
            tasks=["copa"],
            training={"frozen_dropout": False, "batch_size": 8},
        )
        return make_plan(sweep, where="toy.yaml")

    assert plan("lora").cells
    with pytest.raises(IncompatibleError, match=r"toy\.yaml: .*copa is not one sequence"):
        plan("lora", "read")


def test_states_that_never_fit_are_refused_before_the_first_worker(tmp_path: Path) -> None:
    def check(gib: float, method: str = "read") -> None:
        sweep = toy_sweep(
            backbones=[tiny_choice("bert")],
            methods=[method],
            tasks=["entailment"],
            limit={"train": 64, "validation": 20, "test": 20},
            training={"frozen_dropout": False, "batch_size": 8, "max_length": 64},
            resources={"workers": 1, "frozen_states_gib": gib},
        )
        check_data(make_plan(sweep, where="toy.yaml"), cache=tmp_path, data_root=None)

    check(1e-3)
    check(1e-6, "lora")
    with pytest.raises(ResourceError, match=r"task entailment on .*keeps .* GiB of states"):
        check(1e-6)
