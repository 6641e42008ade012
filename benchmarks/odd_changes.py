"""Random changes of what was right: other values in a tree, other bytes, other rows."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import random
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from suite.record.result import checksum


def words(text: str) -> list[str]:
    return text.split()


NUMBERS = (0, 1, -1, 2, 3, 7, 10**4, 10**9, 2**31, 2**63, 10**23, -(10**23))
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 1e23, math.inf, -math.inf, math.nan)
WORDS = words("""
    x 0 1e23 nan null é ../../x /etc/passwd / . a/b package:torch package:x/../.. bpe:1:x bytes
    { } {} {0} {sentence:d} {sentence!x} {sentence:>300000000} {sentence.a} %s ' =1+1 <script>
    http://[::1 2026-01-01 lora acceptability bert-base full mha
""")
SURROGATE = "\ud800"
"""Half of a pair: Python holds it, no encoding does, and so neither a database nor parquet."""
# A NUL, what commands a terminal, half of a surrogate pair, what turns the direction of writing
TEXTS = ("", " ", "x" * 5000, "\0", "\x1b[31m", "\x07", SURROGATE, "\u202e", *WORDS)
TREES = (
    *json.loads('[[], {}, [[]], [null], [{}], {"": null}, {"a": {"b": [1]}}, [1, 1], ["x", "x"]]'),
    [7] * 200,
)
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *FLOATS, *TEXTS, *TREES)
LIKELY = json.loads("""
    [1, 2, 3, 4, 5, 8, 12, 16, 0.0, 0.01, 0.1, 0.5, 1.0, true, false, null,
    "lora", "bitfit", "mha", "mqa"]
""")
"""Values that are often right, so that an input comes further than the check of its types."""
TOKENS = (
    *words(".inf -.inf .nan 1e23 1.0e+999 1:30:00 0b_ 0x_ ._ 2026-02-30 << = ~ ? - : | > --- ..."),
    *words(
        """[ { ] } ' " %YAML "\\0" "\\ud800" "\\x07" [[[[[[[[ {a:{a:{a: *a !!null !!timestamp"""
    ),
    *("!!timestamp x", "!!bool x", "!!int x", "!!float x", "!!binary é", "!!set {a}", "!!omap x"),
    *("!x y", "&a x", "%YAML 9", "9" * 30, "9" * 200),
    # Two of these end a line for YAML, and one begins a file that has a byte order
    *("\x07", "\x00", "\x85", "\u2028", "\ufeff", "\t"),
)
"""What takes the place of a word of a YAML text."""
PIECES = (
    *(b"", b"\0", b"\xff", b"\x07", b"{", b"]", b",", b'"', b"-", b"1e999", b"null", b"NaN"),
    *(b"\n", b"\\ud800", b"9" * 25, b"[" * 3000),
)
"""What takes the place of bytes."""
# Tags thrice: they hold most of what a reader shows
TABLES = words("""
    experiments experiment_tags runs tags tags tags metrics latest_metrics params alembic_version
""")


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a tree, to the tree itself first."""
    found = [at]
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            found += places(value, (*at, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            found += places(value, (*at, number))
    return found


def odd_value(chance: random.Random) -> Any:
    """A value that may be of any type, and in a third of the cases a likely one."""
    if chance.random() < 1 / 3:
        return chance.choice(LIKELY)
    return copy.deepcopy(chance.choice(VALUES))


def changed_tree(chance: random.Random, tree: Any) -> Any:
    """A copy with one to three values gone, replaced, doubled, moved or under another key."""
    tree = copy.deepcopy(tree)
    # One change mostly: the first thing that is wrong hides what comes after it
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        ways = places(tree)[1:]
        if not ways:
            return chance.choice(VALUES)
        change_one(chance, tree, ways)
    return tree


def change_one(chance: random.Random, tree: Any, ways: list[tuple[Any, ...]]) -> None:
    *parents, last = chance.choice(ways)
    target = tree
    for part in parents:
        target = target[part]
    how = chance.random()
    if how < 0.15:
        del target[last]
    elif how < 0.65:
        target[last] = odd_value(chance)
    elif how < 0.75:
        target[last] = [copy.deepcopy(target[last]), copy.deepcopy(target[last])]
    elif how < 0.9:
        other = tree
        for part in chance.choice(ways):
            other = other[part]
        target[last] = copy.deepcopy(other)
    elif isinstance(target, dict):
        # A file's keys are texts; some are very long
        target[str(chance.choice(VALUES))[:50]] = target.pop(last)
    else:
        target.append(odd_value(chance))


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with one to three stretches cut, doubled or replaced."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 1, 4, 30, 500)))
        how = chance.random()
        if how < 0.1:
            data = data[:start]
        elif how < 0.2:
            data = data[:end] + data[start:end] + data[end:]
        else:
            data = data[:start] + chance.choice(PIECES) + data[end:]
    return data


@functools.cache
def tree_of(text: str) -> Any:
    return yaml.safe_load(text)


def changed_yaml(chance: random.Random, text: str) -> bytes:
    """A YAML text changed as a tree, as text or as bytes."""
    how = chance.random()
    if how > 0.85:
        return changed_bytes(chance, text.encode())
    if how < 0.6:
        tree = changed_tree(chance, tree_of(text))
        # JSON is YAML, and quick to write, but has other words for what is not finite
        text = json.dumps(tree, ensure_ascii=chance.random() < 0.5)
        text = text.replace("Infinity", ".inf").replace("NaN", ".nan")
    else:
        word = chance.choice(list(re.finditer(r"[^\s:,{}\[\]]+", text)))
        text = text[: word.start()] + chance.choice(TOKENS) + text[word.end() :]
    return text.encode("utf-8", "surrogatepass")


def changed_json(chance: random.Random, data: bytes) -> bytes:
    """JSON changed as a tree or as bytes.

    Most trees with a checksum get a new one: a wrong checksum alone is refused before all else.
    """
    if chance.random() < 0.3:
        return changed_bytes(chance, data)
    try:
        tree = json.loads(data)
    except ValueError:
        return changed_bytes(chance, data)
    tree = changed_tree(chance, tree)
    if isinstance(tree, dict) and "checksum" in tree and chance.random() < 0.7:
        with contextlib.suppress(ValueError, TypeError):
            tree["checksum"] = checksum(tree)
    return json.dumps(tree).encode()


def changed_table(chance: random.Random, table: pa.Table) -> pa.Table:
    """A table with a column gone, or with other values in one."""
    name = chance.choice(table.column_names)
    place = table.column_names.index(name)
    if chance.random() < 0.2:
        return table.remove_column(place)
    values = table.column(name).to_pylist()
    for _ in range(chance.randint(1, 2)):
        value = chance.choice(VALUES)
        if value != SURROGATE:
            values[chance.randrange(len(values))] = value
    try:
        made = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError):
        made = pa.array([str(value) for value in values])
    # An empty struct is a type that parquet does not have
    if pa.types.is_nested(made.type):
        made = pa.array([json.dumps(value) for value in values])
    return table.set_column(place, name, made)


def spoil(chance: random.Random, path: Path) -> None:
    """Change, cut, empty or remove a file, or put a folder or a link in its place."""
    if not path.is_file():
        return
    how = chance.random()
    if how < 0.75:
        change_file(chance, path)
        return
    path.unlink()
    if how < 0.8:
        path.write_bytes(b"")
    elif how < 0.87:
        path.mkdir()
    elif how < 0.92:
        # A link to itself: reading it is an OSError of its own
        path.symlink_to(path)
    elif how < 0.95:
        path.parent.joinpath("failure-0.json").write_bytes(b'{"type": "Lost')


def change_file(chance: random.Random, path: Path) -> None:
    """Change a file in the way of its kind: a table, JSON, or bytes."""
    data = path.read_bytes()
    if path.suffix != ".parquet":
        path.write_bytes(changed_json(chance, data))
    elif chance.random() < 0.4:
        path.write_bytes(changed_bytes(chance, data))
    else:
        # Some tables are spoilt already, and some values have no column
        with contextlib.suppress(pa.ArrowException, OSError):
            pq.write_table(changed_table(chance, pq.read_table(path)), path)


def spoil_row(chance: random.Random, database: Path) -> None:
    """Put another value into one field of one row, or remove the row."""
    with closing(sqlite3.connect(database)) as connection:
        table = chance.choice(TABLES)
        rows = connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall()
        if not rows:
            return
        columns = [about[1] for about in connection.execute(f"PRAGMA table_info({table})")]
        row = chance.choice(rows)[0]
        remove = chance.random() < 0.15
        column = chance.choice(columns)
        value = chance.choice(VALUES)
        if isinstance(value, list | dict) or value == SURROGATE:
            value = json.dumps(value)
        # What holds a row in its place may not be broken; sqlite has integers of 64 bits
        with contextlib.suppress(sqlite3.Error, OverflowError):
            if remove:
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
            else:
                change = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
                connection.execute(change, (value, row))
            connection.commit()
