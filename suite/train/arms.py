"""Make an arm of the options `--backbone B --method M [--attention V] [--set rank=4 ...]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from suite.errors import ConfigError, UnknownNameError
from suite.petl import get_method
from suite.petl.arm import full_architecture
from suite.petl.own_code import own_code

GROUPS = ("backbone", "attention", "architecture")


def read_overrides(
    data: dict[str, Any], overrides: Sequence[str], *, method: str, groups: Sequence[str]
) -> dict[str, Any]:
    """`data` with `--set` applied; a method's own settings have bare names (`rank=4`).

    Args:
        data: The values to change.
        overrides: `key=value` items.
        method: The method whose settings may be set.
        groups: What else may be set.

    Raises:
        UnknownNameError: A key is neither a setting nor a group.
    """
    # Their names come from the method's own class: a new method needs no line here.
    config = get_method(method, where="--method").Config
    settings = list(config.model_fields)
    # peft's own class knows the settings of its method, and checks them later.
    takes_any = config.model_config.get("extra") == "allow"
    items = []
    for item in overrides:
        first = item.partition("=")[0].split(".")[0]
        if first not in groups and first not in settings and not takes_any:
            raise UnknownNameError("key", first, [*groups, *settings], where="--set")
        # A bare name is a setting of the method, which lies under `architecture`.
        if first not in groups:
            item = f"architecture.{item}"
        items.append(item)
    return apply_overrides(data, items)


def make_arm(backbone: str, method: str, attention: str, changes: dict[str, Any]) -> Arm:
    """The arm with its complete architecture.

    Args:
        backbone: Name, hub id, folder or package of the backbone.
        method: Name of the PETL method.
        attention: Name of the attention variant.
        changes: What `--set` says about each of the groups `GROUPS`.

    Raises:
        ConfigError: A name, key or value cannot be used.
    """
    for group, values in changes.items():
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"--set {group}: got {values!r}, expected one key of it, "
                f"as in --set {group}.KEY=VALUE"
            )
    # Trust needs a commit and --trust-remote-code: no other option may grant it.
    refuse_trust(changes.get("backbone"), where="--set backbone")
    # Complete, with every default written out: an arm's key is the hash of what stands here.
    data = {
        "backbone": {"name": backbone, **changes.get("backbone", {})},
        "attention": {"name": attention, **changes.get("attention", {})},
        "method": method,
        "architecture": full_architecture(method, changes.get("architecture", {})),
    }
    arm = validate(Arm, data, where="--set")
    # A trusted name that nothing uses is a typing error: say so.
    check_named([backbone], where="--backbone")
    trusted = with_trust(arm.backbone, where="--backbone")
    code = own_code(trusted, arm.attention, method, where="command line")
    return arm.model_copy(update={"backbone": trusted, "code": code})


def head_for(resolved: ResolvedBackbone, task: TaskConfig | None, *, num_labels: int) -> Head:
    """The head that a backbone answers with: for the task, or for `num_labels` classes.

    Encoder-decoders answer with text, and so does every backbone on a task of text.
    """
    kind = resolved.family.kind
    # A decoder has heads for classes and for choices; it answers questions with text.
    if kind != "encoder-decoder" and isinstance(task, MultipleChoiceTask):
        return Head("choice")
    if kind == "encoder" and isinstance(task, QuestionAnsweringTask):
        return Head("span")
    if kind == "encoder-decoder" or not isinstance(task, ClassificationTask | None):
        return Head("text")
    if task is not None and task.is_regression:
        return Head("regression")
    if task is not None:
        num_labels = task.num_labels
    return Head("classification", num_labels)


def resolve_backbone(arm: Arm, *, only_shape: bool = False) -> ResolvedBackbone:
    """The arm's backbone, found and checked; with `only_shape` its weights are not needed."""
    return resolve(arm.backbone, where="--backbone", only_shape=only_shape)
