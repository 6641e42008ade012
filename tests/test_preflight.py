"""What is said of a sweep before its first worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suite.config import precision as host
from suite.config.sweep import ResourceConfig
from suite.errors import ResourceError
from suite.plan.cell_state import read_states
from suite.plan.plan import make_plan
from suite.plan.preflight import check_gpus_are_up, warn_of_other_runs, warn_of_untried
from suite.plan.queue import TrialQueue
from suite.record.folder import Home
from suite.record.provenance import versions
from tests.records import make_result, write_trial
from tests.sweeps import toy_roots, toy_sweep

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")


@pytest.mark.parametrize(
    ("torch", "precision", "says"),
    [
        (versions()["torch"], "fp32", ""),
        ("1.0", "fp32", f"runs of this sweep had torch 1.0 (here {versions()['torch']}); a row"),
        (None, "bf16-autocast", "had precision bf16-autocast (here fp32); a row with runs of both"),
    ],
)
def test_runs_of_another_environment_are_named_before_a_row_is_lost(
    torch: str | None,
    precision: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host, "has_fast_bf16", lambda: False)
    home = Home(tmp_path)
    plan = make_plan(toy_sweep(methods=["full"]), where="toy.yaml")
    spec = TrialQueue(plan, home, slots=1).next()
    assert spec is not None
    environment = {"versions": {"torch": torch, "ray": "1.0"}}
    write_trial(home, spec, make_result(spec, provenance=environment, precision=precision))
    warn_of_other_runs(plan.config.training, read_states(plan, home), "cpu")
    assert says in caplog.text and bool(says) == bool(caplog.text)


def test_runs_with_other_threads_are_named_before_their_times_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    plan = make_plan(toy_sweep(methods=["full"]), where="toy.yaml")
    spec = TrialQueue(plan, home, slots=1).next()
    assert spec is not None
    write_trial(home, spec, make_result(spec, provenance={"threads_per_worker": 1}))
    states = read_states(plan, home)
    for threads, says in ((1, ""), (4, "had 1 threads a worker (here 4)")):
        warn_of_other_runs(plan.config.training, states, None, threads=threads)
        assert says in caplog.text and bool(says) == bool(caplog.text)


@pytest.mark.parametrize(
    ("precision", "device", "says"),
    [
        ("bf16", "cpu", "had precision bf16 (here fp32 or bf16-autocast); a row with runs of both"),
        # Nodes may have other processors than the head.
        ("bf16-autocast", "cpu", ""),
        ("fp32", "cpu", ""),
        ("bf16-autocast", "cuda", "had precision bf16-autocast (here fp32 or bf16); a row"),
        ("fp32", "cuda", ""),
    ],
)
def test_runs_on_another_device_are_named_on_a_running_cluster_too(
    precision: str, device: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    plan = make_plan(toy_sweep(methods=["full"]), where="toy.yaml")
    spec = TrialQueue(plan, home, slots=1).next()
    assert spec is not None
    write_trial(home, spec, make_result(spec, precision=precision))
    warn_of_other_runs(plan.config.training, read_states(plan, home), device, here=False)
    assert says in caplog.text and bool(says) == bool(caplog.text)


def test_a_sweep_of_gpus_waits_for_them_and_does_not_go_on_on_processors(tmp_path: Path) -> None:
    home = Home(tmp_path)
    plan = make_plan(toy_sweep(methods=["full"]), where="toy.yaml")
    queue = TrialQueue(plan, home, slots=1)
    states = queue.states
    nodes = [{"CPU": 8.0}, {"CPU": 8.0}]
    check_gpus_are_up(ResourceConfig(), states, nodes)
    for device in ("cpu", "cuda"):
        spec = queue.next()
        assert spec is not None
        check_gpus_are_up(ResourceConfig(), read_states(plan, home), nodes)
        write_trial(home, spec, make_result(spec, provenance={"device": device}))
        queue.ended(spec)
    states = read_states(plan, home)
    with pytest.raises(ResourceError, match="ran on GPUs, and no GPU is up: wait for the nodes"):
        check_gpus_are_up(ResourceConfig(), states, nodes)
    check_gpus_are_up(ResourceConfig(), states, [*nodes, {"CPU": 8.0, "GPU": 1.0}])
    check_gpus_are_up(ResourceConfig(gpus_per_worker=0), states, nodes)


@pytest.mark.parametrize(
    ("trials", "says"), [(2, "more architectures than that have: lora 3"), (3, "")]
)
def test_architectures_that_no_trial_will_try_are_named(
    trials: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"trials": trials, "startup_trials": 1, "per": "method"}
    lora = {"methods": ["lora"], "architectures": "search", "search": search}
    warn_of_untried(make_plan(toy_sweep(**lora), where="toy.yaml"))
    assert says in caplog.text and bool(says) == bool(caplog.text)


def test_a_sweep_to_which_nothing_is_added_may_be_of_another_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    budget: dict[str, Any] = {"search": {"trials": 1}, "confirm": {"seeds": [1]}}
    plan = make_plan(toy_sweep(methods=["full"], **budget), where="toy.yaml")
    queue = TrialQueue(plan, home, slots=1)
    while spec := queue.next():
        old = {"versions": {"torch": "1.0"}}
        write_trial(home, spec, make_result(spec, provenance=old))
        queue.ended(spec)
    warn_of_other_runs(plan.config.training, read_states(plan, home), None)
    assert not caplog.text
    # Its rows would not be ranked together with those of a new method.
    plan = make_plan(toy_sweep(methods=["full", "lora"], **budget), where="toy.yaml")
    warn_of_other_runs(plan.config.training, read_states(plan, home), None)
    assert "had torch 1.0" in caplog.text and "not ranked together" in caplog.text
