"""The home of a sweep on disk. Trial folders are the truth; all else can be rebuilt from them.

HOME/
  sweeps/<name>.json        the definition that was run
  sweeps/looks/<name>/      which cells had a test score when the sweep's seeds changed
  sweeps/leases/<name>/     which driver owns it; with a storage this lies there instead
  sweeps/claims/<hash>/     which driver trains a pretrain run; with a storage the same
  tracking-id               the home's name in stores that several homes write to
  tracking-writer           what it put there, by which it is told from its copies
  trials/<hash>/
    spec.json               written when the trial is handed out
    proposal.json           of a search trial: what proposed its learning rate
    result.json             written once, when it has ended: a folder with it is done
    failure-<n>.json        an attempt that its machine, not its mathematics, ended
    epochs.jsonl            the training curve as it grows
    checkpoint/             the last committed epochs, removed when the trial ends
    best.safetensors        the trained tensors of the best epoch (confirm phase)
    predictions-<split>.parquet
    rank<k>.log
  pretrained/<hash>/        the same files for a pretrain run, which all sweeps of the home share
    model.safetensors       its weights, written before result.json
  cache/                    tokenised data, and what methods prepare from it with its cost
  mlflow.db
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from suite.config.names import why_not
from suite.errors import ConfigError, ResourceError
from suite.files import nearest, read_json, sqlite_uri, write_atomic, write_json
from suite.record.result import (
    DAMAGED,
    EpochRecord,
    FailureRecord,
    TrialResult,
    damage,
    unreadable,
)
from suite.record.spec import Phase, TrialSpec

M = TypeVar("M", bound=BaseModel)
SPEC = "spec.json"
PROPOSAL = "proposal.json"
RESULT = "result.json"
CURVE = "epochs.jsonl"
CHECKPOINT = "checkpoint"
MARKER = "COMMIT.json"
"""The file of a checkpoint that is written last: what lacks it is not whole."""
PRETRAINED = "pretrained"
PARTS = ("trials", "sweeps", PRETRAINED)
"""Folders of a home that hold what cannot be made again without training."""
DATABASE = "mlflow.db"
SIDE_FILES = ("-wal", "-shm", "-journal")
"""Suffixes of the files that sqlite keeps beside a database."""


def read_record(path: Path, kind: type[M]) -> M | None:
    """A stored model; None where it is absent or was cut short."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a file; remove it") from None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        # A file that a crash cut short is as good as none. A whole file of another version is not:
        # to write it anew would destroy what it holds.
        if any(problem["type"] == "json_invalid" for problem in error.errors()):
            return None
        # Two levels of keys are enough to find the place, and five places to know the version is
        # wrong.
        places = {".".join(map(str, problem["loc"][:2])) for problem in error.errors()}
        keys = ", ".join(sorted(places)[:5])
        raise ConfigError(
            f"{path}: not a record of this version of the suite ({keys}); use the version that "
            "wrote it, or choose another --home"
        ) from None


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """One `trials/<hash>/`."""

    path: Path

    @property
    def hash(self) -> str:
        return self.path.name

    @property
    def shared(self) -> str | None:
        """The hash of a run that all sweeps of the home share; None = a trial of one sweep."""
        if self.path.parent.name == PRETRAINED:
            return self.hash
        return None

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def weights(self) -> Path:
        """The weights that a pretrain run makes."""
        return self.path / "model.safetensors"

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def predictions(self, split: str) -> Path:
        return self.path / f"predictions-{split}.parquet"

    def write_spec(self, spec: TrialSpec) -> None:
        """Write the specification where it does not stand there yet.

        The hash is the folder's name, so an existing specification is the same; only a pretrain run
        may have another number of workers.
        """
        if self.spec() != spec:
            write_json(self.path / SPEC, spec.model_dump(mode="json"))

    def spec(self) -> TrialSpec | None:
        """The specification, or None where it was never written whole.

        Raises:
            ConfigError: It is whole, but not one of this version.
        """
        return read_record(self.path / SPEC, TrialSpec)

    def write_proposal(self, proposal: Mapping[str, Any]) -> None:
        """Write where the trial's learning rate comes from; it is written once."""
        path = self.path / PROPOSAL
        if not path.exists():
            write_json(path, proposal)

    def proposal(self) -> dict[str, Any]:
        """Where the trial's learning rate comes from; empty where that was not written."""
        try:
            found = read_json(self.path / PROPOSAL)
        # A confirm run has none, and a torn file says as little.
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return found

    def write_result(self, result: TrialResult) -> None:
        write_atomic(self.path / RESULT, result.as_bytes())

    def result(self) -> TrialResult | None:
        """The result, or None while the trial is not finished.

        A file that is not as it was written counts as a result too, with the reason in `damaged`:
        if it counted as absent, the trial would silently be run again and the record replaced.

        Raises:
            ConfigError: It is whole, but not a record of this version.
        """
        path = self.path / RESULT
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return unreadable(self.hash, f"{self._told(path)} is a folder, expected a file")
        reason = damage(data)
        if reason is None:
            found = read_record(path, TrialResult)
            # It has done its work, and equal results are to be equal wherever they come from.
            return found and found.model_copy(update={"checksum": None})
        why = f"{self._told(path)} {reason}"
        # As far as it can be read it is shown, and the reason with it.
        with contextlib.suppress(ValidationError):
            return TrialResult.model_validate_json(data).model_copy(update={"damaged": why})
        return unreadable(self.hash, why)

    def _told(self, path: Path) -> str:
        """How messages call a file: by its place in the home."""
        return f"{self.path.parent.name}/{self.hash}/{path.name}"

    def add_epoch(self, record: EpochRecord) -> None:
        """Append an epoch to the training curve."""
        line = json.dumps(record.model_dump(mode="json")).encode() + b"\n"
        with (self.path / CURVE).open("ab+") as file:
            # After a line that a crash cut off, this one must begin anew, or both are lost.
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)

    def epochs(self) -> list[EpochRecord]:
        """The training curve so far; an epoch that was trained again after a cut counts once."""
        found: dict[int, EpochRecord] = {}
        with contextlib.suppress(FileNotFoundError):
            # As bytes: one line that is no text must not hide the others.
            for line in (self.path / CURVE).read_bytes().splitlines():
                with contextlib.suppress(ValidationError):  # a crash may cut a line off
                    record = EpochRecord.model_validate_json(line)
                    # A later line wins: after a cut the epoch was trained again.
                    found[record.epoch] = record
        return [found[epoch] for epoch in sorted(found)]

    def add_failure(self, failure: FailureRecord) -> None:
        """Keep the record of an attempt that will be tried again."""
        # The next number and not how many there are: somebody may have removed an earlier one.
        number = max(self._failures(), default=-1) + 1
        write_json(self.path / f"failure-{number}.json", failure.model_dump(mode="json"))

    def failures(self) -> list[FailureRecord]:
        """The attempts that will be, or were, tried again; a damaged record counts as one too."""
        found = self._failures()
        # Sorted as numbers, because as text failure-10 comes before failure-2.
        return [_failure(found[number]) for number in sorted(found)]

    def _failures(self) -> dict[int, Path]:
        found = {}
        for path in self.path.glob("failure-*.json"):
            number = path.stem.removeprefix("failure-")
            # Nothing of ours writes another name.
            if number.isdecimal():
                found[int(number)] = path
        return found


def _failure(path: Path) -> FailureRecord:
    try:
        return FailureRecord.model_validate_json(path.read_bytes())
    # The attempt was made, and must count: its record says why it cannot say more.
    except (ValidationError, IsADirectoryError):
        return FailureRecord(type=DAMAGED, message=f"{path} is not a whole record of an attempt")


@dataclass(frozen=True, slots=True)
class Home:
    """Where the state of sweeps lives (`--home`, default `./runs`)."""

    path: Path

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def tracking_uri(self) -> str:
        """The default MLflow store: sqlite, written by the driver alone."""
        # The path is absolute, so the address means the same from every working directory.
        return sqlite_uri((self.path / DATABASE).resolve())

    @property
    def tracking_lock(self) -> Path:
        """The file that a process locks while it writes the home's runs or its name in a store."""
        return self.path / "tracking.lock"

    def part(self, name: str) -> Path:
        """One of the folders in `PARTS`, which may not be there yet.

        Raises:
            ResourceError: Something else is there, or this user may not enter a folder above it. It
                would count as an empty folder.
        """
        path = self.path / name
        try:
            is_folder = S_ISDIR(path.stat().st_mode)
        except PermissionError:
            raise ResourceError(
                f"{nearest(path)}: may not be entered; choose another --home, or ask for its rights"
            ) from None
        except OSError:
            is_folder = False
        if not is_folder and os.path.lexists(path):
            raise ResourceError(
                f"{path}: is no folder, or a link that leads nowhere; mount it or mend the link, or"
                " choose another --home"
            )
        return path

    def trial(self, spec_or_hash: TrialSpec | str) -> TrialFolder:
        # A hash alone does not tell the phase; callers that have one mean a trial of a sweep.
        if isinstance(spec_or_hash, str):
            return TrialFolder(self.path / "trials" / spec_or_hash)
        if spec_or_hash.phase is Phase.PRETRAIN:
            return self.pretrained(spec_or_hash.hash)
        return TrialFolder(self.path / "trials" / spec_or_hash.hash)

    def pretrained(self, name: str) -> TrialFolder:
        """The folder of a pretrain run, by its hash."""
        return TrialFolder(self.path / PRETRAINED / name)

    def trials(self) -> Iterator[TrialFolder]:
        """Every trial folder, sorted by hash."""
        root = self.part("trials")
        # A home without trials has no such folder.
        if not root.exists():
            return
        # Sorted, because the file system has an order of its own.
        for path in sorted(root.iterdir()):
            if path.is_dir():
                yield TrialFolder(path)

    def sweep_definition(self, name: str) -> Path:
        """The file that defines a sweep.

        Raises:
            ConfigError: The name could lead out of the home.
        """
        wrong = why_not("sweep", name)
        if wrong is not None:
            raise ConfigError(f"{self.path}: {wrong}")
        return self.path / "sweeps" / f"{name}.json"

    def sweep_cells(self, name: str) -> Path:
        """The file of what a sweep's names stand for, beside its definition."""
        return self.sweep_definition(name).with_suffix(".cells")
