"""A rank of a profile. It measures arm after arm and sends the results to the parent process.

Whatever kills a rank ends one arm and no more.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple

import torch

from suite.errors import SuiteError
from suite.profiling.arms import ArmChoice
from suite.profiling.serving import Serving
from suite.profiling.setting import Setting
from suite.profiling.training import Training
from suite.train.failure import status_of
from suite.train.process_group import close_process_group, gather_objects, init_process_group

# Deadline of a collective: the other ranks wait while the first one measures inference.
TIMEOUT_S = 1800.0
# The arm's number in a message about no arm.
NO_ARM = -1


class Visit(NamedTuple):
    """One round of one arm.

    Attributes:
        number: The arm's place in the table.
        with_memory: Whether memory is measured, too; it repeats exactly, so once is enough.
        arm: The arm itself.
    """

    number: int
    with_memory: bool
    arm: ArmChoice


class Message(NamedTuple):
    """What a rank sends to the parent.

    Attributes:
        event: `trained` or `done`, with measurements; `start`, when the ranks could not start;
            or the status of an arm that ended early: oom, incompatible, failed.
        number: The arm's place in the table.
        text: Measurements as JSON, or the reason of a failure.
    """

    event: str
    number: int
    text: str


def rank_main(
    rank: int,
    port: int,
    setting: Setting,
    visits: Sequence[Visit],
    to_parent: connection.Connection,
) -> None:
    """Measure arms in the order given.

    Args:
        rank: Number in the group; the first one reports.
        port: The port of the group's rendezvous on this machine.
        setting: The same for all ranks.
        visits: The arms to measure.
        to_parent: Takes messages.
    """
    _end_with_the_parent()
    # Ranks share the cores: with torch's default each would take them all.
    torch.set_num_threads(setting.rank_threads)
    device = torch.device("cpu")
    try:
        if setting.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        init_process_group(
            rank=rank,
            world_size=setting.ranks,
            local_rank=rank,
            address="127.0.0.1",
            port=port,
            device=setting.device,
            timeout_s=TIMEOUT_S,
        )
    except Exception as error:  # noqa: BLE001 - no arm is to blame; the parent reports it
        to_parent.send(Message("start", NO_ARM, one_line(error)))
        return
    # Every arm collects garbage several times, and need not walk over the imported libraries.
    gc.collect()
    gc.freeze()
    for visit in visits:
        try:
            measure_arm(visit, setting, device, rank=rank, to_parent=to_parent)
        except Exception as error:  # noqa: BLE001 - the arm ends with a reason, the others go on
            to_parent.send(Message(error_status(error), visit.number, one_line(error)))
            return  # the others wait in a collective; the parent starts a new group
    close_process_group()


def measure_arm(
    visit: Visit,
    setting: Setting,
    device: torch.device,
    *,
    rank: int,
    to_parent: connection.Connection,
) -> None:
    """Measure training and then use, and send both to the parent. Collective.

    Training is sent before use begins: a failure in use cannot take it back.
    """
    trained = measured_training(visit, setting, device, rank=rank)
    if rank == 0:
        to_parent.send(Message("trained", visit.number, json.dumps(trained)))
        served = measured_serving(visit.arm, setting, device)
        to_parent.send(Message("done", visit.number, json.dumps(served)))
    gather_objects(None)  # nobody builds the next arm while the first rank measures use


def measured_training(
    visit: Visit, setting: Setting, device: torch.device, *, rank: int
) -> dict[str, Any]:
    """Measure time, energy and, where it is wanted, memory, ready for JSON. Collective."""
    found: dict[str, Any] = {}
    training = Training(visit.arm, setting, device, rank=rank)
    try:
        if visit.with_memory:
            found["memory"] = training.memory().model_dump()
        time, energy_kwh, source, missing = training.time()
    finally:
        # DeepSpeed never frees an engine by itself: the next arm would lack its memory.
        training.close()
    found["time"] = time.model_dump()
    found["energy_kwh_per_1000"] = energy_kwh
    found["energy_source"] = source
    found["missing"] = missing
    return found


def measured_serving(arm: ArmChoice, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Measure inference at every batch size and decoding at every context, ready for JSON.

    What does not fit stands in `missing` with the reason.

    Raises:
        Exception: On a GPU, anything but a lack of memory: CUDA may not work in this process any
            more, and the next arm would fail for it.
    """
    serving = Serving(arm, setting, device)
    inference = []
    decoding = []
    missing = {}
    for batch in setting.inference_batches:
        try:
            # A batch that is too large leaves the smaller ones their numbers.
            inference.append(serving.inference(batch).model_dump())
        except Exception as error:  # noqa: BLE001 - said in `missing`; the other numbers stay
            missing[f"inference[{batch}]"] = _why_missing(error, device)
    for context in setting.contexts:
        reason = serving.why_not(context)
        if reason is None:
            try:
                decoding.append(serving.decoding(context).model_dump())
            except Exception as error:  # noqa: BLE001 - as above
                reason = _why_missing(error, device)
        if reason is not None:
            missing[f"decoding[{context}]"] = reason
    return {"inference": inference, "decoding": decoding, "missing": missing}


def _why_missing(error: Exception, device: torch.device) -> str:
    status = error_status(error)
    if device.type == "cuda" and status != "oom":
        raise error
    return f"{status}: {one_line(error)}"


def error_status(error: BaseException) -> str:
    """Say how an arm that raised this has ended: oom, incompatible or failed."""
    if isinstance(error, SuiteError):
        return "incompatible"
    return status_of(error).value


def one_line(error: BaseException) -> str:
    """Put an error into one line; an unexpected one with its type and place in the code."""
    lines = str(error).splitlines() or [""]
    if error_status(error) != "failed":
        return lines[0]
    described = f"{type(error).__name__}: {lines[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        described += f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return described


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and exit with it, whatever this rank waits for."""
    # Ctrl-C reaches every process of the terminal; the parent stops the ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        # This also ends when the parent was killed and could clean up nothing.
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
