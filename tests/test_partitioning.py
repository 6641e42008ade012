"""How the weights of a sweep are laid out where its file says `auto`: decided once, recorded, and without a trace in the losses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from suite.config.training import Partitioning, TrainingConfig
from suite.plan import partitioning
from suite.plan.cell_state import read_states
from suite.plan.partitioning import (
    Decision,
    candidates,
    cpu_worker_bytes,
    cuts_nothing,
    local_memory_bytes,
    recorded,
    settle,
)
from suite.plan.plan import Plan, make_plan
from suite.plan.resources import lay_out
from suite.profiling import fit
from suite.record.folder import Home
from suite.record.result import Status, TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from suite.tune.driver import decide, run_sweep
from tests.control_groups import control_group
from tests.ranks import in_processes
from tests.sweeps import toy_cluster, toy_roots, toy_sweep
from tests.test_loop import TRAINING, make_spec, run
from tests.tiny import tiny_choice

__all__ = ["toy_roots"]

GIB = 2**30
WHOLE = Partitioning(0, "resident")
RESIDENT = Partitioning(3, "resident")
PARTITIONED = Partitioning(3, "partitioned")
AUTO: dict[str, Any] = {"zero_stage": "auto", "frozen_weights": "auto"}


@pytest.mark.parametrize(
    ("typed", "left_open"),
    [
        ({}, [RESIDENT, PARTITIONED]),
        (AUTO, [WHOLE, Partitioning(1), Partitioning(2), RESIDENT, PARTITIONED]),
        ({"zero_stage": 1}, [Partitioning(1)]),
        ({"frozen_weights": "partitioned"}, [PARTITIONED]),
        ({"zero_stage": "auto", "frozen_weights": "resident"}, [*map(Partitioning, range(4))]),
    ],
)
def test_what_is_typed_stays_and_the_least_partitioned_comes_first(
    typed: dict[str, Any], left_open: list[Partitioning]
) -> None:
    training = TrainingConfig(**typed)
    assert candidates(training) == left_open
    for each in left_open:
        applied = each.applied_to(training)
        assert Partitioning(applied.zero_stage, applied.frozen_weights) == each


@pytest.mark.parametrize(
    ("stage", "workers", "offload", "nothing"),
    [(3, 1, "none", True), (3, 2, "none", False), (0, 1, "none", False), (3, 1, "all", False)],
)
def test_one_worker_that_offloads_nothing_has_nothing_to_cut(
    stage: int, workers: int, offload: str, nothing: bool
) -> None:
    training = TrainingConfig(offload=offload)
    assert cuts_nothing(training, Partitioning(stage), workers=workers) is nothing


@pytest.mark.parametrize(("offload", "stage"), [("optimizer", 0), ("all", 2)])
def test_a_stage_that_cannot_offload_is_refused(offload: str, stage: int) -> None:
    with pytest.raises(ValidationError, match=f"offload: {offload} needs ZeRO stage {stage + 1}"):
        TrainingConfig(offload=offload, zero_stage=stage)


def test_a_stage_that_is_typed_is_not_replaced() -> None:
    assert WHOLE.applied_to(TrainingConfig()).zero_stage == 3
    forced = TrainingConfig(frozen_weights="partitioned")
    assert RESIDENT.applied_to(forced) == forced


@pytest.mark.parametrize(
    ("known", "partitioned", "words"),
    [
        ({}, WHOLE, "states take at most 0.186 GiB of a worker's 1 GiB"),
        ({"parameters": 10**9}, None, ""),
        ({"worker_bytes": None}, PARTITIONED, "memory of a worker is unknown"),
        ({"recorded": Partitioning(2)}, Partitioning(2), "trials of this sweep that have ended"),
        ({"device": "cuda", "training": AUTO | {"offload": "all"}}, PARTITIONED, "offload"),
        ({"worker_bytes": None, "training": {"zero_stage": 1}}, Partitioning(1), "file says"),
        ({"training": AUTO | {"offload": "optimizer"}}, Partitioning(1), "states take"),
    ],
)
def test_small_unknown_recorded_and_typed_need_no_estimate(
    known: dict[str, Any], partitioned: Partitioning | None, words: str
) -> None:
    told: dict[str, Any] = {"device": "cpu", "worker_bytes": GIB, "parameters": 10**7}
    told |= known
    training = TrainingConfig(**told.pop("training", AUTO))
    decision = settle(training, **told)
    if partitioned is None:
        assert decision is None
    else:
        assert decision is not None
        assert decision.partitioning == partitioned
        assert words in decision.why


def test_workers_share_the_memory_of_their_node_and_the_fullest_one_decides() -> None:
    nodes = [{"CPU": 2.0, "memory": 4.0 * GIB}, {"CPU": 4.0, "memory": 6.0 * GIB}]
    layout = lay_out(toy_sweep(resources={"workers": 2}).resources, nodes)
    assert cpu_worker_bytes(layout, nodes, most_workers=2) == 1.5 * GIB
    alone = toy_sweep(resources={"workers": 2, "concurrent_trials": 1}).resources
    assert cpu_worker_bytes(lay_out(alone, nodes), nodes, most_workers=2) == 2 * GIB
    # A node that an autoscaler may add.
    nodes = [*nodes, {"CPU": 4.0}]
    layout = lay_out(toy_sweep(resources={"workers": 2}).resources, nodes)
    assert cpu_worker_bytes(layout, nodes, most_workers=2) is None


def test_a_container_has_no_more_memory_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioning, "CGROUP", tmp_path)
    assert local_memory_bytes() > 2**20
    control_group(tmp_path, limit="max", used=2**19, pages=2**18)
    assert local_memory_bytes() > 2**20
    control_group(tmp_path, limit=2**20, used=2**19, pages=2**18)
    assert local_memory_bytes() == 2**20 - 2**19 + 2**18


def auto_plan() -> Plan:
    training = AUTO | {"epochs": 1, "batch_size": 8}
    return make_plan(toy_sweep(training=training), where="toy", world_size=2)


@pytest.mark.usefixtures("toy_roots")
def test_what_ended_trials_were_laid_out_by_stays(tmp_path: Path) -> None:
    plan = auto_plan()
    home = Home(tmp_path / "home")
    assert recorded(read_states(plan, home).values()) is None
    spec = plan.search_spec(plan.cells[1], 0, 1e-3)
    home.trial(spec).write_spec(spec)
    result = TrialResult(
        trial=spec.hash,
        status=Status.COMPLETED,
        score=1.0,
        validation_score=1.0,
        started_at=0.0,
        finished_at=1.0,
        provenance={"partitioning": {"zero_stage": 2, "frozen_weights": "resident"}},
    )
    home.trial(spec).write_result(result)
    assert recorded(read_states(plan, home).values()) == Partitioning(2)


@pytest.mark.usefixtures("toy_roots")
def test_the_lowest_stage_at_which_the_largest_arm_fits_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = auto_plan()
    sizes = {0: 50, 1: 40, 2: 30, 3: 20}
    asked = []

    def needed(case: fit.Case, layout: Partitioning, *, device: str) -> int:
        asked.append(case.arm.method)
        return sizes[layout.zero_stage]

    monkeypatch.setattr(fit.Case, "needed_bytes", needed)

    def first(worker_bytes: int) -> Partitioning:
        given: dict[str, Any] = {"worker_bytes": worker_bytes, "where": "toy"}
        return fit.first_that_fits(plan, device="cpu", **given).partitioning

    # Four fifths of a worker's memory are for what the estimate counts.
    assert [first(size) for size in (100, 62, 50, 38, 25, 24)] == [
        *(Partitioning(0), Partitioning(1), Partitioning(1), Partitioning(2)),
        *(RESIDENT, PARTITIONED),
    ]
    assert set(asked) == {"full"}, "the largest arm decides for all"


@pytest.mark.slow
@pytest.mark.usefixtures("toy_roots")
def test_the_driver_estimates_what_a_small_memory_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = auto_plan()
    home = Home(tmp_path / "home")

    def decided(memory: float) -> Decision:
        nodes = [{"CPU": 2.0, "memory": memory}]
        layout = lay_out(plan.config.resources, nodes)
        told: dict[str, Any] = {"home": home, "data_root": None, "where": "toy"}
        worker = cpu_worker_bytes(layout, nodes, most_workers=2)
        return decide(plan, layout, lambda: worker, **told)

    assert "states take at most" in decided(8.0 * GIB).why
    monkeypatch.setattr(partitioning, "SMALL_FRAC", 0.0)
    cases = fit._cases(plan, where="toy", cache=None, data_root=None)
    (full,) = [case for case in cases if case.arm.method == "full"]
    needed = full.needed_bytes(WHOLE, device="cpu")
    assert needed > 16 * fit.most_parameters(plan, where="toy")
    # Two workers share the node.
    enough = decided(2.01 * needed / partitioning.USABLE_FRAC)
    assert enough.partitioning == WHOLE
    assert "the largest arm needs about" in enough.why
    assert decided(needed / 100).partitioning == PARTITIONED


@pytest.mark.usefixtures("toy_roots")
def test_all_weights_lie_on_each_gpu_once_however_small_a_share_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share = SimpleNamespace(memory=SimpleNamespace(peak_bytes=1, optimizer_bytes=0))
    monkeypatch.setattr(fit, "estimate_model", lambda *given, **also: share)
    plan = make_plan(toy_sweep(methods=["full"]), where="toy", world_size=2)
    (case,) = fit._cases(plan, where="toy", cache=None, data_root=None)
    whole = 2 * fit.most_parameters(plan, where="toy")
    assert case.needed_bytes(PARTITIONED, device="cuda") == whole


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("toy_roots")
def test_what_is_computed_again_needs_no_memory_in_between(device: str) -> None:
    needed = []
    for again in (False, True):
        training = {"batch_size": 64, "max_length": 64, "gradient_checkpointing": again}
        plan = make_plan(toy_sweep(methods=["lora"], training=training), where="toy", world_size=2)
        (lora,) = fit._cases(plan, where="toy", cache=None, data_root=None)
        needed.append(lora.needed_bytes(RESIDENT, device=device))
    assert needed[1] < 0.8 * needed[0]


def test_what_a_decoder_writes_needs_memory_as_what_it_reads() -> None:
    def cases(target: int, tasks: list[str]) -> list[fit.Case]:
        training = {"batch_size": 16, "max_length": 16, "target_max_length": target}
        sweep = toy_sweep(
            backbones=[tiny_choice("llama")],
            methods=["full"],
            tasks=tasks,
            training=training,
            decoder_objective="text",
        )
        plan = make_plan(sweep, where="toy", world_size=2)
        return list(fit._cases(plan, where="toy", cache=None, data_root=None))

    needed = []
    for target in (8, 96):
        (writes,) = cases(target, ["multi30k-en-de"])
        needed.append(writes.needed_bytes(WHOLE, device="cuda"))
    assert needed[1] > 2 * needed[0]
    both = cases(96, ["copa", "multi30k-en-de"])
    assert [case.objective.trained_positions for case in both] == [16, 112]


def test_the_targets_of_t5s_pretraining_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = toy_sweep(
        backbones=[tiny_choice("t5", vocab_size=32128)],
        attention=["mhe-add"],
        methods=["full"],
        tasks=["entailment"],
        training={"target_max_length": 16},
        pretrain={"corpus": "entailment", "steps": 2, "max_length": 512, "batch_size": 16},
    )
    plan = make_plan(sweep, where="toy", world_size=2)
    cases = list(fit._cases(plan, where="toy", cache=None, data_root=None))
    targets = {case.pretrains: case.objective.trained_targets for case in cases}
    assert targets == {False: 16, True: 114}
    (stage,) = [case for case in cases if case.pretrains]
    needed = stage.needed_bytes(WHOLE, device="cuda")
    monkeypatch.setattr(type(stage.objective), "trained_targets", 16)
    # The logits of the other targets alone.
    logits = (114 - 16) * 8 * 32128 * 4
    assert needed - stage.needed_bytes(WHOLE, device="cuda") > logits


LAYOUTS = (RESIDENT, PARTITIONED, WHOLE)


def trained(rank: int, ports: list[int], folder: Path) -> None:
    """The same trial under every layout, each in a home of its own."""
    for number, (layout, port) in enumerate(zip(LAYOUTS, ports, strict=True)):
        workspace = Workspace(Home(folder / str(number)), partitioning=layout)
        place = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
        trainer = Trainer(workspace, **place)
        run(trainer, auto_spec())
        trainer.close()


def auto_spec() -> TrialSpec:
    training = TRAINING.model_copy(update=AUTO | {"epochs": 1, "precision": "fp32"})
    return make_spec(training=training, world_size=2)


@pytest.mark.slow
def test_every_layout_trains_alike_and_is_recorded(tmp_path: Path) -> None:
    in_processes(trained, [free_port() for _ in LAYOUTS], tmp_path, count=2)
    curves = []
    scores = set()
    for number, layout in enumerate(LAYOUTS):
        result = Home(tmp_path / str(number)).trial(auto_spec()).result()
        assert result is not None and result.score is not None
        assert result.provenance["partitioning"] == asdict(layout)
        assert result.provenance["engine"]["zero_optimization"]["stage"] == layout.zero_stage
        curves.append(result.epochs[0].train_loss)
        scores.add(result.score)
    # Products and sums of whole and of cut tensors may be rounded otherwise.
    assert curves == pytest.approx([curves[0]] * len(LAYOUTS), rel=1e-5)
    assert len(scores) == 1


@pytest.mark.slow
def test_what_the_file_says_and_what_the_driver_decides_reach_the_workers(
    home: Home, tmp_path: Path
) -> None:
    layout = {"zero_stage": "auto", "frozen_weights": "partitioned"}
    config = toy_sweep(
        methods=[{"name": "lora", "learning_rate": 1e-3}],
        confirm={"seeds": [1]},
        training=layout | {"epochs": 1, "batch_size": 8},
        timeouts={"setup_s": 250.0, "epoch_s": 250.0},
    )
    with toy_cluster(tmp_path / "roots") as data_root:
        assert run_sweep(config, home=home, data_root=data_root).ok
    # A learning rate that is typed is not searched.
    (confirmed,) = [folder.result() for folder in home.trials()]
    assert confirmed is not None
    # A worker that is told neither takes stage 3 and keeps frozen weights whole.
    assert confirmed.provenance["partitioning"] == asdict(Partitioning(0, "partitioned"))
    assert confirmed.provenance["engine"]["zero_optimization"]["stage"] == 0
