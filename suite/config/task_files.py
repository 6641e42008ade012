"""Files of tasks: where they are, and what a Python file may say that YAML cannot.

`tasks/NAME.py` holds `TASK`, a dictionary with the keys of a YAML task, and any of

    reads = ["raw", "columns"]             the columns that `rows` is given, by the data's names
    def rows(row) -> Mapping | None        one raw row -> the task's columns; None drops the row
    def score(predictions, golds) -> dict  every metric that TASK["metrics"] names, over a whole
                                           split; more is better

Listing tasks never runs such a file; asking for one by name does. What the file says is part of the
trial: a task carries the file's hash, and a worker that finds another file under the name refuses
it.
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
from suite.registry import OWN_MODULES, shipped_folder, stem_to_name, user_folders
from suite.signals import Stopped

RowHook = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
ScoreHook = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]


class CodeConfig(Strict):
    """What a task takes from its Python file.

    Attributes:
        sha256: Hash of the file.
        rows: Whether the file makes the rows.
        score: Whether the file computes the metrics.
    """

    sha256: str
    rows: bool = False
    score: bool = False


class Coded(Protocol):
    """What this module needs of a task."""

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> list[Any]: ...
    @property
    def code(self) -> CodeConfig | None: ...


@dataclass(frozen=True, slots=True)
class TaskCode:
    """What a task file holds, once it has run.

    Attributes:
        path: The file.
        sha256: The hash of the file.
        task: The dictionary `TASK` of the file.
        reads: Columns of the data that `rows` is given.
        rows, score: The functions of the file; None where it has none.
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
        """One raw row as the task's columns; None = the row is left out.

        Raises:
            ConfigError: `rows` raised an error, or gave something else.
        """
        assert self.rows is not None
        with _blamed(self.path, f"rows(), {where}"):
            made = self.rows(row)
        if made is None:
            return None
        # further columns do no harm and are left out below
        if not isinstance(made, Mapping) or not made.keys() >= set(columns):
            raise ConfigError(
                f"{self.path}: rows(), {where}: gave {_keys(made)}, "
                f"expected the columns {[*columns]} (or None to drop the row)"
            )
        return {column: made[column] for column in columns}

    def scores(
        self, predictions: Sequence[Any], golds: Sequence[Any], metrics: Sequence[str]
    ) -> dict[str, float]:
        """Every metric, as the file computes it.

        Raises:
            ConfigError: `score` raised an error, or gave no number for some metric.
        """
        assert self.score is not None
        with _blamed(self.path, "score()"):
            made = self.score(predictions, golds)
        if not isinstance(made, Mapping) or set(made) != set(metrics):
            raise ConfigError(
                f"{self.path}: score(): gave {_keys(made)}, "
                f"expected a number for each of metrics {[*metrics]}"
            )
        with _blamed(self.path, "score()"):
            numbers = {name: float(made[name]) for name in metrics}
        # NaN is neither better nor worse than a number, and no result can hold either of them.
        if not all(map(math.isfinite, numbers.values())):
            raise ConfigError(
                f"{self.path}: score(): gave {numbers}, expected finite numbers; "
                "say 0 where a metric is undefined"
            )
        return numbers


def _keys(made: Any) -> str:
    """The keys of what a user's function gave, or its type, for an error."""
    if isinstance(made, Mapping):
        return str(sorted(map(str, made)))
    return type(made).__name__


def task_paths() -> dict[str, Path]:
    """Every file of a task, by name; no file runs, and a user's file hides a shipped one.

    Python is never taken from `tasks/` of the working folder, unless the user names that folder.

    Raises:
        ConfigError: One folder has two files of the same name.
    """
    shipped = shipped_folder("tasks")
    # Python is taken only from folders that the user named, and from the suite itself
    with_code = [*user_folders("tasks", code=True), shipped]
    found: dict[str, Path] = {}
    for folder in (*user_folders("tasks"), shipped):
        paths = sorted(folder.glob("*.yaml"))
        if folder in with_code:
            # files such as `__init__.py` are no tasks
            paths += sorted(folder.glob("[!_]*.py"))
        here: dict[str, Path] = {}
        for path in paths:
            name = task_name(path)
            if name in here:
                raise ConfigError(
                    f"{path}: {here[name].name} beside it is the task {name!r} too; "
                    "keep one of them"
                )
            here[name] = path
        # folders come in the order in which they are searched
        found = here | found
    return found


def task_name(path: Path) -> str:
    """`tasks/odd_one.py` is the task `odd-one`; a YAML file's stem is its name as it stands."""
    if path.suffix == ".py":
        return stem_to_name(path.stem)
    return path.stem


def read_task_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The keys of a task, and their lines.

    A Python file is run, and the key `code` describes it.

    Raises:
        ConfigError: The file cannot be read, or raises an error.
    """
    code = None
    if path.suffix == ".py":
        code = load_code(path)
        data = dict(code.task)
        lines = _lines(path)
    else:
        data, lines = load_yaml(path)
    if "code" in data:
        # a field of the task that nobody may type
        known = [key for key in data if key != "code"]
        line = lines.get(("code",), 1)
        raise UnknownNameError("key", "code", known, where=f"{path}:{line}")
    if code is not None:
        data["code"] = code.config
    return data, lines


def load_code(path: Path) -> TaskCode:
    """Run a task file; it runs once, as long as it does not change.

    Raises:
        ConfigError: The file cannot be read, raises an error, or does not say what it must.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    # resolved, so that a file reached by two paths runs once, and errors find its frames
    return _run(path.resolve(), content)


def code_of(task: Coded) -> TaskCode | None:
    """The functions of a task's file; None where the task has no Python file.

    Any process may ask, because the file is found by the task's name.

    Raises:
        ConfigError: The file is gone, or is not the one that the task was made from.
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
    # somebody may have edited the file while a sweep runs
    if code.sha256 != task.code.sha256:
        raise ConfigError(
            f"task {task.name}: {path} (sha256 {code.sha256[:12]}) is not the file that this trial "
            f"was made from ({task.code.sha256[:12]}); an edited file is another task: start its "
            f"trials anew, or restore it; {how}"
        )
    return code


def own_score(task: Coded) -> Callable[[Sequence[Any], Sequence[Any]], dict[str, float]] | None:
    """How a task's file scores predictions against golds; None where the suite does it.

    Raises:
        ConfigError: As `code_of`.
    """
    if task.code is None or not task.code.score:
        return None
    code = code_of(task)
    assert code is not None
    label = getattr(task, "label", None)

    def score(predictions: Sequence[Any], golds: Sequence[Any]) -> dict[str, float]:
        # models answer in floats, and `words[answer]` is what a file does with a class
        if label is not None and label.words is not None:
            predictions = [int(answer) for answer in predictions]
        # bound to the task's metrics, so that callers need not know them
        return code.scores(predictions, golds, task.metrics)

    return score


def describe(path: Path) -> dict[str, str]:
    """`description` and `source` of a Python task, where they are written out.

    The file is read and not run.
    """
    texts = {"description": "", "source": ""}
    given = _task_dict(path)
    if given is None:
        return texts
    for key, value in zip(given.keys, given.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(value, ast.Constant):
            continue
        # a file of a task may have more keys, of which a listing shows none
        if key.value in texts:
            texts[str(key.value)] = str(value.value)
    return texts


@lru_cache(maxsize=64)
def _run(path: Path, content: bytes) -> TaskCode:
    """Run a file with this content; the cache forgets it when the content changes."""
    # what is wrong with a user's file is named here, and not where it is used later
    module = _module(path, content)
    task = getattr(module, "TASK", None)
    if not isinstance(task, dict) or not all(isinstance(key, str) for key in task):
        raise ConfigError(
            f"{path}: TASK is {type(task).__name__}, "
            "expected a dictionary with the keys of a YAML task"
        )
    reads = getattr(module, "reads", ())
    if not isinstance(reads, (list, tuple)) or not all(isinstance(name, str) for name in reads):
        raise ConfigError(f"{path}: reads is {reads!r}, expected names of columns")
    rows = _function(module, "rows", path)
    score = _function(module, "score", path)
    # `rows` without columns would be given empty rows, and `reads` without it does nothing
    if (rows is None) != (not reads):
        raise ConfigError(
            f"{path}: give rows() and reads, the columns of the data that it needs, together"
        )
    sha256 = hashlib.sha256(content).hexdigest()
    return TaskCode(path, sha256, task, tuple(reads), rows, score)


def _function(module: ModuleType, name: str, path: Path) -> Any:
    """A function of a task file; None where the file has none."""
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise ConfigError(f"{path}: {name} is {found!r}, expected a function")
    return found


def _module(path: Path, content: bytes) -> ModuleType:
    """The file as a module.

    It is made of exactly the bytes that are hashed, whatever compiled copies lie about.
    """
    module = ModuleType(f"{OWN_MODULES}.tasks.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    with _blamed(path, "cannot be run"):
        # somebody asked for this task by name, and the file is the user's own
        exec(compile(content, path, "exec"), vars(module))  # noqa: S102
    return module


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Turns whatever the user's code raises into a ConfigError with the file's line."""
    try:
        yield
    # any error at all, or an exit: this is code of the user, and a traceback of ours would hide its
    # line
    except (Exception, SystemExit) as error:
        if isinstance(error, Stopped):
            raise
        line = _line_in(path, error)
        place = f"{path}:{line}" if line else f"{path}"
        raise ConfigError(f"{place}: {what}: {type(error).__name__}: {error}") from error


def _line_in(path: Path, error: BaseException) -> int | None:
    """The deepest line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    # the innermost frame comes last
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.realpath(frame.filename) == str(path):
            return frame.lineno
    return None


def _task_dict(path: Path) -> ast.Dict | None:
    """The literal `TASK = {...}` of a file; None where the file makes it in another way."""
    try:
        # parsed and never run: listing tasks must have no effects
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
    """The line of every key of a file's `TASK`."""
    given = _task_dict(path)
    if given is None:
        return {}
    return dict(_lines_of(given, ()))


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
