"""The pretrain stage without training: its place in a plan, in a schedule and in an arm."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import save_file
from transformers import ByT5Tokenizer

from suite.backbones.loading import Head, resolve
from suite.cli.estimate import show_plan
from suite.cli.options import Format
from suite.cli.status import status as cli_status
from suite.clock import CLOCK, Clock
from suite.config.arm import Arm
from suite.config.pretrain import PretrainConfig
from suite.config.sweep import AttentionChoice, BackboneChoice, LimitConfig
from suite.config.task import PretrainTask, load_task
from suite.config.training import TrainingConfig
from suite.data.prepare import split_rows
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import (
    BackboneError,
    CheckpointError,
    ConfigError,
    IncompatibleError,
    StaleDriverError,
    SweepConflictError,
    UnknownNameError,
)
from suite.files import sha256
from suite.petl.arm import build_arm
from suite.plan.cell_state import CellStatus
from suite.plan.definition import check_definition, read_plan, store_definition
from suite.plan.plan import Plan, make_plan
from suite.plan.pretraining import ENGINE
from suite.plan.queue import TrialQueue
from suite.plan.status import status
from suite.progress import Board
from suite.record.folder import Home
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.lease import BEAT_S, Lease, acquire, held_lease
from suite.storage.mirror import Mirror
from suite.storage.shared_run import LOOK_S, SharedRun
from suite.storage.urls import open_storage
from suite.train.warm import check_vocabulary, read_pretrain
from tests.clocks import FakeClock
from tests.records import make_result
from tests.sweeps import finish, run_all, toy_roots, toy_sweep
from tests.tiny import FAMILIES, tiny_choice

__all__ = ["toy_roots"]
STAGE: dict[str, Any] = {
    "corpus": "toy",
    "steps": 20,
    "checkpoint_every_steps": 5,
    "batch_size": 4,
    "max_length": 16,
}


# ---- configuration and plan ----------------------------------------------------------------------------------------------


def test_the_defaults_are_the_published_settings() -> None:
    stage = PretrainConfig(corpus="toy")
    shown = stage.model_dump(
        include={
            "steps",
            "batch_size",
            "max_length",
            "learning_rate",
            "weight_decay",
            "adam_beta2",
            "adam_eps",
            "schedule",
        }
    )
    assert shown == {
        "steps": 1_000_000,
        "batch_size": 32 * 4,
        "max_length": 512,
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "adam_beta2": 0.9999,
        "adam_eps": 1e-8,
        "schedule": "linear",
    }
    assert (
        stage.warmup_frac * stage.steps == 10_000
        and stage.corrupted_frac == 0.15
        and stage.mean_span_tokens == 3
    )
    assert PretrainConfig(corpus="toy", attention="all", fraction=0.05).uptraining_steps == 50_000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fraction": 0.05}, "set attention: all"),
        (
            {"steps": 7, "checkpoint_every_steps": 5},
            "steps 7 is not a multiple of checkpoint_every_steps 5",
        ),
        (
            {"attention": "all", "fraction": 0.35, "steps": 20, "checkpoint_every_steps": 5},
            "steps x fraction 7 is not a multiple",
        ),
        ({"corrupted_frac": 1.0}, "less than 1"),
        ({"micro_batch_size": 3}, "batch_size 128 is not divisible by micro_batch_size 3"),
    ],
)
def test_a_stage_that_does_not_fit_together_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PretrainConfig(corpus="toy", **changes)


def planned(**changes: Any) -> Plan:
    stage = STAGE | changes.pop("pretrain", {})
    return make_plan(
        toy_sweep(**({"attention": ["sha", "pretrained"], "pretrain": stage} | changes)),
        where="toy.yaml",
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.mark.usefixtures("toy_roots")
def test_one_pretrain_run_serves_every_cell_of_a_backbone_and_variant() -> None:
    plan = planned(tasks=["toy", "toy2"])
    (run,) = plan.pretrains
    assert (run.phase, run.arm.method, run.arm.attention.name) == (Phase.PRETRAIN, "full", "sha")
    assert (
        run.training.epochs,
        run.training.epoch_steps,
        run.training.batch_size,
        run.training.patience,
    ) == (4, 5, 4, None)
    assert isinstance(run.task, PretrainTask) and run.random_start and run.task.inputs == ["text"]
    assert [c.arm.pretrain for c in plan.cells] == [run.hash] * 4 + [None] * 4
    assert len(planned(pretrain={"attention": "all"}).pretrains) == 2
    assert read_back(run) == run


def read_back(spec: TrialSpec) -> TrialSpec:
    return TrialSpec.model_validate_json(spec.model_dump_json())


def test_every_setting_of_training_is_the_stages_the_sweeps_or_means_nothing_before_a_task() -> (
    None
):
    """A setting in none of these would silently have its default in a pretrain run."""
    own = set(PretrainConfig.model_fields) | {"epochs", "epoch_steps", "patience"}
    means_nothing = {
        *("keep", "target_max_length", "max_new_tokens", "stride", "beams"),  # no task is answered
        *("frozen_weights", "frozen_dropout"),  # all weights train
    }
    fields = set(TrainingConfig.model_fields)
    assert fields - own == {*ENGINE, *means_nothing}


def test_weights_of_another_vocabulary_than_is_trained_now_are_refused(tmp_path: Path) -> None:
    trained = BackboneChoice(name="t5-small", config={}, tokenizer="bpe:300:toy2")
    for backbone, then, refused in (
        (trained, "another", True),
        (trained, tokenizer_fingerprint(ByT5Tokenizer()), False),
        (tiny_choice("t5"), "another", False),
    ):
        arm = Arm(backbone=backbone, method="full")
        result = SimpleNamespace(provenance={"tokenizer_sha256": then})
        folder: Any = SimpleNamespace(path=tmp_path, result=lambda result=result: result)
        given: Any = (SimpleNamespace(arm=arm), ByT5Tokenizer())
        with (
            pytest.raises(CheckpointError, match="belong to the old") if refused else nullcontext()
        ):
            check_vocabulary(folder, *given)


@pytest.mark.usefixtures("toy_roots")
def test_what_changes_the_weights_changes_the_hash_and_nothing_else_does() -> None:
    (run,) = planned().pretrains
    for change in (
        {"steps": 40},
        {"seed": 1},
        {"learning_rate": 0.001},
        {"corpus": "toy2"},
        {"limit": 12},
    ):
        (other,) = planned(pretrain=change).pretrains
        assert other.hash != run.hash, change
    unchanged: list[dict[str, Any]] = [
        {"name": "toyer"},
        {"methods": ["lora"]},
        {"search": {"trials": 1}},
        {"tasks": ["toy2"]},
    ]
    for same in (*unchanged, {"resources": {"workers": 4}}):
        assert planned(**same).pretrains[0].hash == run.hash, same
    plans = planned(), planned(pretrain={"steps": 40})
    keys = [{c.key for c in plan.cells if c.arm.pretrain} for plan in plans]
    assert not keys[0] & keys[1], "cells of other weights are other cells"


@pytest.mark.usefixtures("toy_roots")
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"pretrain": {"corpus": "toyy"}}, UnknownNameError, r"pretrain\.corpus.*did you mean toy"),
        (
            {"pretrain": {"objective": "causal-lm"}},
            IncompatibleError,
            "attention sha on bert-base.*use mlm",
        ),
        ({"pretrain": {"max_length": 129}}, IncompatibleError, "128 positions"),
        (
            {"pretrain": {"batch_size": 5}},
            IncompatibleError,
            r"pretrain\.batch_size: got 5, expected a multiple of 2",
        ),
        (
            {"attention": ["pretrained"]},
            ConfigError,
            r"no attention of the sweep starts from scratch; set pretrain\.attention: all",
        ),
        (
            {"pretrain": {"attention": "all", "fraction": 0.5}},
            IncompatibleError,
            r"fraction: attention pretrained.*has random weights",
        ),
    ],
)
def test_mistakes_in_a_stage_are_found_before_anything_starts(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        planned(**changes)
    assert "toy.yaml" in str(raised.value)


@pytest.mark.usefixtures("toy_roots")
def test_a_checkpoint_is_uptrained_where_it_can_be_converted_and_left_aside_where_it_cannot(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    torch.manual_seed(1)
    weights = build_arm(
        resolve(tiny_choice("bert")),
        Head("masked"),
        Arm(backbone=tiny_choice("bert"), method="full"),
    )[0]
    weights.save_pretrained(folder)  # type: ignore[operator]
    choice = BackboneChoice(name=str(folder), tokenizer="bytes")
    plan = planned(
        backbones=[choice],
        attention=["sha", "gqa", "pretrained"],
        pretrain={"attention": "all", "fraction": 0.25},
    )
    runs = {run.arm.attention.name: run for run in plan.pretrains}
    assert {name: (run.random_start, run.training.epochs) for name, run in runs.items()} == {
        "sha": (True, 4),
        "gqa": (False, 1),
        "pretrained": (False, 1),
    }
    for name, run in runs.items():
        arm = run.arm
        resolved = resolve(choice)
        model, _ = build_arm(
            resolved, Head("masked"), arm, pretrained=True, random_start=run.random_start
        )
        kept = dict(model.named_parameters())["bert.encoder.layer.0.intermediate.dense.weight"]
        assert (
            kept.equal(
                dict(weights.named_parameters())["bert.encoder.layer.0.intermediate.dense.weight"]
            )
            != run.random_start
        ), name


def test_a_corpus_keeps_out_the_rows_that_its_task_keeps_out() -> None:
    (run,) = planned(tasks=["multirc"], pretrain={"corpus": "multirc"}).pretrains
    task = load_task("multirc")
    held_out = task.splits.model_copy(update={"rule": "held-out", "held_out": 40})
    table = pa.table(
        {
            "paragraph_number": [n // 8 for n in range(400)],
            "question_number": [n // 4 for n in range(400)],
        }
    )
    parts = [
        split_rows(
            of.model_copy(update={"splits": held_out}), {"train": table}, LimitConfig(), where=""
        )
        for of in (task, run.task)
    ]
    for split in ("train", "validation", "test"):
        assert parts[0][split].rows.tolist() == parts[1][split].rows.tolist()


@pytest.mark.usefixtures("toy_roots")
def test_a_stored_plan_keeps_its_pretrain_runs_and_an_edited_corpus_is_noticed(
    home: Home, tmp_path: Path
) -> None:
    plan = planned(tasks=["toy2"])
    store_definition(plan, home)
    assert read_plan(home, "toy") == plan
    check_definition(planned(tasks=["toy2"], attention=["sha", "pretrained", "mhe-mul"]), home)
    with pytest.raises(SweepConflictError, match=r"pretrain\.steps: 20 -> 40"):
        check_definition(planned(tasks=["toy2"], pretrain={"steps": 40}), home)
    path = tmp_path / "user" / "tasks" / "toy.yaml"
    path.write_text(path.read_text() + "version: 2\n")
    with pytest.raises(SweepConflictError, match=r"corpus tasks/toy\.yaml: version: 1 -> 2"):
        check_definition(planned(tasks=["toy2"]), home)


# ---- schedule ------------------------------------------------------------------------------------------------------------


def result_of(spec: TrialSpec, status: Status = Status.COMPLETED) -> TrialResult:
    score, failure = (
        (3.0, None)
        if status.has_score
        else (None, FailureRecord(type="ValueError", message="wrong", log_path="x.log"))
    )
    return TrialResult(
        trial=spec.hash,
        status=status,
        score=score,
        failure=failure,
        started_at=0.0,
        finished_at=1.0,
    )


def end_run(
    home: Home, schedule: TrialQueue, spec: TrialSpec, status: Status = Status.COMPLETED
) -> None:
    home.trial(spec).write_result(result_of(spec, status))
    schedule.ended(spec)


@pytest.mark.usefixtures("toy_roots")
def test_the_energy_of_a_pretrain_run_is_that_of_its_train_phase(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    (run,) = plan.pretrains
    phases = make_result(run).phases
    assert phases["train"].energy_kwh and phases["load"].energy_kwh
    home.trial(run).write_spec(run)
    home.trial(run).write_result(result_of(run).model_copy(update={"phases": phases}))
    shown = status(home, "toy")[0].pretrain
    assert shown is not None and shown.energy_kwh == phases["train"].energy_kwh


@pytest.mark.usefixtures("toy_roots")
def test_cells_wait_for_their_pretrain_run_and_others_do_not(home: Home) -> None:
    plan = planned()
    schedule = TrialQueue(plan, home, slots=2)
    run = schedule.next()
    meanwhile = schedule.next()
    assert run is not None and meanwhile is not None
    assert run == plan.pretrains[0] and meanwhile.arm.pretrain is None
    assert (
        home.trial(run).path == home.path / "pretrained" / run.hash
        and home.trial(run).spec() == run
    )
    assert schedule.next() is None and schedule.live == 2
    finish(home, meanwhile, 50.0)
    schedule.ended(meanwhile)
    end_run(home, schedule, run)
    rest = run_all(schedule, home)
    assert len(rest) == plan.total_trials - 1 and {s.arm.pretrain for s in rest} == {None, run.hash}


@pytest.mark.usefixtures("toy_roots")
def test_a_finished_run_is_never_handed_out_again_by_this_or_another_sweep(home: Home) -> None:
    schedule = TrialQueue(planned(), home, slots=1)
    run = schedule.next()
    assert run is not None
    end_run(home, schedule, run)
    for plan in (planned(), planned(name="toyer", methods=["lora"])):
        specs = run_all(TrialQueue(plan, home, slots=1), home)
        assert len(specs) == plan.total_trials and not [
            s for s in specs if s.phase is Phase.PRETRAIN
        ]
    again = TrialQueue(planned(name="third", pretrain={"seed": 1}), home, slots=1).next()
    assert again is not None and again.phase is Phase.PRETRAIN


def _queue(name: str, home: Home, lease: Lease, clock: Clock = CLOCK) -> TrialQueue:
    queue = TrialQueue(planned(name=name, attention=["sha"]), home, slots=1, fence=lease.fence)
    for run, pretrain in queue.pretrains.items():
        pretrain.shared = SharedRun(lease.fence, run, clock=clock)
    return queue


@pytest.mark.usefixtures("toy_roots")
@pytest.mark.parametrize("homes", [1, 2])
def test_two_sweeps_never_train_the_same_checkpoint_at_once(
    home: Home, tmp_path: Path, homes: int
) -> None:
    """In one home, and on two hosts with a home each, which share no lock but the storage."""
    other = home if homes == 1 else Home(tmp_path / "other-host")
    root = tmp_path / "storage"
    clock = FakeClock()
    with held_lease(root, "toy") as lease, held_lease(root, "toyer") as others:
        first = _queue("toy", home, lease)
        second = _queue("toyer", other, others, clock)
        mirror = Mirror(other, open_storage(root))
        second.fetch = mirror.fetch
        run = first.next()
        assert run is not None and run.phase is Phase.PRETRAIN
        assert second.next() is None and second.waiting and not first.waiting
        end_run(home, first, run)
        Mirror(home, mirror.storage).push_home()
        clock.advance(LOOK_S)
        spec = second.next()
        assert spec is not None and spec.arm.pretrain == run.hash and not second.waiting


@pytest.mark.usefixtures("toy_roots")
def test_a_checkpoint_is_taken_over_from_a_driver_that_gives_no_sign_of_life(
    home: Home, tmp_path: Path
) -> None:
    root = tmp_path / "storage"
    clock = FakeClock()
    frozen = acquire(root, "toy", clock=FakeClock())  # no time passes for it, so it sends no beat
    with held_lease(root, "toyer") as lease:
        run = _queue("toy", home, frozen).next()
        assert run is not None
        shared = SharedRun(lease.fence, run.hash, clock=clock)
        looks = []
        for _ in range(4):
            looks.append(shared.take())
            clock.advance(BEAT_S)
        assert looks == [False, False, False, True], "after three beats that did not come"
        lease.fence.check(shared=run.hash)
        frozen.fence.check()  # its own sweep is still its own
        with pytest.raises(StaleDriverError, match=f"run {run.hash}: the driver of sweep 'toyer'"):
            Mirror(home, None, frozen.fence).end(home.trial(run), result_of(run))
        assert home.trial(run).result() is None
    frozen.release()


@pytest.mark.usefixtures("toy_roots")
def test_a_run_that_ended_counts_also_where_a_full_disk_takes_no_word_of_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with held_lease(tmp_path / "storage", "toy") as lease:
        queue = _queue("toy", home, lease)
        run = queue.next()
        assert run is not None
        home.trial(run).write_result(result_of(run))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            queue.ended(run)
        spec = queue.next()
        assert spec is not None and spec.arm.pretrain == run.hash


@pytest.mark.usefixtures("toy_roots")
def test_a_failed_pretrain_run_fails_its_cells_with_its_reason(home: Home) -> None:
    plan = planned()
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    run = schedule.next()
    assert run is not None
    end_run(home, schedule, run, Status.FAILED)
    assert {s.arm.pretrain for s in run_all(schedule, home)} == {None}
    cells = status(home, "toy")
    assert [c.status for c in cells] == [CellStatus.FAILED] * 2 + [CellStatus.DONE] * 2
    assert [(f.trial, f.type, f.message) for f in cells[0].failures] == [
        (run.hash, "ValueError", "wrong")
    ]
    assert cells[0].pretrain is not None and (cells[0].pretrain.state, cells[0].left) == (
        "failed",
        0,
    )
    assert cells[2].pretrain is None


def test_a_finished_run_without_its_weights_is_named_before_any_trial(
    home: Home, toy_roots: Path
) -> None:
    from suite.tune.driver import run_sweep

    plan = planned()
    (run,) = plan.pretrains
    folder = home.trial(run)
    folder.write_spec(run)
    folder.write_result(result_of(run))
    says = f"{re.escape(str(folder.weights))}: lost or changed since it was written; remove its"
    with pytest.raises(ConfigError, match=says):
        show_plan(plan.config, where="toy.yaml", home=home.path, address="none", fmt=Format.TABLE)
    with pytest.raises(ConfigError, match=says):
        run_sweep(plan.config, home=home, data_root=toy_roots)
    folder.weights.touch()
    show_plan(plan.config, where="toy.yaml", home=home.path, address="none", fmt=Format.TABLE)


@pytest.mark.usefixtures("toy_roots")
def test_a_run_whose_retries_are_used_up_is_tried_again_by_the_next_driver_only(home: Home) -> None:
    plan = planned(attention=["sha"])
    schedule = TrialQueue(plan, home, slots=1)
    run = schedule.next()
    assert run is not None
    schedule.ended(run)
    assert schedule.next() is None and not schedule.waiting
    assert TrialQueue(plan, home, slots=1).next() == run


# ---- what a person sees --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy_roots")
def test_the_dry_run_and_the_status_show_pretrain_runs(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned()
    (run,) = plan.pretrains
    show_plan(plan.config, where="toy.yaml", home=home.path, address="none", fmt=Format.JSON)
    shown = json.loads(capsys.readouterr().out)
    expected = {
        "attention": "sha",
        "checkpoint": run.hash,
        "corpus": "toy",
        "objective": "mlm",
        "start": "random",
        "steps": 20,
        "state": "waiting",
    }
    assert expected.items() <= shown["pretrain"][0].items()
    assert [cell["pretrain"] for cell in shown["cells"]] == [run.hash] * 2 + [None] * 2

    store_definition(plan, home)
    folder = home.trial(run)
    folder.write_spec(run)
    numbers = {
        "train_loss": 5.0,
        "validation_score": 4.5,
        "validation_scores": {},
        "learning_rate": 0.1,
        "seconds": 1.0,
    }
    lines = [json.dumps({"epoch": n, "step": 5 * n, **numbers}) for n in (1, 2, 2)]
    (folder.path / "epochs.jsonl").write_text("\n".join([*lines, "{cut off"]))
    cli_status(home.path, fmt=Format.TABLE)
    assert (
        f"sha on bert-base, {run.hash}: begun, 10 of 20 steps on toy, loss 4.5"
        in capsys.readouterr().out
    )
    show_plan(plan.config, where="toy.yaml", home=home.path, address="none", fmt=Format.TABLE)
    assert (
        f"sha on bert-base: mlm on toy, 20 steps from random weights; begun ({run.hash})"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("toy_roots")
def test_the_live_table_tells_of_a_pretrain_run_at_the_cells_that_wait_for_it(home: Home) -> None:
    plan = planned()
    out = io.StringIO()
    schedule = TrialQueue(plan, home, slots=1)
    board = Board(Console(file=out, width=200))
    board.on_start(plan, schedule.states)
    run = schedule.next()
    assert run is not None
    board.on_trial_start(run)
    fields = {
        "train_loss": 5.0,
        "validation_score": 4.5,
        "validation_scores": {},
        "learning_rate": 0.1,
        "seconds": 1.0,
    }
    board.on_epoch(run, EpochRecord(epoch=1, step=5, **fields))  # type: ignore[arg-type]
    Console(file=out, width=200).print(board)
    assert out.getvalue().count("pretrain step 5: loss 4.5") == 2
    end_run(home, schedule, run)
    board.on_trial_end(run, home.trial(run).result())
    assert "[0/28] pretrain of attention sha on bert-base, corpus toy: loss 3" in out.getvalue()
    assert board.done == 0 and board.eta_s() is None, "a pretrain run is no trial of a cell"


# ---- weights -------------------------------------------------------------------------------------------------------------


def save_weights(path: Path, family: str, attention: str = "sha") -> dict[str, torch.Tensor]:
    """The weights of a pretrain run that did nothing."""
    head = Head("masked" if family == "bert" else "text")
    torch.manual_seed(3)
    model, _ = build_arm(
        resolve(tiny_choice(family)),
        head,
        Arm(backbone=tiny_choice(family), attention=AttentionChoice(name=attention), method="full"),
    )
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(state, path)
    return state


@pytest.mark.parametrize("family", FAMILIES)
def test_an_arm_takes_the_weights_and_its_task_head_is_new(family: str, tmp_path: Path) -> None:
    state = save_weights(tmp_path / "w", family)
    head = Head("text") if family == "t5" else Head("classification", 2)
    arm = Arm(
        backbone=tiny_choice(family),
        attention=AttentionChoice(name="sha"),
        method="lora",
        architecture={"rank": 2},
        pretrain="0" * 16,
    )
    torch.manual_seed(4)
    model, _ = build_arm(resolve(arm.backbone), head, arm, weights=tmp_path / "w")
    own = {
        name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()
    }  # LoRA's wrapping
    same = {name for name in state if name in own and own[name].equal(state[name])}
    assert same == {
        name for name in state if not name.startswith(("cls.", "lm_head.")) or family == "t5"
    }
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    assert not trained & state.keys(), (
        "the variant's own weights are the checkpoint's now, and frozen like it"
    )
    assert any("pooler" in name for name in trained) == (family == "bert"), (
        "which masked language modelling does not train"
    )


def test_weights_of_another_variant_and_broken_files_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "w", "bert", "mhe-mul")
    arm = Arm(
        backbone=tiny_choice("bert"),
        attention=AttentionChoice(name="sha"),
        method="full",
        pretrain="0" * 16,
    )
    resolved = resolve(tiny_choice("bert"))
    head = Head("classification", 2)
    with pytest.raises(BackboneError, match="not the weights of this model"):
        build_arm(resolved, head, arm, weights=tmp_path / "w")
    (tmp_path / "w").write_bytes(b"short")
    with pytest.raises(BackboneError, match="cannot be read"):
        build_arm(resolved, head, arm, weights=tmp_path / "w")


def test_weights_that_changed_on_disk_are_refused(home: Home) -> None:
    folder = home.pretrained("abc")
    folder.path.mkdir(parents=True)
    save_weights(folder.weights, "bert")
    with pytest.raises(CheckpointError, match="has no weights"):
        read_pretrain(folder)
    result = TrialResult(
        trial="abc",
        status=Status.COMPLETED,
        score=3.0,
        weights_sha256=sha256(folder.weights),
        started_at=0.0,
        finished_at=1.0,
    )
    folder.write_result(result)
    folder.weights.write_bytes(folder.weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="lost or changed"):
        read_pretrain(folder)
