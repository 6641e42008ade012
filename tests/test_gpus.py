"""What torch says of a host's GPUs, before a worker starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.config.training import TrainingConfig
from suite.doctor.install import compiler
from suite.errors import ResourceError
from suite.plan import gpus
from suite.plan.gpus import Gpus, as_computed, local_gpus, missing_for_offload, usable
from suite.plan.resources import Layout
from suite.tune import driver
from tests.sweeps import toy_roots, toy_sweep

__all__ = ["toy_roots"]
GIB = 1 << 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this host's GPU")
def test_a_torch_that_cannot_use_a_gpu_says_why_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = local_gpus()
    assert found.problem, "torch's own words"

    def ask(nodes: dict[str, str], function: Callable[[], Gpus], **_: float) -> dict[str, Gpus]:
        return {node: found if function is local_gpus else function() for node in nodes}

    monkeypatch.setattr(driver, "alive_nodes", lambda *, with_gpu: {"id": "gpu-3 (10.0.0.3)"})
    monkeypatch.setattr(driver, "ask_nodes", ask)
    with pytest.raises(
        ResourceError, match=r"node gpu-3 \(10\.0\.0\.3\): torch cannot use its GPU"
    ):
        driver._asked_gpus(Layout(1, 1.0, 1.0, 1), TrainingConfig())
    assert driver._asked_gpus(Layout(1, 1.0, 0.0, 1), TrainingConfig()) == Gpus()


def test_a_host_that_does_not_answer_decides_nothing_by_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout(1, 1.0, 1.0, 1)
    answers: dict[str, Gpus] = {}
    names = {"id3": "gpu-3", "id4": "gpu-4"}
    monkeypatch.setattr(driver, "alive_nodes", lambda *, with_gpu: names)
    monkeypatch.setattr(driver, "ask_nodes", lambda *_, timeout_s: answers)
    with pytest.raises(ResourceError, match=r"node gpu-3, gpu-4: did not say within 360 s"):
        driver._asked_gpus(layout, TrainingConfig())
    answers["id4"] = Gpus(80 * GIB, bf16=True)
    assert driver._asked_gpus(layout, TrainingConfig()) == answers["id4"]
    assert "node gpu-3: did not say" in caplog.text


def test_a_torch_that_dies_or_hangs_is_a_problem_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "QUESTION", "import sys; sys.exit('no libcudart')")
    assert local_gpus() == Gpus(problem="no libcudart")
    monkeypatch.setattr(gpus, "QUESTION", "import os; os.abort()")
    assert local_gpus() == Gpus(problem="it ended with code -6")
    monkeypatch.setattr(gpus, "ASK_S", 0.01)
    assert local_gpus() == Gpus(problem="it did not answer within 0.01 s")


def test_offloading_without_a_compiler_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_for_offload() == ["c++"]
    assert "c++ not found: training.offload needs" in compiler().found

    def ask(nodes: dict[str, str], function: Callable[[], Any], **_: float) -> dict[str, Any]:
        return {node: Gpus() if function is local_gpus else function() for node in nodes}

    monkeypatch.setattr(driver, "alive_nodes", lambda *, with_gpu: {"id": "gpu-3"})
    monkeypatch.setattr(driver, "ask_nodes", ask)
    layout = Layout(1, 1.0, 1.0, 1)
    assert driver._asked_gpus(layout, TrainingConfig()) == Gpus()
    with pytest.raises(ResourceError, match=r"node gpu-3: c\+\+ not found"):
        driver._asked_gpus(layout, TrainingConfig(offload="optimizer", zero_stage=3))


def test_the_smallest_and_the_oldest_gpu_decide() -> None:
    found = usable(
        {"a": Gpus(80 * GIB, bf16=True), "b": Gpus(24 * GIB, bf16=False), "c": Gpus(bf16=None)}
    )
    assert found == Gpus(24 * GIB, bf16=False)
    assert usable({"a": Gpus(80 * GIB, bf16=True)}).bf16
    assert usable({}) == Gpus(), "nodes to come are taken to be as good"


@pytest.mark.usefixtures("toy_roots")
def test_memory_is_estimated_in_the_precision_that_auto_comes_to() -> None:
    config = toy_sweep(training={"precision": "auto"})
    assert as_computed(config, Gpus()) is config
    assert as_computed(config, Gpus(bf16=False)).training.precision == "fp32"
    assert as_computed(config, Gpus(bf16=True)).training.precision == "bf16"
    named = toy_sweep(training={"precision": "bf16"})
    assert as_computed(named, Gpus(bf16=False)) is named
