"""Reads YAML that a person typed: safely, and with errors that name file, line and key."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from suite.errors import ConfigError, UnknownNameError

# far above what a person writes: these keep a hostile or mistaken file from using up the memory
MAX_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 50
MAX_NUMBER_CHARS = 100
"""YAML 1.1 has numbers in base 60 (1:30:00); reading one takes time quadratic in its length."""
MAX_INT = 2**63 - 1
"""Larger whole numbers overflow in torch, Arrow and databases."""
NUMBER_WITHOUT_POINT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e-3, which PyYAML reads as text."""
OF_MAPPINGS = ("model_type", "dict_type")
"""Pydantic's errors about a value that is no mapping."""
FILE = "valid YAML"
Key = tuple[str | int, ...]
Lines = dict[Key, int]
"""The line of each key; 0 = `--set` gave it."""
SET = 0


class Strict(BaseModel):
    """Base of everything a person types: frozen, no unknown keys, no silent conversion."""

    # records are JSON, which has no infinity and no NaN
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """A SafeLoader of what JSON can hold: no aliases, tags, dates or duplicate keys, within limits.

    Aliases would let a small file describe gigabytes (the "billion laughs").
    """

    # without dates: `2026-01-01` stays the text that it looks like
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases (*name) are not allowed", mark)
        # a tag calls a constructor with whatever text follows it
        if event.tag is not None:
            raise _refusal(f"tags are not allowed, got {event.tag}", mark)
        # counted before the children are composed, so that a deep or large file ends early
        self.nodes += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} levels deep", mark)
        if self.nodes > MAX_NODES:
            raise _refusal(f"more than {MAX_NODES:,} keys and values", mark)
        # this composes the children too, each with a call of this method
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        return node

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        if not node.tag.endswith((":int", ":float")):
            for char in node.value:
                # escapes such as "\0" give characters that files, terminals and JSON refuse
                if char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cs"):
                    raise _refusal(f"character U+{ord(char):04X} in a text", node.start_mark)
            return
        # before it is read: see MAX_NUMBER_CHARS
        if len(node.value) > MAX_NUMBER_CHARS:
            raise _refusal(f"a number of {len(node.value):,} digits", node.start_mark)
        number = self.construct_object(node)
        # 1.0e+999 is infinite too
        if isinstance(number, float) and not math.isfinite(number):
            raise _refusal(f"{node.value} is no finite number", node.start_mark)
        if abs(number) > MAX_INT and isinstance(number, int):
            raise _refusal(f"{node.value} has more than 64 bits", node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            # YAML reads the keys on, off, yes and no as true and false
            if not isinstance(key, str):
                raise _refusal(f"key {key!r} is not text; put it in quotes", key_node.start_mark)
            # PyYAML would keep the last one
            if key in seen:
                raise _refusal(f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refusal(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def load_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file and the line of each of its keys.

    Raises:
        ConfigError: The file is absent, too large, not YAML, or holds no mapping.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"{path}: {size:,} bytes, expected at most {MAX_BYTES:,}; is this the right file?"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML text and the line of each of its keys.

    Args:
        text: The text.
        where: What errors call it.

    Raises:
        ConfigError: As `load_yaml`.
    """
    data, node = _compose(text, where=where, what=FILE)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where}: expected YAML of keys and values, got {_kind(data)}; is this the right file?"
        )
    return data, _lines(node)


def _kind(data: object) -> str:
    """What YAML that holds no keys is called: to YAML, any file of words is a text."""
    if data is None:
        return "nothing"
    if isinstance(data, list):
        return "a list"
    return "plain text"


def _compose(text: str, *, where: str, what: str) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text, and the node that knows the lines of its keys.

    Raises:
        ConfigError: With the line, where the text has several.
    """
    line = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None
        if node is not None:
            data = loader.construct_document(node)
        return data, node
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        problem = f"character U+{error.character:04X}, expected text without control characters"
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None:
            line = error.problem_mark.line
        problem = str(error.problem)
    except (yaml.YAMLError, ValueError) as error:
        problem = str(error)
    # marks count lines from 0, people from 1; what is typed in a shell is one line
    if line is not None and what == FILE:
        where = f"{where}:{line + 1}"
    raise ConfigError(f"{where}: not {what}: {problem}")


def _lines(node: yaml.Node | None, at: Key = ()) -> Lines:
    """The line, counted from 1, of every key and list entry below a node."""
    lines: Lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place: Key = (*at, key.value)
            lines[place] = key.start_mark.line + 1
            lines |= _lines(value, place)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            place = (*at, number)
            lines[place] = value.start_mark.line + 1
            lines |= _lines(value, place)
    return lines


def validate(
    model: type[M], data: Mapping[str, Any], *, where: str, lines: Lines | None = None
) -> M:
    """Build a `model` from plain data.

    Args:
        model: What to build.
        data: Keys and values.
        where: Where they come from, for errors.
        lines: The line of each key; None = unknown.

    Raises:
        ConfigError: One line of text per faulty key, with file, line, key, what was got and what
            was expected.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        faults = _joined(error.errors(), model)
        messages = [_explain(model, fault, where, lines or {}) for fault in faults]
        # each alternative of a union gives the same error
        raise ConfigError("\n".join(dict.fromkeys(messages))) from None


def _explain(model: type[BaseModel], error: Any, where: str, lines: Lines) -> str:
    """Put one of pydantic's errors into our words."""
    loc = _loc(error, model)
    key = ".".join(map(str, loc))
    place = place_of(loc, where, lines)
    got = error.get("input")
    # most likely a typing mistake, so the nearest known key is suggested
    if error["type"] == "extra_forbidden":
        # the name alone: with the names of its groups in front it would be near to nothing
        *groups, name = map(str, loc)
        if groups:
            place = f"{place}: {'.'.join(groups)}"
        return str(UnknownNameError("key", name, _keys_beside(model, error["loc"]), where=place))
    if error["type"] == "missing":
        return f"{place}: key {key!r} is missing"
    if isinstance(got, str) and NUMBER_WITHOUT_POINT.fullmatch(got):
        return (
            f"{place}: {key}: got the text {got!r}, expected a number; "
            f"YAML reads it as text, write {_with_point(got)}"
        )
    if error["type"] == "string_type" and isinstance(got, bool | int | float):
        return (
            f"{place}: {key}: got {got!r}, expected text; YAML reads a bare yes, no, on, off, true "
            'or false as a truth value and 1 as a number: quote them, as "no"'
        )
    # pydantic puts this before what our own validators raise
    message = error["msg"].removeprefix("Value error, ")
    if key:
        message = f"{key}: {message}"
    if got is None and error["type"] in (*OF_MAPPINGS, "list_type"):
        return f"{place}: {message}, but the key has nothing below it"
    # our own messages say what was got, and a whole mapping would fill the screen
    if error["type"] != "value_error" and not isinstance(got, (Mapping, BaseModel)):
        message += f", got {got!r}"
    return f"{place}: {message}"


def _joined(errors: Iterable[Any], model: type[BaseModel]) -> list[Any]:
    """Pydantic's errors, with one for all alternatives of a union: each says what it allows."""
    found: list[Any] = []
    first: dict[Key, Any] = {}
    for error in errors:
        loc = _loc(error, model)
        if error["type"] in OF_MAPPINGS:
            error["msg"] = f"Input should be {_keys_and_values(model, error['loc'])}"
        # An alternative's error ends with the alternative itself.
        if loc == error["loc"]:
            found.append(error)
        elif loc in first:
            first[loc]["msg"] += f" or {error['msg'].removeprefix('Input should be ')}"
        else:
            first[loc] = error
            found.append(error)
    return found


def _loc(error: Any, model: type[BaseModel]) -> Key:
    """The key that an error is about, without the types that pydantic puts among its parts."""
    kept = []
    for at, part in enumerate(error["loc"]):
        # A key may look like a type: `K`.
        is_key = at == 0 and part in model.model_fields
        if is_key or not _is_union_tag(part):
            kept.append(part)
    # The last part of an unknown key's place is the key itself, whatever it looks like.
    if error["type"] == "extra_forbidden" and _is_union_tag(error["loc"][-1]):
        kept.append(error["loc"][-1])
    return tuple(kept)


def place_of(loc: Key, where: str, lines: Lines) -> str:
    """Where a key was given: a line of the file, or `--set`."""
    for key, line in lines.items():
        # A group may be refused for what `--set` put into it, which stands on no line.
        if line == SET and key[: len(loc)] == loc:
            # Of the whole file, any other part may be at fault as well.
            return "--set" if loc else f"{where} with --set"
    # from the inside out, for the nearest line
    for length in range(len(loc), 0, -1):
        # a key that is missing has no line; the nearest one around it has
        at = loc[:length]
        if at in lines:
            return "--set" if lines[at] == SET else f"{where}:{lines[at]}"
    return where


def _with_point(number: str) -> str:
    """Write `1e-3` in the form that YAML reads as a number: `1.0e-3`."""
    mantissa, exponent = re.split("[eE]", number)
    if "." not in mantissa:
        mantissa += ".0"
    if exponent[0] not in "+-":
        exponent = f"+{exponent}"
    return f"{mantissa}e{exponent}"


def _is_union_tag(part: str | int) -> bool:
    """Whether a part of an error's place is a type of a union, which pydantic puts among keys."""
    if not isinstance(part, str):
        return False
    if part.startswith("constrained-") or part in ("str", "int", "float", "bool"):
        return True
    # names of models are capitalised and keys are not; "[" stands in types such as list[str]
    return part[:1].isupper() or "[" in part


def _keys_and_values(model: type[BaseModel], loc: Key) -> str:
    """What to write at `loc`, where a mapping belongs: pydantic names our class instead."""
    # any key shows the form; a model's first one is among those that people write
    first = next(iter(_keys_beside(model, (*loc, ""))), "key")
    return f"keys and values, such as {{{first}: ...}}"


def _keys_beside(model: type[BaseModel], loc: Key) -> Sequence[str]:
    """Field names at the level of `loc`, as far as nested models can be followed.

    Args:
        model: Where `loc` begins.
        loc: The place of an error as pydantic gives it: of a union it names the class that is
            meant, else the first one counts.
    """
    annotation: Any = model
    for part in loc[:-1]:
        models = [*_models(annotation)]
        # the place in a list has no fields of its own
        if isinstance(part, int) or not models:
            continue
        named = {found.__name__: found for found in models}
        if part in models[0].model_fields:
            annotation = models[0].model_fields[part].annotation
        elif part in named:
            annotation = named[part]
        elif not _is_union_tag(part):
            return []
    return [*next(_models(annotation), BaseModel).model_fields]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type such as `list[Annotated[Model, ...]] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for nested in getattr(annotation, "__args__", ()):
        yield from _models(nested)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with items such as `key.sub=value` set.

    Values are read as YAML, and `1e-3` as the number that it means.

    Raises:
        ConfigError: An item has no `=`, or its path goes through something that is no mapping.
    """
    result: dict[str, Any] = _sorted_copy(data)
    for item in overrides:
        key, equals, text = item.partition("=")
        where = f"--set {item!r}"
        if not equals or not key:
            raise ConfigError(f"{where}: expected key=value, for example --set training.epochs=3")
        _put(result, key, parse_value(text, where=where), where=where)
    return result


def apply_changes(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with Python values set, by keys such as `key.sub`.

    Raises:
        ConfigError: A key is no text, its path goes through something that is no mapping, or the
            changes themselves are none.
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes: got {changes!r}, expected a mapping such as {{'training.epochs': 2}}"
        )
    result: dict[str, Any] = _sorted_copy(data)
    for key, value in _with_text_keys(changes).items():
        # a copy, because a later key may lie in this value
        _put(result, key, _sorted_copy(value), where=f"change {key!r}")
    return result


def _put(data: dict[str, Any], key: str, value: Any, *, where: str) -> None:
    """Set the value of a dotted key."""
    # each key begins at the top, and goes down one level with each of its parts
    target: Any = data
    *parents, last = key.split(".")
    if not all((*parents, last)):
        raise ConfigError(f"{where}: a part of the key is empty, expected a name between the dots")
    for part in parents:
        # a group that the file leaves out is made
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{where}: {'.'.join(parents)} is not a group of keys")
    target[last] = value


def with_overrides(lines: Lines, overrides: Iterable[str]) -> Lines:
    """The lines of a file's keys, without those that `--set` replaces.

    Args:
        lines: The line of each key of the file.
        overrides: The items that `apply_overrides` takes, or the keys of `apply_changes`.
    """
    found = dict(lines)
    for item in overrides:
        given = tuple(item.partition("=")[0].split("."))
        for key in lines:
            # What stood below the key in the file is gone with it.
            if key[: len(given)] == given:
                found.pop(key, None)
        found[given] = SET
    return found


def _sorted_copy(value: Any) -> Any:
    """A copy with sorted keys, so that the order in which they are typed shows nowhere."""
    if isinstance(value, Mapping):
        return {key: _sorted_copy(value[key]) for key in sorted(_with_text_keys(value))}
    # models take lists alone, and Python code may give either
    if isinstance(value, list | tuple):
        return [_sorted_copy(item) for item in value]
    return value


def _with_text_keys(value: Mapping[Any, Any]) -> Mapping[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"got the key {key!r}, expected the name of a setting, as text")
    return value


def parse_value(text: str, *, where: str) -> Any:
    """One value from the command line, read as YAML, and `1e-3` as the number that it means.

    Raises:
        ConfigError: It is not YAML, or no finite number.
    """
    value, _ = _compose(text, where=where, what="a valid value")
    if isinstance(value, str) and NUMBER_WITHOUT_POINT.fullmatch(value):
        number = float(value)
        if not math.isfinite(number):
            raise ConfigError(f"{where}: not a valid value: {value} is no finite number")
        return number
    return value
