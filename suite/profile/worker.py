"""A rank of a profile: measures arm after arm and tells the parent; whatever kills it ends one arm and no more."""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import connection, parent_process
from typing import Any

import torch

from suite.errors import SuiteError
from suite.profile.arms import ArmChoice
from suite.profile.serving import Serving
from suite.profile.setting import Setting
from suite.profile.training import Training
from suite.train.failure import status_of
from suite.train.process_group import close_process_group, gather_objects, init_process_group

TIMEOUT_S = 1800.0
"""Of a collective: the other ranks wait while the first one measures inference."""
NOBODY = -1
Message = tuple[str, int, str]
"""What happened, the arm's number, and a reason or numbers as JSON: start (failed), trained, done, oom, failed, incompatible."""


def rank_main(
    rank: int,
    port: int,
    setting: Setting,
    arms: Sequence[tuple[int, bool, ArmChoice]],
    to_parent: connection.Connection,
) -> None:
    """Measure arms in the order given.

    Args:
        rank: In the group; the first reports.
        port: Of the group's rendezvous on this machine.
        setting: As for all ranks.
        arms: Number, whether its memory is wanted too, and the arm itself.
        to_parent: Takes messages.
    """
    _live_with_the_parent()
    torch.set_num_threads(setting.rank_threads)
    device = torch.device(setting.device, rank) if setting.device == "cuda" else torch.device("cpu")
    place: dict[str, Any] = {
        "rank": rank,
        "world_size": setting.ranks,
        "local_rank": rank,
        "address": "127.0.0.1",
        "port": port,
    }
    try:
        if setting.device == "cuda":
            torch.cuda.set_device(device)
        init_process_group(**place, device=setting.device, timeout_s=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever it is, no arm is to blame, and the parent says it
        to_parent.send(("start", NOBODY, told(error)))
        return
    for number, wholly, arm in arms:
        try:
            measure_arm(arm, number, setting, device, rank=rank, wholly=wholly, to_parent=to_parent)
        except Exception as error:  # noqa: BLE001 - the border of an arm: it ends with a reason, and the others go on
            to_parent.send((how_it_ended(error), number, told(error)))
            return
    close_process_group()


def measure_arm(
    arm: ArmChoice,
    number: int,
    setting: Setting,
    device: torch.device,
    *,
    rank: int,
    wholly: bool,
    to_parent: connection.Connection,
) -> None:
    """Tell the parent what training costs, then what use does; what is in use cannot take back what training gave. Collective.

    Args:
        wholly: Also memory, which repeats exactly.
    """
    trained = measured_training(arm, setting, device, rank=rank, wholly=wholly)
    if rank == 0:
        to_parent.send(("trained", number, json.dumps(trained)))
        to_parent.send(("done", number, json.dumps(served(arm, setting, device))))
    gather_objects(None)  # nobody builds the next arm beside the first rank's timing


def measured_training(
    arm: ArmChoice, setting: Setting, device: torch.device, *, rank: int, wholly: bool
) -> dict[str, Any]:
    """Time, energy and memory as JSON. Collective."""
    training = Training(arm, setting, device, rank=rank)
    try:
        memory = training.memory() if wholly else None
        time, energy_kwh, source, missing = training.time()
    finally:
        training.close()
    found: dict[str, Any] = {
        "time": time.model_dump(),
        "energy_kwh_per_1000": energy_kwh,
        "energy_source": source,
        "missing": missing,
    }
    return found if memory is None else {**found, "memory": memory.model_dump()}


def served(arm: ArmChoice, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Inference at every batch size and decoding at every context, as JSON; what does not fit is missing with the reason."""
    serving = Serving(arm, setting, device)
    found: dict[str, Any] = {"inference": [], "decoding": [], "missing": {}}
    for batch in setting.inference_batches:
        try:
            found["inference"].append(serving.inference(batch).model_dump())
        except (RuntimeError, MemoryError) as error:
            found["missing"][f"inference[{batch}]"] = f"{how_it_ended(error)}: {told(error)}"
    for context in setting.contexts:
        if (why := serving.why_not(context)) is not None:
            found["missing"][f"decoding[{context}]"] = why
            continue
        try:
            found["decoding"].append(serving.decoding(context).model_dump())
        except (RuntimeError, MemoryError) as error:
            found["missing"][f"decoding[{context}]"] = f"{how_it_ended(error)}: {told(error)}"
    return found


def how_it_ended(error: BaseException) -> str:
    """oom, incompatible or failed."""
    if isinstance(error, SuiteError):
        return "incompatible"
    words = str(error).lower()
    return (
        "oom"
        if "can't allocate memory" in words or "alloc_failed" in words
        else status_of(error).value
    )


def told(error: BaseException) -> str:
    """The message in a line, with the place in the code where it is a surprise."""
    first = (str(error).splitlines() or [""])[0]
    if how_it_ended(error) != "failed":
        return first
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first}{place}"


def _live_with_the_parent() -> None:
    """Ctrl-C is the parent's to answer; and without it a rank ends, whatever it waits for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
