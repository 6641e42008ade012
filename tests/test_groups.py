"""Groups that span nodes, on a cluster of two raylets with training replaced by a fake; one real run over both of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.exceptions import RuntimeEnvSetupError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from suite.cluster import shared
from suite.cluster.host import Process
from suite.cluster.session import RAY_ENVIRONMENT, ask_nodes, worker_environment
from suite.cluster.shared import check_home_is_shared
from suite.config.sweep import SweepConfig
from suite.config.variables import environment
from suite.errors import ResourceError
from suite.plan.events import Listener
from suite.plan.plan import make_plan
from suite.plan.resources import Layout
from suite.record.folder import Home, TrialFolder
from suite.record.result import EpochRecord, FailureRecord, TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.tune.driver import run_sweep
from suite.tune.group import Group, RankLocation, RunSettings, in_words, rank_order
from tests.cluster.processes import wait_until
from tests.fake_trainer import FakeTrainer, calls
from tests.sweeps import make_roots, toy_sweep
from tests.tiny import tiny_choice

ROOT = Path(__file__).parents[1]
STORE_BYTES = 80 * 2**20


class PlacedTrainer(FakeTrainer):
    """Writes down where it is."""

    def __init__(self, workspace: Workspace, **place: Any) -> None:
        super().__init__(workspace, **place)
        node = ray.get_runtime_context().get_node_id()
        about = {
            **place,
            "node": node,
            "pid": os.getpid(),
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
            "at": time.time(),
        }
        with (workspace.home.path / "places.jsonl").open("a") as file:
            file.write(json.dumps(about) + "\n")


class SlowPlacedTrainer(PlacedTrainer):
    seconds_per_epoch = 0.7


TRAINING = {"epochs": 3, "batch_size": 12}
PATIENT = {"setup_s": 300.0, "epoch_s": 300.0}
PLACED = "tests.test_groups:PlacedTrainer"
SLOW = "tests.test_groups:SlowPlacedTrainer"


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A raylet of one CPU and one of two, and a data root."""
    with pytest.MonkeyPatch.context() as patch, environment(RAY_ENVIRONMENT):
        patch.setenv("PYTHONPATH", str(ROOT))
        roots = make_roots(tmp_path_factory.mktemp("roots"), patch)
        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        try:
            ray.init(
                address=cluster.address,
                log_to_driver=False,
                runtime_env={"env_vars": worker_environment(1)},
            )
            yield cluster, roots
        finally:
            ray.shutdown()
            cluster.shutdown()


def small(**changes: Any) -> SweepConfig:
    """One cell, one search trial, one seed."""
    return toy_sweep(
        **{
            "methods": ["full"],
            "search": {"trials": 1},
            "confirm": {"seeds": [1]},
            "training": TRAINING,
            "timeouts": PATIENT,
        }
        | changes
    )


def places(home: Home) -> list[dict[str, Any]]:
    path = home.path / "places.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ranks_of_a_node_are_neighbours_ordered_by_gpu() -> None:
    def at(node: str, *gpus: str) -> RankLocation:
        return RankLocation(node, None, "", 1, gpus, Process(node, 1, {}))

    found = [at("b", "10"), at("a", "1"), at("b", "9"), at("a", "0")]
    assert rank_order(found) == [2, 0, 3, 1]
    assert rank_order([at("a")] * 3) == [0, 1, 2]


def test_a_traceback_that_ray_quotes_is_told_by_its_last_line() -> None:
    quoted = "Could not create the actor.\n[Node 10.0.0.2] Traceback (most recent call last):\n  File x\nOSError: no disk\n"
    told = in_words(RuntimeEnvSetupError(quoted))
    assert told.endswith("Could not create the actor. [Node 10.0.0.2] OSError: no disk")
    assert in_words(ValueError("two\nlines")) == "two\nlines"
    assert in_words(ValueError("x Traceback (most recent call last)\n")) == "x "


@pytest.mark.slow
def test_a_group_over_two_nodes_knows_its_places_and_talks_over_their_interface(
    two_nodes: tuple[Cluster, Path], home: Home
) -> None:
    outcome = run_sweep(
        small(resources={"workers": 3}), home=home, data_root=two_nodes[1], trainer=PLACED
    )
    assert outcome.ok and outcome.finished == 2
    found = sorted(places(home), key=lambda place: int(place["rank"]))
    assert [(p["rank"], p["world_size"]) for p in found] == [(0, 3), (1, 3), (2, 3)], (
        "one warm group served both trials"
    )
    first, second, third = (p["node"] for p in found)
    assert first != third and [p["local_rank"] for p in found] == (
        [0, 1, 0] if first == second else [0, 0, 1]
    )
    addresses = {str(node["NodeManagerAddress"]) for node in ray.nodes()}
    assert {(p["master_addr"], p["master_port"]) for p in found} <= {
        (a, found[0]["master_port"]) for a in addresses
    }
    assert None not in {p["gloo"] for p in found}


@pytest.mark.slow
def test_strict_pack_keeps_a_group_on_a_node(two_nodes: tuple[Cluster, Path], home: Home) -> None:
    config = small(resources={"workers": 2, "placement": "strict-pack"})
    assert run_sweep(config, home=home, data_root=two_nodes[1], trainer=PLACED).ok
    first, second = places(home)
    assert first["node"] == second["node"] and {first["master_addr"], second["master_addr"]} == {
        "127.0.0.1"
    }
    too_large = small(name="x", resources={"workers": 3, "placement": "strict-pack"})
    with pytest.raises(ResourceError, match=r"no node of the cluster .* holds more than 2"):
        run_sweep(too_large, home=home, data_root=two_nodes[1], trainer=PLACED)


@pytest.mark.slow
def test_a_node_that_is_lost_while_it_is_asked_is_done_without(
    two_nodes: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, _ = two_nodes
    lost = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    nodes = {str(node["NodeID"]): str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    assert lost.node_id in nodes

    def kill_once_asked() -> None:
        while not (tmp_path / lost.node_id).exists():
            time.sleep(0.05)
        cluster.remove_node(lost, allow_graceful=False)

    killer = threading.Thread(target=kill_once_asked)
    killer.start()
    # it is the loss that ends the wait
    answers = ask_nodes(nodes, marks_and_answers, tmp_path, lost.node_id, timeout_s=1000.0)
    killer.join()
    assert answers == dict.fromkeys(nodes.keys() - {lost.node_id}, "here")


def marks_and_answers(folder: Path, slow: str) -> str:
    """In a worker; on one node it does not come to its answer."""
    node = ray.get_runtime_context().get_node_id()
    (folder / node).touch()
    time.sleep(2000.0 if node == slow else 0.0)
    return "here"


@pytest.mark.slow
def test_a_node_on_which_the_suite_cannot_run_is_an_error_that_names_it(
    two_nodes: tuple[Cluster, Path],
) -> None:
    here = (
        ray.get_runtime_context().get_node_id()
    )  # not one that Ray lists: a node lost before may still be there
    with pytest.raises(
        ResourceError,
        match=r"node host-7: cannot run the suite \(.*no such module.*suite doctor --address",
    ):
        ask_nodes({here: "host-7"}, fails)


def fails() -> None:
    """In a worker."""
    raise ImportError("no such module")


def test_a_node_is_asked_until_it_answers_or_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"b": "host b"}
    answers: list[dict[str, bool]] = [{}, {"b": True}]
    monkeypatch.setattr(shared, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(shared, "ask_nodes", lambda *_args, **_: answers.pop(0))
    monkeypatch.setattr(shared, "ASK_AGAIN_S", 0.0)
    assert shared._who_sees(Path("mark"), nodes) == {"b": True}
    assert answers == []
    monkeypatch.setattr(shared, "HOME_ANSWER_S", 0.0)
    assert shared._who_sees(Path("mark"), nodes) == {}


@pytest.mark.slow
def test_a_node_that_does_not_say_whether_it_sees_the_home_stops_the_sweep(
    two_nodes: tuple[Cluster, Path], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.path.mkdir(parents=True, exist_ok=True)
    check_home_is_shared(home, None)
    monkeypatch.setattr(shared, "HOME_ANSWER_S", 0.0)
    with pytest.raises(ResourceError, match=r"did not say within 0 s.*give the same command again"):
        check_home_is_shared(home, None)


@pytest.mark.slow
def test_a_node_whose_worker_was_killed_while_it_was_asked_is_asked_again(
    two_nodes: tuple[Cluster, Path], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.path.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(shared, "_sees", dies_and_then_sees)
    check_home_is_shared(home, None)
    (died,) = home.path.glob("*-died")
    assert not died.name.startswith(ray.get_runtime_context().get_node_id())


def dies_and_then_sees(path: str) -> bool:
    """In a worker."""
    died = Path(path).with_name(f"{ray.get_runtime_context().get_node_id()}-died")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Path(path).exists()


@pytest.mark.slow
def test_a_named_interface_is_used_and_a_wrong_one_is_an_error_before_any_worker(
    two_nodes: tuple[Cluster, Path], home: Home
) -> None:
    with pytest.raises(
        ResourceError,
        match=r"resources.interface: got 'eth77', expected one that every node has; .* has .*lo",
    ):
        run_sweep(
            small(resources={"interface": "eth77"}),
            home=home,
            data_root=two_nodes[1],
            trainer=PLACED,
        )
    assert not places(home) and not home.sweep_definition("toy").exists()
    config = small(resources={"workers": 2, "placement": "spread", "interface": "lo"})
    assert run_sweep(config, home=home, data_root=two_nodes[1], trainer=PLACED).ok
    assert {(p["gloo"], p["master_addr"]) for p in places(home)} == {("lo", "127.0.0.1")}
    assert len({p["node"] for p in places(home)}) == 2


def _spec(folder: TrialFolder) -> TrialSpec:
    spec = folder.spec()
    assert spec is not None
    return spec


class Saboteur(Listener):
    """Does something once, after the first epoch that anyone finished."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.epochs, self.retries = act, 0, list[FailureRecord]()

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        self.epochs += 1
        if self.epochs == 1:
            self.act()

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.retries.append(failure)


def _gone(pid: int, seen_at: float) -> bool:
    """Whether a process is dead (a zombie is) that was alive at that time of the day."""
    try:
        process = psutil.Process(pid)
        # A younger one has only got its number, which the kernel gives again after 32,768 others.
        return process.create_time() > seen_at or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {
        Path(line[line.index("/dev/shm/") :])
        for line in lines
        if "/dev/shm/" in line and not line.endswith("(deleted)")
    }


def check_nothing_left(home: Home, files: set[Path]) -> None:
    """No rank's process, no placement group that holds anything, no shared memory, and all CPUs are free again."""
    end = time.monotonic() + 60

    def left() -> list[object]:
        groups = [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
        busy = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
        return (
            [p["pid"] for p in places(home) if not _gone(p["pid"], p["at"])]
            + groups
            + [f for f in files if f.exists()]
            + ([busy] if busy else [])
        )

    while left() and time.monotonic() < end:
        time.sleep(0.2)
    assert not left()


@pytest.mark.slow
def test_trials_of_different_sizes_share_the_cluster_and_each_size_stays_warm(
    two_nodes: tuple[Cluster, Path], home: Home
) -> None:
    """Two workers for T5 and one for BERT, on three CPUs: side by side, and no trial of one size on the other's processes."""
    bert = tiny_choice("bert")
    t5 = tiny_choice("t5")
    resources = {"workers": 1, "workers_by_backbone": {t5.name: 2}}
    config = small(backbones=[bert, t5], search={"trials": 3}, resources=resources)
    recorder = Saboteur(lambda: None)
    outcome = run_sweep(
        config, home=home, data_root=two_nodes[1], trainer=SLOW, listeners=[recorder]
    )
    assert outcome.ok and outcome.finished == 8 and not recorder.retries
    found = places(home)
    assert sorted(p["world_size"] for p in found) == [1, 2, 2], (
        "one group of each size served all trials of its size"
    )
    begun, ended = (
        {c["trial"]: c["at"] for c in calls(home, call)} for call in ("start", "finish")
    )
    spans: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for folder in home.trials():
        spans[_spec(folder).world_size].append((begun[folder.hash], ended[folder.hash]))
    assert any(b < other_e and other_b < e for b, e in spans[1] for other_b, other_e in spans[2]), (
        "side by side"
    )


@pytest.mark.slow
def test_a_killed_trial_process_takes_its_ranks_along_and_the_trial_goes_on(
    two_nodes: tuple[Cluster, Path], home: Home
) -> None:
    files: set[Path] = set()

    def kill() -> None:
        files.update(shared_memory(p["pid"] for p in places(home)))
        (pid,) = [
            a["Pid"]
            for a in actors().values()
            if a["ActorClassName"].endswith("Trainable") and a["State"] == "ALIVE"
        ]
        os.kill(int(pid), signal.SIGKILL)

    saboteur = Saboteur(kill)
    outcome = run_sweep(
        small(resources={"workers": 3}),
        home=home,
        data_root=two_nodes[1],
        trainer=SLOW,
        listeners=[saboteur],
    )
    assert outcome.ok and outcome.finished == 2
    (failure,) = saboteur.retries
    assert failure.type == "TrialProcessDied"
    first, second, third = (c["epoch"] for c in calls(home, "start"))
    assert first == third == 0 < second, "taken up at the last committed epoch"
    check_nothing_left(home, files)


@pytest.mark.slow
def test_a_trial_goes_on_with_fewer_workers_when_its_node_is_lost_and_the_next_has_all_again(
    two_nodes: tuple[Cluster, Path], home: Home
) -> None:
    cluster, data_root = two_nodes
    files: set[Path] = set()
    times: list[float] = []

    def lose() -> None:
        files.update(shared_memory(p["pid"] for p in places(home)))
        times.append(time.time())
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)

    class Mender(Saboteur):
        def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
            super().on_trial_retry(spec, failure)
            times.append(time.time())

        def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
            super().on_epoch(spec, record)
            if self.retries and len(cluster.list_all_nodes()) == 1:  # on what is left
                # Ray's own wait ends after 30 s, which a raylet may take on a busy machine.
                cluster.add_node(wait=False, num_cpus=2, object_store_memory=STORE_BYTES)
                wait_until(
                    "the node has joined",
                    lambda: ray.cluster_resources()["CPU"] == 3.0,
                    timeout_s=200,
                )

    mender = Mender(lose)
    resources = {"workers": 3, "min_workers": 1, "room_wait_s": 1.0}
    outcome = run_sweep(
        small(resources=resources), home=home, data_root=data_root, trainer=SLOW, listeners=[mender]
    )
    assert outcome.ok and outcome.finished == 2 and len(mender.retries) == 1
    found = places(home)
    lost_at, failed_at = times
    print(
        f"seconds from the node's loss: {failed_at - lost_at:.1f} to the attempt's end, {found[3]['at'] - lost_at:.1f} to the next one"
    )
    assert [p["world_size"] for p in found] == [3, 3, 3, 1, 3, 3, 3]
    first, second, third = (c["epoch"] for c in calls(home, "start"))
    assert first == third == 0 < second, "taken up at the last committed epoch"
    check_nothing_left(home, files)


@contextmanager
def group_on(home: Home, data_root: Path, nodes: str, *, workers: int = 2) -> Iterator[Group]:
    """A group that trains for real, in a placement group of its own."""
    bundles = placement_group([{"CPU": 1.0}] * workers, strategy=nodes)
    group = Group(
        RunSettings(Workspace(home, data_root), Layout(2, 1.0, 0.0, 1), small().timeouts), bundles
    )
    try:
        yield group
    finally:
        group.close()
        remove_placement_group(bundles)


def trained(group: Group, spec: TrialSpec) -> TrialResult:
    group.start([spec])
    while not group.epoch()[spec.hash].done:
        pass
    return group.finish(spec.hash)


@pytest.mark.slow
def test_zero3_over_two_nodes_scores_as_on_one_and_goes_on_with_fewer_ranks(
    two_nodes: tuple[Cluster, Path], tmp_path: Path
) -> None:
    plan = make_plan(
        small(methods=["lora"], training={"epochs": 2, "batch_size": 8}), where="toy", world_size=2
    )
    spec, other = (plan.confirm_spec(plan.cells[0], 1e-2, seed) for seed in (1, 2))
    two = Home(tmp_path / "two")
    one = Home(tmp_path / "one")
    with group_on(two, two_nodes[1], "STRICT_SPREAD") as group:
        spread = trained(group, spec)
        group.start([other])
        group.epoch()
    with group_on(one, two_nodes[1], "STRICT_PACK") as group:
        packed = trained(group, spec)
        whole = trained(group, other)
    assert (packed.score, packed.scores, packed.frozen_sha256) == (
        spread.score,
        spread.scores,
        spread.frozen_sha256,
    )
    assert [e.train_loss for e in packed.epochs] == [e.train_loss for e in spread.epochs]

    with group_on(two, two_nodes[1], "PACK", workers=1) as group:
        shrunk = trained(group, other)
    assert (
        shrunk.provenance["world_sizes"],
        shrunk.resumed_from_epochs,
        whole.provenance["world_sizes"],
    ) == ([2, 1], [1], [2])
    assert spread.provenance["hosts"] == [2]
    assert packed.provenance["hosts"] == [1]
    assert shrunk.provenance["hosts"] == [2, 1]
    (first, second), (as_first, as_second) = (
        [e.train_loss for e in result.epochs] for result in (shrunk, whole)
    )
    # of the second epoch sums are taken in another order, and dropout is seeded by rank
    assert first == as_first and second == pytest.approx(as_second, rel=0.05)
    assert (
        shrunk.phases["train"].energy_kwh is not None
        and shrunk.phases["train"].memory.rss_sum_bytes is not None
    )
