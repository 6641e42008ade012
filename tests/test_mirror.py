"""Hosts that share no disk: what one of them trained, another goes on with, and nothing half put is taken for whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from suite.config.arm import Arm
from suite.config.sweep import LimitConfig, TimeoutConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.errors import CheckpointError, StaleDriverError, StorageError
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.lm_eval import FILE, add_evaluation
from suite.record.lm_eval import read_record as read
from suite.record.result import MEND, FailureRecord, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.fence import Fence, claim_key
from suite.storage.identity import home_id
from suite.storage.local import FileStorage
from suite.storage.mirror import Mirror
from suite.storage.urls import open_storage
from suite.storage.workspace import Workspace
from suite.train.warm import read_pretrain
from tests.buckets import BUCKET, s3_server
from tests.ports import free_port
from tests.records import make_home, make_result, make_spec, write_trial
from tests.test_lm_eval import made
from tests.tiny import tiny_choice

__all__ = ["s3_server"]
ROOT = Path(__file__).parents[1]


def hosts(tmp_path: Path, *names: str) -> list[Mirror]:
    """Homes of their own, one storage."""
    return [Mirror(Home(tmp_path / name), open_storage(tmp_path / "storage")) for name in names]


def records(home: Home) -> dict[str, bytes]:
    """The files of a home by key, but MLflow's."""
    found = (
        path
        for root in ("trials", "sweeps")
        for path in (home.path / root).rglob("*")
        if path.is_file()
    )
    return {path.relative_to(home.path).as_posix(): path.read_bytes() for path in found}


def test_a_home_that_is_put_and_fetched_is_the_same_and_nothing_moves_twice(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    make_home(one.home.path)
    assert home_id(other.home) != home_id(one.home) and one.fetch_home() == 0
    trials = len(list(one.home.trials()))
    assert one.push_home() == trials and one.push_home() == 0
    for sweep in one.home.path.glob("sweeps/*.json"):
        one.push_definition(sweep.stem)
    assert other.fetch_home() > 0
    assert records(other.home) == records(one.home)
    assert home_id(other.home) == home_id(one.home), "in MLflow and Optuna the two are one"
    times = {path: path.stat().st_mtime_ns for path in other.home.path.glob("trials/*/*")}
    other.fetch_home()
    assert {path: path.stat().st_mtime_ns for path in other.home.path.glob("trials/*/*")} == times


def test_a_home_of_one_storage_is_refused_by_another(tmp_path: Path) -> None:
    """Its trials would count as the other's, and both would write the same runs of MLflow."""
    (one,) = hosts(tmp_path, "one")
    make_home(one.home.path)
    one.fetch_home()
    one.push_home()
    elsewhere = Mirror(one.home, open_storage(tmp_path / "elsewhere"))
    with pytest.raises(StorageError, match=r"belongs to another storage.*give another --home"):
        elsewhere.fetch_home()
    assert open_storage(tmp_path / "elsewhere").keys() == []
    copied = Mirror(
        one.home, open_storage(shutil.copytree(tmp_path / "storage", tmp_path / "copy"))
    )
    assert copied.fetch_home() >= 0, "a storage that was moved has its name with it"


def test_a_home_in_which_nothing_was_trained_may_change_its_storage(tmp_path: Path) -> None:
    """As after a start that was refused, because other hosts do not see the folder."""
    (one,) = hosts(tmp_path, "one")
    one.fetch_home()
    first = home_id(one.home)
    elsewhere = Mirror(one.home, open_storage(tmp_path / "elsewhere"))
    elsewhere.fetch_home()
    assert home_id(one.home) != first, "two storages are two homes to MLflow"
    assert (tmp_path / "elsewhere" / "tracking-id").read_text() == home_id(one.home)
    elsewhere.fetch_home()


def test_a_trial_is_removed_where_the_messages_say(tmp_path: Path) -> None:
    one, other, third = hosts(tmp_path, "one", "other", "third")
    spec = make_spec()
    write_trial(one.home, spec, make_result(spec))
    one.push_home()
    other.fetch_home()
    gone = one.home.trial(spec)
    shutil.rmtree(gone.path)
    one.fetch_home()
    assert gone.result() is not None, "the storage has it"
    shutil.rmtree(tmp_path / "storage" / "trials")
    shutil.rmtree(gone.path)
    other.push_home()
    one.fetch_home()
    assert gone.result() is not None, "another host has it"
    for place in (gone.path, other.home.trial(spec).path, tmp_path / "storage" / "trials"):
        shutil.rmtree(place)
    for host in (one, other, third):
        host.fetch_home()
        host.push_home()
        assert not list(host.home.trials())
    where = r"\(with --storage, below it and in the home of each host that has it\)"
    assert re.search(rf"or remove it {where}, and the trial runs again", MEND)
    gone.path.mkdir(parents=True)
    gone.write_result(make_result(spec).model_copy(update={"weights_sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match=rf"remove .* {where} to train it again"):
        read_pretrain(gone)


def test_what_lm_eval_measured_by_hand_stays_beside_what_the_storage_has(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    folder = write_folder(one.home)
    add_evaluation(folder, made(0.5))
    one.push_home()
    other.fetch_home()
    there = other.home.trial(folder.name).path
    add_evaluation(there, made(0.7, shots=5))
    add_evaluation(folder, made(0.6, at=2.0))
    one.push_file(folder / FILE)
    other.fetch_home()
    other.fetch_file(there / FILE)
    found = {e.settings.name: e.total.scores["acc"].value for e in read(there).evaluations.values()}
    assert found == {"t": 0.6, "t:5": 0.7}, "of two results of a task the later one"


def write_folder(home: Home) -> Path:
    spec = make_spec()
    write_trial(home, spec, make_result(spec))
    return home.trial(spec).path


def test_of_two_results_the_first_stays_and_both_hosts_have_it(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    spec = make_spec()
    first = make_result(spec, score=80.0)
    second = make_result(spec, score=81.0)
    assert one.end(one.home.trial(spec), first) == first
    assert other.end(other.home.trial(spec), second) == first
    assert other.home.trial(spec).result() == first == other.settle(other.home.trial(spec))
    assert Mirror(one.home).end(one.home.trial(spec), second) == first, (
        "nor on a disk that they share"
    )
    assert one.home.trial(spec).result() == first


def test_the_files_in_the_storage_are_those_of_the_result(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    spec = make_spec()
    name = "predictions-test.parquet"
    for host in (one, other):
        folder = host.home.trial(spec)
        folder.path.mkdir(parents=True)
        (folder.path / name).write_bytes(host.home.path.name.encode())
    one.end(one.home.trial(spec), make_result(spec, score=80.0))
    # A third host began the trial and was cut off before it ended.
    (third,) = hosts(tmp_path, "third")
    shutil.copytree(other.home.path, third.home.path)
    other.end(other.home.trial(spec), make_result(spec, score=81.0))
    settled = third.settle(third.home.trial(spec))
    assert settled is not None and settled.score == 80.0
    assert other.storage is not None
    assert other.storage.read(f"trials/{spec.hash}/{name}") == b"one"
    for host in (one, other, third):
        assert (host.home.trial(spec).path / name).read_bytes() == b"one"


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_driver_that_was_cut_off_while_another_took_over_puts_no_result(
    cuts: int, tmp_path: Path
) -> None:
    class CutOff(FileStorage):
        """Another driver takes the sweep over while this one cannot put its result."""

        def create(self, key: str, data: bytes) -> bool:
            nonlocal cuts
            cuts -= 1
            if not cuts:
                super().create(claim_key("test", 2), b"another driver")
            raise StorageError("cut off")

    storage = CutOff(tmp_path / "storage")
    mirror = Mirror(Home(tmp_path / "own"), storage, Fence(str(tmp_path / "storage"), "test", 1))
    spec = make_spec()
    with pytest.raises(StaleDriverError, match="another driver took it over"):
        mirror.end(mirror.home.trial(spec), make_result(spec))
    assert mirror.home.trial(spec).result() is None
    assert not storage.keys("trials")


def test_a_host_whose_driver_was_superseded_puts_no_result(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "storage")
    fence = Fence(str(tmp_path / "storage"), "test", 1)
    spec = make_spec()
    storage.create(claim_key("test", 2), b"another driver")
    for mirror in (
        Mirror(Home(tmp_path / "own"), storage, fence),
        Mirror(Home(tmp_path / "shared"), None, fence),
    ):
        with pytest.raises(StaleDriverError, match="another driver took it over"):
            mirror.end(mirror.home.trial(spec), make_result(spec))
        assert mirror.home.trial(spec).result() is None
    assert not storage.keys("trials")


def test_a_result_that_only_its_host_has_is_put_before_it_counts(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    spec = make_spec()
    assert one.settle(one.home.trial(spec)) is None
    write_trial(one.home, spec, make_result(spec))  # its host died before it could put it
    assert other.settle(other.home.trial(spec)) is None
    assert one.settle(one.home.trial(spec)) == other.settle(other.home.trial(spec)) is not None


def test_failures_of_two_hosts_are_all_kept(tmp_path: Path) -> None:
    one, other = hosts(tmp_path, "one", "other")
    spec = make_spec()

    def fail(mirror: Mirror, name: str) -> None:
        for number in range(5):
            mirror.add_failure(
                mirror.home.trial(spec), FailureRecord(type=name, message=str(number))
            )

    threads = [
        threading.Thread(target=fail, args=pair) for pair in ((one, "one"), (other, "other"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.fetch(one.home.trial(spec))
    assert sorted((f.type, f.message) for f in one.home.trial(spec).failures()) == [
        (n, str(i)) for n in ("one", "other") for i in range(5)
    ]


def test_the_driver_does_not_replace_what_a_rank_put_by_what_lies_in_its_own_home(
    tmp_path: Path,
) -> None:
    driver, rank = hosts(tmp_path, "driver", "rank")
    spec = make_spec()
    for mirror, curve in ((driver, "old\n"), (rank, "old\nnew\n")):
        write_trial(mirror.home, spec)
        (mirror.home.trial(spec).path / "epochs.jsonl").write_text(curve)
    rank.push(rank.home.trial(spec))
    driver.push_home()
    driver.fetch(driver.home.trial(spec))
    assert (driver.home.trial(spec).path / "epochs.jsonl").read_text() == "old\nnew\n"


def test_claims_locks_checkpoints_and_weights_stay_where_they_are_until_asked_for(
    tmp_path: Path,
) -> None:
    one, other = hosts(tmp_path, "one", "other")
    assert one.storage is not None
    wanted = [
        "tracking-id",
        "trials/a/result.json",
        "trials/a/predictions-test.parquet",
        "sweeps/s.json",
        "lm-eval/b/lm-eval.json",
    ]
    own = "tracking-writer"  # what this host knows of MLflow does not travel
    heavy = ["trials/a/best.safetensors", "trials/a/rank0.log", "cache/tokenizers/t/tokenizer.json"]
    for key in (
        *wanted[1:],
        *heavy,
        "leases/s/1",
        "README.md",
        "sweeps/s.lock",
        "trials/a/checkpoint/epoch-1/COMMIT.json",
    ):
        one.storage.write(key, b"{}")
    other.fetch_home()
    assert sorted(
        p.relative_to(other.home.path).as_posix() for p in other.home.path.rglob("*") if p.is_file()
    ) == sorted([*wanted, own])
    other.fetch_home(weights=True)
    assert sorted(
        p.relative_to(other.home.path).as_posix() for p in other.home.path.rglob("*") if p.is_file()
    ) == sorted([*wanted, *heavy, own])


def test_a_file_of_a_checkpoint_that_was_damaged_here_is_fetched_again_and_one_that_is_nowhere_is_not_made_up(
    tmp_path: Path,
) -> None:
    one, other = hosts(tmp_path, "one", "other")
    generation = one.home.path / "trials" / "a" / "checkpoint" / "epoch-1"
    generation.mkdir(parents=True)
    (generation / "part").write_bytes(b"whole")
    one.push_file(generation / "part")
    there = other.home.path / "trials" / "a" / "checkpoint" / "epoch-1"
    there.mkdir(parents=True)
    (there / "part").write_bytes(b"whol3")
    files = {
        name: {"bytes": 5, "sha256": hashlib.sha256(b"whole").hexdigest()}
        for name in ("part", "gone")
    }
    other.fetch_files(there, files)
    assert (there / "part").read_bytes() == b"whole" and not (there / "gone").exists()


def test_a_storage_that_is_gone_is_an_error_and_leaves_the_home_alone(
    s3_server: ThreadedMotoServer, tmp_path: Path
) -> None:
    spec = make_spec()
    mirror = Mirror(Home(tmp_path / "home"), open_storage(f"s3://{BUCKET}/gone", patience_s=0.0))
    s3_server.stop()
    with pytest.raises(StorageError, match="could not be reached"):
        mirror.end(mirror.home.trial(spec), make_result(spec))
    assert mirror.home.trial(spec).result() is None, (
        "a result that nobody else can see does not count here either"
    )
    s3_server.start()


@pytest.mark.parametrize("shortest", ["setup_s", "epoch_s", "collective_s"])
def test_a_rank_gives_up_its_storage_before_any_deadline_ends_the_attempt(
    tmp_path: Path, shortest: str
) -> None:
    timeouts = TimeoutConfig(**{shortest: 30.0})
    workspace = Workspace(
        Home(tmp_path / "home"), storage=str(tmp_path / "store"), patience_s=timeouts.patience_s
    )
    storage = Mirror.of(workspace).storage
    assert storage is not None and storage.patience_s == 15.0


# ---- a real trial, begun by one host and ended by another -------------------------------------------------------------

TRAINING = TrainingConfig(epochs=4, batch_size=16, eval_batch_size=16, patience=None, max_length=64)


def trial() -> TrialSpec:
    return TrialSpec(
        sweep="test",
        arm=Arm(
            backbone=tiny_choice("bert", dropout=0.1),
            method="lora",
            architecture=full_architecture("lora", {}),
        ),
        task=load_task("entailment"),
        training=TRAINING,
        limit=LimitConfig(train=48, validation=20, test=20),
        phase=Phase.CONFIRM,
        learning_rate=1e-2,
        seed=1,
    )


def first_host(folder: Path, url: str) -> None:
    """Train the trial whole without a storage, then three epochs of it with one, and die."""
    from suite.train.loop import Trainer

    alone = Trainer(Workspace(Home(folder / "alone")), master_port=free_port())
    alone.start(trial())
    while not alone.epoch().done:
        pass
    alone.finish()
    alone.close()
    trainer = Trainer(Workspace(Home(folder / "one"), storage=url), master_port=free_port())
    assert trainer.start(trial()) == 0
    for _ in range(3):
        trainer.epoch()
    os.kill(os.getpid(), signal.SIGKILL)


def second_host(folder: Path, url: str) -> None:
    """Go on with it where nothing of it lies, and end it."""
    from suite.train.loop import Trainer

    trainer = Trainer(Workspace(Home(folder / "other"), storage=url), master_port=free_port())
    print(f"taken up after epoch {trainer.start(trial())}", flush=True)
    while not trainer.epoch().done:
        pass
    trainer.finish()
    trainer.close()


def on_host(name: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from pathlib import Path; from tests.test_mirror import {name}; {name}(Path(sys.argv[1]), sys.argv[2])"
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_trial_that_one_host_began_is_ended_by_another_as_if_nothing_had_happened(
    s3_server: ThreadedMotoServer, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    began = on_host("first_host", tmp_path, url)
    assert began.returncode == -signal.SIGKILL, began.stderr
    storage = open_storage(url)
    name = f"trials/{trial().hash}"
    generations = f"{name}/checkpoint"
    assert {key.split("/")[3] for key in storage.keys(generations)} == {"epoch-2", "epoch-3"}, (
        "two are kept"
    )
    storage.delete(
        f"{generations}/epoch-3/COMMIT.json"
    )  # as if it had died between the files and their marker
    went_on = on_host("second_host", tmp_path, url)
    assert went_on.returncode == 0, went_on.stderr
    assert "taken up after epoch 2" in went_on.stdout
    alone, other = (Home(tmp_path / home).trial(trial()) for home in ("alone", "other"))
    assert _numbers(other.result()) == _numbers(alone.result())
    for path in (other.best, other.predictions("test"), other.predictions("validation")):
        assert (
            path.read_bytes()
            == (alone.path / path.name).read_bytes()
            == storage.read(f"{name}/{path.name}")
        )
    assert json.loads(storage.read(f"{name}/result.json") or b"") == json.loads(
        (other.path / "result.json").read_bytes()
    )
    assert not storage.keys(generations) and not other.checkpoint.exists(), (
        "a trial that has ended keeps no checkpoint anywhere"
    )


def _numbers(result: TrialResult | None) -> dict[str, Any]:
    assert result is not None
    curve = [
        (e.epoch, e.train_loss, e.validation_score, e.validation_scores) for e in result.epochs
    ]
    return {
        "curve": curve,
        **result.model_dump(
            include={"status", "score", "validation_score", "test_score", "frozen_sha256"}
        ),
    }
