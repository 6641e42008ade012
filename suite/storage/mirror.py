"""A home's copy below a URL, for hosts that share no disk: each has a home of its own, and what all must know lies in the storage.

Keys are paths below the home (`suite.record.folder`). A trial's result is created last, after everything that it speaks of, and never
replaced; a checkpoint's marker is written last, after the files that it names. So a host that dies between two pushes leaves nothing
that looks whole and is not. Without a storage every call does what one home needs, so that callers need not ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from suite.errors import StorageError
from suite.files import json_bytes, sha256, write_atomic
from suite.record.folder import Home, TrialFolder
from suite.record.result import FailureRecord, TrialResult
from suite.storage.base import Storage
from suite.storage.fence import Fence
from suite.storage.identity import home_id, identity_path
from suite.storage.urls import open_storage
from suite.storage.workspace import Workspace

T = TypeVar("T")
TRANSFERS = 8
"""Files on their way at once."""
RESULT, CURVE, EVALUATIONS, CHECKPOINT = "result.json", "epochs.jsonl", "lm-eval.json", "checkpoint"
DEFINITIONS = (".json", ".cells")
RECORDS = (".json", ".jsonl", ".parquet")
"""What tables are made of; all else in a trial's folder is weights and logs."""


class Mirror:
    """What one process fetches from the storage and puts there.

    Args:
        home: This host's.
        storage: None = every host sees this home.
        fence: The claim of the driver that this process works for; None = nobody can take the sweep over.
    """

    def __init__(
        self, home: Home, storage: Storage | None = None, fence: Fence | None = None
    ) -> None:
        self.home, self.storage, self.fence = home, storage, fence
        self._pushed: dict[Path, tuple[int, int]] = {}

    @classmethod
    def of(cls, workspace: Workspace) -> Mirror:
        """That of a sweep: patient, but done with waiting before the other ranks are."""
        url, patience_s = workspace.storage, workspace.collective_timeout_s / 2
        return cls(
            workspace.home,
            None if url is None else open_storage(url, patience_s=patience_s),
            workspace.fence,
        )

    # ---- a trial's folder -----------------------------------------------------------------------------------------

    def push(self, folder: TrialFolder) -> None:
        """Put what the folder holds, but its logs and what has a way of its own: result, failures, checkpoints."""
        if self.storage is None or not folder.path.is_dir():
            return
        files = [
            p
            for p in folder.path.iterdir()
            if p.is_file() and not p.name.startswith((".", "failure-")) and p.suffix != ".log"
        ]
        self._push_all(p for p in files if p.name != RESULT)

    def push_log(self, path: Path) -> None:
        """Put a log if that is possible at once: none is worth a trial."""
        if self.storage is not None and path.is_file():
            with contextlib.suppress(StorageError, OSError), self.storage.asked_once():
                self.storage.push(path, self.key(path))

    def end(self, folder: TrialFolder, result: TrialResult) -> TrialResult:
        """Put everything, then the result, then keep the result here; an earlier one stays and is returned.

        Raises:
            StaleDriverError: Another driver has taken the sweep over.
        """
        if self.fence is not None:
            self.fence.check()
        return self._end(folder, result)

    def settle(self, folder: TrialFolder) -> TrialResult | None:
        """The result of a trial, as stored; one that only this host has is put there first. While it has none, its failures come."""
        if self.storage is None:
            return folder.result()
        key = self.key(folder.path / RESULT)
        data, own = self.storage.read(key), folder.result()
        if data is not None:
            _keep(folder.path / RESULT, data)
            return folder.result()
        if own is not None:
            return self._end(folder, own)
        self._fetch_failures(folder)
        return None

    def add_failure(self, folder: TrialFolder, failure: FailureRecord) -> None:
        """Keep the record of an attempt, numbered after those of all hosts."""
        if self.storage is None:
            return folder.add_failure(failure)
        self._fetch_failures(folder)
        number, data = len(folder.failures()), (failure.model_dump_json(indent=1) + "\n").encode()
        while not self.storage.create(self.key(folder.path / f"failure-{number}.json"), data):
            number += 1
        write_atomic(folder.path / f"failure-{number}.json", data)
        return None

    def fetch(self, folder: TrialFolder) -> None:
        """Get what tables are made of, the result last: predictions, curve, failures."""
        self._fetch_folder(folder, is_record)

    def fetch_all(self, folder: TrialFolder) -> None:
        """`fetch`, and the weights of a trial that has ended."""
        self._fetch_folder(folder, lambda name: is_record(name) or name.endswith(".safetensors"))

    def fetch_begun(self, folder: TrialFolder) -> None:
        """Get what a trial that goes on from a checkpoint had kept by then, whatever lies here."""
        if self.storage is not None:
            names = {CURVE, folder.best.name, folder.predictions("validation").name}
            self._pull_all(
                key
                for key in self.storage.keys(self.key(folder.path))
                if key.rpartition("/")[2] in names
            )

    def fetch_weights(self, folder: TrialFolder) -> None:
        """Get a pretrain run's result and weights, unless this host has them as they were written."""
        if self.storage is None:
            return
        result = self.settle(folder)
        if (
            result is not None
            and result.weights_sha256 is not None
            and digest(folder.weights) != result.weights_sha256
        ):
            self.storage.pull(self.key(folder.weights), folder.weights)

    def fetch_file(self, path: Path) -> None:
        """Get one file, if there is one; it replaces what lies here."""
        if self.storage is not None and self.storage.exists(self.key(path)):
            self.storage.pull(self.key(path), path)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def push_file(self, path: Path) -> None:
        """Put one file, if there is one; of a checkpoint, before its marker."""
        if self.storage is not None and path.is_file():
            self.storage.push(path, self.key(path))

    def fetch_markers(self, checkpoints: Path, name: str) -> None:
        """Get the markers of all committed generations."""
        if self.storage is not None:
            self._pull_all(
                key for key in self.storage.keys(self.key(checkpoints)) if key.endswith(f"/{name}")
            )

    def fetch_files(self, generation: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Get the files of a generation that this host lacks or has otherwise; one that the storage lacks stays missing.

        Args:
            generation: Its folder.
            files: Name -> {"bytes": ..., "sha256": ...}, as its marker has them.
        """
        if self.storage is None:
            return
        stored = set(self.storage.keys(self.key(generation)))
        lacking = [
            generation / name
            for name, expected in files.items()
            if digest(generation / name) != expected["sha256"]
        ]
        self._pull_all(key for key in map(self.key, lacking) if key in stored)

    def generations(self, checkpoints: Path) -> list[int]:
        """Epochs of which anything is stored."""
        prefix = f"{self.key(checkpoints)}/"
        keys = [] if self.storage is None else self.storage.keys(prefix)
        return epochs_of({key.removeprefix(prefix).partition("/")[0] for key in keys})

    def drop(self, path: Path, marker: str) -> None:
        """Remove checkpoints from the storage; markers first, so that no remains look whole."""
        if self.storage is not None:
            for key in self.storage.keys(self.key(path)):
                if key.endswith(f"/{marker}"):
                    self.storage.delete(key)
            self.storage.delete(self.key(path))

    # ---- the whole home -------------------------------------------------------------------------------------------

    def fetch_home(self, *, weights: bool = False) -> int:
        """Get the records of every sweep that this home lacks; the storage's definitions and identity replace those here.

        Args:
            weights: Also what trained models and logs there are.

        Returns:
            Files that came.
        """
        if self.storage is None:
            return 0
        self._take_identity(self.storage)
        stored = self.storage.keys()
        keys = [key for key in stored if self._is_wanted(key, weights=weights)]
        results = [key for key in keys if key.endswith(f"/{RESULT}")]
        ended = {key.removesuffix(RESULT) for key in results if (self.home.path / key).exists()}
        lacking = [
            key for key in keys if not key.endswith(f"/{RESULT}") and self._is_due(key, ended)
        ]
        came = self._pull_all(lacking)
        return came + self._pull_all(
            key for key in results if key.removesuffix(RESULT) not in ended
        )

    def push_home(self) -> int:
        """Put what only this home has: trials that ended without a storage, or began without one.

        Returns:
            Trials that were put.
        """
        if self.storage is None:
            return 0
        stored, count = self.storage.keys(), 0
        begun, ended = (
            {key.rpartition("/")[0] for key in stored},
            {key.rpartition("/")[0] for key in stored if key.endswith(f"/{RESULT}")},
        )
        for folder in (*self.home.trials(), *self._pretrained()):
            key, result = self.key(folder.path), folder.result()
            if key not in ended and (result is not None or key not in begun):
                count += 1
                self._push_begun(folder)
                if result is not None:
                    self._end(folder, result)
        return count

    def push_definition(self, sweep: str) -> None:
        """Put what was decided about a sweep: its definition."""
        path = self.home.sweep_definition(sweep)
        self._push_all(p for suffix in DEFINITIONS if (p := path.with_suffix(suffix)).is_file())

    def push_tokenizers(self) -> None:
        """Put those that were trained for this home: a model is loaded with the one that it had."""
        self._push_all(
            p
            for p in (self.home.cache / "tokenizers").rglob("*")
            if p.is_file() and not p.name.startswith(".")
        )

    def key(self, path: Path) -> str:
        """The storage's name of a path of this home."""
        return path.relative_to(self.home.path).as_posix()

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _take_identity(self, storage: Storage) -> None:
        """All homes of a storage have one name: in MLflow and Optuna the runs of one host are those of the next."""
        path = identity_path(self.home)
        named = storage.read(self.key(path))
        if named is None:
            storage.create(self.key(path), home_id(self.home).encode())
            named = storage.read(self.key(path))
        if named:
            _keep(path, named)

    def _pretrained(self) -> Iterable[TrialFolder]:
        root = self.home.path / "pretrained"
        return (
            (TrialFolder(path) for path in sorted(root.iterdir()) if path.is_dir())
            if root.is_dir()
            else ()
        )

    def _push_begun(self, folder: TrialFolder) -> None:
        """A trial that no other host knows, with its failures and checkpoints; markers follow what they name."""
        assert self.storage is not None
        self.push(folder)
        inside = [
            p
            for p in (folder.path / CHECKPOINT).rglob("*")
            if p.is_file() and not p.name.startswith(".")
        ]
        self._push_all(
            (*folder.path.glob("failure-*.json"), *(p for p in inside if p.suffix != ".json"))
        )
        self._push_all(p for p in inside if p.suffix == ".json")

    def _end(self, folder: TrialFolder, result: TrialResult) -> TrialResult:
        if self.storage is None:
            known = folder.result()
            if known is None:
                folder.write_result(result)
            return known or result
        self.push(folder)
        key, data = self.key(folder.path / RESULT), json_bytes(result.model_dump(mode="json"))
        if not self.storage.create(key, data):
            data = self.storage.read(key) or data
        _keep(folder.path / RESULT, data)
        return folder.result() or result

    def _fetch_failures(self, folder: TrialFolder) -> None:
        self._fetch_folder(folder, lambda name: name.startswith("failure-"))

    def _fetch_folder(self, folder: TrialFolder, wanted: Callable[[str], bool]) -> None:
        """Files that lie in the folder itself: those that are lacking, and those that may have changed."""
        if self.storage is None:
            return
        prefix, ended = f"{self.key(folder.path)}/", (folder.path / RESULT).exists()
        keys = [
            key
            for key in self.storage.keys(prefix)
            if "/" not in key.removeprefix(prefix) and wanted(key.removeprefix(prefix))
        ]
        self._pull_all(
            key
            for key in keys
            if not key.endswith(f"/{RESULT}") and self._is_due(key, {prefix} if ended else set())
        )
        self._pull_all(key for key in keys if key.endswith(f"/{RESULT}") and not ended)

    def _is_wanted(self, key: str, *, weights: bool) -> bool:
        """Whether other commands read it: not claims, locks, checkpoints."""
        root, _, rest = key.partition("/")
        *middle, name = rest.split("/")
        if root == "sweeps":
            return not middle and name.endswith(DEFINITIONS)
        if root == "cache":
            return weights and middle[:1] == ["tokenizers"]
        return (
            root in ("trials", "pretrained", "lm-eval")
            and len(middle) == 1
            and (weights or is_record(name))
        )

    def _is_due(self, key: str, ended: set[str]) -> bool:
        """Whether to get it: lacking here, or of the kind that changes. Of a trial that has ended only lm-eval's record does."""
        folder, _, name = key.rpartition("/")
        if not (self.home.path / key).exists() or folder == "sweeps":
            return True
        if f"{folder}/" in ended:
            return name == EVALUATIONS
        return name in (CURVE, EVALUATIONS) or name.endswith(".parquet")

    def _push_all(self, paths: Iterable[Path]) -> None:
        """Those that changed since this process put them, a few at a time; the first error is raised when none is on its way any more."""
        storage = self.storage
        if storage is None:
            return

        def push(path: Path) -> None:
            stat = path.stat()
            if self._pushed.get(path) != (stat.st_mtime_ns, stat.st_size):
                storage.push(path, self.key(path))
                self._pushed[path] = (stat.st_mtime_ns, stat.st_size)

        _each(push, paths)

    def _pull_all(self, keys: Iterable[str]) -> int:
        storage = self.storage
        assert storage is not None
        return len(_each(lambda key: storage.pull(key, self.home.path / key), keys))


def epochs_of(names: Iterable[str]) -> list[int]:
    """The epochs of folders `epoch-<n>`, sorted; other names are left out."""
    numbers = [name.removeprefix("epoch-") for name in names if name.startswith("epoch-")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def is_record(name: str) -> bool:
    """Whether a file of a trial's folder is one that tables are made of."""
    return name.endswith(RECORDS)


def digest(path: Path) -> str | None:
    """SHA-256 of a file, None where there is none."""
    try:
        return sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _keep(path: Path, data: bytes) -> None:
    """Write where something else lies: an equal file keeps its time, by which others see that nothing changed."""
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def _each(call: Callable[[T], None], items: Iterable[T]) -> list[T]:
    work = list(items)
    if len(work) == 1:
        call(work[0])
    elif work:
        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(call, work))
    return work
