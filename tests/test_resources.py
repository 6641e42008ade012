"""What fits where and who comes next, in numbers: nodes, sizes of trials and their turns. No cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from ray.tune.experiment import Trial

from suite.cluster import session
from suite.cluster.network import choose, interfaces, use_loopback
from suite.config.sweep import ResourceConfig, SweepConfig
from suite.errors import IncompatibleError, ResourceError, SweepConflictError
from suite.meters import LocalPhase, combine, name_devices_by_attempt
from suite.plan.admission import Admission
from suite.plan.definition import check_definition, read_plan, store_definition
from suite.plan.plan import make_plan
from suite.plan.queue import TrialQueue
from suite.plan.resources import Capacity, lay_out, local_cpus
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.tune.elastic import ElasticScheduler, fewer_workers
from suite.tune.searcher import SweepSearcher
from tests.sweeps import finish, toy_roots, toy_sweep
from tests.tiny import tiny_choice

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")
BERT = tiny_choice("bert")
T5 = tiny_choice("t5")


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("400000 100000", 4), ("250000 100000", 3), ("50000 100000", 2), ("max 100000", 64)],
)
def test_a_container_has_the_cores_of_its_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    """`docker run --cpus 4` and Kubernetes' limits leave all cores of the host in sight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert local_cpus(tmp_path) == 64
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert local_cpus(tmp_path) == cores


GPU_WORKERS = """
max_workers: 5
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, max_workers: 0}
  gpu-worker: {resources: {CPU: 48, GPU: 4, memory: 2.0e11}, max_workers: 4}
  cpu-worker: {resources: {CPU: 8}}
  as-it-is: {resources: {}, max_workers: 9}
"""


def test_what_the_autoscaler_of_a_launcher_may_add_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Ray's own autoscalers none tells Ray, and the head alone holds no rank."""
    head: dict[str, Any] = {"Alive": True, "Resources": {"memory": 1.6e10}}
    worker: dict[str, Any] = {"Alive": True, "Resources": {"CPU": 48.0, "GPU": 4.0}}
    monkeypatch.setattr(session.ray, "nodes", lambda: [head, *up])
    monkeypatch.setattr(
        session.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="192.0.2.1:6379")
    )
    monkeypatch.setattr(
        session.cluster_state, "get_max_resources_from_cluster_config", lambda: None
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "ray_bootstrap_config.yaml"
    file.write_text(GPU_WORKERS)
    options = ["--gcs-address=192.0.2.1:6379", f"--autoscaling-config=~/{file.name}"]
    monitor = subprocess.Popen([sys.executable, "-c", "input()", *options], stdin=subprocess.PIPE)
    try:
        up: list[dict[str, Any]] = []
        laid_out = lay_out(ResourceConfig(), session.cluster_nodes())
        assert (laid_out.workers, laid_out.gpus, laid_out.slots) == (16, 1.0, 1)
        assert (
            lay_out(ResourceConfig(placement="strict-pack"), session.cluster_nodes()).workers == 4
        )
        up = [worker] * 3
        found = session.cluster_nodes()[4:]
        assert found == [{"CPU": 48.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 0.0}]
        file.write_text("[")
        assert len(session.cluster_nodes()) == 4, "a file that is being written"
    finally:
        monitor.kill()
        monitor.communicate()


def two_sizes(**changes: Any) -> SweepConfig:
    """Two cells: four workers for T5, one for BERT; two search trials and one seed each."""
    resources = {"workers": 1, "workers_by_backbone": {T5.name: 4}}
    small = {
        "backbones": [BERT, T5],
        "methods": ["full"],
        "search": {"trials": 2},
        "confirm": {"seeds": [1]},
    }
    return toy_sweep(**small | {"resources": resources} | changes)


# ---- what fits -------------------------------------------------------------------------------------------------------


def test_a_group_spans_nodes_unless_it_may_not() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 3.0}]
    spread = lay_out(ResourceConfig(workers=3), nodes)
    assert (spread.strategy, spread.slots, spread.capacity) == ("PACK", 2, Capacity((4, 3)))
    packed = lay_out(ResourceConfig(workers=3, placement="strict-pack"), nodes)
    assert (packed.strategy, packed.slots) == ("STRICT_PACK", 2)
    assert lay_out(ResourceConfig(workers=7), nodes).slots == 1
    with pytest.raises(
        ResourceError,
        match=r"no node of the cluster \(4 CPU \+ 3 CPU\) holds more than 4; .*placement: pack",
    ):
        lay_out(ResourceConfig(workers=5, placement="strict-pack"), nodes)


def test_strict_pack_takes_by_itself_the_gpus_of_one_node() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]
    assert lay_out(ResourceConfig(placement="strict-pack"), nodes).workers == 4
    assert lay_out(ResourceConfig(), nodes).workers == 6


def test_the_size_of_every_backbone_must_fit() -> None:
    with pytest.raises(
        ResourceError,
        match=r"5 workers of 1 CPU each never fit: .* holds 4; lower resources.workers_by_backbone.t5-large",
    ):
        lay_out(ResourceConfig(workers=1, workers_by_backbone={"t5-large": 5}), [{"CPU": 4.0}])


def test_a_trial_that_may_shrink_fits_where_its_least_does() -> None:
    layout = lay_out(ResourceConfig(workers=4, min_workers=1), [{"CPU": 2.0}])
    assert (layout.workers, layout.slots, layout.capacity.most) == (4, 1, 2)
    with pytest.raises(
        ResourceError, match=r"3 workers .* never fit: .*lower resources.min_workers"
    ):
        lay_out(ResourceConfig(workers=4, min_workers=3), [{"CPU": 2.0}])
    with pytest.raises(ValidationError, match="min_workers: got 3, expected at most workers"):
        ResourceConfig(workers=2, min_workers=3)


def test_one_node_capacity_packs_by_node() -> None:
    nodes = Capacity((4, 2), one_node=True)
    assert nodes.fits([2, 4]) and nodes.fits([2, 2, 2]) and nodes.fits([3, 2, 1])
    assert not nodes.fits([3, 3]) and not nodes.fits([5]) and Capacity((4, 2)).fits([3, 3])


def test_a_shrunk_trial_takes_the_largest_number_that_divides_its_batch() -> None:
    plan = make_plan(
        toy_sweep(training={"epochs": 1, "batch_size": 12}, resources={"workers": 6}), where="toy"
    )
    spec = plan.search_spec(plan.cells[0], 0, 1e-3)
    assert [fewer_workers(spec, free, least=1) for free in (9, 6, 5, 4, 2, 1, 0)] == [
        4,
        4,
        4,
        4,
        2,
        1,
        None,
    ]
    assert fewer_workers(spec, 2, least=3) is None
    micro = spec.model_copy(
        update={"training": spec.training.model_copy(update={"micro_batch_size": 4})}
    )
    assert fewer_workers(micro, 5, least=1) == 3, "12 = 3 x 4"


# ---- whose turn it is ------------------------------------------------------------------------------------------------


def test_small_trials_get_only_what_a_waiting_larger_one_will_leave() -> None:
    turn = Admission(Capacity((4,)), live=[1, 1])
    assert turn.admits(1) and turn.admits(2) and not turn.admits(3)
    turn.wait(3)
    assert not turn.admits(1), "one of the two must end, and none follow"
    beside = Admission(Capacity((4,)), live=[3])
    beside.wait(3)
    assert beside.admits(1) and not beside.admits(2), "a fourth worker is of no use to it"


def test_a_trial_that_the_cluster_cannot_hold_stands_in_nobodys_way() -> None:
    turn = Admission(Capacity((2,)), live=[4])
    turn.wait(4)
    assert turn.admits(2) and turn.admits(1)
    assert Admission(Capacity((2,)), live=[]).admits(4), (
        "nothing runs: it is handed out, and waits for the cluster to grow"
    )


def test_nothing_smaller_overtakes_a_trial_that_found_no_room() -> None:
    turn = Admission(Capacity((2, 2)), live=[2, 1], held_for=2)
    assert not turn.admits(1)
    assert not Admission(Capacity((2, 2)), live=[2, 1]).held_for and Admission(
        Capacity((2, 2)), live=[2, 1]
    ).admits(1)


def test_a_large_trial_gets_its_turn_among_small_ones(tmp_path: Path) -> None:
    """On four workers, BERT's trials (one each) are running when T5 (four) becomes due: none of BERT's follows until it has run."""
    home = Home(tmp_path / "home")
    schedule = TrialQueue(
        make_plan(two_sizes(search={"trials": 8}), where="toy"),
        home,
        slots=99,
        capacity=Capacity((3,)),
    )
    running = [schedule.next() for _ in range(3)]
    assert [spec.world_size for spec in running if spec is not None] == [1, 1, 1], (
        "no room for T5 anywhere"
    )
    schedule.capacity = Capacity((4,))
    assert schedule.next() is None, "T5 waits, and so does the fourth of BERT's"
    for spec in running:
        assert spec is not None
        finish(home, spec, 1.0)
        schedule.ended(spec)
        following = schedule.next()
    assert following is not None and following.world_size == 4


def test_the_largest_go_first_and_small_ones_fill_what_is_left(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    schedule = TrialQueue(
        make_plan(two_sizes(), where="toy"), home, slots=99, capacity=Capacity((4, 1))
    )
    live = list(iter(schedule.next, None))
    assert [spec.world_size for spec in live] == [4, 1]
    done: list[TrialSpec] = []
    while live:
        done.append(spec := live.pop(0))
        finish(home, spec, 1.0)
        schedule.ended(spec)
        live += list(iter(schedule.next, None))
        assert sum(s.world_size for s in live) <= 5
    assert sorted(spec.world_size for spec in done) == [1, 1, 1, 4, 4, 4]


def test_a_trial_that_shrank_leaves_its_room_to_others(tmp_path: Path) -> None:
    schedule = TrialQueue(
        make_plan(two_sizes(), where="toy"), Home(tmp_path), slots=99, capacity=Capacity((4,))
    )
    large = schedule.next()
    assert large is not None and large.world_size == 4 and schedule.next() is None
    schedule.resized(large, 2)
    small = schedule.next()
    assert small is not None and small.world_size == 1


# ---- a waiting trial gets another size ----------------------------------------------------------------------------------


class Waiting:
    """What Tune shows a scheduler: trials that wait for room, which it can be told to stop."""

    def __init__(self, searcher: SweepSearcher) -> None:
        self.searcher = searcher
        self.number = 0
        self.trials: list[Any] = []

    def ask(self) -> int:
        """Hand out the next trial; returns its size."""
        self.number += 1
        config = self.searcher.suggest(str(self.number))
        self.trials.append(
            SimpleNamespace(trial_id=str(self.number), status=Trial.PENDING, config=config)
        )
        return int(config["workers"])

    def get_live_trials(self) -> list[Any]:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        self.trials.remove(trial)
        self.searcher.on_trial_complete(trial.trial_id)


def test_a_trial_that_found_no_room_is_suggested_again_with_fewer_workers_and_never_ends(
    tmp_path: Path,
) -> None:
    config = ResourceConfig(workers=4, min_workers=1, room_wait_s=10.0)
    plan = make_plan(toy_sweep(resources=config.model_dump()), where="toy")
    queue = TrialQueue(plan, Home(tmp_path), slots=1, capacity=Capacity((4,)))
    searcher = SweepSearcher(queue)
    free = [Capacity((2,))]
    scheduler = ElasticScheduler(config, searcher, lambda: free[0])
    tune = Waiting(searcher)
    assert tune.ask() == 4
    (spec,) = searcher.specs["1"]
    for now in (100.0, 109.0):
        scheduler.resize_pending(tune, now)
        assert tune.trials, "it has not waited long enough"
    scheduler.resize_pending(tune, 110.0)
    assert not tune.trials and queue.live == 1 and not queue.states[spec.cell].given_up
    assert tune.ask() == 2 and searcher.specs == {"2": (spec,)}
    for now in (111.0, 121.0):
        scheduler.resize_pending(tune, now)
    assert tune.trials, "two workers are what fits"
    free[0] = Capacity((4,))
    scheduler.resize_pending(tune, 122.0)
    assert tune.ask() == 4 and searcher.specs == {"3": (spec,)}
    queue.capacity, free[0] = Capacity((1,)), Capacity((1,))
    for now in (200.0, 210.0):
        scheduler.resize_pending(tune, now)
    assert tune.ask() == 1
    tune.trials[0].status = Trial.RUNNING
    searcher.on_trial_complete("4", error=True)
    searcher.hand_back("4")
    tune.trials.clear()
    assert tune.ask() == 4, "the attempt after a failure asks for all workers again"
    scheduler.resize_pending(tune, 230.0)
    scheduler.resize_pending(tune, 231.0)
    assert tune.ask() == 1, "the cluster has been too small for ten seconds already"
    finish(queue.home, spec, 1.0)
    searcher.on_trial_complete(str(tune.number))
    assert queue.live == 0


# ---- sizes are part of the plan --------------------------------------------------------------------------------------


def test_workers_by_backbone_are_planned_by_cell_and_change_no_other_trial() -> None:
    plan = make_plan(two_sizes(), where="toy")
    plain = make_plan(two_sizes(resources={"workers": 1}), where="toy")
    assert [plan.workers(cell) for cell in plan.cells] == [1, 4]
    hashes, before = ([p.search_spec(c, 0, 1e-3).hash for c in p.cells] for p in (plan, plain))
    assert hashes[0] == before[0] and hashes[1] != before[1]
    with pytest.raises(IncompatibleError, match="expected a multiple of 3"):
        make_plan(
            two_sizes(resources={"workers": 1, "workers_by_backbone": {T5.name: 3}}), where="toy"
        )
    with pytest.raises(ValidationError, match="'t9' is no backbone of this sweep"):
        two_sizes(resources={"workers_by_backbone": {"t9": 1}})


def test_two_forms_of_a_backbone_are_two_sweeps() -> None:
    short = BERT.model_copy(update={"drop_layers": 1, "config": None})
    with pytest.raises(ValidationError, match=rf"'{BERT.name}' stands there 2 times"):
        two_sizes(backbones=[BERT, short])


def test_the_number_of_workers_of_a_planned_cell_may_not_change(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    plan = make_plan(two_sizes(), where="toy")
    store_definition(plan, home)
    check_definition(plan, home)
    with pytest.raises(
        SweepConflictError, match=rf"resources.workers_by_backbone.{T5.name}: 4 -> 1"
    ):
        check_definition(make_plan(two_sizes(resources={"workers": 1}), where="toy"), home)
    with pytest.raises(SweepConflictError, match=r"resources.workers: 1 -> 2"):
        check_definition(
            make_plan(
                two_sizes(resources={"workers": 2, "workers_by_backbone": {T5.name: 4}}),
                where="toy",
            ),
            home,
        )
    stored = read_plan(home, "toy")
    for cell in plan.cells:
        assert stored.search_spec(cell, 0, 1e-3) == plan.search_spec(cell, 0, 1e-3)


# ---- the network interface -------------------------------------------------------------------------------------------


def test_the_interface_is_that_of_the_hosts_address_or_the_one_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interfaces()["lo"] == "127.0.0.1"
    assert choose(None, address="127.0.0.1") == ("lo", "127.0.0.1")
    assert choose(None, address="198.51.100.7") == (None, "198.51.100.7"), (
        "an address behind translation is on no interface"
    )
    assert choose("lo", address="198.51.100.7") == ("lo", "127.0.0.1")
    with pytest.raises(ResourceError, match=r"got 'eth77', expected an interface of .*lo"):
        choose("eth77", address="127.0.0.1")


def test_ranks_of_one_machine_talk_over_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set first: what was not there is otherwise not taken away again after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


# ---- energy over hosts and attempts ----------------------------------------------------------------------------------


def account(
    joules: dict[str, float], kind: str = "nvml", seconds: float = 10.0, **more: Any
) -> dict[str, LocalPhase]:
    return {
        "train": LocalPhase(
            seconds=seconds, joules={kind: joules}, covered_s={kind: seconds}, **more
        )
    }


def total_j(*ranks: dict[str, LocalPhase]) -> float:
    energy_kwh = combine(ranks)[0]["train"].energy_kwh
    assert energy_kwh is not None
    return energy_kwh * 3.6e6


def test_a_device_is_counted_once_and_devices_of_two_hosts_are_added() -> None:
    """Two ranks read one host's package; a third reads that of another host with the same name and index."""
    host_a = {"boot-a/intel-rapl:0-package-0": 100.0}
    host_b = {"boot-b/intel-rapl:0-package-0": 60.0}
    assert total_j(
        account(host_a, "rapl"), account(host_a, "rapl"), account(host_b, "rapl")
    ) == pytest.approx(160.0)
    assert total_j(account({"GPU-1": 50.0}), account({"GPU-2": 70.0})) == pytest.approx(120.0)


def test_a_board_that_changed_its_rank_between_attempts_is_counted_for_both() -> None:
    """Attempt 1: rank 0 on board A, rank 1 on B. A's host dies; attempt 2 has rank 0 alone, on board B."""
    first = [
        name_devices_by_attempt({"train": dict_of(account({board: spent}))}, 1)["train"]
        for board, spent in (("A", 100.0), ("B", 80.0))
    ]
    taken_up = LocalPhase(**first[0])
    taken_up.merge(account({"B": 30.0})["train"])
    assert total_j({"train": taken_up}, {"train": LocalPhase(**first[1])}) == pytest.approx(
        100 + 80 + 30
    )
    again = name_devices_by_attempt({"train": dict_of({"train": taken_up})}, 2)["train"]
    assert again["joules"]["nvml"] == {"A@1": 100.0, "B@2": 30.0}, (
        "what an attempt was is named once"
    )


def dict_of(phases: dict[str, LocalPhase]) -> dict[str, Any]:
    return asdict(phases["train"])
