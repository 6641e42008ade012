"""A mirror keeps a copy of a home below a URL, for hosts that share no disk.

Each host has a home of its own, and what all must know lies in the storage. Keys are paths below
the home (`suite.record.folder`). A trial's result is created last, after everything that it speaks
of, and never replaced. A checkpoint's marker is written last, after the files that it names. So a
host that dies between two pushes leaves nothing that looks whole and is not. Without a storage
every call does what one home needs, so that callers need not ask.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from suite.errors import StorageError
from suite.files import sha256, write_atomic
from suite.record import looks
from suite.record.folder import (
    CHECKPOINT,
    CURVE,
    MARKER,
    PRETRAINED,
    RESULT,
    Home,
    TrialFolder,
)
from suite.record.lm_eval import FILE as LM_EVAL
from suite.record.lm_eval import merge_record
from suite.record.result import FailureRecord, TrialResult
from suite.storage.base import Storage
from suite.storage.fence import Fence
from suite.storage.identity import (
    SHARED,
    home_id,
    identity_path,
    remember_token,
    renew_unused,
    tokens,
)
from suite.storage.urls import open_storage
from suite.storage.workspace import Workspace

T = TypeVar("T")
TRANSFERS = 8
"""Files on their way at once."""
TRIES = 3
"""How often a result is put, each time after the fence was asked."""
DEFINITIONS = (".json", ".cells")
RECORDS = (".json", ".jsonl", ".parquet")
"""Tables are made of these; all else in a trial's folder is weights and logs."""


class Mirror:
    """One process's way to fetch files from the storage and to put files there.

    Args:
        home: The home of this host.
        storage: The home's copy; None = every host sees this home.
        fence: The claim of the driver that this process works for; None = no other driver can take
            the sweep over.
    """

    def __init__(
        self, home: Home, storage: Storage | None = None, fence: Fence | None = None
    ) -> None:
        self.home = home
        self.storage = storage
        self.fence = fence
        # Modification time in ns, and size, of every file that this process has put.
        self._pushed: dict[Path, tuple[int, int]] = {}

    @classmethod
    def of(cls, workspace: Workspace) -> Mirror:
        """The mirror of a rank's home."""
        storage: Storage | None = None
        if workspace.storage is not None:
            storage = open_storage(workspace.storage, patience_s=workspace.patience_s)
        return cls(workspace.home, storage, workspace.fence)

    # ---- a trial's folder ----

    def push(self, folder: TrialFolder) -> None:
        """Put what the folder holds, without its logs, result, failures and checkpoints.

        Results, failures and checkpoints have calls of their own.
        """
        if self.storage is None or not folder.path.is_dir():
            return
        files = []
        for path in folder.path.iterdir():
            # Hidden files are still being written.
            has_own_call = path.name == RESULT or path.name.startswith((".", "failure-"))
            if path.is_file() and not has_own_call and path.suffix != ".log":
                files.append(path)
        self._push_all(files)

    def push_log(self, path: Path) -> None:
        """Put a log if that is possible at once: no log is worth a trial."""
        if self.storage is not None and path.is_file():
            with contextlib.suppress(StorageError, OSError), self.storage.asked_once():
                self.storage.push(path, self.key(path))

    def end(self, folder: TrialFolder, result: TrialResult) -> TrialResult:
        """Put everything, then the result, then keep the result here.

        An earlier result stays, and is returned.

        Raises:
            StaleDriverError: Another driver has taken the sweep over.
        """
        if self.fence is not None:
            # A stored result is never replaced, so a driver that lost the sweep must not write one.
            self.fence.check(shared=folder.shared)
        return self._end(folder, result)

    def settle(self, folder: TrialFolder) -> TrialResult | None:
        """Return the stored result of a trial. If there is none, fetch its failures.

        A result that only this host has is put into the storage first.
        """
        own = folder.result()
        if self.storage is None:
            return own
        data = self.storage.read(self.key(folder.path / RESULT))
        if data is not None:
            # The stored result counts, even if this host has one of its own.
            return self._take(folder, data)
        # A stored result is never replaced, so a damaged one must not become it.
        if own is not None and own.damaged is None:
            return self._end(folder, own)
        if own is not None:
            return own
        self._fetch_failures(folder)
        return None

    def add_failure(self, folder: TrialFolder, failure: FailureRecord) -> None:
        """Keep the record of an attempt, numbered after those of all hosts."""
        if self.storage is None:
            folder.add_failure(failure)
            return
        self._fetch_failures(folder)
        data = (failure.model_dump_json(indent=1) + "\n").encode()
        # The failures of other hosts are here now, so the number is free as a rule.
        number = len(folder.failures())
        # Another host may have taken the number since.
        while not self.storage.create(self.key(folder.path / f"failure-{number}.json"), data):
            number += 1
        write_atomic(folder.path / f"failure-{number}.json", data)

    def fetch(self, folder: TrialFolder) -> None:
        """Get the files that tables are made of (predictions, curve, failures), the result last."""
        self._fetch_folder(folder, is_record)

    def fetch_all(self, folder: TrialFolder) -> None:
        """Get what `fetch` gets, and the weights of a trial that has ended."""
        self._fetch_folder(folder, lambda name: is_record(name) or name.endswith(".safetensors"))

    def fetch_begun(self, folder: TrialFolder) -> None:
        """Get the curve, best weights and predictions of a trial that goes on from a checkpoint.

        They replace what lies here.
        """
        if self.storage is None:
            return
        # The checkpoint's state speaks of these three files.
        names = {CURVE, folder.best.name, folder.predictions("validation").name}
        stored = self.storage.keys(self.key(folder.path))
        self._pull_all(key for key in stored if key.rpartition("/")[2] in names)

    def fetch_weights(self, folder: TrialFolder) -> None:
        """Get a pretrain run's result and weights, unless this host has the same bytes."""
        if self.storage is None:
            return
        result = self.settle(folder)
        if result is None or result.weights_sha256 is None:
            return
        if digest(folder.weights) != result.weights_sha256:
            self.storage.pull(self.key(folder.weights), folder.weights)

    def fetch_file(self, path: Path) -> None:
        """Get one file, if it is stored. It replaces what lies here, except lm-eval's record."""
        if self.storage is not None and self.storage.exists(self.key(path)):
            self._pull(self.storage, self.key(path))

    # ---- checkpoints ----

    def push_file(self, path: Path) -> None:
        """Put one file, if there is one. A checkpoint's files come before its marker."""
        if self.storage is not None and path.is_file():
            self.storage.push(path, self.key(path))

    def fetch_markers(self, checkpoints: Path, name: str) -> None:
        """Get the markers of all committed generations."""
        if self.storage is None:
            return
        stored = self.storage.keys(self.key(checkpoints))
        self._pull_all(key for key in stored if key.endswith(f"/{name}"))

    def fetch_files(self, generation: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Get the files of a generation that this host lacks, or has with other bytes.

        A file that the storage lacks stays missing.

        Args:
            generation: Folder of the generation.
            files: Name -> {"bytes": ..., "sha256": ...}, as its marker has them.
        """
        if self.storage is None:
            return
        stored = set(self.storage.keys(self.key(generation)))
        lacking = []
        for name, expected in files.items():
            key = self.key(generation / name)
            if key in stored and digest(generation / name) != expected["sha256"]:
                lacking.append(key)
        self._pull_all(lacking)

    def generations(self, checkpoints: Path) -> list[int]:
        """The epochs of which anything is stored."""
        if self.storage is None:
            return []
        prefix = f"{self.key(checkpoints)}/"
        keys = self.storage.keys(prefix)
        return epochs_of({key.removeprefix(prefix).partition("/")[0] for key in keys})

    def drop_checkpoint(self, folder: TrialFolder) -> None:
        """Remove the checkpoints of a trial that has ended, here and from the storage."""
        shutil.rmtree(folder.checkpoint, ignore_errors=True)
        # Files that cannot be removed now disturb nobody.
        with contextlib.suppress(StorageError):
            self.drop(folder.checkpoint)

    def drop(self, path: Path) -> None:
        """Remove checkpoints from the storage, markers first, so that no remains look whole."""
        if self.storage is None:
            return
        for key in self.storage.keys(self.key(path)):
            if key.endswith(f"/{MARKER}"):
                self.storage.delete(key)
        self.storage.delete(self.key(path))

    # ---- the whole home ----

    def fetch_home(self, *, weights: bool = False) -> int:
        """Get the records of every sweep that this home lacks.

        The storage's definitions and identity replace those here.

        Args:
            weights: Get trained models and logs too.

        Returns:
            Files that came.
        """
        if self.storage is None:
            return 0
        self._take_identity(self.storage)
        stored = self.storage.keys()
        return self._pull_due(key for key in stored if self._is_wanted(key, weights=weights))

    def push_home(self) -> int:
        """Put the trials that only this home has: those that ended or began without a storage.

        Returns:
            Trials that were put.
        """
        if self.storage is None:
            return 0
        begun = set()
        ended = set()
        stored = self.storage.keys()
        for key in stored:
            parent, _, name = key.rpartition("/")
            begun.add(parent)
            if name == RESULT:
                ended.add(parent)
        count = 0
        for folder in (*self.home.trials(), *self._pretrained()):
            key = self.key(folder.path)
            result = folder.result()
            if result is not None and result.damaged is not None:
                continue
            # A trial that is stored without a result may be running elsewhere: it is left alone
            # unless this host has the result.
            if key not in ended and (result is not None or key not in begun):
                count += 1
                self._push_begun(folder)
                if result is not None:
                    self._end(folder, result)
        return count

    def push_definition(self, sweep: str) -> None:
        """Put the files that define a sweep."""
        definition = self.home.sweep_definition(sweep)
        paths = [definition.with_suffix(suffix) for suffix in DEFINITIONS]
        # These first: a definition with other seeds must not come without them.
        self._push_all(_visible_files(looks.folder(self.home, sweep)))
        self._push_all(path for path in paths if path.is_file())

    def push_tokenizers(self) -> None:
        """Put the tokenizers that were trained here, because a model is loaded with its own."""
        self._push_all(_visible_files(self.home.cache / "tokenizers"))

    def key(self, path: Path) -> str:
        """The storage's name of a path of this home."""
        return path.relative_to(self.home.path).as_posix()

    # ---- parts ----

    def _take_identity(self, storage: Storage) -> None:
        """Take the storage's name, so that all hosts are one home to MLflow and Optuna."""
        path = identity_path(self.home)
        named = storage.read(self.key(path))
        if SHARED in tokens(self.home) and named != home_id(self.home).encode():
            # Its trials would count as this storage's, and both would write the same MLflow runs.
            if any(self.home.trials()):
                raise StorageError(
                    f"{self.home.path}: got a home that belongs to another storage than"
                    f" {storage.url} (or to this one before it was emptied), expected a new one;"
                    " give another --home"
                )
            # A start with the other storage was refused, or nothing has been trained yet.
            renew_unused(self.home)
        if named is None:
            # Several hosts may do this at once. One creates it, and all read back that one.
            storage.create(self.key(path), home_id(self.home).encode())
            named = storage.read(self.key(path))
        if named:
            _keep(path, named)
            remember_token(self.home, SHARED)

    def _pretrained(self) -> Iterable[TrialFolder]:
        root = self.home.path / PRETRAINED
        if not root.is_dir():
            return []
        return [TrialFolder(path) for path in sorted(root.iterdir()) if path.is_dir()]

    def _push_begun(self, folder: TrialFolder) -> None:
        """Put a trial that no other host knows, with its failures and checkpoints."""
        self.push(folder)
        checkpoints = _visible_files(folder.path / CHECKPOINT)
        self._push_all(folder.path.glob("failure-*.json"))
        # Markers follow what they name.
        self._push_all(path for path in checkpoints if path.suffix != ".json")
        self._push_all(path for path in checkpoints if path.suffix == ".json")

    def _end(self, folder: TrialFolder, result: TrialResult) -> TrialResult:
        if self.storage is None:
            known = folder.result()
            if known is None:
                folder.write_result(result)
            return known or result
        key = self.key(folder.path / RESULT)
        # If another host was first, its result stays, with its files.
        stored = self.storage.read(key)
        if stored is None:
            self.push(folder)
            data = result.as_bytes()
            if self._create(key, data, shared=folder.shared):
                _keep(folder.path / RESULT, data)
                return folder.result() or result
            stored = self.storage.read(key) or data
        return self._take(folder, stored) or result

    def _create(self, key: str, data: bytes, *, shared: str | None) -> bool:
        """Create a key that no driver may set that lost its sweep, however long it was cut off."""
        assert self.storage is not None
        if self.fence is None:
            return self.storage.create(key, data)
        for tries_left in reversed(range(TRIES)):
            # The fence waits for a storage that is away; the key itself must not, or another driver
            # could take the sweep over in between.
            self.fence.check(shared=shared)
            try:
                with self.storage.asked_once():
                    return self.storage.create(key, data)
            except StorageError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _take(self, folder: TrialFolder, data: bytes) -> TrialResult | None:
        """Keep a stored result here, after the files that it speaks of."""
        # An earlier attempt here may have left others.
        if folder.result() is None:
            self._fetch_folder(folder, is_record)
        _keep(folder.path / RESULT, data)
        return folder.result()

    def _fetch_failures(self, folder: TrialFolder) -> None:
        self._fetch_folder(folder, lambda name: name.startswith("failure-"))

    def _fetch_folder(self, folder: TrialFolder, wanted: Callable[[str], bool]) -> None:
        """Get files that lie in the folder itself, if they are lacking or may have changed."""
        if self.storage is None:
            return
        prefix = f"{self.key(folder.path)}/"
        keys = []
        for key in self.storage.keys(prefix):
            name = key.removeprefix(prefix)
            if "/" not in name and wanted(name):
                keys.append(key)
        self._pull_due(keys)

    def _pull_due(self, keys: Iterable[str]) -> int:
        """Get the files that are due, results last: a trial with a result is whole here."""
        others = []
        results = []
        ended: set[str] = set()
        for key in keys:
            folder, _, name = key.rpartition("/")
            if name != RESULT:
                others.append(key)
            elif (self.home.path / key).exists():
                ended.add(folder)
            else:
                results.append(key)
        came = self._pull_all(key for key in others if self._is_due(key, ended))
        return came + self._pull_all(results)

    def _is_wanted(self, key: str, *, weights: bool) -> bool:
        """Whether other commands read the file: claims, locks and checkpoints are left out."""
        root, _, rest = key.partition("/")
        *middle, name = rest.split("/")
        if root == "sweeps":
            return (not middle or middle[0] == looks.FOLDER) and name.endswith(DEFINITIONS)
        if root == "cache":
            return weights and middle[:1] == ["tokenizers"]
        return (
            root in ("trials", PRETRAINED, "lm-eval")
            # deeper paths are checkpoints
            and len(middle) == 1
            and (weights or is_record(name))
        )

    def _is_due(self, key: str, ended: set[str]) -> bool:
        """Whether to get a file, because it is lacking here or is of a kind that changes."""
        folder, _, name = key.rpartition("/")
        # A later run may extend a definition, so definitions are always due.
        if not (self.home.path / key).exists() or folder == "sweeps":
            return True
        # Of a trial that has ended only lm-eval's record changes.
        if folder in ended:
            return name == LM_EVAL
        # A trial that still runs rewrites its curve and its predictions.
        return name in (CURVE, LM_EVAL) or name.endswith(".parquet")

    def _push_all(self, paths: Iterable[Path]) -> None:
        """Put the files that changed since this process put them, a few at a time.

        The first error is raised when no file is on its way any more.
        """
        storage = self.storage
        if storage is None:
            return

        def push(path: Path) -> None:
            # Looked at before the transfer: a change during it is put again the next time.
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if self._pushed.get(path) != version:
                storage.push(path, self.key(path))
                self._pushed[path] = version

        _each(push, paths)

    def _pull_all(self, keys: Iterable[str]) -> int:
        storage = self.storage
        assert storage is not None
        return len(_each(lambda key: self._pull(storage, key), keys))

    def _pull(self, storage: Storage, key: str) -> None:
        path = self.home.path / key
        # What somebody measured by hand is in this home alone.
        if path.name == LM_EVAL and merge_record(path.parent, storage.read(key) or b""):
            return
        storage.pull(key, path)


def epochs_of(names: Iterable[str]) -> list[int]:
    """The epochs of folders `epoch-<n>`, sorted; other names are left out."""
    epochs = []
    for name in names:
        prefix, _, number = name.partition("-")
        if prefix == "epoch" and number.isdecimal():
            epochs.append(int(number))
    return sorted(epochs)


def _visible_files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, which are still being written."""
    files = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            files.append(path)
    return files


def is_record(name: str) -> bool:
    """Whether a file of a trial's folder is one that tables are made of."""
    return name.endswith(RECORDS)


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None where there is no file."""
    try:
        return sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _keep(path: Path, data: bytes) -> None:
    """Write a file unless it holds these bytes: it keeps its time, and nothing looks changed."""
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def _each(call: Callable[[T], None], items: Iterable[T]) -> list[T]:
    work = list(items)
    if len(work) == 1:
        call(work[0])
    elif work:
        with ThreadPoolExecutor(TRANSFERS) as pool:
            # `list` raises the first error; an iterator that nobody reads would hide it.
            list(pool.map(call, work))
    return work
