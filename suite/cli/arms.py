"""An arm as it is typed on the command line: `--backbone B --method M [--attention V] [--set rank=4 ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.backbones.loading import Head, ResolvedBackbone, resolve
from suite.config.arm import Arm
from suite.config.loader import apply_overrides, validate
from suite.config.task import (
    ClassificationTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.trust import check_named, refuse_trust, with_trust
from suite.errors import UnknownNameError
from suite.petl import get_method
from suite.petl.arm import full_architecture

GROUPS = ("backbone", "attention", "architecture")


def read_overrides(
    data: dict[str, Any], overrides: Sequence[str], *, method: str, groups: Sequence[str]
) -> dict[str, Any]:
    """`data` with `--set` applied; a method's own settings are typed by their bare names (`rank=4`).

    Args:
        data: Where to start.
        overrides: `key=value` items.
        method: Whose settings are known.
        groups: What else may be set.

    Raises:
        UnknownNameError: A key that is neither.
    """
    settings = list(get_method(method, where="--method").Config.model_fields)
    items = []
    for item in overrides:
        first = item.partition("=")[0].split(".")[0]
        if first not in groups and first not in settings:
            raise UnknownNameError("key", first, [*groups, *settings], where="--set")
        items.append(item if first in groups else f"architecture.{item}")
    return apply_overrides(data, items)


def make_arm(backbone: str, method: str, attention: str, changes: dict[str, Any]) -> Arm:
    """The arm with its complete architecture.

    Args:
        backbone, method, attention: Names.
        changes: What `--set` said of the groups `GROUPS`.

    Raises:
        ConfigError: A name, key or value that cannot be used.
    """
    refuse_trust(changes.get("backbone"), where="--set backbone")
    data = {
        "backbone": {"name": backbone, **changes.get("backbone", {})},
        "attention": {"name": attention, **changes.get("attention", {})},
        "method": method,
        "architecture": full_architecture(method, changes.get("architecture", {})),
    }
    arm = validate(Arm, data, where="--set")
    check_named([backbone], where="--backbone")
    return arm.model_copy(update={"backbone": with_trust(arm.backbone, where="--backbone")})


def head_for(resolved: ResolvedBackbone, task: TaskConfig | None, *, num_labels: int) -> Head:
    """What a backbone answers with: text (encoder-decoders, tasks of text), else a head for the task, or of `num_labels` classes."""
    kind = resolved.family.kind
    if kind != "encoder-decoder" and isinstance(task, MultipleChoiceTask):
        return Head("choice")
    if kind == "encoder" and isinstance(task, QuestionAnsweringTask):
        return Head("span")
    if kind == "encoder-decoder" or not isinstance(task, ClassificationTask | None):
        return Head("text")
    if task is not None and task.is_regression:
        return Head("regression")
    return Head("classification", task.num_labels if task is not None else num_labels)


def resolve_backbone(arm: Arm, *, only_shape: bool = False) -> ResolvedBackbone:
    """The arm's backbone, found and checked; `only_shape` where it is only counted."""
    return resolve(arm.backbone, where="--backbone", only_shape=only_shape)
