"""Files of tasks: where they are, and what one in Python may say that YAML cannot.

`tasks/NAME.py` holds `TASK`, a dictionary with the keys of a YAML task, and any of

    reads = ["raw", "columns"]                  what `rows` is given, by the data's names
    def rows(row) -> Mapping | None             one raw row -> the task's columns; None drops it
    def score(predictions, golds) -> dict       every metric that TASK["metrics"] names, over a whole split; more is better

Listing tasks never runs such a file; asking for one by name does. What it says is part of the trial: a task carries the
file's hash, and a worker that finds another file under the name refuses it.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from suite.config.loader import Key, Lines, Strict, load_yaml
from suite.errors import ConfigError, UnknownNameError
from suite.registry import shipped_folder, stem_to_name, user_folders

RowHook = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
ScoreHook = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]


class CodeConfig(Strict):
    """What a task takes from its Python file.

    Attributes:
        sha256: Of the file.
        rows: Whether it makes the rows.
        score: Whether it computes the metrics.
    """

    sha256: str
    rows: bool = False
    score: bool = False


class Coded(Protocol):
    """A task, as far as this module needs one."""

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> list[Any]: ...
    @property
    def code(self) -> CodeConfig | None: ...


@dataclass(frozen=True, slots=True)
class TaskCode:
    """The functions of a task file that ran.

    Attributes:
        task: Its `TASK`.
        reads: Columns of the data that `rows` is given.
    """

    path: Path
    sha256: str
    task: dict[str, Any]
    reads: tuple[str, ...]
    rows: RowHook | None
    score: ScoreHook | None

    @property
    def config(self) -> CodeConfig:
        return CodeConfig(
            sha256=self.sha256, rows=self.rows is not None, score=self.score is not None
        )

    def convert(
        self, row: Mapping[str, Any], columns: Sequence[str], *, where: str
    ) -> dict[str, Any] | None:
        """One raw row as the task's columns; None = left out.

        Raises:
            ConfigError: `rows` raised, or gave something else.
        """
        assert self.rows is not None
        with _blamed(self.path, f"rows(), {where}"):
            made = self.rows(row)
        if made is None:
            return None
        if not isinstance(made, Mapping) or any(column not in made for column in columns):
            got = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
            raise ConfigError(
                f"{self.path}: rows(), {where}: gave {got}, expected the columns {[*columns]} (or None to drop the row)"
            )
        return {column: made[column] for column in columns}

    def scores(
        self, predictions: Sequence[Any], golds: Sequence[Any], metrics: Sequence[str]
    ) -> dict[str, float]:
        """Every metric.

        Raises:
            ConfigError: `score` raised, or gave something else than a number for each.
        """
        assert self.score is not None
        with _blamed(self.path, "score()"):
            made = self.score(predictions, golds)
        if not isinstance(made, Mapping) or set(made) != set(metrics):
            got = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
            raise ConfigError(
                f"{self.path}: score(): gave {got}, expected a number for each of metrics {[*metrics]}"
            )
        with _blamed(self.path, "score()"):
            numbers = {name: float(made[name]) for name in metrics}
        if any(map(math.isnan, numbers.values())):
            raise ConfigError(
                f"{self.path}: score(): gave NaN in {numbers}; say 0 where a metric is undefined"
            )
        return numbers


def task_paths() -> dict[str, Path]:
    """Every file of a task by its name, without running any; a user's hides a shipped one.

    Python is never taken from `tasks/` of the working folder, unless that is named.

    Raises:
        ConfigError: One folder has two files of a name.
    """
    found: dict[str, Path] = {}
    own = user_folders("tasks", code=True)
    for folder in dict.fromkeys((*user_folders("tasks"), shipped_folder("tasks"))):
        here: dict[str, Path] = {}
        code = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
        for path in (
            *sorted(folder.glob("*.yaml")),
            *(code if folder in own or folder == shipped_folder("tasks") else ()),
        ):
            if (name := task_name(path)) in here:
                raise ConfigError(
                    f"{path}: {here[name].name} beside it is the task {name!r} too; keep one of them"
                )
            here[name] = path
        found = {**here, **found}
    return found


def task_name(path: Path) -> str:
    """`tasks/odd_one.py` is the task `odd-one`; a YAML file's stem is its name as it stands."""
    return stem_to_name(path.stem) if path.suffix == ".py" else path.stem


def read_task_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The keys of a task and their lines; of a Python file, which is run, with `code` about the file.

    Raises:
        ConfigError: The file cannot be read, or raises.
    """
    if path.suffix == ".py":
        code = load_code(path)
        data, lines = dict(code.task), _lines(path)
    else:
        data, lines = load_yaml(path)
    if "code" in data:
        raise UnknownNameError(
            "key",
            "code",
            [key for key in data if key != "code"],
            where=f"{path}:{lines.get(('code',), 1)}",
        )
    return (data | {"code": code.config} if path.suffix == ".py" else data), lines


def load_code(path: Path) -> TaskCode:
    """Run a task file (once, as long as it does not change).

    Raises:
        ConfigError: It cannot be read, raises, or does not say what it must.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return _run(path.resolve(), content)


def code_of(task: Coded) -> TaskCode | None:
    """The functions of a task's file; None where it has none. Any process may ask: the file is found by the task's name.

    Raises:
        ConfigError: The file is gone, or is another than the one the task was made from.
    """
    if task.code is None:
        return None
    path = task_paths().get(task.name)
    how = "its folder must be named by --tasks, SUITE_TASKS or SUITE_PATH, on every machine alike"
    if path is None or path.suffix != ".py":
        raise ConfigError(
            f"task {task.name}: its Python file was not found (found: {path or 'none'}); {how}"
        )
    code = load_code(path)
    if code.sha256 != task.code.sha256:
        raise ConfigError(
            f"task {task.name}: {path} (sha256 {code.sha256[:12]}) is not the file that this trial was made from "
            f"({task.code.sha256[:12]}); an edited file is another task: start its trials anew, or restore it; {how}"
        )
    return code


def own_score(task: Coded) -> Callable[[Sequence[Any], Sequence[Any]], dict[str, float]] | None:
    """How a task's file scores predictions against golds; None where the suite does.

    Raises:
        ConfigError: As `code_of`.
    """
    if task.code is None or not task.code.score:
        return None
    code = code_of(task)
    assert code is not None
    return lambda predictions, golds: code.scores(predictions, golds, task.metrics)


def describe(path: Path) -> dict[str, str]:
    """`description` and `source` of a Python task as far as they are written out: read, not run."""
    given = _task_dict(path)
    pairs = zip(given.keys, given.values, strict=True) if given is not None else ()
    texts = {
        k.value: v.value
        for k, v in pairs
        if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)
    }
    return {key: str(texts.get(key, "")) for key in ("description", "source")}


@lru_cache(maxsize=64)
def _run(path: Path, content: bytes) -> TaskCode:
    module = _module(path, content)
    task, reads = getattr(module, "TASK", None), getattr(module, "reads", ())
    if not isinstance(task, dict) or not all(isinstance(key, str) for key in task):
        raise ConfigError(
            f"{path}: TASK is {type(task).__name__}, expected a dictionary with the keys of a YAML task"
        )
    if not isinstance(reads, (list, tuple)) or not all(isinstance(name, str) for name in reads):
        raise ConfigError(f"{path}: reads is {reads!r}, expected names of columns")
    hooks = {name: getattr(module, name, None) for name in ("rows", "score")}
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ConfigError(f"{path}: {name} is {hook!r}, expected a function")
    if (hooks["rows"] is None) != (not reads):
        raise ConfigError(
            f"{path}: give rows() and reads, the columns of the data that it needs, together"
        )
    return TaskCode(path, hashlib.sha256(content).hexdigest(), task, tuple(reads), **hooks)


def _module(path: Path, content: bytes) -> ModuleType:
    """The file as a module: exactly the bytes that are hashed, whatever compiled copies lie about."""
    module = ModuleType(f"suite_user.tasks.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    with _blamed(path, "cannot be run"):
        exec(compile(content, path, "exec"), vars(module))  # noqa: S102 - a task in Python was asked for by name, and is its user's own
    return module


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes a ConfigError with the file's line."""
    try:
        yield
    except Exception as error:
        line = _line_in(path, error)
        raise ConfigError(
            f"{path}{f':{line}' if line else ''}: {what}: {type(error).__name__}: {error}"
        ) from error


def _line_in(path: Path, error: Exception) -> int | None:
    """The deepest line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == str(path)
    ]
    return lines[-1] if lines else None


def _task_dict(path: Path) -> ast.Dict | None:
    """The literal `TASK = {...}` of a file; None where it is made otherwise."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "TASK" for target in targets):
                return node.value
    return None


def _lines(path: Path) -> Lines:
    given = _task_dict(path)
    return {} if given is None else dict(_lines_of(given, ()))


def _lines_of(node: ast.AST, at: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield (*at, key.value), key.lineno
                yield from _lines_of(value, (*at, key.value))
    elif isinstance(node, (ast.List, ast.Tuple)):
        for i, value in enumerate(node.elts):
            yield (*at, i), value.lineno
            yield from _lines_of(value, (*at, i))
