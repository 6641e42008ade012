"""Find plug-ins by scanning folders: one file, one class, one name.

A file `suite/petl/lora.py` that defines one concrete subclass of `Method` *is* the method `lora`; nothing is
registered by hand. Folders of the user's own come first (`SUITE_PATH`, see `user_folders`), so that adding a method,
a variant, a task or a search space edits no existing file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from suite.errors import ConfigError, UnknownNameError

T = TypeVar("T")


TASK_FOLDERS = "SUITE_TASKS"
"""Environment variable: folders that hold files of tasks themselves, separated by `:`; what `--tasks DIR` sets."""


def user_folders(axis: str, *, code: bool = False) -> list[Path]:
    """Folders of the user's own for one axis, searched before the shipped one.

    Args:
        axis: "petl", "attention", "generators", "tasks", "search_spaces" or "sweeps".
        code: Only those from which Python is taken: never the working folder's own.

    Returns:
        `<root>/<axis>` for every root in the environment variable `SUITE_PATH` (separated by `:`) and, for YAML, the working
        folder, as far as they exist; of tasks, first the folders in `SUITE_TASKS`.
    """
    direct = _folders(TASK_FOLDERS) if axis == "tasks" else []
    roots = _folders("SUITE_PATH")
    if axis in ("tasks", "search_spaces", "sweeps") and not code:
        roots.append(Path.cwd())
    return [folder for folder in (*direct, *(root / axis for root in roots)) if folder.is_dir()]


def _folders(variable: str) -> list[Path]:
    return [Path(p) for p in os.environ.get(variable, "").split(os.pathsep) if p]


def shipped_folder(axis: str) -> Path:
    """The folder of this axis that comes with the project: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent / "_shipped" / axis
    return inside if inside.is_dir() else Path(__file__).parents[1] / axis


def yaml_names(axis: str) -> dict[str, Path]:
    """Every YAML file of an axis by its stem; a user's file hides a shipped one of the same name."""
    found: dict[str, Path] = {}
    for folder in (*user_folders(axis), shipped_folder(axis)):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


class Registry(Generic[T]):
    """The classes of one axis, found by scanning `suite/<package>/*.py` and the user's folders.

    Args:
        kind: Word used in errors ("method").
        base: Class that every plug-in derives from; it carries `name` (defaults to the file's stem) and `aliases`.
        package: Dotted name of the folder to scan, e.g. "suite.petl".
        axis: Name of the sub-folder in the user's roots.
    """

    def __init__(self, kind: str, base: type[T], package: str, axis: str) -> None:
        self.kind, self.base, self.package, self.axis = kind, base, package, axis
        self._classes: dict[str, type[T]] = {}
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
        for cls in classes.values():
            if name in getattr(cls, "aliases", ()):
                return cls
        raise UnknownNameError(self.kind, name, classes, where=where)

    def _scan(self) -> dict[str, type[T]]:
        folders = tuple(user_folders(self.axis))
        if self._scanned != folders:
            shipped = Path(next(iter(importlib.import_module(self.package).__path__)))
            found: dict[str, type[T]] = {}
            for folder in (*folders, shipped):
                for path in sorted(folder.glob("*.py")):
                    if path.stem.startswith("_") or path.stem == "base":
                        continue
                    cls = self._class_in(self._load(path, shipped=folder == shipped))
                    if cls is not None:
                        found.setdefault(getattr(cls, "name", "") or stem_to_name(path.stem), cls)
            self._classes, self._scanned = found, folders
        return self._classes

    def _load(self, path: Path, *, shipped: bool) -> ModuleType:
        if shipped:
            return importlib.import_module(f"{self.package}.{path.stem}")
        name = f"suite_user.{self.axis}.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's file may raise anything; say which file
            raise ConfigError(
                f"{path}: cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return module

    def _class_in(self, module: ModuleType) -> type[T] | None:
        """The one concrete subclass of `base` that this module defines; helper modules define none."""
        classes = [
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls)
            and issubclass(cls, self.base)
            and cls.__module__ == module.__name__
            and not inspect.isabstract(cls)
        ]
        if len(classes) > 1:
            names = ", ".join(cls.__name__ for cls in classes)
            raise ConfigError(
                f"{module.__file__}: defines {len(classes)} {self.kind} classes ({names}), expected one"
            )
        if not classes:
            return None
        cls = classes[0]
        if "name" not in vars(cls):
            cls.name = stem_to_name(module.__name__.rsplit(".", 1)[-1])  # type: ignore[attr-defined]
        return cls


def stem_to_name(stem: str) -> str:
    """`mhe_add` -> `mhe-add`: names are typed with hyphens, modules are named with underscores."""
    return stem.replace("_", "-")
