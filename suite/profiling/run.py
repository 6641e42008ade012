"""Measure arms in separate processes: several rounds, in alternating order.

An arm that dies takes no other with it.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from suite.clock import CLOCK
from suite.errors import UNGUARDED, ResourceError, SuiteError, gib
from suite.meters import hardware
from suite.profiling import peak
from suite.profiling.arms import ArmChoice, replace_record
from suite.profiling.estimate import estimate
from suite.profiling.record import (
    ArmProfile,
    Decoding,
    Inference,
    Memory,
    Profile,
    Spread,
    TrainingTime,
)
from suite.profiling.setting import Setting
from suite.profiling.worker import TIMEOUT_S, Message, Visit, one_line, rank_main
from suite.record.provenance import versions
from suite.train.process_group import free_port

OnProgress = Callable[[str], None]
# How often the parent looks whether a rank has died.
POLL_S = 1.0
# A collective has its own deadline; this one is for ranks that hang elsewhere.
SILENT_S = 4 * TIMEOUT_S
# How long a killed rank is waited for.
END_S = 30.0
# Estimates at a time: each process holds torch and transformers, some 0.7 GB.
MOST_ESTIMATES = 8
TIMES = ("step_s", "forward_s", "backward_s", "update_s")


@dataclass
class Findings:
    """What is known of an arm so far.

    Attributes:
        record: Its names, counts, estimate and status.
        rounds: What each round measured, as `suite.profiling.worker` sends it; `served` holds what
            was measured in use.
    """

    record: ArmProfile
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.record = replace_record(self.record, status=status, reason=reason)


def estimate_only(
    arms: Sequence[ArmChoice], setting: Setting, *, on_progress: OnProgress = lambda line: None
) -> Profile:
    """Count and estimate all arms.

    Nothing is trained, and nothing of a model's size is allocated.
    """
    return _profile([_estimated(arm, setting, on_progress) for arm in arms], setting)


def measure(
    arms: Sequence[ArmChoice], setting: Setting, *, on_progress: OnProgress = lambda line: None
) -> Profile:
    """Measure all arms that fit. Ctrl-C ends it; what was measured until then is returned.

    Args:
        arms: What `choose` returned.
        setting: Shapes, ranks and precision.
        on_progress: Takes a line of progress.

    Raises:
        ResourceError: There are fewer GPUs than ranks, or the ranks cannot find each other.
    """
    check_devices(setting)
    found = [Findings(record) for record in _all_estimated(arms, setting, on_progress)]
    machine = peak.inspect_machine(setting)
    # After the estimates, and before any rank takes memory.
    for each in found:
        _refuse_too_large(each, setting, machine.free_bytes)
    waiting = deque(_visits(arms, found, setting.rounds))
    stopped = False
    try:
        # A group ends with the first arm that fails; the next one goes on with the others.
        while waiting:
            _one_group(waiting, found, setting, on_progress)
    except KeyboardInterrupt:
        stopped = True
    records = [_record_of(each, setting) for each in found]
    return _profile(records, setting, machine, stopped=stopped)


def check_devices(setting: Setting) -> None:
    """Check that every rank has a device.

    Raises:
        ResourceError: There are fewer GPUs than ranks.
    """
    if setting.device != "cuda":
        return
    boards = torch.cuda.device_count()
    if boards < setting.ranks:
        raise ResourceError(
            f"--device cuda: {setting.ranks} ranks need as many GPUs, this machine has {boards};"
            " use --device cpu or fewer --ranks"
        )


def _all_estimated(
    arms: Sequence[ArmChoice], setting: Setting, on_progress: OnProgress
) -> list[ArmProfile]:
    """Estimate all arms, each in a process of its own as far as there are cores."""
    processes = min(len(arms), len(os.sched_getaffinity(0)), MOST_ESTIMATES)
    if processes == 1:
        return [_estimated(arm, setting, on_progress) for arm in arms]
    on_progress(f"estimate {len(arms)} arms")
    # Ctrl-C reaches every process of the terminal: these end at once, without a word.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=mp.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        waiting = [pool.submit(_estimated, arm, setting, _no_progress) for arm in arms]
        return [each.result() for each in waiting]
    except BrokenProcessPool as error:
        raise ResourceError(
            "estimates: a process was killed, as the kernel does when memory runs out; profile"
            f" fewer arms at a time ({UNGUARDED})"
        ) from error
    finally:
        # On Ctrl-C nobody waits for what has not begun.
        pool.shutdown(cancel_futures=True)


def _no_progress(_line: str) -> None:
    """Of a process whose output nobody reads."""


def _estimated(arm: ArmChoice, setting: Setting, on_progress: OnProgress) -> ArmProfile:
    unmeasured = arm.unmeasured()
    reason = arm.reason or arm.too_long(setting.seq)
    if reason is not None:
        return replace_record(unmeasured, status="incompatible", reason=reason)
    on_progress(f"estimate {unmeasured.name}")
    try:
        counted = arm.counted(dtype=setting.dtype)
        return replace_record(counted, status="estimated", estimate=estimate(arm, setting))
    except (RuntimeError, ValueError, SuiteError) as error:
        # One arm that cannot run is no reason to leave out the others.
        return replace_record(unmeasured, status="failed", reason=f"estimate: {one_line(error)}")


def _refuse_too_large(each: Findings, setting: Setting, free: int) -> None:
    """End an arm that cannot fit, without trying it.

    Every rank builds the whole model in fp32 on the host before it is cut; inference needs it
    whole on one device.
    """
    expected = each.record.estimate
    total = each.record.total_parameters
    if expected is None or total is None:
        return
    memory = expected.memory
    if setting.device == "cuda":
        # A GPU refuses by itself what is too large, so only what is certainly there counts.
        training = memory.parameters_bytes + memory.optimizer_bytes + memory.gradients_bytes
        remedy = "try more --ranks"
        width = 2 if setting.dtype == "bf16" else 4
    else:
        # On a CPU the kernel would kill a process of its choice.
        training = memory.peak_bytes
        remedy = "try a smaller --micro-batch, or more --ranks"
        width = 4  # of fp32: the model before it is cut
    if training > free:
        each.end("oom", f"needs about {gib(training)} on each rank, {gib(free)} are free; {remedy}")
    elif total * width > free:
        each.end(
            "oom",
            f"the whole model needs about {gib(total * width)} on each rank, {gib(free)} are free;"
            " only --estimate goes without it",
        )


def _needs(record: ArmProfile) -> str:
    assert record.estimate is not None
    return f"needs about {gib(record.estimate.memory.peak_bytes)} on each rank"


def _visits(arms: Sequence[ArmChoice], found: Sequence[Findings], rounds: int) -> list[Visit]:
    """List every arm that fits, once for each round.

    Every second round goes backwards, so that a drift of the machine meets all arms alike.
    """
    fitting = [i for i in range(len(arms)) if found[i].record.status == "estimated"]
    visits = []
    for number in range(rounds):
        for i in fitting:
            visits.append(Visit(i, with_memory=number == 0, arm=arms[i]))
        fitting.reverse()
    return visits


def _one_group(
    waiting: deque[Visit], found: Sequence[Findings], setting: Setting, on_progress: OnProgress
) -> None:
    """Start the ranks on all visits that wait.

    Returns when all are done or a rank has died; then the rest of that arm's visits is dropped.
    """
    # A forked process would inherit torch's threads and the state of CUDA.
    context = mp.get_context("spawn")
    port = free_port()
    pipes = []
    ranks: list[Any] = []
    try:
        for rank in range(setting.ranks):
            near_end, far_end = context.Pipe(duplex=False)
            pipes.append(near_end)
            process = context.Process(
                target=rank_main,
                args=(rank, port, setting, list(waiting), far_end),
                daemon=True,
            )
            ranks.append(process)
            process.start()
            far_end.close()  # otherwise the pipe would not end with the rank
        failure = _listen(pipes, ranks, waiting, found, on_progress)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()  # a rank may wait for one that has died
                # A process that waits for a driver or a hard mount does not die of it.
                process.join(END_S)
    if failure is not None:
        _drop(failure, waiting, found, on_progress)


def _drop(
    failure: Message, waiting: deque[Visit], found: Sequence[Findings], on_progress: OnProgress
) -> None:
    """End an arm that failed, and drop its other visits."""
    if failure.event == "start":
        raise ResourceError(f"the ranks could not start: {failure.text}")
    each = found[failure.number]
    reason = failure.text
    if failure.event == "oom":
        reason += f"; {_needs(each.record)} by the estimate"
    each.end(failure.event, reason)
    on_progress(f"{each.record.name}: {failure.event}: {failure.text}")
    rest = [visit for visit in waiting if visit.number != failure.number]
    waiting.clear()
    waiting.extend(rest)


def _listen(
    pipes: Sequence[Connection],
    ranks: Sequence[Any],
    waiting: deque[Visit],
    found: Sequence[Findings],
    on_progress: OnProgress,
) -> Message | None:
    """Store what the ranks measure; returns the failure that ended it, if any."""
    talking = list(pipes)
    heard_s = CLOCK.now_s()
    while waiting:
        for pipe in mp.connection.wait(talking, timeout=POLL_S):
            assert isinstance(pipe, Connection)
            try:
                message: Message = pipe.recv()
                heard_s = CLOCK.now_s()
            except EOFError:  # the rank has left; its exit code says how
                talking.remove(pipe)
                continue
            # Training is kept even if the arm fails in use afterwards.
            if message.event == "trained":
                found[message.number].rounds.append(json.loads(message.text))
            elif message.event == "done":
                waiting.popleft()
                each = found[message.number]
                each.rounds[-1]["served"] = json.loads(message.text)
                on_progress(_progress(each, len(waiting)))
            else:
                return message
        if CLOCK.now_s() - heard_s > SILENT_S:
            reason = f"the ranks have been silent for {SILENT_S:g} s"
            return Message("failed", waiting[0].number, reason)
        codes = [process.exitcode for process in ranks]
        # The first rank must not leave before all is done; any other may leave with 0.
        died = any(codes) or codes[0] is not None
        # A rank that has left may have messages in its pipe: they are read first.
        if waiting and len(talking) < len(pipes) and died:
            # A rank that left with 0 explains nothing.
            code = next((code for code in codes if code), 0)
            return _death(waiting[0].number, code)
    return None


def _death(number: int, code: int) -> Message:
    if code == -9:
        reason = "a rank was killed (signal 9): the kernel does this when memory runs out"
        return Message("oom", number, reason)
    return Message("failed", number, f"a rank ended with exit code {code}; see its output above")


def _progress(each: Findings, left: int) -> str:
    seconds = each.rounds[-1]["time"]["step_s"]["median"]
    return f"{each.record.name}, round {len(each.rounds)}: {seconds:.3g} s a step; {left} to go"


def _record_of(each: Findings, setting: Setting) -> ArmProfile:
    """Make an arm's record from its rounds; memory and peaks come from the first round."""
    if not each.rounds:
        return each.record
    first = each.rounds[0]  # the only round that measured memory
    time = _over_rounds(each.rounds, setting)
    energy_kwh, source, missing = _energy(each.rounds)
    medians = [_medians(measured, source) for measured in each.rounds]
    inference = []
    decoding = []
    if "served" in first:
        for item in first["served"]["inference"]:
            again = _again(medians, f"inference_s[{item['batch']}]", "seconds")
            inference.append(Inference(**item | again))
        for item in first["served"]["decoding"]:
            again = _again(medians, f"token_s[{item['context_tokens']}]", "token_s")
            decoding.append(Decoding(**item | again))
        missing |= first["served"]["missing"]
    status = each.record.status
    # An arm that ended early keeps its status beside what it measured before.
    if status == "estimated":
        status = "ok"
    assert each.record.estimate is not None
    return replace_record(
        each.record,
        status=status,
        time=time,
        energy_kwh_per_1000=energy_kwh,
        energy_source=source,
        memory=Memory(**first["memory"]),
        flops_per_s=each.record.estimate.step_flops / time.step_s.median,
        inference=inference,
        decoding=decoding,
        rounds=medians,
        missing=missing,
    )


def _again(medians: Sequence[dict[str, float]], name: str, key: str) -> dict[str, Spread]:
    """Spread over the rounds' medians, to replace the first round's; {} for one round."""
    values = [measured[name] for measured in medians if name in measured]
    if len(values) > 1:
        return {key: Spread.of(values)}
    return {}


def _energy(rounds: Sequence[dict[str, Any]]) -> tuple[float | None, str | None, dict[str, str]]:
    """Find the median energy over rounds, its source, and the reasons for what is missing.

    None where a round has no energy, or where the sources differ: measured and estimated joules
    do not mix.
    """
    missing: dict[str, str] = {}
    for measured in reversed(rounds):  # the first round's reasons win
        missing |= measured["missing"]
    sources = {measured["energy_source"] for measured in rounds}
    if len(sources) > 1:
        names = ", ".join(sorted(map(str, sources)))
        missing["energy_kwh_per_1000"] = f"the rounds' sources differ: {names}"
    if len(sources) > 1 or None in sources:
        return None, None, missing
    middle = median(measured["energy_kwh_per_1000"] for measured in rounds)
    return middle, sources.pop(), missing


def _over_rounds(rounds: Sequence[dict[str, Any]], setting: Setting) -> TrainingTime:
    """Spread the rounds' medians; a single round gives the spread of its steps."""
    if len(rounds) == 1:
        return TrainingTime(**rounds[0]["time"])
    times = {}
    for name in TIMES:
        times[name] = Spread.of([measured["time"][name]["median"] for measured in rounds])
    return TrainingTime(**times, samples_per_s=setting.batch / times["step_s"].median)


def _medians(measured: dict[str, Any], source: str | None) -> dict[str, float]:
    """Flatten one round to numbers, by the names that `suite.profiling.compare` knows."""
    found = {name: measured["time"][name]["median"] for name in TIMES}
    if source is not None:
        found["energy_kwh_per_1000"] = measured["energy_kwh_per_1000"]
    if "served" in measured:
        for item in measured["served"]["inference"]:
            found[f"inference_s[{item['batch']}]"] = item["seconds"]["median"]
        for item in measured["served"]["decoding"]:
            found[f"token_s[{item['context_tokens']}]"] = item["token_s"]["median"]
    return found


def _profile(
    arms: Sequence[ArmProfile],
    setting: Setting,
    machine: peak.Machine | None = None,
    *,
    stopped: bool = False,
) -> Profile:
    """Make the table, with what it was measured on; `machine` is None where nothing ran."""
    measured_on: dict[str, Any] = {
        "device_name": "nothing ran",
        "idle_watts_missing": "nothing was measured",
    }
    if machine is not None:
        measured_on = {
            "device_name": machine.name,
            "peak_flops": machine.peak_flops,
            "peak_flops_source": machine.peak_source,
            "idle_watts": machine.idle_watts,
            "idle_watts_missing": machine.idle_missing,
        }
        # A step's operations are those of all ranks, so the peak is, too.
        arms = [_with_utilisation(arm, machine.peak_flops * setting.ranks) for arm in arms]
    return Profile(
        setting=setting.model_dump(mode="json"),
        **measured_on,
        hardware=hardware(),
        versions=versions(),
        arms=list(arms),
        stopped=stopped,
    )


def _with_utilisation(arm: ArmProfile, peak_flops: float) -> ArmProfile:
    if not arm.flops_per_s:
        return arm
    return replace_record(arm, flops_utilisation=arm.flops_per_s / peak_flops)
