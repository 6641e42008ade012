"""Find plug-ins by scanning folders: one file, one class, one name.

A file `suite/petl/lora.py` that defines one concrete subclass of `Method` *is* the method `lora`.
Nothing is registered by hand. The user's own folders come first (`SUITE_PATH`, see `user_folders`),
so that adding a method, a variant, a task or a search space edits no existing file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from suite.errors import ConfigError, OwnCodeError, SuiteError, UnknownNameError
from suite.signals import Stopped

T = TypeVar("T")


PACKAGE = Path(__file__).parent
"""The folder `suite/`."""
TASK_FOLDERS = "SUITE_TASKS"
"""Environment variable with folders of task files, separated by `:`. `--tasks DIR` sets it."""
OWN_MODULES = "suite_user"
"""The package in whose name the user's files are imported."""


def user_folders(axis: str, *, code: bool = False) -> list[Path]:
    """The user's own folders for one axis, which are searched before the shipped one.

    Args:
        axis: "petl", "attention", "backbones", "generators", "tasks", "search_spaces" or "sweeps".
        code: Only folders from which Python is taken, never the working folder.

    Returns:
        The existing ones of these: for tasks the folders in `SUITE_TASKS`; `<root>/<axis>` for
        every root in the environment variable `SUITE_PATH` (separated by `:`); for YAML, the
        working folder's.
    """
    candidates = []
    if axis == "tasks":
        candidates += _folders(TASK_FOLDERS)
    roots = plug_in_roots()
    # Python is never taken from wherever the command happens to run.
    if axis in ("tasks", "search_spaces", "sweeps") and not code:
        roots.append(Path.cwd())
    candidates += [root / axis for root in roots]
    return [folder for folder in candidates if folder.is_dir()]


def plug_in_roots() -> list[Path]:
    """The folders in `SUITE_PATH`, from which the user takes code."""
    return _folders("SUITE_PATH")


def check_plug_in_roots() -> None:
    """Refuse a folder of plug-ins or tasks that is not there: they would be missing in silence.

    Raises:
        ConfigError: With the folder, and what to do.
    """
    expected = {
        "SUITE_PATH": "folders with petl/, attention/, tasks/, ... in them",
        TASK_FOLDERS: "folders whose *.yaml and *.py are tasks",
    }
    for variable, folders in expected.items():
        for folder in _folders(variable):
            if not folder.is_dir():
                raise ConfigError(
                    f"{variable}: {folder}: no such folder (looked from {Path.cwd()}); expected "
                    f"{folders}, and {os.pathsep!r} between them"
                )


def _folders(variable: str) -> list[Path]:
    return [Path(p) for p in os.environ.get(variable, "").split(os.pathsep) if p]


def shipped_folder(axis: str) -> Path:
    """The folder of this axis that comes with the project."""
    in_wheel = PACKAGE / "_shipped" / axis
    if in_wheel.is_dir():
        return in_wheel
    # In a checkout it lies beside the package.
    return PACKAGE.parent / axis


def yaml_names(axis: str) -> dict[str, Path]:
    """Every YAML file of an axis by its stem.

    A user's file hides a shipped one of the same name.
    """
    found: dict[str, Path] = {}
    for folder in (*user_folders(axis), shipped_folder(axis)):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def find_sweep(given: str) -> Path:
    """The file of a path, or of a name that `suite list sweeps` knows.

    Raises:
        UnknownNameError: It is neither.
        ConfigError: It is a folder.
    """
    known = yaml_names("sweeps")
    path = Path(given)
    if path.is_file():
        return path
    if given in known:
        return known[given]
    where = "SWEEP (a file or a known name)"
    if path.is_dir():
        held = ", ".join(_yaml_files(path)) or "none"
        raise ConfigError(f"{where}: {given} is a folder; sweeps may be among its files: {held}")
    advice = ""
    if path.suffix in (".yaml", ".yml"):
        advice = f"there is no such file; suite init {given} writes one"
    # A typing error in a path is likely, so files beside it are suggested too
    names = [*known, *_yaml_files(path.parent)]
    raise UnknownNameError("sweep", given, names, where=where, advice=advice)


def _yaml_files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("*.yaml") if path.is_file())


def plug_in_files(folder: Path) -> list[Path]:
    """The files of a folder that may define a plug-in; names with `_` in front are helpers."""
    found = []
    for path in sorted(folder.glob("*.py")):
        if not path.stem.startswith("_") and path.stem != "base":
            found.append(path)
    return found


class Registry(Generic[T]):
    """The classes of one axis, found by scanning `suite/<package>/*.py` and the user's folders.

    Args:
        kind: Word used in errors ("method").
        base: Class that every plug-in derives from. It carries `name` (defaults to the file's stem)
            and `aliases`.
        package: Dotted name of the folder to scan, e.g. "suite.petl".
        axis: Name of the sub-folder in the user's roots.
    """

    def __init__(self, kind: str, base: type[T], package: str, axis: str) -> None:
        self.kind = kind
        self.base = base
        self.package = package
        self.axis = axis
        self._classes: dict[str, type[T]] = {}
        self._own: dict[type[T], str] = {}
        self._scanned: tuple[Path, ...] | None = None

    def names(self) -> list[str]:
        """All names, sorted, without aliases."""
        return sorted(self._scan())

    def get(self, name: str, *, where: str = "") -> type[T]:
        """The class of a name or alias.

        Raises:
            UnknownNameError: No file defines it; near names are offered.
        """
        classes = self._scan()
        if name in classes:
            return classes[name]
        # Names come before aliases, so that nobody's alias hides a class.
        for cls in classes.values():
            if name in getattr(cls, "aliases", ()):
                return cls
        raise UnknownNameError(self.kind, name, classes, where=where, advice=self._read_for(name))

    def _read_for(self, name: str) -> str:
        """That a file of the user's has an unknown name and no class of this axis; "" = none is."""
        with_class = {cls.__module__ for cls in self._scan().values()}
        for folder in user_folders(self.axis):
            for path in plug_in_files(folder):
                module = f"{OWN_MODULES}.{self.axis}.{path.stem}"
                if stem_to_name(path.stem) == stem_to_name(name) and module not in with_class:
                    return f"{path} was read, and defines no subclass of {self.base.__name__}"
        return ""

    def own_names(self) -> list[str]:
        """The names whose class comes from a folder of the user's, sorted."""
        return sorted(name for name, cls in self._scan().items() if cls in self._own)

    def digest(self, cls: type[T]) -> str | None:
        """SHA-256 of the user's file that defines a class; None = the class is no user's."""
        return self._own.get(cls)

    def _scan(self) -> dict[str, type[T]]:
        folders = tuple(user_folders(self.axis))
        # A changed SUITE_PATH is noticed; a changed file in a folder is not.
        if self._scanned == folders:
            return self._classes
        shipped = Path(next(iter(importlib.import_module(self.package).__path__)))
        found: dict[str, type[T]] = {}
        own: dict[str, Path] = {}
        for folder in (*folders, shipped):
            for path in plug_in_files(folder):
                cls = self._class_in(self._load(path, shipped=folder == shipped))
                if cls is None:
                    continue
                name = getattr(cls, "name", "") or stem_to_name(path.stem)
                if folder != shipped:
                    self._own[cls] = hashlib.sha256(path.read_bytes()).hexdigest()
                    # Which of the two would run depends on the order of folders and files.
                    if own.setdefault(name, path) != path:
                        raise ConfigError(
                            f"{path}: defines the {self.kind} {name!r}, as {own[name]} does; "
                            "rename or remove one of the two"
                        )
                # The user's folders come first and hide shipped classes of the same name.
                found.setdefault(name, cls)
        self._classes = found
        self._scanned = folders
        return found

    def _load(self, path: Path, *, shipped: bool) -> ModuleType:
        if shipped:
            return importlib.import_module(f"{self.package}.{path.stem}")
        name = f"{OWN_MODULES}.{self.axis}.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Before the file runs: dataclasses look their module up here.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        # A user's file may raise anything, or be a script that exits; the error says which file.
        except (Exception, SystemExit) as error:
            if isinstance(error, Stopped):
                raise
            raise ConfigError(
                f"{path}: cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return module

    def _class_in(self, module: ModuleType) -> type[T] | None:
        """The one concrete subclass of `base` that this module defines; None for helper modules."""
        classes = []
        unfinished = []
        for value in vars(module).values():
            # Classes that the module imports are not its own.
            if not inspect.isclass(value) or value.__module__ != module.__name__:
                continue
            if issubclass(value, self.base) and inspect.isabstract(value):
                unfinished.append(value)
            elif issubclass(value, self.base):
                classes.append(value)
        if len(classes) > 1:
            names = ", ".join(cls.__name__ for cls in classes)
            raise ConfigError(
                f"{module.__file__}: defines {len(classes)} {self.kind} classes ({names}), "
                "expected one"
            )
        # A misspelt function leaves the class abstract, and its name would be unknown.
        if unfinished and not classes:
            self._check_whole(unfinished[0], module)
        if not classes:
            return None
        cls = classes[0]
        if "name" not in vars(cls):
            cls.name = stem_to_name(module.__name__.rsplit(".", 1)[-1])  # type: ignore[attr-defined]
        self._check_whole(cls, module)
        return cls

    def _check_whole(self, cls: type[T], module: ModuleType) -> None:
        """Refuse a class without a function or an attribute that `base` leaves open.

        Raises:
            ConfigError: With the file, what is missing, and near names that the class has.
        """
        # `inspect.isabstract` is true where this set is not empty.
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        for name in inspect.get_annotations(self.base):
            # The file's stem gives the name.
            if name != "name" and not hasattr(cls, name):
                missing.append(name)
        if missing:
            raise ConfigError(
                f"{module.__file__}: class {cls.__name__} is no whole {self.kind}: "
                f"it does not define {_with_near_names(cls, missing)}"
            )


def _with_near_names(cls: type, missing: Sequence[str]) -> str:
    """What a class must define and does not, each with a near name that it has."""
    own = [name for name in vars(cls) if not name.startswith("__")]
    said = []
    for name in missing:
        near = get_close_matches(name, own, n=1)
        said.append(f"{name} (it has {near[0]})" if near else name)
    return ", ".join(said)


@contextmanager
def own_code_named() -> Iterator[None]:
    """Turn what a plug-in of the user's raises into an error that names its file and line.

    An exception that passed through no such file is a bug of ours, and keeps its traceback.

    Raises:
        OwnCodeError: The user's code raised something; the exception is its cause.
    """
    try:
        yield
    except SuiteError:
        raise
    # A user's file may raise anything, or exit.
    except (Exception, SystemExit) as error:
        place = _own_line(error)
        if place is None or isinstance(error, Stopped):
            raise
        raise OwnCodeError(f"{place}: {type(error).__name__}: {error}") from error


def _own_line(error: BaseException) -> str | None:
    """File and line of the user's that an exception passed through, the innermost one."""
    place = None
    # The innermost frame comes last.
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(f"{OWN_MODULES}."):
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def stem_to_name(stem: str) -> str:
    """Turn `mhe_add` into `mhe-add`: names have hyphens where modules have underscores."""
    return stem.replace("_", "-")
