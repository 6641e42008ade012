"""A rank of a profile: measures arm after arm and tells the parent; whatever kills it ends one arm and no more."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from suite.profile.arms import ArmChoice
from suite.profile.serving import Serving
from suite.profile.setting import Setting
from suite.profile.training import Training
from suite.train.engine import close_process_group, init_process_group

TIMEOUT_S = 1800.0
"""Of a collective: the other ranks wait while the first one measures inference."""


def rank_main(rank: int, port: int, setting: Setting, arms: Sequence[tuple[int, bool, ArmChoice]], to_parent: Connection) -> None:
    """Measure arms in the order given.

    Args:
        rank: In the group; the first reports.
        port: Of the group's rendezvous on this machine.
        setting: As for all ranks.
        arms: Number, whether its memory is wanted too, and the arm itself.
        to_parent: Takes `(what, number, text)`: begun, done (with JSON), oom or failed (with the reason).
    """
    torch.set_num_threads(setting.rank_threads)
    device = torch.device(setting.device, rank) if setting.device == "cuda" else torch.device("cpu")
    if setting.device == "cuda":
        torch.cuda.set_device(device)
    place: dict[str, Any] = {"rank": rank, "world_size": setting.ranks, "local_rank": rank, "address": "127.0.0.1", "port": port}
    init_process_group(**place, device=setting.device, timeout_s=TIMEOUT_S)
    for number, wholly, arm in arms:
        if rank == 0:
            to_parent.send(("begun", number, ""))
        try:
            found = measured(arm, setting, device, rank=rank, wholly=wholly)
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:
            to_parent.send(("oom" if ran_out_of_memory(error) else "failed", number, _told(error)))
            return
        if rank == 0:
            to_parent.send(("done", number, json.dumps(found)))
    close_process_group()


def measured(arm: ArmChoice, setting: Setting, device: torch.device, *, rank: int, wholly: bool) -> dict[str, Any]:
    """All numbers of an arm that need it to run, as JSON. Collective.

    Args:
        wholly: Also memory, which repeats exactly.
    """
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
    if memory is not None:
        found["memory"] = memory.model_dump()
    if rank == 0:
        found |= served(arm, setting, device)
    return found


def served(arm: ArmChoice, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Inference at every batch size and decoding at every context."""
    serving = Serving(arm, setting, device)
    inference = [serving.inference(batch).model_dump() for batch in setting.inference_batches]
    decoding, missing = [], {}
    for context in setting.contexts:
        why = serving.why_not(context)
        if why is None:
            decoded = serving.decoding(context)
            decoding += [] if decoded is None else [decoded.model_dump()]
        else:
            missing[f"decoding[{context}]"] = why
    return {"inference": inference, "decoding": decoding, "missing_serving": missing}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused, on a GPU or by the CPU's allocator."""
    words = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in words or "CUDA out of memory" in words


def _told(error: BaseException) -> str:
    """The message, with the last lines of our own on the way to it."""
    if ran_out_of_memory(error):
        return str(error).split("\n")[0]
    with suppress(IndexError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    return f"{type(error).__name__}: {error}"
