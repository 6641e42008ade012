"""One rank of an arm in training: time, energy and memory of a few steps on DeepSpeed's engine."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from suite.backbones.base import Family
from suite.meters import PhaseMeter, combine, synchronise
from suite.profiling.arms import ArmChoice
from suite.profiling.batches import forward_options, training_batch
from suite.profiling.clock import LiveBytes
from suite.profiling.estimate import vocabulary_of
from suite.profiling.record import Memory, Spread, TrainingTime
from suite.profiling.setting import Setting
from suite.train.engine import Engine
from suite.train.process_group import gather_objects

LEARNING_RATE = 1e-5
LEAST_STEPS = 5
MOST_STEPS = 5000
PARTED_STEPS = 3
PARTS = ("forward", "backward", "update")


class Training:
    """An arm under ZeRO on this rank. `close` frees it. Every method is collective.

    Args:
        arm: The arm to train.
        setting: Shapes, ranks and precision.
        device: This rank's device.
        rank: Number of this rank; its batch differs from the others'.
    """

    def __init__(
        self, arm: ArmChoice, setting: Setting, device: torch.device, *, rank: int
    ) -> None:
        self.setting = setting
        self.device = device
        self._bytes = LiveBytes(device)  # before the model, so that it counts
        torch.manual_seed(0)  # all ranks build the same weights
        resolved = arm.resolve()
        model = arm.build(resolved).train()
        vocabulary = vocabulary_of(model)
        self._batches = _micro_batches(resolved.family, vocabulary, setting, device, rank=rank)
        self._engine = Engine(model, setting.training, world_size=setting.ranks, device=device.type)

    def close(self) -> None:
        self._engine.release()

    def step(self, mark: Any = None) -> None:
        """Run one optimizer step.

        Args:
            mark: Called with the name of each of `PARTS` when that part has ended.
        """
        self._engine.step(self._batches, LEARNING_RATE, mark=mark)

    def memory(self) -> Memory:
        """Measure the bytes of one step on the fullest rank."""
        self.step()  # the first step makes Adam's states
        seen: dict[str, int] = {}
        with self._bytes as watched:
            held = watched.now()

            def mark(part: str) -> None:
                # A step of several micro-batches ends each part more than once.
                if part not in seen:
                    seen[part] = watched.now()

            self.step(mark)
            weights, optimizer = self._engine.held_bytes()
            own = Memory(
                peak_bytes=watched.peak(),
                parameters_bytes=weights,
                optimizer_bytes=optimizer,
                gradients_bytes=max(0, seen["backward"] - weights - optimizer),
                # Buffers that are freed during the pass can make a difference negative.
                activations_bytes=max(0, seen["forward"] - held),
            )
        everyone: list[Memory] = gather_objects(own)
        return max(everyone, key=lambda memory: memory.peak_bytes)

    def time(self) -> tuple[TrainingTime, float | None, str | None, dict[str, str]]:
        """Time some steps.

        Returns:
            Seconds of a step; kWh of 1,000 samples over all ranks, or None; the source of the
            energy; and by name, why something was not measured.
        """
        steps = self._number_of_steps()
        # READ's formula samples about once a second, which is too coarse for a few steps.
        meter = PhaseMeter(self.device, sample_read_energy=False)
        with meter.phase("train"):
            whole = [self._timed_step() for _ in range(steps)]
        # Outside the meter's phase: these steps wait for the device, which makes them slower.
        parted = [self._parted_step() for _ in range(PARTED_STEPS)]
        # All ranks wait for the slowest one, so its times are the times of the step.
        per_rank = gather_objects((whole, parted))
        slowest = [max(times) for times in zip(*(times for times, _ in per_rank), strict=True)]
        parts = {}
        for part in PARTS:
            seconds = []
            for i in range(PARTED_STEPS):
                seconds.append(max(parted_steps[i][part] for _, parted_steps in per_rank))
            parts[f"{part}_s"] = Spread.of(seconds)
        training_time = TrainingTime(
            step_s=Spread.of(slowest),
            **parts,
            samples_per_s=self.setting.batch / median(slowest),
        )

        records, not_measured = combine(gather_objects(meter.local()))
        energy_kwh = records["train"].energy_kwh
        if energy_kwh is not None:
            energy_kwh = energy_kwh * 1000 / (steps * self.setting.batch)
        missing = {}
        for key, reason in not_measured.items():
            # READ's own energy, equation 16, is not sampled here.
            if "energy" in key and "read" not in key:
                missing[key.removeprefix("phases.train.")] = reason
        return training_time, energy_kwh, records["train"].energy_source, missing

    def _timed_step(self) -> float:
        began_s = time.perf_counter()
        self.step()
        synchronise(self.device)
        return time.perf_counter() - began_s

    def _parted_step(self) -> dict[str, float]:
        """Time one step by part, in seconds; it waits for the device after each part."""
        spent = dict.fromkeys(PARTS, 0.0)
        last_s = time.perf_counter()

        def mark(part: str) -> None:
            nonlocal last_s
            synchronise(self.device)
            now_s = time.perf_counter()
            spent[part] += now_s - last_s
            last_s = now_s

        self.step(mark)
        return spent

    def _number_of_steps(self) -> int:
        """Find how many steps fit into the budget. The first rank's clock decides for all."""
        self.step()  # warms up
        synchronise(self.device)
        wanted = round(self.setting.seconds / self._timed_step())
        agreed = int(gather_objects(wanted)[0])
        return max(LEAST_STEPS, min(MOST_STEPS, agreed))


def _micro_batches(
    family: Family, vocabulary: int, setting: Setting, device: torch.device, *, rank: int
) -> list[Any]:
    """Make the micro-batches of a step with their weights, as the engine takes them."""
    made = []
    for i in range(setting.accumulation):
        batch = training_batch(
            family,
            vocabulary,
            rows=setting.micro,
            tokens=setting.seq,
            target=setting.target,
            # No two micro-batches of a step are alike, on any rank.
            seed=rank * setting.accumulation + i,
        )
        inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in batch.items()}
        # All micro-batches have as many tokens, so they weigh the same.
        made.append((inputs | forward_options(family), 1.0))
    return made
