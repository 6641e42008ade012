"""lm-eval's own side: whether it is installed, which tasks it knows, and their data."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from suite.config.lm_eval import Request
from suite.config.variables import environment
from suite.errors import ConfigError, DataError

# Folders that editors and Python leave behind: they define no task.
IGNORED = ("__pycache__", ".ipynb_checkpoints")
# lm-eval's own default of max_gen_toks.
DEFAULT_ANSWER_TOKENS = 256
MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task, group or tag of lm-eval with its data read.

    Attributes:
        request: The name asked for, with its shots.
        item: lm-eval's object: a task, or a group of them.
        leaves: Its tasks.
    """

    request: Request
    item: Any
    leaves: list[Any]

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest answer that a model may write; 0 where answers are only scored."""
        longest = 0
        for leaf in self.leaves:
            if leaf.get_config("output_type") == "generate_until":
                options = leaf.get_config("generation_kwargs") or {}
                tokens = int(options.get("max_gen_toks", DEFAULT_ANSWER_TOKENS))
                longest = max(longest, tokens)
        return longest


def version() -> str:
    """Version of the installed lm-eval.

    Raises:
        ConfigError: It is not installed.
    """
    # find_spec looks for the package without importing it.
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed; run: pip install 'petl-suite[lm-eval]'")
    return metadata.version("lm_eval")


def short_reason(error: Exception) -> str:
    """What an error of lm-eval says, in one line; its type where it says nothing."""
    return " ".join(str(error).split())[:MESSAGE_CHARS] or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval from downloading code, starting processes and logging warnings."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    switches = {
        # Without it, lm-eval downloads and runs code for a metric that it does not have.
        "HF_EVALUATE_OFFLINE": "1",
        # Without it, lm-eval forks once per core to bootstrap an error.
        "DISABLE_MULTIPROC": "1",
    }
    # It warns of models in memory and of truncation that nobody asked for: both are as they
    # should be here.
    logger.setLevel(logging.ERROR)
    try:
        with environment(switches):
            yield
    finally:
        logger.setLevel(level)


class Library:
    """lm-eval's tasks, and those of the user's own folder.

    Args:
        include_path: That folder.

    Raises:
        ConfigError: lm-eval is not installed, or there is no such folder.
    """

    def __init__(self, include_path: str | Path | None = None) -> None:
        self.version = version()
        self.folder: Path | None = None
        if include_path is not None:
            self.folder = Path(include_path).resolve()
            if not self.folder.is_dir():
                raise ConfigError(
                    f"include_path {include_path}: no such folder;"
                    " expected one with lm-eval task files (*.yaml)"
                )

    def definition(self, request: Request) -> str | None:
        """Compute a digest of the files that define a task of the user's own.

        None for lm-eval's tasks: its version defines them.
        """
        if self._is_own(request.name):
            return self._digest
        return None

    def load(self, request: Request) -> Loaded:
        """Find a task and read its data, from `datasets`' cache or files where it can.

        Raises:
            ConfigError: There is no such task, it takes no shots, or it is not for text models.
            DataError: Its data cannot be had, or its files cannot be used.
        """
        name = request.name
        manager = self._manager(name)
        if name not in manager.task_index:
            raise ConfigError(f"unknown lm-eval task {name!r}; {self._hint(name, manager)}")
        try:
            with quiet():
                found = manager.load([name])
        except Exception as error:
            # A task's file may name any data and any function, so anything may be raised.
            raise DataError(self._why_not(request, error)) from error
        tasks = list(found["tasks"].values())
        if name in found.get("groups", {}):
            item = found["groups"][name]
        elif name in found["tasks"]:
            item = found["tasks"][name]
        else:
            item = _as_group(name, tasks)  # a tag
        loaded = Loaded(request, item, tasks)
        _check(loaded)
        return loaded

    def _hint(self, name: str, manager: Any) -> str:
        known = list(manager.all_tasks)
        if self._own is not None:
            known = [*self._own.all_tasks, *known]
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"did you mean {' or '.join(near)}?"
        return "list them with: lm-eval ls tasks"

    def _why_not(self, request: Request, error: Exception) -> str:
        reason = short_reason(error)
        remedy = "correct it"
        if not self._is_own(request.name):
            remedy = "if its data are not in the cache, connect this machine to the hub once"
        return (
            f"lm-eval task {request.name}: cannot be loaded: {reason}; {remedy},"
            " or give a task file of your own with --include-path"
        )

    def _is_own(self, name: str) -> bool:
        return self._own is not None and name in self._own.all_tasks

    def _manager(self, name: str) -> Any:
        """The index that has the task; the user's own folder comes first."""
        if not self._is_own(name):
            return _shipped()
        # A group may have tasks of lm-eval's, which take long to read: only groups need both.
        if name in self._own.all_groups:
            return self._both
        return self._own

    @cached_property
    def _own(self) -> Any:
        """Index of the user's own folder; None without one."""
        if self.folder is None:
            return None
        with quiet():
            from lm_eval.tasks import TaskManager

            return TaskManager(include_path=str(self.folder), include_defaults=False)

    # Reading the index of thousands of files takes seconds: once, and only where it is needed.
    @cached_property
    def _both(self) -> Any:
        with quiet():
            from lm_eval.tasks import TaskManager

            return TaskManager(include_path=str(self.folder))

    @cached_property
    def _digest(self) -> str:
        """Digest of the names, sizes and contents of the folder's files."""
        assert self.folder is not None
        sha = hashlib.sha256()
        # rglob's order is that of the file system: without sorting, machines would disagree.
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not set(path.parts) & set(IGNORED):
                name = path.relative_to(self.folder).as_posix()
                # The size keeps the end of one file apart from the start of the next.
                sha.update(f"{name}\0{path.stat().st_size}\0".encode())
                sha.update(path.read_bytes())
        return sha.hexdigest()[:16]


@cache
def _shipped() -> Any:
    """lm-eval's own tasks: thousands of files, which do not change."""
    with quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager()


def _as_group(name: str, tasks: Sequence[Any]) -> Any:
    """Make a group of the tasks of a tag, with every metric that most of them have.

    It is weighted by size, like lm-eval's own groups.
    """
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    counts: dict[str, int] = {}
    # CoLA, say, has no accuracy: a metric need not be in every task.
    for task in tasks:
        for metric in task.higher_is_better():
            counts[metric] = counts.get(metric, 0) + 1
    shared = []
    for metric in sorted(counts):
        if 2 * counts[metric] > len(tasks):
            shared.append(AggMetricConfig(metric=metric))
    group = Group(name, aggregate_metric_list=shared)
    for task in tasks:
        group.add(task)
    return group


def _check(loaded: Loaded) -> None:
    """Refuse what lm-eval would ignore in silence, or cannot run here."""
    for leaf in loaded.leaves:
        name = leaf.get_config("task")
        if getattr(leaf, "UNSAFE_CODE", False) or getattr(leaf, "MULTIMODAL", False):
            raise ConfigError(
                f"lm-eval task {name}: it runs code that the model writes, or needs pictures or"
                " sound; take another task"
            )
        # lm-eval stores None for a metric that it did not find. The field has no public name.
        functions = getattr(leaf, "_metric_fn_list", {})
        unknown = [metric for metric in functions if functions[metric] is None]
        if unknown:
            raise ConfigError(
                f"lm-eval task {name}: lm-eval has no metric {', '.join(unknown)},"
                " and code for it is not downloaded"
            )
        # lm-eval only logs that it keeps the 0, and `quiet` hides the line.
        if loaded.request.shots and leaf.get_config("num_fewshot") == 0:
            raise ConfigError(
                f"lm-eval task {loaded.request}: its file fixes {name} to 0 shots;"
                f" leave :{loaded.request.shots} out"
            )
