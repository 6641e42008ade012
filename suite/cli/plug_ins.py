"""Read what methods and attention variants say of themselves from their files, which never run.

To import them takes seconds, because they import torch and transformers, and `suite list` needs
a few plain values of each. A cache would have to notice every change of every file that a class
depends on, would be cold where people list first, and would run a stranger's file to list it. The
source needs none of this. It may say less than the class knows, if a value is computed, or if a
base class is somebody else's: then `described` gives None, and the caller asks the classes.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from suite.registry import PACKAGE, plug_in_files, stem_to_name, user_folders

# Classes of these packages are bases of no method and no variant.
STRANGERS = {*sys.stdlib_module_names, "peft", "pydantic", "torch", "transformers"}
PLAIN_STATEMENTS = (
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.FunctionDef,
    ast.Import,
    ast.ImportFrom,
)


class _UnknownError(Exception):
    """The source alone does not tell."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A class and the file that it stands in, where its names are looked up."""

    node: ast.ClassDef
    path: Path


def described(axis: str, base: str, keys: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """The attributes of every plug-in class of an axis, by name, as the registry finds them.

    Args:
        axis: "petl" or "attention": the folder in `suite/`, and in the user's roots.
        base: Name of the class in `suite/<axis>/base.py` that all of them derive from.
        keys: Attributes.

    Returns:
        None where a file has to be imported to know.
    """
    found: dict[str, dict[str, Any]] = {}
    root = _Class(_class_named(base, PACKAGE / axis / "base.py"), PACKAGE / axis / "base.py")
    try:
        for folder in (*user_folders(axis), PACKAGE / axis):
            for path in plug_in_files(folder):
                lineage = _plug_in(path, root)
                if lineage is None:
                    continue
                name = _name(lineage)
                # Of two files of the user's with one name the registry's own error is to be shown.
                if name in found and folder != PACKAGE / axis:
                    raise _UnknownError
                # The user's folders come first and hide shipped classes of the same name.
                found.setdefault(name, {key: _value(lineage, key) for key in keys})
    except (_UnknownError, SyntaxError, UnicodeDecodeError):
        return None
    return found


def method_names() -> list[str]:
    """The names of all methods, sorted."""
    found = described("petl", "Method", ())
    if found is not None:
        return sorted(found)
    from suite.petl import methods

    return methods.names()


def variant_names() -> list[str]:
    """The names of all attention variants, sorted."""
    found = described("attention", "Variant", ())
    if found is not None:
        return sorted(found)
    from suite.attention import variants

    return variants.names()


def _plug_in(path: Path, root: _Class) -> list[_Class] | None:
    """The one concrete class of a file that derives from `root`, and its bases up to there."""
    found = []
    for statement in _tree(path).body:
        if not _is_plain(statement):
            raise _UnknownError
        if isinstance(statement, ast.ClassDef):
            lineage = _lineage(_Class(statement, path), root)
            if lineage and not _is_abstract(lineage):
                found.append(lineage)
    # Of several the registry's own error is to be shown; a user's file without any may make one.
    if len(found) > 1 or (not found and path.parent != root.path.parent):
        raise _UnknownError
    return next(iter(found), None)


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement of a module changes nothing of the module's classes."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) for target in statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "TYPE_CHECKING"
    return isinstance(statement, PLAIN_STATEMENTS)


def _lineage(found: _Class, root: _Class) -> list[_Class]:
    """A class and its bases up to `root`, in this order; empty where it does not derive from it."""
    if found.node is root.node:
        return [found]
    above: list[_Class] = []
    others = 0
    for expression in found.node.bases:
        base = _base(expression, found.path)
        if base is None:
            continue
        lineage = _lineage(base, root)
        others += 1
        above = above or lineage
    # With two bases of the suite the order of their attributes is Python's to find.
    if above and (others > 1 or found.node.decorator_list or found.node.keywords):
        raise _UnknownError
    if not above:
        return []
    return [found, *above]


def _base(expression: ast.expr, path: Path) -> _Class | None:
    """The class of the suite or of the file that a base names; None for one of a library."""
    # `Method[LoraArchitecture]` is the class `Method`.
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    first = expression
    while isinstance(first, ast.Attribute):
        first = first.value
    if not isinstance(first, ast.Name):
        raise _UnknownError
    name = first.id
    for statement in _tree(path).body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return _Class(statement, path)
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name).split(".")[0] == name:
                return _imported(statement, alias, plain=expression is first)
    if hasattr(builtins, name):
        return None
    raise _UnknownError


def _imported(
    statement: ast.Import | ast.ImportFrom, alias: ast.alias, *, plain: bool
) -> _Class | None:
    module = alias.name
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
    if module.split(".")[0] in STRANGERS:
        return None
    # Only `from suite.x import Name`, as the suite's own files write it, is followed.
    if not plain or isinstance(statement, ast.Import) or module.split(".")[0] != PACKAGE.name:
        raise _UnknownError
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return _Class(_class_named(alias.name, path), path)


def _class_named(name: str, path: Path) -> ast.ClassDef:
    if path.is_file():
        for statement in _tree(path).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return statement
    raise _UnknownError


def _is_abstract(lineage: Sequence[_Class]) -> bool:
    """Whether a method that a base leaves open is still open."""
    opened: set[str] = set()
    for found in reversed(lineage):
        for name, statement in _members(found.node):
            opened.discard(name)
            decorators = getattr(statement, "decorator_list", [])
            if any("abstractmethod" in ast.unparse(decorator) for decorator in decorators):
                opened.add(name)
    return bool(opened)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """What a class defines, by name; a name with a type and no value is not defined yet."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is not None:
                yield statement.target.id, statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id, statement
        elif not isinstance(statement, ast.Expr | ast.Pass):
            raise _UnknownError


def _name(lineage: Sequence[_Class]) -> str:
    """The name by the registry's rule: the class's own, else its file's stem."""
    own = lineage[0]
    if any(name == "name" for name, _ in _members(own.node)):
        return str(_value([own], "name"))
    return stem_to_name(own.path.stem)


def _value(lineage: Sequence[_Class], key: str) -> Any:
    """The value of an attribute, from the first class that has one."""
    for found in lineage:
        values = [member for name, member in _members(found.node) if name == key]
        if values:
            return _plain_value(values[-1], found.path)
    raise _UnknownError


def _plain_value(statement: ast.stmt, path: Path) -> Any:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        raise _UnknownError
    value = statement.value
    # The one value that the suite's classes share by name.
    if isinstance(value, ast.Name):
        for other in _tree(path).body:
            if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == value.id:
                return _plain_value(other, path)
        raise _UnknownError
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "frozenset":
        if len(value.args) != 1:
            raise _UnknownError
        value = value.args[0]
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise _UnknownError from None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())
