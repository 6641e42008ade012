"""The weights of a trial's step 0, whole, with what its method prepares from training data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from suite.attention import variants
from suite.backbones.loading import ResolvedBackbone
from suite.clock import CLOCK
from suite.config.hashing import short_hash
from suite.config.task_base import PLACE
from suite.data.objective import Objective
from suite.data.prepare import Prepared
from suite.errors import CheckpointError, OwnCodeError
from suite.files import make_once, replacing, write_json
from suite.meters import LocalPhase, PhaseMeter, combine, hardware
from suite.petl.base import Method
from suite.record.result import PREPARE_PHASE, PreparationRecord
from suite.record.spec import TrialSpec
from suite.registry import own_code_named
from suite.train.build import build_model
from suite.train.fingerprint import frozen_fingerprint, place_sum
from suite.train.process_group import all_agree, gather_objects
from suite.train.shards import stored_buffers

# 1: weights alone; 2: with what they cost; 3: LST walks through all blocks; 4: LoRA's starts tell
# encoder and decoder apart.
FORMAT = 4
"""Raise this number when a method prepares other weights, or more is kept beside them."""
PREPARED = "prepared.safetensors"
COST = "cost.json"
INCOMPLETE = "cost.incomplete"
"""Lies beside the cost while it is that of the working rank alone, and the group's is to come."""
GROUP_S = 30.0
"""How long other trials wait for the group's cost."""


def initial_model(
    spec: TrialSpec,
    resolved: ResolvedBackbone,
    objective: Objective,
    data: Prepared,
    *,
    weights: Path | None,
    cache: Path,
    device: str,
    meter: PhaseMeter,
) -> tuple[nn.Module, PreparationRecord | None]:
    """Build the arm of a trial and initialise all of its weights. Collective.

    What a method prepares from training data depends on the arm, its frozen weights and the data,
    and on the trial's seed only where the attention variant draws weights. The first trial that
    asks prepares it, and all others find it in the cache, with what it cost.

    Args:
        weights: File of the pretrain run that the arm names; None if it names none.
        cache: The home's cache.
        device: Where a method computes what it prepares.
        meter: The trial's meter, in its phase `load`.

    Returns:
        The model; and what was prepared, or None where the method prepares nothing.
    """
    model, method = build_model(spec, resolved, objective.head, weights=weights)
    if not method.needs_preparation:
        return model, None
    # Everything that the preparation reads is part of the folder's name.
    parts = [
        FORMAT,
        frozen_fingerprint(model),
        spec.arm.model_dump(mode="json"),
        # Files that were moved are the same data.
        spec.task.model_dump(mode="json", exclude=PLACE),
        data.data_hash,
        objective.fingerprint(),
    ]
    variant = variants.get(spec.arm.attention.name).configure(spec.arm.attention.options)
    if spec.arm.pretrain is None and variant.draws:
        # It trains, so it is not among the frozen weights, and each seed draws another.
        parts.append(spec.stream("init"))
    # a method of peft has a colon in its name
    key = f"{spec.arm.method.replace(':', '-')}-{short_hash(parts)}"
    folder = prepared_folder(cache, key)

    def work() -> dict[str, torch.Tensor]:
        rows = _single_rows(data, objective, spec, device)
        return _prepare(model, method, resolved, rows, device=device, meter=meter)

    record = _once(folder, work, trial=spec.hash, meter=meter)
    try:
        take_prepared(model, folder)
    except CheckpointError as error:
        raise _removed(folder, error.__cause__ or error) from error
    return model, record


def take_prepared(model: nn.Module, folder: Path) -> None:
    """Put what was prepared into a freshly built arm, whole and on the CPU.

    Raises:
        CheckpointError: The file is absent or damaged.
    """
    path = folder / PREPARED
    try:
        # safetensors says of every file that it cannot open that it is absent. A disk that fails
        # says here what is wrong.
        with path.open("rb"):
            prepared = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{path}: absent or damaged ({_line(error)})") from error
    with torch.no_grad():
        for name, tensor in prepared.items():
            model.get_parameter(name).copy_(tensor)


def _removed(folder: Path, error: BaseException) -> CheckpointError:
    """Remove a folder of the cache that cannot be read; the error of the attempt that read it."""
    if isinstance(error, FileNotFoundError) and not folder.exists():
        # States of another sweep took its room.
        return CheckpointError(
            f"{folder}: was removed meanwhile; the next attempt prepares it again"
        )
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        return CheckpointError(
            f"{folder}: damaged, and could not be removed ({_line(error)}); remove it by hand"
        )
    return CheckpointError(
        f"{folder}: was damaged and is removed ({_line(error)}); the next attempt prepares it again"
    )


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def prepared_folder(cache: Path, key: str) -> Path:
    """Where the cache of a home keeps what was prepared under a key."""
    return cache / "prepared" / key


def _once(
    folder: Path, work: Callable[[], dict[str, torch.Tensor]], *, trial: str, meter: PhaseMeter
) -> PreparationRecord:
    """Do the work unless it is in the cache, as `once` does, and keep the weights. Collective."""

    def write(temporary: Path) -> None:
        # `replacing` lets others read the file, which safetensors by itself does not.
        with replacing(temporary / PREPARED) as path:
            save_file(work(), path)

    return once(folder, write, phase=PREPARE_PHASE, trial=trial, meter=meter)


def once(
    folder: Path,
    write: Callable[[Path], None],
    *,
    phase: str,
    trial: str,
    meter: PhaseMeter,
) -> PreparationRecord:
    """Do some work unless it is in the cache, and say what it cost. Collective.

    Of the ranks that see one cache, one works, and the others wait for it in the same phase,
    because the trial holds their boards all the time.

    Args:
        folder: Where the cache keeps what came of it.
        write: Does the work, and writes what came of it into an empty folder.
        phase: Phase of the meter that it is charged to.
        trial: Hash of the trial that asks.
        meter: The trial's meter, in its phase `load`.
    """
    made = False

    def make(temporary: Path) -> None:
        nonlocal made
        # A phase of its own inside the outer one, because peaks are read where a phase ends.
        with meter.phase(phase):
            write(temporary)
        alone = _record(folder.name, trial, [{phase: meter.local()[phase]}], phase)
        # Written before the folder has its name: whatever kills the trial from here on, nobody
        # finds what was made without its cost.
        write_json(temporary / COST, alone.model_dump(mode="json"))
        if dist.get_world_size() > 1:
            (temporary / INCOMPLETE).touch()
        made = True

    if all_agree(folder.exists()):
        return kept_record(folder)
    with meter.phase(phase):
        make_once(folder, make)
        # On a CPU nothing else tells what the ranks hold that have only waited.
        with meter.probe():
            makers = gather_objects(made)
    # Out of the meter: a trial that is killed now and taken up finds its cost in the cache.
    account = meter.hand_over(phase, late_to="load")
    if not any(makers):
        # Another trial did the work; this one has only waited for it.
        meter.load_state({"load": asdict(account)})
        return kept_record(folder)
    # The worker's cost is the group's, and another trial may have read it by now.
    if dist.get_world_size() == 1:
        return kept_record(folder)
    record = _record(folder.name, trial, gather_objects({phase: account}), phase)
    if made:
        write_json(folder / COST, record.model_dump(mode="json"))
        (folder / INCOMPLETE).unlink(missing_ok=True)
    return record


def _record(
    key: str, trial: str, accounts: list[dict[str, LocalPhase]], phase: str
) -> PreparationRecord:
    costs, reasons = combine(accounts)
    missing = {}
    for name, why in reasons.items():
        missing[name.removeprefix(f"phases.{phase}.")] = why
    return PreparationRecord(
        key=key,
        made_by=trial,
        cost=costs[phase],
        world_size=dist.get_world_size(),
        hardware=hardware(),
        missing=missing,
    )


def kept_record(folder: Path) -> PreparationRecord:
    """Rank 0's record of what was prepared, on every rank. Collective."""
    end_s = CLOCK.now_s() + GROUP_S
    while (folder / INCOMPLETE).exists():
        if CLOCK.now_s() >= end_s:
            # The trial that did the work was killed: nobody waits for it again.
            (folder / INCOMPLETE).unlink(missing_ok=True)
            break
        CLOCK.sleep(0.05)
    try:
        own = PreparationRecord.model_validate_json((folder / COST).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise _removed(folder, error) from error
    # Hosts without a common disk may each have prepared their own.
    of_rank_0: PreparationRecord = gather_objects(own)[0]
    return of_rank_0


def _prepare(
    model: nn.Module,
    method: Method[Any],
    resolved: ResolvedBackbone,
    rows: Iterator[dict[str, torch.Tensor]],
    *,
    device: str,
    meter: PhaseMeter,
) -> dict[str, torch.Tensor]:
    """Let the method prepare the model; return the weights that it changed, by name.

    Raises:
        OwnCodeError: A method of the user's own raises something else, or changes a buffer.
    """
    before = _sums(model)
    buffers = buffer_sums(model)
    model.to(device)
    with ExitStack() as watching, own_code_named():
        method.prepare(model, resolved.family, _watched(rows, meter, watching), _loss)
    model.to("cpu")
    check_buffers(model, buffers, f"prepare of method {method.name}")
    after = _sums(model)
    changed = {}
    for name, parameter in model.named_parameters():
        # All other weights are drawn by the trial's seed, and must not come from another's.
        if after[name] != before[name]:
            changed[name] = parameter.detach().contiguous()
    return changed


def _sums(model: nn.Module) -> dict[str, int]:
    """A fingerprint of every weight, frozen ones too: a copy of them would take their memory again.

    A start that reads data may move a part of the frozen weights into the adapters.
    """
    return {name: place_sum(p.detach().reshape(-1), 0) for name, p in model.named_parameters()}


def buffer_sums(model: nn.Module) -> dict[str, int]:
    """A fingerprint of every buffer that is stored with the parameters, by name."""
    return {name: place_sum(b.reshape(-1), 0) for name, b in stored_buffers(model).items()}


def check_buffers(model: nn.Module, before: Mapping[str, int], who: str) -> None:
    """Check that stored buffers are as they were.

    A trial keeps the parameters that trained, and what was prepared is put into those of the next.

    Args:
        model: With its buffers of now.
        before: Their `buffer_sums` of then.
        who: What ran in between, for the error.

    Raises:
        OwnCodeError: One has changed.
    """
    for name, found in buffer_sums(model).items():
        if before.get(name, found) != found:
            raise OwnCodeError(
                f"{who} changed the buffer {name}, and a trial keeps parameters only: make it an"
                " nn.Parameter; running statistics, as of BatchNorm, cannot be kept"
            )


def _watched(
    rows: Iterator[dict[str, torch.Tensor]], meter: PhaseMeter, watching: ExitStack
) -> Iterator[dict[str, torch.Tensor]]:
    """Hand on the rows, and watch memory from each one to the next where it may be the peak.

    The caller closes `watching`, because a method need not ask for all rows.
    """
    for row in rows:
        watching.close()
        size = max(tensor.numel() for tensor in row.values())
        watching.enter_context(meter.probe(size))
        yield row


def _single_rows(
    data: Prepared, objective: Objective, spec: TrialSpec, device: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Training examples one by one in a seeded order, the same for every seed of the task.

    One by one, because Fisher importance is per example.
    """
    rows = data.split("train", confirm=False)
    # A generator of its own leaves the global streams alone.
    generator = torch.Generator().manual_seed(spec.preparation_seed)
    order = torch.randperm(len(rows), generator=generator)
    for index in order.tolist():
        yield {name: tensor.to(device) for name, tensor in objective.collate([rows[index]]).items()}


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
