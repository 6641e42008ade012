"""One rank of an arm in training: a few steps on DeepSpeed's engine, timed and weighed."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from suite.backbones.base import Family
from suite.meters import PhaseMeter, combine, synchronise
from suite.profile.arms import ArmChoice
from suite.profile.batches import forward_options, training_batch
from suite.profile.clock import LiveBytes
from suite.profile.estimate import vocabulary_of
from suite.profile.record import Memory, Spread, TrainingTime
from suite.profile.setting import Setting
from suite.train.engine import Engine
from suite.train.process_group import gather_objects

LEARNING_RATE = 1e-5
LEAST_STEPS, MOST_STEPS, PARTED_STEPS = 5, 5000, 3
PARTS = ("forward", "backward", "update")


class Training:
    """An arm under ZeRO on this rank; `close` frees it. Every method is collective.

    Args:
        arm: Which.
        setting: Shapes, ranks and precision.
        device: This rank's.
        rank: Its batch differs from the others'.
    """

    def __init__(
        self, arm: ArmChoice, setting: Setting, device: torch.device, *, rank: int
    ) -> None:
        self.setting, self.device = setting, device
        self._bytes = LiveBytes(device)
        torch.manual_seed(0)
        resolved = arm.resolve()
        model = arm.build(resolved).train()
        self._batches = _micro_batches(
            resolved.family, vocabulary_of(model), setting, device, rank=rank
        )
        self._engine = Engine(model, setting.training, world_size=setting.ranks, device=device.type)

    def close(self) -> None:
        self._engine.release()

    def step(self, mark: Any = None) -> None:
        """One optimizer step."""
        self._engine.step(self._batches, LEARNING_RATE, mark=mark)

    def memory(self) -> Memory:
        """Of a step that is watched, after one in which Adam's state came to be; the fullest rank's."""
        self.step()
        seen: dict[str, int] = {}
        with self._bytes as watched:
            held = watched.now()

            def mark(part: str) -> None:
                seen.setdefault(part, watched.now())

            self.step(mark)
            weights, optimizer = self._engine.held_bytes()
            own = Memory(
                peak_bytes=watched.peak(),
                parameters_bytes=weights,
                optimizer_bytes=optimizer,
                gradients_bytes=max(0, seen["backward"] - weights - optimizer),
                activations_bytes=max(0, seen["forward"] - held),
            )
        everyone: list[Memory] = gather_objects(own)
        return max(everyone, key=lambda memory: memory.peak_bytes)

    def time(self) -> tuple[TrainingTime, float | None, str | None, dict[str, str]]:
        """Seconds of a step, and energy in kWh of 1,000 samples over all ranks with its source and the reasons where there is none."""
        steps = self._number_of_steps()
        meter = PhaseMeter(self.device, sample_read_energy=False)
        with meter.phase("train"):
            whole = [self._timed() for _ in range(steps)]
        parts = [self._parted() for _ in range(PARTED_STEPS)]
        per_rank = gather_objects((whole, parts))
        slowest = [max(times) for times in zip(*(ranks for ranks, _ in per_rank), strict=True)]
        split = {
            name: Spread.of([max(r[1][i][name] for r in per_rank) for i in range(PARTED_STEPS)])
            for name in PARTS
        }
        records, missing = combine(gather_objects(meter.local()))
        energy_kwh = records["train"].energy_kwh
        return (
            TrainingTime(
                step_s=Spread.of(slowest),
                forward_s=split["forward"],
                backward_s=split["backward"],
                update_s=split["update"],
                samples_per_s=self.setting.batch / median(slowest),
            ),
            None if energy_kwh is None else energy_kwh * 1000 / (steps * self.setting.batch),
            records["train"].energy_source,
            {
                key.removeprefix("phases.train."): why
                for key, why in missing.items()
                if "energy" in key and "read" not in key
            },
        )

    def _timed(self) -> float:
        began_s = time.perf_counter()
        self.step()
        synchronise(self.device)
        return time.perf_counter() - began_s

    def _parted(self) -> dict[str, float]:
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
        """As many as fit into the budget by the first rank's clock, after a step that is not counted."""
        self.step()
        synchronise(self.device)
        wanted = round(self.setting.seconds / self._timed())
        return max(LEAST_STEPS, min(MOST_STEPS, int(gather_objects(wanted)[0])))


def _micro_batches(
    family: Family, vocabulary: int, setting: Setting, device: torch.device, *, rank: int
) -> list[Any]:
    shape = {"rows": setting.micro, "tokens": setting.seq, "target": setting.target}
    made = [
        training_batch(family, vocabulary, **shape, seed=rank * setting.accumulation + i)
        for i in range(setting.accumulation)
    ]
    return [
        ({name: t.to(device) for name, t in batch.items()} | forward_options(family), 1.0)
        for batch in made
    ]
