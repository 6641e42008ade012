"""Measure arms in processes of their own: several rounds in alternating order, and an arm that dies takes no other with it."""

from __future__ import annotations

import json
import multiprocessing as mp
import multiprocessing.connection
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import torch

from suite.errors import ResourceError
from suite.meters import Unavailable, hardware, idle_watts
from suite.profile.arms import ArmChoice, replace_record
from suite.profile.estimate import estimate
from suite.profile.peak import peak_flops
from suite.profile.record import ArmProfile, Decoding, Inference, Memory, Profile, Spread, TrainingTime
from suite.profile.setting import Setting
from suite.profile.worker import rank_main
from suite.train.engine import free_port

Tell = Callable[[str], None]
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "petl-suite")
USABLE_FRAC = 0.95
"""Of free memory: what the estimate does not see (libraries, fragments) needs the rest."""
LOOK_S = 1.0


@dataclass
class Findings:
    """What is known of an arm so far.

    Attributes:
        rounds: What each round measured, as `suite.profile.worker.measured` gives it.
    """

    record: ArmProfile
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.record = replace_record(self.record, status=status, reason=reason)


def estimate_only(arms: Sequence[ArmChoice], setting: Setting, *, tell: Tell = lambda line: None) -> Profile:
    """Counts and estimates of all arms; nothing is trained, and nothing of a model's size is allocated."""
    return _profile([_estimated(arm, setting, tell) for arm in arms], setting, measured=False)


def measure(arms: Sequence[ArmChoice], setting: Setting, *, tell: Tell = lambda line: None) -> Profile:
    """Measure all arms that fit.

    Args:
        arms: As `choose` made them.
        setting: Shapes, ranks and precision.
        tell: Takes a line of progress.

    Raises:
        ResourceError: Fewer GPUs than ranks.
    """
    check_devices(setting)
    found = [Findings(_estimated(arm, setting, tell)) for arm in arms]
    free = free_bytes(setting)
    for each in found:
        _refuse_too_large(each, free)
    waiting = deque(_order(arms, found, setting.rounds))
    while waiting:
        _one_group(waiting, found, setting, tell)
    return _profile([_ended(each, setting) for each in found], setting, measured=True)


def check_devices(setting: Setting) -> None:
    """Raise ResourceError where a rank would have no device."""
    boards = torch.cuda.device_count()
    if setting.device == "cuda" and boards < setting.ranks:
        raise ResourceError(
            f"--device cuda: {setting.ranks} ranks need as many GPUs, this machine has {boards}; use --device cpu or fewer --ranks"
        )


def free_bytes(setting: Setting) -> int:
    """Memory that one rank may fill."""
    if setting.device == "cuda":
        return int(min(torch.cuda.mem_get_info(board)[0] for board in range(setting.ranks)) * USABLE_FRAC)
    return int(psutil.virtual_memory().available * USABLE_FRAC) // setting.ranks


def _estimated(arm: ArmChoice, setting: Setting, tell: Tell) -> ArmProfile:
    if arm.reason is not None:
        return replace_record(arm.named(), status="incompatible", reason=arm.reason)
    tell(f"estimate {arm.named().name}")
    return replace_record(arm.counted(dtype=setting.dtype), status="estimated", estimate=estimate(arm, setting))


def _refuse_too_large(each: Findings, free: int) -> None:
    """What cannot fit is not tried: on a CPU the kernel would kill whom it likes."""
    if each.record.estimate is not None and (needed := each.record.estimate.memory.peak_bytes) > free:
        sizes = f"needs about {needed / 2**30:.1f} GiB on each rank, {free / 2**30:.1f} GiB are free"
        each.end("oom", f"{sizes}; try a smaller --micro-batch, or more --ranks")


def _order(arms: Sequence[ArmChoice], found: Sequence[Findings], rounds: int) -> list[tuple[int, bool, ArmChoice]]:
    """Every arm that fits once a round, every second round backwards, so that a drift of the machine meets all alike."""
    fitting = [(number, arm) for number, arm in enumerate(arms) if found[number].record.status == "estimated"]
    return [(number, i == 0, arm) for i in range(rounds) for number, arm in (fitting if i % 2 == 0 else reversed(fitting))]


def _one_group(waiting: deque[tuple[int, bool, ArmChoice]], found: Sequence[Findings], setting: Setting, tell: Tell) -> None:
    """Start the ranks on all that waits; returns when they are done or one has died, with that arm's remaining rounds dropped."""
    context, port = mp.get_context("spawn"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(setting.ranks)]
    ranks = [
        context.Process(target=rank_main, args=(rank, port, setting, list(waiting), pipes[rank][1]), daemon=True)
        for rank in range(setting.ranks)
    ]
    try:
        for process in ranks:
            process.start()
        for _, far_end in pipes:
            far_end.close()
        ended = _listen([near_end for near_end, _ in pipes], ranks, waiting, found, tell)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if ended is not None:
        number, status, reason = ended
        found[number].end(status, reason)
        tell(f"{found[number].record.name}: {status}: {reason}")
        rest = [each for each in waiting if each[0] != number]
        waiting.clear()
        waiting.extend(rest)


def _listen(
    pipes: Sequence[Connection], ranks: Sequence[Any], waiting: deque[tuple[int, bool, ArmChoice]], found: Sequence[Findings], tell: Tell
) -> tuple[int, str, str] | None:
    """Take in what the ranks measure; returns how an arm ended that had no result."""
    talking = list(pipes)
    while waiting:
        number = waiting[0][0]
        for pipe in mp.connection.wait(talking, timeout=LOOK_S):
            assert isinstance(pipe, Connection)
            try:
                what, told, text = pipe.recv()
            except EOFError:  # the rank has left; its exit code says how
                talking.remove(pipe)
                continue
            if what in ("oom", "failed"):
                return told, what, text
            if what == "done":
                waiting.popleft()
                found[told].rounds.append(json.loads(text))
                tell(_progress(found[told], len(waiting)))
        if waiting and len(talking) < len(pipes) and (codes := [p.exitcode for p in ranks if p.exitcode is not None]):
            return number, *_death(next((code for code in codes if code), 0))
    return None


def _death(code: int) -> tuple[str, str]:
    if code == -9:
        return "oom", "a rank was killed (signal 9), as the kernel does to who fills the memory; the estimate stands beside"
    return "failed", f"a rank ended with exit code {code}; its last words are above"


def _progress(each: Findings, left: int) -> str:
    seconds = each.rounds[-1]["time"]["step_s"]["median"]
    return f"{each.record.name}, round {len(each.rounds)}: {seconds:.3g} s a step; {left} to go"


def _ended(each: Findings, setting: Setting) -> ArmProfile:
    """The record of an arm from its rounds; what only the first one measured is taken from there."""
    if not each.rounds:
        return each.record
    first, rounds = each.rounds[0], each.rounds
    seconds = _middle(rounds, lambda r: r["time"]["step_s"]["median"])
    energies = [r["energy_kwh_per_1000"] for r in rounds]
    assert each.record.estimate is not None
    flops_per_s = each.record.estimate.step_flops / seconds
    return replace_record(
        each.record,
        status="ok" if each.record.status == "estimated" else each.record.status,
        time=_over_rounds(rounds, setting),
        energy_kwh_per_1000=None if None in energies else median(energies),
        energy_source=first["energy_source"],
        memory=Memory(**first["memory"]),
        flops_per_s=flops_per_s,
        inference=[Inference(**item) for item in first["inference"]],
        decoding=[Decoding(**item) for item in first["decoding"]],
        rounds=[_medians(r) for r in rounds],
        missing=first["missing"] | first["missing_serving"],
    )


def _over_rounds(rounds: Sequence[dict[str, Any]], setting: Setting) -> TrainingTime:
    """Medians and quartiles of the rounds' own medians, where there are several; else of the steps."""
    if len(rounds) == 1:
        return TrainingTime(**rounds[0]["time"])
    parts = {name: Spread.of([r["time"][name]["median"] for r in rounds]) for name in ("step_s", "forward_s", "backward_s", "update_s")}
    return TrainingTime(**parts, samples_per_s=setting.batch / parts["step_s"].median)


def _medians(measured: dict[str, Any]) -> dict[str, float]:
    """One round in plain numbers by the names that `suite.profile.compare` knows."""
    times = {name: measured["time"][name]["median"] for name in ("step_s", "forward_s", "backward_s", "update_s")}
    energy = {} if measured["energy_kwh_per_1000"] is None else {"energy_kwh_per_1000": measured["energy_kwh_per_1000"]}
    inference = {f"inference_s[{item['batch']}]": item["seconds"]["median"] for item in measured["inference"]}
    decoding = {f"token_s[{item['context_tokens']}]": item["token_s"]["median"] for item in measured["decoding"]}
    return times | energy | inference | decoding


def _middle(rounds: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return median(map(of, rounds))


def _profile(arms: Sequence[ArmProfile], setting: Setting, *, measured: bool) -> Profile:
    """The table, with what it was measured on."""
    peak, source = peak_flops(setting) if measured else (None, None)
    watts, why = None, "nothing was measured"
    if measured:
        try:
            watts, why = idle_watts(torch.device(setting.device)), ""
        except Unavailable as unavailable:
            why = str(unavailable)
    used = [
        replace_record(arm, flops_utilisation=arm.flops_per_s / (peak * setting.ranks)) if peak and arm.flops_per_s else arm for arm in arms
    ]
    device_name = torch.cuda.get_device_name() if setting.device == "cuda" and measured else hardware()["cpu_model"] or "CPU"
    return Profile(
        setting=setting.model_dump(mode="json"),
        device_name=device_name,
        peak_flops=peak,
        peak_flops_source=source,
        idle_watts=watts,
        idle_watts_missing=why or None,
        hardware=hardware(),
        versions={name: version(name) for name in PACKAGES},
        arms=list(used),
    )
