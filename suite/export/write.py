"""Write a trained arm into a new folder, whole or not at all.

The format is the plainest one that gives the arm's answers.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers.utils.logging as hf_logging

from suite.backbones.loading import Origin, identity
from suite.config.arm import Arm
from suite.config.task import FileData, TaskConfig
from suite.config.task_base import FILE_KEYS
from suite.errors import CheckpointError, ConfigError, IncompatibleError
from suite.export.adapter import (
    Adapter,
    PeftCannotHoldError,
    as_adapter,
    as_lora,
    write_adapter,
)
from suite.export.base import found_by_name, reads_plain_text
from suite.export.card import Facts, write_card
from suite.export.description import BasePlace, Description, Format, Reading
from suite.export.load import load_model
from suite.export.own import place_of_base, write_own
from suite.export.plain import as_plain
from suite.export.same import make_batch, same
from suite.train.restore import Restored

NOT_PEFTS = "peft's own format would not give the same answers, so it is in the suite's"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how many bytes it takes."""

    folder: Path
    description: Description
    bytes: int


def export(
    restored: Restored,
    target: Path,
    facts: Facts,
    *,
    name: str | None = None,
    lora: bool = False,
    copy_base: bool = True,
) -> Exported:
    """Export a trained arm.

    The format is plain weights of transformers where the model is one, or else an adapter of
    peft, or else the suite's own. Before the folder gets its name it is loaded again, and must
    answer as the trained model does.

    Args:
        restored: The model, on the CPU.
        target: A folder that does not exist, or is empty.
        facts: What is known beside the trial itself, for the model card.
        name: What others will call the folder, in the card and in peft's path of a copied base;
            None = `target` as it is given.
        lora: Whether to write it as plain LoRA.
        copy_base: Whether an adapter of an encoder with a classification head brings its base, so
            that transformers and peft load the folder without a further argument.

    Raises:
        ConfigError: There is something at `target`, the checkpoint brings code for its model, or
            the method cannot be expressed as LoRA.
        CheckpointError: The folder does not give the model's answers; nothing is left behind.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not empty; give a new folder")
    if restored.spec.arm.backbone.trust_remote_code:
        raise ConfigError(
            f"{restored.folder.path}: its model is made by code of its checkpoint,"
            " which an exported folder never carries"
        )
    # The description and the card come last: a folder with a description is whole.
    name = name or str(target)
    with _replacing_folder(target) as folder, _no_progress_bars():
        if lora:
            description = _write_lora(restored, folder, name, copy_base=copy_base)
        else:
            description = _write_model(restored, folder, name, copy_base=copy_base)
        _write_tokenizer(restored, folder)
        description.write(folder)
        shown = name
        # The card is for others, and a path of this machine means nothing to them.
        if Path(name).is_absolute():
            shown = Path(name).name
        write_card(restored, description, facts, folder, name=shown)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Exported(target, description, size)


def _write_model(restored: Restored, folder: Path, name: str, *, copy_base: bool) -> Description:
    # From the format that most programs read to the one that only the suite reads.
    plain = as_plain(restored)
    if plain is not None:
        plain.model.save_pretrained(str(folder))
        description = _describe(restored, "transformers", "none", note=plain.note)
        _check(restored, description, folder)
        return description
    note = ""
    adapter = as_adapter(restored)
    if adapter is not None:
        try:
            return _write_adapter(restored, adapter, folder, name, copy_base=copy_base)
        except (PeftCannotHoldError, CheckpointError):
            # What peft's attempt left behind must not be mixed with the suite's own files.
            _empty(folder)
            note = NOT_PEFTS
    description = _describe(restored, "suite", place_of_base(restored), note=note)
    write_own(restored, description, folder)
    _check(restored, description, folder)
    return description


def _write_lora(restored: Restored, folder: Path, name: str, *, copy_base: bool) -> Description:
    try:
        return _write_adapter(restored, as_lora(restored), folder, name, copy_base=copy_base)
    except (PeftCannotHoldError, CheckpointError) as error:
        raise IncompatibleError(
            f"--as-lora: {restored.spec.arm.method} cannot be expressed as LoRA: it computes more"
            " than a low-rank product, or its start changed the base, so as LoRA it does not give"
            " the trained model's answers; leave the option out"
        ) from error


def _write_adapter(
    restored: Restored, adapter: Adapter, folder: Path, name: str, *, copy_base: bool
) -> Description:
    place: BasePlace = "name"
    # Only a copy's configuration can name the labels and say how many there are, and only a copy
    # lacks the layers that the trial dropped.
    shortened = restored.spec.arm.backbone.drop_layers > 0
    if not found_by_name(restored) or shortened or (copy_base and reads_plain_text(restored)):
        place = "copy"
    description = _describe(restored, "peft", place)
    write_adapter(restored, adapter, description, folder, at=name)
    _check(restored, description, folder)
    return description


def _write_tokenizer(restored: Restored, folder: Path) -> None:
    tokenizer = copy.deepcopy(restored.tokenizer)
    if reads_plain_text(restored):
        # By this a pipeline cuts texts where the trial did.
        tokenizer.model_max_length = restored.spec.training.max_length
    tokenizer.save_pretrained(str(folder))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _describe(restored: Restored, form: Format, base: BasePlace, *, note: str = "") -> Description:
    spec = restored.spec
    resolved = restored.resolved
    known = identity(resolved)
    if resolved.origin != "hub":
        known.pop("path")  # a path of this machine means nothing elsewhere
    dtype: Literal["float32", "bfloat16"] = "float32"
    if next(restored.model.parameters()).dtype == torch.bfloat16:
        dtype = "bfloat16"
    return Description(
        format=form,
        base=base,
        base_identity=known,
        arm=_without_paths(spec.arm, resolved.origin),
        head=asdict(restored.objective.head),
        dtype=dtype,
        task=spec.task.name,
        reading=Reading(
            task=_without_folders(spec.task),
            training=spec.training,
            decoder_objective=spec.decoder_objective,
        ),
        trial=restored.folder.hash,
        seed=spec.seed,
        note=note,
    )


def _without_paths(arm: Arm, origin: Origin) -> Arm:
    """The arm with the last part of each path: a folder of this machine means nothing elsewhere."""
    backbone = arm.backbone
    changes: dict[str, Any] = {}
    if origin == "folder":
        changes["name"] = Path(backbone.name).name
    if backbone.tokenizer is not None and Path(backbone.tokenizer).is_dir():
        changes["tokenizer"] = Path(backbone.tokenizer).name
    return arm.model_copy(update={"backbone": backbone.model_copy(update=changes)})


def _without_folders(task: TaskConfig) -> TaskConfig:
    """The task with the names of its data files, without the folders that they lie in."""
    data = task.data
    if not isinstance(data, FileData):
        return task
    # Of these keys a file has one or three; None stays None.
    names: dict[str, str | None] = {"folder": None}
    for key in FILE_KEYS:
        path = getattr(data, key)
        if path is not None:
            names[key] = Path(path).name
    return task.model_copy(update={"data": data.model_copy(update=names)})


def _check(restored: Restored, description: Description, folder: Path) -> None:
    """Load what was written, and compare its answers with the trained model's."""
    batch = make_batch(restored.model, restored.resolved.family, restored.objective.head)
    if not same(restored.model, load_model(description, folder), batch):
        raise CheckpointError(
            f"{restored.folder.path}: what was exported does not give the trained model's"
            " answers; nothing was written"
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars: one for every file of a small model tells nothing."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, which gets its name in the end, or is removed after an error."""
    # A folder cannot replace a link, but what it leads to.
    target = target.resolve()
    if target.is_mount():
        raise ConfigError(
            f"{target}: is a mount point, which nothing can replace; give a folder in it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, so that renaming it at the end is atomic.
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield folder
        # mkdtemp and safetensors make files that only their owner reads.
        folder.chmod(0o755)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(folder, target)  # an empty folder at `target` is replaced, too
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
