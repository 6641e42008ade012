"""Keep the plan of a dry run, so that the next dry run of the same sweep checks nothing anew.

A dry run builds every arm without weights. To import torch and transformers for that takes most of
its time, and the answer is a function of what `_digest` reads: the suite's code, the versions of
the libraries, the sweep, its tasks and search spaces, and the files of its backbones. Only plans
without a mistake are kept. `suite run` does not look here: it checks every arm itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from suite.backbones.folders import local_folder
from suite.backbones.presets import PRESETS
from suite.cli.work import Work, arm_work
from suite.config.hashing import canonical_json
from suite.config.loader import Strict
from suite.config.sweep import BackboneChoice, SweepConfig
from suite.config.task import load_task
from suite.files import keep, kept_folder
from suite.plan.definition import StoredCells, stored_cells
from suite.plan.plan import Plan, make_plan
from suite.plan.resources import planned_workers
from suite.registry import PACKAGE, user_folders, yaml_names

CODE_AXES = ("petl", "attention", "backbones", "generators")
LIBRARIES = ("huggingface-hub", "peft", "tokenizers", "torch", "transformers")
# No check looks at these but at the batch sizes, so that another budget finds the same plan.
UNCHECKED = {
    "name",
    "description",
    "search",
    "confirm",
    "failures",
    "timeouts",
    "tracking",
    "lm_eval",
}
KEPT = 64
"""Plans that are kept, a few kB each; the oldest goes first."""


class KeptPlan(Strict):
    """A plan, and the computing of every arm by its key."""

    cells: StoredCells
    work: dict[str, Work]


def checked_plan(
    config: SweepConfig, *, where: str, world_size: int | None
) -> tuple[Plan, dict[str, Work]]:
    """The plan of a sweep, and the computing of every arm by its key.

    Args:
        config: The sweep.
        where: Its file, for errors.
        world_size: As in `make_plan`.

    Raises:
        SuiteError: As `make_plan`.
    """
    digest = _digest(config, world_size, where=where)
    if digest is None:
        return _check(config, where=where, world_size=world_size)
    path = kept_folder("plans") / f"{digest}.json"
    # A file that cannot be used is as good as none: the plan is checked, and the file written anew.
    with contextlib.suppress(OSError, ValidationError):
        kept = KeptPlan.model_validate_json(path.read_bytes())
        return kept.cells.plan(config), kept.work
    plan, work = _check(config, where=where, world_size=world_size)
    kept = KeptPlan(cells=stored_cells(plan), work=work)
    keep(path, kept.model_dump_json().encode(), most=KEPT)
    return plan, work


def _check(
    config: SweepConfig, *, where: str, world_size: int | None
) -> tuple[Plan, dict[str, Work]]:
    plan = make_plan(config, where=where, world_size=world_size)
    return plan, arm_work(plan, where=where)


def _digest(config: SweepConfig, world_size: int | None, *, where: str) -> str | None:
    """A name for all that the plan depends on; None where it depends on more than can be read."""
    # Code of the user's own may import anything, and a pretrain stage reads a corpus.
    if config.pretrain is not None or any(user_folders(axis, code=True) for axis in CODE_AXES):
        return None
    backbones = []
    for choice in config.backbones:
        files = _backbone_files(choice, where=where)
        if files is None:
            return None
        backbones.append(files)
    parts = {
        "code": _content(sorted(PACKAGE.rglob("*.py"))),
        "spaces": _content(sorted(yaml_names("search_spaces").values())),
        "versions": [platform.python_version(), *map(metadata.version, LIBRARIES)],
        "sweep": config.model_dump(mode="json", exclude=UNCHECKED),
        "batch_sizes": config.search.batch_sizes,
        "tasks": [
            load_task(name, where=f"{where}: tasks").model_dump(mode="json")
            for name in config.tasks
        ],
        "backbones": backbones,
        "world_size": planned_workers(config, world_size),
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


def _content(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _backbone_files(choice: BackboneChoice, *, where: str) -> list[str] | None:
    """Name, size and time of every file that a backbone is read from; None = not all of it is here.

    Raises:
        BackboneError: The folder or package does not exist.
    """
    # What the hub has may be another tomorrow, and a stranger's code may do anything.
    if choice.trust_remote_code or choice.tokenizer not in (None, "bytes"):
        return None
    preset = PRESETS.get(choice.name)
    # A preset with a changed configuration is read from no file at all.
    if preset is not None and choice.config is not None:
        return []
    name = choice.name
    if preset is not None:
        name = preset.path or name
    folder = local_folder(name, where=f"{where}: backbones: ")
    if folder is None:
        return None
    files = []
    # A link may lead nowhere: then the check of the plan says what is wrong with the folder.
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            about = path.stat()
            files.append(f"{path} {about.st_size} {about.st_mtime_ns}")
        return files
    return None
