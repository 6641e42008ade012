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

import torch

from suite.errors import ResourceError, SuiteError
from suite.meters import hardware
from suite.profile import peak
from suite.profile.arms import ArmChoice, replace_record
from suite.profile.estimate import estimate
from suite.profile.record import (
    ArmProfile,
    Decoding,
    Inference,
    Memory,
    Profile,
    Spread,
    TrainingTime,
)
from suite.profile.setting import Setting
from suite.profile.worker import rank_main, told
from suite.train.process_group import free_port

Tell = Callable[[str], None]
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "petl-suite")
LOOK_S = 1.0
PARTS = ("step_s", "forward_s", "backward_s", "update_s")


@dataclass
class Findings:
    """What is known of an arm so far.

    Attributes:
        rounds: What each round measured, as `suite.profile.worker` sends it.
    """

    record: ArmProfile
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.record = replace_record(self.record, status=status, reason=reason)


def estimate_only(
    arms: Sequence[ArmChoice], setting: Setting, *, tell: Tell = lambda line: None
) -> Profile:
    """Counts and estimates of all arms; nothing is trained, and nothing of a model's size is allocated."""
    return _profile([_estimated(arm, setting, tell) for arm in arms], setting, None)


def measure(
    arms: Sequence[ArmChoice], setting: Setting, *, tell: Tell = lambda line: None
) -> Profile:
    """Measure all arms that fit. Ctrl-C ends it with what was measured until then.

    Args:
        arms: As `choose` made them.
        setting: Shapes, ranks and precision.
        tell: Takes a line of progress.

    Raises:
        ResourceError: Fewer GPUs than ranks, or the ranks cannot find each other.
    """
    check_devices(setting)
    found = [Findings(_estimated(arm, setting, tell)) for arm in arms]
    machine = peak.look(setting)
    for each in found:
        _refuse_too_large(each, setting, machine.free_bytes)
    waiting, stopped = deque(_order(arms, found, setting.rounds)), False
    try:
        while waiting:
            _one_group(waiting, found, setting, tell)
    except KeyboardInterrupt:
        stopped = True
    return _profile([_ended(each, setting) for each in found], setting, machine, stopped=stopped)


def check_devices(setting: Setting) -> None:
    """Raise ResourceError where a rank would have no device."""
    boards = torch.cuda.device_count()
    if setting.device == "cuda" and boards < setting.ranks:
        raise ResourceError(
            f"--device cuda: {setting.ranks} ranks need as many GPUs, this machine has {boards}; use --device cpu or fewer --ranks"
        )


def _estimated(arm: ArmChoice, setting: Setting, tell: Tell) -> ArmProfile:
    if (why := arm.reason or arm.too_long(setting.seq)) is not None:
        return replace_record(arm.named(), status="incompatible", reason=why)
    tell(f"estimate {arm.named().name}")
    try:
        return replace_record(
            arm.counted(dtype=setting.dtype), status="estimated", estimate=estimate(arm, setting)
        )
    except (
        RuntimeError,
        ValueError,
        SuiteError,
    ) as error:  # one arm that cannot run is no reason to leave out the others
        return replace_record(arm.named(), status="failed", reason=f"estimate: {told(error)}")


def _refuse_too_large(each: Findings, setting: Setting, free: int) -> None:
    """What cannot fit is not tried: on a CPU the kernel would kill whom it likes. A GPU says no itself, so there only the states count.

    Every rank builds the whole model in fp32 before it is cut, on the host; inference needs it whole on one device.
    """
    expected, total = each.record.estimate, each.record.total_parameters
    if expected is None or total is None:
        return
    memory = expected.memory
    states = max(
        memory.parameters_bytes + memory.optimizer_bytes + memory.gradients_bytes,
        total * (2 if setting.dtype == "bf16" else 4),
    )
    needed = states if setting.device == "cuda" else max(memory.peak_bytes, total * 4)
    if needed > free:
        each.end(
            "oom",
            f"{_needs(each.record)}, {_gib(free)} are free; try a smaller --micro-batch, or more --ranks",
        )


def _needs(record: ArmProfile) -> str:
    assert record.estimate is not None
    return f"needs about {_gib(record.estimate.memory.peak_bytes)} on each rank"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _order(
    arms: Sequence[ArmChoice], found: Sequence[Findings], rounds: int
) -> list[tuple[int, bool, ArmChoice]]:
    """Every arm that fits once a round, every second round backwards, so that a drift of the machine meets all alike."""
    fitting = [
        (number, arm)
        for number, arm in enumerate(arms)
        if found[number].record.status == "estimated"
    ]
    return [
        (number, i == 0, arm)
        for i in range(rounds)
        for number, arm in (fitting if i % 2 == 0 else reversed(fitting))
    ]


def _one_group(
    waiting: deque[tuple[int, bool, ArmChoice]],
    found: Sequence[Findings],
    setting: Setting,
    tell: Tell,
) -> None:
    """Start the ranks on all that waits; returns when they are done or one has died, with that arm's remaining rounds dropped."""
    context, port = mp.get_context("spawn"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(setting.ranks)]
    ranks: list[Any] = []
    try:
        for rank, (_, far_end) in enumerate(pipes):
            ranks.append(
                context.Process(
                    target=rank_main,
                    args=(rank, port, setting, list(waiting), far_end),
                    daemon=True,
                )
            )
            ranks[-1].start()
            far_end.close()
        ended = _listen([near_end for near_end, _ in pipes], ranks, waiting, found, tell)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    if ended is not None:
        _drop(ended, waiting, found, tell)


def _drop(
    ended: tuple[int, str, str],
    waiting: deque[tuple[int, bool, ArmChoice]],
    found: Sequence[Findings],
    tell: Tell,
) -> None:
    """End an arm that had no result, or none of this round."""
    number, status, reason = ended
    if status == "start":
        raise ResourceError(f"the ranks could not start: {reason}")
    each = found[number]
    each.end(
        status, f"{reason}; {_needs(each.record)} by the estimate" if status == "oom" else reason
    )
    tell(f"{each.record.name}: {status}: {reason}")
    rest = [other for other in waiting if other[0] != number]
    waiting.clear()
    waiting.extend(rest)


def _listen(
    pipes: Sequence[Connection],
    ranks: Sequence[Any],
    waiting: deque[tuple[int, bool, ArmChoice]],
    found: Sequence[Findings],
    tell: Tell,
) -> tuple[int, str, str] | None:
    """Take in what the ranks measure; returns how an arm ended that had no result."""
    talking = list(pipes)
    while waiting:
        for pipe in mp.connection.wait(talking, timeout=LOOK_S):
            assert isinstance(pipe, Connection)
            try:
                what, number, text = pipe.recv()
            except EOFError:  # the rank has left; its exit code says how
                talking.remove(pipe)
                continue
            if what == "trained":
                found[number].rounds.append(json.loads(text))
            elif what == "done":
                waiting.popleft()
                found[number].rounds[-1] |= {"served": json.loads(text)}
                tell(_progress(found[number], len(waiting)))
            else:
                return number, what, text
        codes = [process.exitcode for process in ranks]
        if waiting and len(talking) < len(pipes) and (any(codes) or codes[0] is not None):
            return waiting[0][0], *_death(next((code for code in codes if code), 0))
    return None


def _death(code: int) -> tuple[str, str]:
    if code == -9:
        return "oom", "a rank was killed (signal 9), as the kernel does to who fills the memory"
    return "failed", f"a rank ended with exit code {code}; its last words are above"


def _progress(each: Findings, left: int) -> str:
    seconds = each.rounds[-1]["time"]["step_s"]["median"]
    return f"{each.record.name}, round {len(each.rounds)}: {seconds:.3g} s a step; {left} to go"


def _ended(each: Findings, setting: Setting) -> ArmProfile:
    """The record of an arm from its rounds; what only the first one measured is taken from there."""
    if not each.rounds:
        return each.record
    first, rounds = each.rounds[0], each.rounds
    time = _over_rounds(rounds, setting)
    energy_kwh, source, missing = _energy(rounds)
    by_round = [_medians(r, source) for r in rounds]
    served: dict[str, Any] = first.get("served", {"inference": [], "decoding": [], "missing": {}})
    assert each.record.estimate is not None
    return replace_record(
        each.record,
        status="ok" if each.record.status == "estimated" else each.record.status,
        time=time,
        energy_kwh_per_1000=energy_kwh,
        energy_source=source,
        memory=Memory(**first["memory"]),
        flops_per_s=each.record.estimate.step_flops / time.step_s.median,
        inference=[
            Inference(**item | _again(by_round, f"inference_s[{item['batch']}]", "seconds"))
            for item in served["inference"]
        ],
        decoding=[
            Decoding(**item | _again(by_round, f"token_s[{item['context_tokens']}]", "token_s"))
            for item in served["decoding"]
        ],
        rounds=by_round,
        missing=missing | served["missing"],
    )


def _again(by_round: Sequence[dict[str, float]], name: str, key: str) -> dict[str, Spread]:
    """Seconds over the rounds' own medians in place of the first one's, where there are several."""
    values = [each[name] for each in by_round if name in each]
    return {key: Spread.of(values)} if len(values) > 1 else {}


def _energy(rounds: Sequence[dict[str, Any]]) -> tuple[float | None, str | None, dict[str, str]]:
    """The median over rounds of one source; None where they differ or one has none: measured and estimated joules do not mix."""
    missing: dict[str, str] = {}
    for each in reversed(rounds):
        missing |= each["missing"]
    sources = {each["energy_source"] for each in rounds}
    if len(sources) > 1:
        missing["energy_kwh_per_1000"] = (
            f"the rounds' sources differ: {', '.join(sorted(map(str, sources)))}"
        )
    if len(sources) > 1 or None in sources:
        return None, None, missing
    return median(each["energy_kwh_per_1000"] for each in rounds), sources.pop(), missing


def _over_rounds(rounds: Sequence[dict[str, Any]], setting: Setting) -> TrainingTime:
    """Medians and quartiles of the rounds' own medians, where there are several; else of the steps."""
    if len(rounds) == 1:
        return TrainingTime(**rounds[0]["time"])
    parts = {name: Spread.of([r["time"][name]["median"] for r in rounds]) for name in PARTS}
    return TrainingTime(**parts, samples_per_s=setting.batch / parts["step_s"].median)


def _medians(measured: dict[str, Any], source: str | None) -> dict[str, float]:
    """One round in plain numbers by the names that `suite.profile.compare` knows."""
    times = {name: measured["time"][name]["median"] for name in PARTS}
    energy = {} if source is None else {"energy_kwh_per_1000": measured["energy_kwh_per_1000"]}
    served = measured.get("served", {"inference": [], "decoding": []})
    inference = {
        f"inference_s[{item['batch']}]": item["seconds"]["median"] for item in served["inference"]
    }
    decoding = {
        f"token_s[{item['context_tokens']}]": item["token_s"]["median"]
        for item in served["decoding"]
    }
    return times | energy | inference | decoding


def _profile(
    arms: Sequence[ArmProfile],
    setting: Setting,
    machine: peak.Machine | None,
    *,
    stopped: bool = False,
) -> Profile:
    """The table, with what it was measured on."""
    if machine is not None:
        whole = machine.peak_flops * setting.ranks
        arms = [
            replace_record(arm, flops_utilisation=arm.flops_per_s / whole)
            if arm.flops_per_s
            else arm
            for arm in arms
        ]
    return Profile(
        setting=setting.model_dump(mode="json"),
        device_name="nothing ran" if machine is None else machine.name,
        peak_flops=None if machine is None else machine.peak_flops,
        peak_flops_source=None if machine is None else machine.peak_source,
        idle_watts=None if machine is None else machine.idle_watts,
        idle_watts_missing="nothing was measured" if machine is None else machine.idle_missing,
        hardware=hardware(),
        versions={name: version(name) for name in PACKAGES},
        arms=list(arms),
        stopped=stopped,
    )
