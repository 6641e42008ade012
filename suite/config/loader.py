"""Read YAML that a person typed: safely, with the line of every key, and with errors that name it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from suite.errors import ConfigError, UnknownNameError

MAX_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 50
MAX_NUMBER_CHARS = 100
"""A number in base 60 (1:30:00), as YAML 1.1 has it, takes time that grows with the square of its length."""
Key = tuple[str | int, ...]
Lines = dict[Key, int]


class Strict(BaseModel):
    """Base of everything a person types: frozen, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (no billion laughs), without duplicate keys, and with an end to depth and size."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not allowed",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark
            )
        if self.nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_NODES:,} keys and values", problem_mark=mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        if (
            isinstance(node, yaml.ScalarNode)
            and node.tag.endswith((":int", ":float"))
            and len(node.value) > MAX_NUMBER_CHARS
        ):
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(node.value):,} digits", problem_mark=mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is not text; put it in quotes",
                    problem_mark=key_node.start_mark,
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file and the line of each of its keys.

    Raises:
        ConfigError: The file is absent, too large, not YAML or not a mapping.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: {path.stat().st_size:,} bytes, expected at most {MAX_BYTES:,}; is this the right file?"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> tuple[dict[str, Any], Lines]:
    """As `load_yaml`, for text."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys and values, got {type(data).__name__}")
    return data, _lines(node)


def _lines(node: yaml.Node | None, at: Key = ()) -> Lines:
    lines: Lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*at, key.value)] = key.start_mark.line + 1
            lines.update(_lines(value, (*at, key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*at, i)] = value.start_mark.line + 1
            lines.update(_lines(value, (*at, i)))
    return lines


def validate(
    model: type[M], data: Mapping[str, Any], *, where: str, lines: Lines | None = None
) -> M:
    """Build `model` from plain data; every error names file, line and key, what was got and what is expected.

    Raises:
        ConfigError: One line per faulty key.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        messages = [_explain(model, e, where, lines or {}) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(messages))) from None


def _explain(model: type[BaseModel], error: Any, where: str, lines: Lines) -> str:
    loc: Key = tuple(part for part in error["loc"] if not _is_union_tag(part))
    line = next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), None)
    place = f"{where}:{line}" if line else where
    key = ".".join(str(p) for p in loc)
    got = error.get("input")
    if error["type"] == "extra_forbidden":
        return str(UnknownNameError("key", key, _keys_beside(model, loc), where=place))
    if error["type"] == "missing":
        return f"{place}: key {key!r} is missing"
    if isinstance(got, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", got):
        mantissa, exponent = re.split("[eE]", got)
        fixed = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"
        return f"{place}: {key}: got the text {got!r}, expected a number; YAML reads it as text, write {fixed}"
    message = error["msg"].removeprefix("Value error, ")
    shown = (
        ""
        if isinstance(got, (Mapping, BaseModel)) or error["type"] == "value_error"
        else f", got {got!r}"
    )
    return f"{place}: {key + ': ' if key else ''}{message}{shown}"


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and (
        part[:1].isupper() or part in ("str", "int", "float", "bool") or "[" in part
    )


def _keys_beside(model: type[BaseModel], loc: Key) -> Sequence[str]:
    """Field names at the level of `loc`, as far as nested models can be followed."""
    current: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if _is_model(current) else None
        current = (
            next((a for a in _annotations(field.annotation) if _is_model(a)), None)
            if field
            else None
        )
    return list(current.model_fields) if _is_model(current) else []


def _annotations(annotation: Any) -> list[Any]:
    nested = [a for arg in getattr(annotation, "__args__", ()) for a in _annotations(arg)]
    return [annotation, *nested]


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with `key.sub=value` set; values are read as YAML (`1e-3` as the number it means).

    Raises:
        ConfigError: An item without `=`, or a path through something that is not a mapping.
    """
    result: dict[str, Any] = yaml.safe_load(yaml.safe_dump(data))
    for item in overrides:
        key, eq, text = item.partition("=")
        if not eq or not key:
            raise ConfigError(
                f"--set {item!r}: expected key=value, for example --set training.epochs=3"
            )
        target: Any = result
        *parents, last = key.split(".")
        for part in parents:
            target = target.setdefault(part, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise ConfigError(f"--set {item!r}: {'.'.join(parents)} is not a group of keys")
        target[last] = parse_value(text, where=f"--set {item!r}")
    return result


def parse_value(text: str, *, where: str) -> Any:
    """One value typed on the command line, read as YAML; numbers such as `1e-3` count as numbers here."""
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not a valid value: {error}") from None
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value
