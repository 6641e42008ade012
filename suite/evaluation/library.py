"""lm-eval's own side: is it installed, which tasks does it know, can their data be had."""

from __future__ import annotations

import hashlib
import logging
import os
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
from suite.errors import ConfigError, DataError

IGNORED = ("__pycache__", ".ipynb_checkpoints")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task, group or tag of lm-eval with its data read.

    Attributes:
        item: lm-eval's object: a task, or a group of them.
        leaves: Its tasks.
    """

    request: Request
    item: Any
    leaves: list[Any]

    @property
    def longest_answer_tokens(self) -> int:
        """What its questions may need for written answers; 0 where answers are only scored."""
        writing = [
            leaf for leaf in self.leaves if leaf.get_config("output_type") == "generate_until"
        ]
        return max(
            (
                int((leaf.get_config("generation_kwargs") or {}).get("max_gen_toks", 256))
                for leaf in writing
            ),
            default=0,
        )


def version() -> str:
    """Of the installed lm-eval.

    Raises:
        ConfigError: There is none.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed; run: pip install 'petl-suite[lm-eval]'")
    return metadata.version("lm_eval")


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval's warnings (of models in memory, of left-out truncation) stay out of the way; nothing it needs is fetched and run.

    It would download code for a metric that it does not have (`evaluate`), and fork once per core to bootstrap an error.
    """
    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    before = {name: os.environ.get(name) for name in ("HF_EVALUATE_OFFLINE", "DISABLE_MULTIPROC")}
    os.environ.update(dict.fromkeys(before, "1"))
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Library:
    """lm-eval's tasks with those of a folder of one's own.

    Args:
        include_path: That folder.

    Raises:
        ConfigError: lm-eval is not installed, or there is no such folder.
    """

    def __init__(self, include_path: str | Path | None = None) -> None:
        self.version = version()
        self.folder = None if include_path is None else Path(include_path).resolve()
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(
                f"include_path {include_path}: no such folder; expected one with lm-eval task files (*.yaml)"
            )

    def definition(self, request: Request) -> str | None:
        """Digest of the files that define a task of one's own; None where lm-eval's version says it all."""
        return (
            self._digest if self._own is not None and request.name in self._own.all_tasks else None
        )

    def load(self, request: Request) -> Loaded:
        """Find a task and read its data, from `datasets`' cache or files where it can.

        Raises:
            ConfigError: No such task, shots for a task that takes none, or not a task for text models.
            DataError: Its data cannot be had, or its files cannot be used.
        """
        manager = self._manager(request.name)
        if request.name not in manager.task_index:
            near = get_close_matches(
                request.name,
                [*(self._own.all_tasks if self._own else ()), *manager.all_tasks],
                n=3,
                cutoff=0.5,
            )
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "list them with: lm-eval ls tasks"
            )
            raise ConfigError(f"unknown lm-eval task {request.name!r}; {hint}")
        try:
            with quiet():
                found = manager.load([request.name])
        except (
            Exception
        ) as error:  # a task's file may name any data and any function; say which task
            raise DataError(self._why(request, error)) from error
        loaded = Loaded(request, self._item(request.name, found), list(found["tasks"].values()))
        _check(loaded)
        return loaded

    def _item(self, name: str, found: Any) -> Any:
        """What was asked for: a group, a task, or a tag, which becomes a group weighted by size as lm-eval's groups are."""
        if name in found.get("groups", {}):
            return found["groups"][name]
        if name in found["tasks"]:
            return found["tasks"][name]
        return _as_group(name, list(found["tasks"].values()))

    def _why(self, request: Request, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = (
            "connect this machine to the hub once, so that its data are in the cache"
            if self.definition(request) is None
            else "mend it"
        )
        return f"lm-eval task {request.name}: cannot be loaded: {reason}; {remedy}, or give a task file of your own with --include-path"

    def _manager(self, name: str) -> Any:
        """The index that has the task: the folder's comes first; its groups may have tasks of lm-eval's, which takes long to read."""
        if self._own is None or name not in self._own.all_tasks:
            return _shipped()
        return self._both if name in self._own.all_groups else self._own

    @cached_property
    def _own(self) -> Any:
        with quiet():
            from lm_eval.tasks import TaskManager

            return (
                None
                if self.folder is None
                else TaskManager(include_path=str(self.folder), include_defaults=False)
            )

    @cached_property
    def _both(self) -> Any:
        with quiet():
            from lm_eval.tasks import TaskManager

            return TaskManager(include_path=str(self.folder))

    @cached_property
    def _digest(self) -> str:
        assert self.folder is not None
        sha = hashlib.sha256()
        for path in sorted(
            p for p in self.folder.rglob("*") if p.is_file() and not set(p.parts) & set(IGNORED)
        ):
            sha.update(
                f"{path.relative_to(self.folder).as_posix()}\0{path.stat().st_size}\0".encode()
            )
            sha.update(path.read_bytes())
        return sha.hexdigest()[:16]


@cache
def _shipped() -> Any:
    """lm-eval's own tasks: thousands of files, which do not change."""
    with quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager()


def _as_group(name: str, tasks: Sequence[Any]) -> Any:
    """A group of the tasks of a tag, with every metric that most of them have."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    metrics = [set(task.higher_is_better()) for task in tasks]
    shared = sorted(
        metric
        for metric in set().union(*metrics)
        if 2 * sum(metric in has for has in metrics) > len(metrics)
    )
    group = Group(name, aggregate_metric_list=[AggMetricConfig(metric=metric) for metric in shared])
    for task in tasks:
        group.add(task)
    return group


def _check(loaded: Loaded) -> None:
    """Refuse what would be ignored in silence, or cannot be run here."""
    for leaf in loaded.leaves:
        name = leaf.get_config("task")
        if getattr(leaf, "UNSAFE_CODE", False) or getattr(leaf, "MULTIMODAL", False):
            raise ConfigError(
                f"lm-eval task {name}: it runs code that the model writes, or needs pictures or sound; take another task"
            )
        unknown = [
            metric
            for metric, function in getattr(leaf, "_metric_fn_list", {}).items()
            if function is None
        ]
        if unknown:
            raise ConfigError(
                f"lm-eval task {name}: lm-eval has no metric {', '.join(unknown)}, and code for it is not downloaded"
            )
        if loaded.request.shots and leaf.get_config("num_fewshot") == 0:
            raise ConfigError(
                f"lm-eval task {loaded.request}: its file fixes {name} to 0 shots; leave :{loaded.request.shots} out"
            )
