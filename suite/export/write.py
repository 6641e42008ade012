"""Write a trained arm into a folder of its own, in the plainest format that gives its answers, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers.utils.logging as hf_logging

from suite.backbones.loading import Origin, identity
from suite.config.arm import Arm
from suite.errors import CheckpointError, ConfigError
from suite.export.adapter import NotPeftsError, peft_config_of, write_adapter
from suite.export.base import by_name
from suite.export.card import Facts, write_card
from suite.export.description import Description, Format, Where, head_fields
from suite.export.load import load_model
from suite.export.own import where_base, write_own
from suite.export.plain import as_plain
from suite.export.same import make_batch, same
from suite.train.restore import Restored

NOT_PEFTS = "peft's own format would not give the same answers, so it is in the suite's"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    description: Description
    bytes: int


def export(restored: Restored, target: Path, facts: Facts) -> Exported:
    """Export a trained arm: plain weights of transformers, else an adapter of peft's, else the suite's own format.

    What was written is loaded again and must answer as the trained model does, before it gets its name.

    Args:
        restored: On the CPU.
        target: A folder that does not exist, or is empty.
        facts: For the model card, what is known beside the trial itself.

    Raises:
        ConfigError: There is something at `target`, or the model needs code that its checkpoint brings.
        CheckpointError: The folder does not give the model's answers; nothing is left behind.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not empty; give a new folder")
    if restored.spec.arm.backbone.trust_remote_code:
        raise ConfigError(
            f"{restored.folder.path}: its model is made by code of its checkpoint, which an exported folder never carries"
        )
    with _replacing_folder(target) as folder, _no_bars():
        description = _write_model(restored, folder)
        restored.tokenizer.save_pretrained(str(folder))
        description.write(folder)
        write_card(restored, description, facts, folder)
    return Exported(
        target,
        description,
        sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
    )


def _write_model(restored: Restored, folder: Path) -> Description:
    plain = as_plain(restored)
    if plain is not None:
        plain.model.save_pretrained(str(folder))
        description = _describe(restored, "transformers", "none", note=plain.note)
        _check(restored, description, folder)
        return description
    return _write_adapter(restored, folder) or _write_own(restored, folder)


def _write_adapter(restored: Restored, folder: Path) -> Description | None:
    config = peft_config_of(restored)
    if config is None:
        return None
    description = _describe(restored, "peft", "name" if by_name(restored) else "copy")
    try:
        write_adapter(restored, config, description, folder)
        _check(restored, description, folder)
    except (NotPeftsError, CheckpointError):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return None
    return description


def _write_own(restored: Restored, folder: Path) -> Description:
    note = NOT_PEFTS if peft_config_of(restored) is not None else ""
    description = _describe(restored, "suite", where_base(restored), note=note)
    write_own(restored, description, folder)
    _check(restored, description, folder)
    return description


def _describe(restored: Restored, form: Format, base: Where, *, note: str = "") -> Description:
    spec, resolved = restored.spec, restored.resolved
    arm, known = _without_paths(spec.arm, resolved.origin), identity(resolved)
    if resolved.origin != "hub":
        known.pop("path")
    return Description(
        format=form,
        base=base,
        base_identity=known,
        arm=arm,
        head=head_fields(restored.objective.head),
        dtype="bfloat16"
        if next(restored.model.parameters()).dtype == torch.bfloat16
        else "float32",
        task=spec.task.name,
        trial=restored.folder.hash,
        seed=spec.seed,
        note=note,
    )


def _without_paths(arm: Arm, origin: Origin) -> Arm:
    """A folder of this machine means nothing elsewhere: of a backbone or tokenizer in one, its last name is kept."""
    backbone = arm.backbone
    changes = {"name": Path(backbone.name).name} if origin == "folder" else {}
    if backbone.tokenizer is not None and Path(backbone.tokenizer).is_dir():
        changes["tokenizer"] = Path(backbone.tokenizer).name
    return arm.model_copy(update={"backbone": backbone.model_copy(update=changes)})


def _check(restored: Restored, description: Description, folder: Path) -> None:
    batch = make_batch(restored.model, restored.resolved.family, restored.objective.head)
    if not same(restored.model, load_model(description, folder), batch):
        raise CheckpointError(
            f"{restored.folder.path}: what was exported does not give the trained model's answers; nothing was written"
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """A bar for every file of a small model tells nothing."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name in the end, or vanishes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield folder
        for path in (folder, *folder.rglob("*")):  # safetensors writes for its owner alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
