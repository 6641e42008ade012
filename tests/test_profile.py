"""`suite profile`: what is measured and estimated, what happens to an arm that does not fit or dies, and what the tables say."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from suite.backbones.t5 import T5
from suite.errors import ResourceError
from suite.petl.arm import full_architecture
from suite.plan import partitioning
from suite.profiling import (
    ArmProfile,
    Setting,
    choose,
    estimate_only,
    measure,
    peak,
    ratios,
    worker,
)
from suite.profiling import run as profile_run
from suite.profiling.arms import BLOCK, ArmChoice, RepeatedNumbers
from suite.profiling.estimate import estimate
from suite.profiling.figures import ATTENTION_WEIGHTS, against_full, draw
from suite.profiling.record import Estimate, Memory, Profile
from suite.profiling.serving import Serving
from suite.profiling.setting import make_setting
from suite.profiling.training import Training
from suite.profiling.worker import Message, Visit
from suite.train.process_group import close_process_group, free_port, init_process_group
from tests.commands import Suite, suite
from tests.control_groups import control_group
from tests.ranks import forkserver_context, on_ranks
from tests.tiny import tiny_choice

__all__ = ["suite"]


def make_quick(patch: pytest.MonkeyPatch) -> None:
    """Take the device's speed from products that are soon done."""
    patch.setattr(peak, "SIDES", {"cpu": 256, "cuda": 256})
    patch.setattr(peak, "SECONDS", 0.05)


def start_forks(patch: pytest.MonkeyPatch) -> None:
    """Make ranks forks of a process that has imported everything; one test starts them as they are."""
    context = forkserver_context()
    patch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    start_forks(monkeypatch)


CPU = torch.device("cpu")
SHORT: dict[str, Any] = {
    "batch": 4,
    "seq": 16,
    "target": 4,
    "seconds": 0.01,
    "rounds": 1,
    "inference_batches": (1,),
    "contexts": (16,),
    "decoded": 2,
}


def shape_of(family: str) -> dict[str, Any]:
    """With dropout, as all published backbones have it."""
    return tiny_choice(family, dropout=0.1).config or {}


def wide(family: str) -> dict[str, Any]:
    """Large enough that activations outweigh the odds and ends that no estimate counts."""
    sizes = {
        "t5": {"d_model": 128, "d_ff": 512, "d_kv": 32},
        "bert": {"hidden_size": 128, "intermediate_size": 512},
    }
    return shape_of(family) | sizes[family] | {"vocab_size": 2048}


def arms_of(
    family: str,
    methods: list[str],
    *,
    attention: str = "pretrained",
    shape: dict[str, Any] | None = None,
) -> Any:
    preset = tiny_choice(family).name
    return choose([preset], methods, [attention], shape=shape or shape_of(family))


@contextmanager
def one_rank() -> Iterator[None]:
    init_process_group(
        rank=0,
        world_size=1,
        local_rank=0,
        address="127.0.0.1",
        port=free_port(),
        device="cpu",
        timeout_s=60,
    )
    try:
        yield
    finally:
        close_process_group()


def memory_of(arm: Any, setting: Setting, *, rank: int = 0) -> Memory:
    training = Training(arm, setting, CPU, rank=rank)
    try:
        return training.memory()
    finally:
        training.close()


# the estimate beside what is measured


ALL = ["full", "lora", "read", "lst", "adapter", "bitfit", "prompt"]


def test_a_slice_of_a_board_is_measured_and_not_taken_for_the_whole_board(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peak, "measured_flops", lambda setting, side: 1.0)
    setting = Setting(**SHORT | {"device": "cuda", "dtype": "bf16"})
    flops, source = peak.peak_flops(setting, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert flops == 1.0 and "fastest product" in source
    assert peak.peak_flops(setting, "NVIDIA A100-SXM4-40GB")[0] == 311.9e12


def test_steps_are_timed_for_longer_on_a_gpu() -> None:
    assert make_setting({"device": "cuda"}).seconds == 10.0
    assert make_setting({"device": "cpu"}).seconds == 3.0
    assert make_setting({"device": "cuda", "seconds": 0.5}).seconds == 0.5


def test_gpus_that_do_not_answer_end_the_profile_with_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peak, "PATIENCE_S", 0.0)
    with pytest.raises(ResourceError, match="the GPUs gave no answer within 0 s"):
        peak.inspect_machine(Setting(**SHORT | {"device": "cuda"}))


@pytest.mark.parametrize(
    ("family", "zero", "frozen_weights", "methods"),
    [
        ("t5", 0, "resident", ["full", "read"]),
        ("bert", 2, "resident", ["full", "lora"]),
        pytest.param("t5", 3, "resident", ALL, marks=pytest.mark.slow),
        pytest.param("t5", 3, "partitioned", ["lora"], marks=pytest.mark.slow),
    ],
)
def test_the_estimate_of_the_peak_is_within_a_twentieth_of_what_is_measured(
    family: str, zero: int, frozen_weights: str, methods: list[str]
) -> None:
    shapes = {"batch": 8, "seq": 64, "zero": zero, "frozen_weights": frozen_weights}
    setting = Setting(**SHORT | shapes)
    with one_rank():
        for arm in arms_of(family, methods, shape=wide(family)):
            measured = memory_of(arm, setting)
            expected = estimate(arm, setting).memory
            assert expected.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05), arm.method
            assert expected.parameters_bytes == measured.parameters_bytes, arm.method
            assert expected.activations_bytes == pytest.approx(
                measured.activations_bytes, rel=0.02
            ), arm.method


def two_rank_cases() -> list[tuple[Any, Setting]]:
    """What trains is cut in two in each; what is frozen, in the last one only."""
    full, lora = arms_of("bert", ["full", "lora"], shape=wide("bert"))
    resident = Setting(**SHORT | {"batch": 8, "seq": 64, "ranks": 2})
    partitioned = resident.model_copy(update={"frozen_weights": "partitioned"})
    return [(full, resident), (lora, resident), (lora, partitioned)]


def on_two_ranks(rank: int) -> list[Memory]:
    return [memory_of(arm, setting, rank=rank) for arm, setting in two_rank_cases()]


@pytest.mark.slow
def test_two_ranks_hold_half_of_what_trains_each_and_say_the_same() -> None:
    first, second = on_ranks(on_two_ranks)
    assert first == second
    # What is gathered when is DeepSpeed's to say; resident weights are never gathered.
    tolerances = (0.25, 0.05, 0.25)
    for (arm, setting), measured, tolerance in zip(
        two_rank_cases(), first, tolerances, strict=True
    ):
        expected = estimate(arm, setting).memory
        case = f"{arm.method} {setting.frozen_weights}"
        # DeepSpeed fills shares up.
        assert expected.parameters_bytes == pytest.approx(measured.parameters_bytes, rel=0.01), case
        assert expected.optimizer_bytes == pytest.approx(measured.optimizer_bytes, rel=0.01), case
        assert expected.peak_bytes == pytest.approx(measured.peak_bytes, rel=tolerance), case
    whole = first[1]
    cut = first[2]
    assert cut.parameters_bytes == pytest.approx(whole.parameters_bytes / 2, rel=0.05)


def test_accumulation_divides_activations_and_multiplies_no_work() -> None:
    (arm,) = arms_of("bert", ["full"], shape=wide("bert"))
    whole, parts = (
        estimate(arm, Setting(**SHORT | {"batch": 8, "micro_batch": micro})) for micro in (8, 2)
    )
    assert parts.memory.activations_bytes == pytest.approx(
        whole.memory.activations_bytes / 4, rel=0.01
    )
    assert parts.step_flops == whole.step_flops


def test_forward_flops_are_those_of_the_matrix_products() -> None:
    (arm,) = arms_of("bert", ["full"])
    setting = Setting(**SHORT)
    found = estimate(arm, setting)
    d = 32
    inner = 64
    tokens = setting.batch * setting.seq
    layers = 2
    blocks = layers * (2 * tokens * (4 * d * d + 2 * d * inner) + 2 * 2 * tokens * setting.seq * d)
    head = 2 * setting.batch * (d * d + d * 2)
    assert found.forward_flops == blocks + head
    assert found.step_flops == pytest.approx(
        3 * found.forward_flops, rel=0.01
    )  # the first layer's input needs no gradient


def test_estimating_allocates_nothing_of_the_models_size() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    # One layer: words enough make it large.
    shape = {"num_hidden_layers": 1, "vocab_size": 400_000}
    (arm,) = choose(["bert-large"], ["read"], ["pretrained"], shape=shape)
    found = estimate_only([arm], Setting(batch=8, seq=128)).arms[0]
    assert found.estimate is not None
    assert found.estimate.memory.parameters_bytes > 1.3e9
    assert process.memory_info().rss - before < 0.5e9


# measuring


def test_each_gate_of_reads_recurrence_costs_the_same_products() -> None:
    """torch's fused LSTM is one operation, whose products no counter would see."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    forward = []
    step = []
    for cell in ("rnn", "gru", "lstm"):  # one gate, three, four
        (arm,) = choose(
            ["bert-base"],
            ["read"],
            ["pretrained"],
            architectures={"read": {"cell": cell, "hidden": 32}},
            shape={**shape, "num_attention_heads": 4},
        )
        found = estimate(arm, Setting(batch=2, seq=8, zero=0))
        forward.append(found.forward_flops)
        step.append(found.step_flops)
    for rnn, gru, lstm in (forward, step):
        assert gru - rnn == 2 * (lstm - gru) > 0


@pytest.fixture(scope="module")
def measured() -> list[ArmProfile]:
    """Two arms that fit, one of parts that do not go together, and one that is too large."""
    shapes = Setting(**SHORT | {"rounds": 2})
    pair = arms_of("t5", ["full", "read"], attention="gqa")
    misfit = arms_of("bert", ["full", "lora"], attention="fnet")[1]
    (large,) = arms_of("t5", ["full"], shape=wide("t5"))
    sizes = [estimate(arm, shapes).memory.peak_bytes for arm in (*pair, large)]
    assert max(sizes[:2]) < sizes[2]
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        start_forks(patch)
        patch.setattr(peak, "free_bytes", lambda setting: max(sizes[:2]))
        return list(measure([*pair, misfit, large], shapes).arms)


@pytest.mark.slow
def test_arms_are_measured_and_those_that_do_not_go_together_say_why(
    measured: list[ArmProfile],
) -> None:
    *found, incompatible, _ = measured
    for arm in found:
        assert arm.status == "ok", arm.reason
        assert arm.time is not None and arm.memory is not None
        assert arm.time.samples_per_s == pytest.approx(4 / arm.time.step_s.median)
        assert arm.energy_kwh_per_1000 is not None and arm.energy_kwh_per_1000 > 0
        assert len(arm.rounds) == 2
        assert arm.decoding[0].kv_bytes == 16 * 2 * (
            arm.kv_bytes_per_token or 0
        )  # as many source tokens, for as many heads
    assert incompatible.status == "incompatible"
    assert "projections" in str(incompatible.reason)


@pytest.mark.slow
def test_an_arm_that_cannot_fit_is_not_tried_and_the_others_are(
    measured: list[ArmProfile],
) -> None:
    first, _, _, large = measured
    assert (first.status, large.status) == ("ok", "oom")
    assert large.time is None


def test_an_arm_that_cannot_fit_is_told_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Setting(**SHORT)
    (arm,) = arms_of("t5", ["full"])
    needed = estimate(arm, shapes).memory.peak_bytes
    monkeypatch.setattr(peak, "free_bytes", lambda setting: needed - 1)
    (large,) = measure([arm], shapes).arms
    assert large.status == "oom" and large.time is None
    assert "needs about" in str(large.reason) and "a smaller --micro-batch" in str(large.reason)


def test_a_model_that_cannot_fit_whole_is_not_told_to_use_more_ranks() -> None:
    shapes = Setting(**SHORT)
    (record,) = estimate_only(arms_of("t5", ["full"]), shapes).arms
    assert record.estimate is not None and record.total_parameters is not None
    # As many ranks would leave each of them.
    memory = record.estimate.memory.model_copy(update={"peak_bytes": 1})
    small = record.estimate.model_copy(update={"memory": memory})
    each = profile_run.Findings(record.model_copy(update={"estimate": small}))
    profile_run._refuse_too_large(each, shapes, record.total_parameters * 4 - 1)
    assert each.record.status == "oom" and "--ranks" not in str(each.record.reason)
    assert "the whole model needs about" in str(each.record.reason)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_two_ranks_measure_every_arm_and_the_first_one_alone_what_is_in_use() -> None:
    first, last = measure(arms_of("bert", ["full", "bitfit"]), Setting(**SHORT | {"ranks": 2})).arms
    for arm in (first, last):
        assert arm.status == "ok", arm.reason
        assert arm.time is not None and arm.inference


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_what_is_in_use_takes_nothing_from_what_training_gave() -> None:
    shape = shape_of("gpt2") | {"n_positions": 32}
    (arm,) = measure(
        choose(["gpt2"], ["bitfit"], ["pretrained"], shape=shape),
        Setting(**SHORT | {"contexts": (8, 64)}),
    ).arms
    assert arm.status == "ok" and arm.time is not None
    assert [item.context_tokens for item in arm.decoding] == [8]
    assert "exceed the backbone's 32 positions" in arm.missing["decoding[64]"]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_ctrl_c_keeps_what_was_measured() -> None:
    def interrupt(line: str) -> None:
        if "round 1" in line:
            raise KeyboardInterrupt

    found = measure(arms_of("bert", ["full", "bitfit"]), Setting(**SHORT), on_progress=interrupt)
    assert found.stopped
    assert [arm.status for arm in found.arms] == ["ok", "estimated"]
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_deepspeeds_linear_does_not_outlive_its_engine() -> None:
    before = torch.nn.functional.linear
    with one_rank():
        training = Training(arms_of("bert", ["full"])[0], Setting(**SHORT), CPU, rank=0)
        try:
            assert torch.nn.functional.linear is not before
        finally:
            training.close()
    assert torch.nn.functional.linear is before


def test_fused_attention_of_a_gpu_keeps_no_probabilities() -> None:
    (arm,) = arms_of("bert", ["full"], shape=shape_of("bert") | {"max_position_embeddings": 512})
    shapes = SHORT | {"seq": 256, "zero": 0}
    cpu, gpu = (
        estimate(arm, Setting(**shapes | {"device": device})).memory.activations_bytes
        for device in ("cpu", "cuda")
    )
    assert cpu - gpu > 2 * 4 * 4 * 256 * 256 * 4  # layers x batch x heads x T x T x fp32, and masks


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_an_arm_whose_process_is_killed_takes_no_other_with_it() -> None:
    killed: list[int] = []

    def kill_once(line: str) -> None:
        if "round 1" in line and not killed:  # the first arm is done, the second has begun
            killed.extend(child.pid for child in multiprocessing.active_children() if child.pid)
            os.kill(killed[0], signal.SIGKILL)

    first, second, third = measure(
        arms_of("bert", ["full", "bitfit", "lora"]), Setting(**SHORT), on_progress=kill_once
    ).arms
    assert (first.status, second.status, third.status) == ("ok", "oom", "ok")
    assert "killed (signal 9)" in str(second.reason)
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_ranks_that_hang_outside_of_a_collective_end_their_arm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_run, "SILENT_S", 0.05)
    (arm,) = arms_of("bert", ["full"])
    near, far = multiprocessing.Pipe(duplex=False)
    stopped = multiprocessing.current_process()  # it lives, and says nothing
    monkeypatch.setattr(type(stopped), "exitcode", None)
    waiting = deque([Visit(0, with_memory=False, arm=arm)])
    message = profile_run._listen([near], [stopped], waiting, [], print)
    assert message is not None
    assert (message.event, message.number) == ("failed", 0)
    assert message.text == "the ranks have been silent for 0.05 s"
    far.close()


class Undying:
    """A rank that says why it stops and does not die of its kill, as one that waits for a driver."""

    pid = 1
    exitcode = None
    waited_s: list[float | None] = []

    def __init__(self, *, args: Any, **_: Any) -> None:
        self.pipe = args[-1]

    def start(self) -> None:
        self.pipe.send(Message("failed", 0, "it hangs"))

    def kill(self) -> None:
        assert not self.waited_s, "killed before it is waited for"

    def join(self, timeout: float | None = None) -> None:
        self.waited_s.append(timeout)


class Unserved:
    """Stands for `Serving`; a forward pass ends in an error."""

    error = RuntimeError()

    def __init__(self, *_: object) -> None:
        pass

    def inference(self, batch: int) -> None:
        raise self.error

    def why_not(self, context: int) -> str:
        return "no decoder"


@pytest.mark.parametrize(
    ("family", "method", "first"),
    [
        ("llama", "peft:prefix-tuning", 8 + 20),
        ("t5", "peft:prefix-tuning", 8 + 20),
        ("t5", "peft:prompt-tuning", 8),
    ],
)
def test_pefts_prompts_are_in_the_cache_once_and_stay_there(
    family: str, method: str, first: int
) -> None:
    arm = ArmChoice(
        backbone=tiny_choice(family).name,
        attention="pretrained",
        method=method,
        architecture=full_architecture(method, {"num_virtual_tokens": 20}),
        shape=shape_of(family),
    )
    serving = Serving(arm, Setting(**SHORT | {"contexts": (8,)}), CPU)
    keys = []
    base = serving.model.get_base_model()  # type: ignore[operator]
    base.register_forward_hook(
        lambda _module, _args, output: keys.append(output.past_key_values.get_seq_length())
    )
    serving.decoding(8)
    assert keys == [*range(first, first + len(keys))] and len(keys) > 2


def test_a_gpu_that_fails_in_use_ends_the_ranks_and_one_that_is_full_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "Serving", Unserved)
    (arm,) = arms_of("bert", ["full"])
    gpu = torch.device("cuda")
    monkeypatch.setattr(Unserved, "error", RuntimeError("CUDA error: an illegal memory access"))
    assert (
        "failed" in worker.measured_serving(arm, Setting(**SHORT), CPU)["missing"]["inference[1]"]
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.measured_serving(arm, Setting(**SHORT), gpu)
    monkeypatch.setattr(Unserved, "error", KeyError("of a method of one's own"))
    missing = worker.measured_serving(arm, Setting(**SHORT), CPU)["missing"]
    assert "failed: KeyError" in missing["inference[1]"]
    monkeypatch.setattr(Unserved, "error", torch.OutOfMemoryError("CUDA out of memory"))
    assert "oom" in worker.measured_serving(arm, Setting(**SHORT), gpu)["missing"]["inference[1]"]


def test_a_rank_that_does_not_die_is_waited_for_a_while_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(type(context), "Process", Undying)
    (arm,) = arms_of("bert", ["full"])
    found = profile_run.Findings(arm.unmeasured())
    waiting = deque([Visit(0, with_memory=False, arm=arm)])
    profile_run._one_group(waiting, [found], Setting(**SHORT), lambda line: None)
    assert Undying.waited_s == [profile_run.END_S]
    assert (found.record.status, found.record.reason) == ("failed", "it hangs")


def test_ranks_on_a_cpu_share_what_their_container_may_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control_group(tmp_path, limit=2**20, used=0, pages=0)
    monkeypatch.setattr(partitioning, "CGROUP", tmp_path)
    assert peak.free_bytes(Setting(**SHORT | {"ranks": 2})) == int(2**20 * peak.USABLE_FRAC) // 2


# comparing


def record(method: str, steps: list[float], peak: int) -> ArmProfile:
    memory = Memory(
        peak_bytes=peak,
        parameters_bytes=1,
        optimizer_bytes=1,
        gradients_bytes=1,
        activations_bytes=1,
    )
    expected = Estimate(
        memory=memory.model_copy(update={"peak_bytes": 2 * peak}), forward_flops=1, step_flops=3
    )
    rounds = [{"step_s": step} for step in steps]
    return ArmProfile(
        backbone="b",
        attention="pretrained",
        method=method,
        memory=memory,
        estimate=expected,
        rounds=rounds,
    )


def test_a_ratio_is_taken_within_rounds_and_its_interval_is_students() -> None:
    found = {
        r.quantity: r
        for r in ratios(record("read", [1.0, 2.0, 4.0], 30), record("full", [2.0, 4.0, 16.0], 60))
    }
    logs = [math.log(0.5), math.log(0.5), math.log(0.25)]
    middle = sum(logs) / 3
    deviation = math.sqrt(sum((each - middle) ** 2 for each in logs) / 2)
    half = 4.302652729749464 * deviation / math.sqrt(3)  # t with 2 degrees of freedom at 97.5%
    assert found["step_s"].ratio == pytest.approx(math.exp(middle))
    assert found["step_s"].low == pytest.approx(math.exp(middle - half))
    assert found["step_s"].high == pytest.approx(math.exp(middle + half))
    peak = found["memory.peak_bytes"]
    assert (peak.ratio, peak.low, peak.estimated) == (0.5, None, 0.5)


def test_a_single_round_has_no_interval() -> None:
    (step, *_) = ratios(record("read", [1.0], 30), record("full", [2.0], 60))
    assert (step.ratio, step.exact, step.low, step.high) == (0.5, False, None, None)


def oom(arm: ArmProfile) -> ArmProfile:
    """The same arm as it is where it was not tried."""
    return arm.model_copy(update={"memory": None, "rounds": [], "status": "oom"})


def test_a_measured_arm_is_set_against_one_that_did_not_fit_by_estimates_that_are_named_so() -> (
    None
):
    found = {r.quantity: r for r in ratios(record("read", [], 30), oom(record("full", [], 60)))}
    assert "memory.peak_bytes" not in found
    peak = found["estimate.memory.peak_bytes"]
    assert (peak.first, peak.second, peak.ratio, peak.estimated) == (60, 120, 0.5, None)


def profile_of(*arms: ArmProfile) -> Profile:
    return Profile(setting={}, device_name="CPU", hardware={}, versions={}, arms=list(arms))


def test_a_figure_shows_memory_by_measurements_alone_or_by_estimates_and_says_so() -> None:
    full = record("full", [], 60)
    read = record("read", [], 30)
    # 20% of what is estimated for full.
    read = read.model_copy(update={"estimate": record("read", [], 12).estimate})
    for arms, title, share in (
        ([full, read], "peak training memory", "50"),
        ([oom(full), read], "estimated peak training memory", "20"),
    ):
        figure = against_full(profile_of(*arms))
        assert figure is not None
        (panel,) = figure.axes
        assert panel.get_title() == f"{title}, % of full"
        assert [label.get_text() for label in panel.texts] == ["100", share]


def test_mhes_table_of_attention_weights_is_met() -> None:
    """GPT-3: 96 layers, 96 heads of width 128 (MHE, arXiv 2310.07911, section 3.5)."""
    whole = {name: 96 * weights(96, 128) for name, weights in ATTENTION_WEIGHTS.items()}
    assert whole == {
        "mha": 43_486_543_872,
        "el": 14_495_514_624,
        "mqa": 14_797_504_512,
        "skv": 28_991_029_248,
        "mhe": 456_523_776,
        "sha": 96 * 3 * 128 * 128 * 96,
    }


# the command

FLAGS = (
    "--backbone",
    "bert-base",
    "--batch",
    4,
    "--seq",
    16,
    "--rounds",
    2,
    "--seconds",
    0.01,
    "--infer-batch",
    "1",
    "--device",
    "cpu",
)


def shape_flags(family: str) -> list[str]:
    return [
        item
        for key, value in shape_of(family).items()
        for item in ("--set", f"backbone.{key}={value}")
    ]


@pytest.mark.slow
def test_the_command_prints_tables_ratios_and_writes_json_and_figures(
    suite: Suite, tmp_path: Path
) -> None:
    options = (
        "--methods",
        "full,bitfit",
        "--compare",
        "bitfit,full",
        "--out",
        tmp_path / "p.json",
        "--figures",
        tmp_path / "figures",
    )
    code, out, err = suite("profile", *FLAGS, *shape_flags("bert"), *options)
    assert code == 0, err
    assert "Training" in out and "Use" in out
    assert "bert-base/bitfit / bert-base/full" in out
    assert "est." in out and "Wh/1000" in out and "an estimate: no counter can be read here" in out
    stored = json.loads((tmp_path / "p.json").read_text())
    assert [arm["method"] for arm in stored["arms"]] == ["full", "bitfit"]
    assert stored["arms"][0]["memory"]["peak_bytes"] > stored["arms"][1]["memory"]["peak_bytes"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "cost-against-full.png",
        "attention-parameters.png",
    }
    assert all(
        path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "figures").iterdir()
    )


@pytest.mark.parametrize("fmt", ["json", "csv", "md"])
def test_estimates_alone_can_be_piped(suite: Suite, fmt: str) -> None:
    code, out, err = suite(
        "profile",
        "--estimate",
        *FLAGS,
        *shape_flags("bert"),
        "--methods",
        "bitfit",
        "--format",
        fmt,
    )
    assert code == 0, err
    if fmt == "json":
        assert [arm["status"] for arm in json.loads(out)["arms"]] == ["estimated"]
    else:
        assert "bert-base/bitfit" in out


@pytest.mark.parametrize(
    ("positions", "why"),
    [
        (
            32,
            "16 tokens and 20 positions of prompt exceed the backbone's 32 positions; "
            "use a smaller --seq",
        ),
        (16, "the 20 positions of prompt leave none of the backbone's 16 to an example; use fewer"),
    ],
)
def test_an_arm_that_is_too_long_is_set_aside_and_the_others_go_on(
    suite: Suite, positions: int, why: str
) -> None:
    flags = (
        "--methods",
        "prompt,bitfit",
        "--format",
        "json",
        "--set",
        f"backbone.max_position_embeddings={positions}",
    )
    code, out, _ = suite("profile", "--estimate", *FLAGS, *shape_flags("bert"), *flags)
    assert code == 0
    prompt, bitfit = json.loads(out)["arms"]
    assert (prompt["status"], bitfit["status"]) == ("incompatible", "estimated")
    assert why in prompt["reason"]


def test_an_encoder_decoder_with_a_table_of_positions_ends_where_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (arm,) = arms_of("t5", ["full"])
    serving = Serving(arm, Setting(**SHORT), CPU)
    assert (arm.too_long(17), serving.why_not(16)) == (None, None)
    monkeypatch.setattr(T5, "positions", lambda _family, _config: 16)
    assert "17 tokens exceed the backbone's 16 positions" in arm.too_long(17)
    assert "20 tokens exceed the backbone's 16 positions" in str(serving.why_not(16))


def test_json_with_a_comparison_is_one_document(suite: Suite) -> None:
    flags = ("--methods", "full,bitfit", "--compare", "bitfit,full", "--format", "json")
    code, out, _ = suite("profile", "--estimate", *FLAGS, *shape_flags("bert"), *flags)
    assert code == 0
    (couple,) = json.loads(out)["compared"]
    assert (couple["first"], couple["second"]) == ("bert-base/bitfit", "bert-base/full")


def test_figures_by_size_need_two_sizes(tmp_path: Path) -> None:
    both = [arm for family in ("bert", "gpt2") for arm in arms_of(family, ["bitfit"])]
    two = estimate_only(both, Setting(**SHORT))
    one = two.model_copy(update={"arms": two.arms[:1]})
    by_size = {"memory-by-size", "trainable-by-size"}
    assert {path.stem for path in draw(two, tmp_path / "two")} >= by_size
    assert not {path.stem for path in draw(one, tmp_path / "one")} & by_size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--methods", "lorra"), "did you mean lora"),
        (("--methods", ","), "expected names with commas"),
        (("--attention", "gqua"), "did you mean gqa"),
        (("--backbone", "t5-bse"), "did you mean t5-base"),
        (("--batch", 6, "--ranks", 4), "cannot be cut into equal parts"),
        (("--infer-batch", "1;2"), "expected whole numbers"),
        (("--compare", "full"), "expected two different names"),
        (("--compare", "full,reed"), "did you mean read"),
        (("--set", "lst.depth=3", "--methods", "full"), "--set"),
        (("--set", "lora=3"), "expected METHOD.KEY=VALUE"),
        (("--compare", "lora,pretrained"), "no two arms differ in this alone"),
        (("--compare", "full,read", "--format", "csv"), "holds one table"),
        (("--out", "/dev/null/p.json"), "expected a folder that can be made"),
        (("--out", "/"), "got a folder, expected a file"),
        (
            ("--methods", "lora", "--attention", "fnet", "--backbone", "bert-base"),
            "left no attention projections to adapt",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    suite: Suite, options: tuple[Any, ...], words: str
) -> None:
    code, out, err = suite("profile", *options)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_missed_by_name(suite: Suite) -> None:
    code, _, err = suite("profile", "--device", "cuda", "--methods", "full")
    assert code == 2
    assert "this machine has 0" in err and "--device cpu" in err


def test_a_setting_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch 3"):
        Setting(batch=8, micro_batch=3)


def test_large_random_weights_repeat_a_block_and_small_ones_are_drawn() -> None:
    torch.manual_seed(0)
    with RepeatedNumbers():
        large = torch.empty(3 * BLOCK + 5).normal_(std=0.02)
        small = torch.empty(100).uniform_(-1.0, 1.0)
    assert torch.equal(large[:BLOCK], large[BLOCK : 2 * BLOCK])
    assert torch.equal(large[:5], large[3 * BLOCK :])
    assert large.std().item() == pytest.approx(0.02, rel=0.05)
    assert small.unique().numel() > 90
