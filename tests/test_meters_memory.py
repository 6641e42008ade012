"""Memory: the resident set, the tensors' peak by operation, and which steps are watched."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from suite.meters import PhaseMeter, TensorPeak, baseline_bytes, combine, release_memory
from suite.meters.memory import ResidentPeak

CPU = torch.device("cpu")


def test_a_small_phase_after_a_big_one_does_not_inherit_its_resident_peak() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("big"):
        block = torch.ones(50_000_000)  # 200 MB, touched
    del block
    release_memory()
    with meter.phase("small"):
        torch.ones(1000)
    rss = {name: phase.memory["rss_bytes"] for name, phase in meter.local().items()}
    assert rss["small"] < rss["big"] - 150_000_000


def test_release_memory_returns_freed_memory_to_the_system() -> None:
    before = baseline_bytes(CPU)
    blocks = [
        torch.ones(20_000) for _ in range(1000)
    ]  # 80 kB each: below glibc's mmap threshold, so freeing alone keeps them
    held = baseline_bytes(CPU)
    del blocks
    release_memory()
    assert held - before > 60_000_000
    assert baseline_bytes(CPU) - before < 20_000_000


def test_what_a_process_holds_is_its_tensors_on_a_gpu_and_its_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = 2**60
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: on_gpu)
    block = torch.ones(10_000_000)  # 40 MB of the host
    assert baseline_bytes(torch.device("cuda")) > on_gpu + block.nbytes


def test_a_resident_peak_that_cannot_be_reset_is_null_with_the_reason(tmp_path: Path) -> None:
    meter = PhaseMeter(CPU)
    meter._resident = ResidentPeak(tmp_path / "no-proc")
    with meter.phase("train"):
        pass
    record, missing = combine([meter.local()])
    assert record["train"].memory.rss_max_bytes is None
    assert "cannot reset" in missing["phases.train.memory.rss_max_bytes"]


B = 64
D = 32
H = 128
OUT = 256
BH = 4 * B * H
B_OUT = 4 * B * OUT
OUT_H = 4 * OUT * H
SCALARS = 4 + 4  # the loss and its gradient


def mlp_peak(*, frozen: tuple[bool, bool], grad: bool) -> int:
    """Peak bytes above the start of one forward and backward of relu(x W1') W2', summed; float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, H, bias=False), nn.ReLU(), nn.Linear(H, OUT, bias=False))
    for layer, freeze in zip((net[0], net[2]), frozen, strict=True):
        layer.weight.requires_grad_(not freeze)
    x = torch.randn(B, D)
    gc.collect()
    with TensorPeak() as peak, torch.set_grad_enabled(grad):
        start_bytes = peak.live_bytes
        loss = net(x).sum()
        if loss.requires_grad:
            loss.backward()
    return peak.peak_bytes - start_bytes


@pytest.mark.parametrize(
    ("frozen", "grad", "expected"),
    [
        ((False, False), False, BH + B_OUT),  # hidden after relu, and the output
        ((True, True), True, BH + B_OUT),  # nothing is saved for a backward pass that nobody needs
        ((True, False), True, BH + OUT_H + SCALARS),  # saved hidden, gradient of W2
        (
            (False, False),
            True,
            3 * BH + OUT_H + SCALARS,
        ),  # saved hidden, its gradient before and after relu, gradient of W2
    ],
)
def test_tensor_peak_of_a_two_layer_mlp_is_the_analytic_one(
    frozen: tuple[bool, bool], grad: bool, expected: int
) -> None:
    assert mlp_peak(frozen=frozen, grad=grad) == expected


def test_tensor_peak_sees_recomputation_of_checkpointed_blocks() -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(6)
    )
    x = torch.randn(256, 64)

    def peak_bytes(recompute: bool) -> int:
        blocks.zero_grad()
        gc.collect()
        with TensorPeak() as peak:
            start_bytes = peak.live_bytes
            h = x
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
            h.sum().backward()
        return peak.peak_bytes - start_bytes

    saved = (
        4 * 256 * 64
    )  # bytes of one activation; a plain block keeps four, a recomputed one keeps its input
    assert peak_bytes(False) >= 6 * 4 * saved - saved
    assert peak_bytes(True) <= peak_bytes(False) - 5 * 3 * saved + 2 * saved


def test_tensor_peak_counts_views_once_and_gradients_that_python_has_not_touched() -> None:
    weight = nn.Parameter(torch.ones(1000))
    (weight * 2).sum().backward()
    gc.collect()
    with TensorPeak() as peak:
        start_bytes = peak.live_bytes
        view = weight.detach().view(10, 100)[2:]
        assert peak.live_bytes == start_bytes
        weight.grad = None
        assert start_bytes - peak.live_bytes == 4000
    assert view.shape == (8, 100)


def test_tensor_peak_follows_a_parameter_whose_data_is_swapped_as_zero3_does() -> None:
    weight = nn.Parameter(torch.ones(10), requires_grad=False)
    gc.collect()
    with TensorPeak() as peak:
        start_bytes = peak.live_bytes
        weight.data = torch.ones(1000)
        assert peak.live_bytes == start_bytes - 40 + 4000
        weight.data = torch.empty(0)
        assert peak.live_bytes == start_bytes - 40
    assert peak.peak_bytes == start_bytes + 4000


def test_watching_a_step_changes_no_bit_of_it() -> None:
    def losses(watch: bool) -> list[float]:
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        meter = PhaseMeter(CPU)
        found = []
        with meter.phase("train"):
            for _ in range(4):
                with meter.probe() if watch else meter.probe(-1) as watched:
                    loss = layer(torch.randn(4, 8, 32)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.item())
        assert watched is watch
        return found

    assert losses(True) == losses(False)


def test_the_first_two_steps_are_watched_and_then_only_larger_ones() -> None:
    meter = PhaseMeter(CPU)
    watched = []
    for sizes in (
        (50, 30, 40),
        (30, 40, 50, 50),
    ):  # the first step has no optimizer state yet, so 40 and 50 come again
        with meter.phase("train"):
            for size in sizes:
                with meter.probe(size) as watching:
                    watched.append(watching)
    assert watched == [True, True, True, False, False, True, False]


def test_a_step_is_larger_by_its_inputs_or_by_its_answers() -> None:
    meter = PhaseMeter(CPU)
    watched = []
    for inputs, answers in ((9, 1), (9, 1), (9, 1), (9, 2), (5, 2), (5, 3), (10, 1), (10, 3)):
        with meter.phase("train"), meter.probe(inputs, answers) as watching:
            watched.append(watching)
    assert watched == [True, True, False, True, False, True, True, False]


def test_a_probe_measures_its_phase_with_the_optimizer_state() -> None:
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([weight])
    meter = PhaseMeter(CPU)

    def peak_bytes(name: str) -> int:
        gc.collect()
        with meter.phase(name), meter.probe(1):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return meter.local()[name].memory["allocated_bytes"]

    first = peak_bytes("first")
    second = peak_bytes("second")
    with meter.phase("idle"):
        pass
    assert (
        0 <= second - first <= 8000
    )  # exp_avg and exp_avg_sq live from the start, gradients and temporaries come on top
    assert "allocated_bytes" not in meter.local()["idle"].memory
