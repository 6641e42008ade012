"""Feed the command line what nobody should write, and look for tracebacks.

    python -m benchmarks.odd_inputs --inputs 20000 --seed 1
    python -m benchmarks.odd_inputs --only records:17 --seed 1     # one of them again, with what it printed

An input is something whole (a sweep, `--set`, a task, a home's records, its MLflow database, a file of results) with one to three random
changes: other values at random places, and other bytes. Each goes to a real command in this process. A command may refuse it (exit code 1
or 2, and a message). A finding is anything else: a traceback, another exit code, more than two minutes, or more than 6 GiB of memory.
`tests/test_odd_inputs.py` feeds a small share of the same inputs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import functools
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer.main
import yaml

from suite.cli import app as command_line
from suite.cli.trial import build_spec
from suite.errors import SuiteError
from suite.record.folder import Home
from suite.record.result import FailureRecord, checksum
from suite.tracking import sync
from tests.answers import some_right, write_confirmed
from tests.records import make_spec, make_store, write_definition, write_trial

PATIENCE_S = 120
MEMORY_BYTES = 6 * 2**30
CHUNK = 25
"""Inputs that a process takes at a time."""
SUITE = f"{os.sep}suite{os.sep}"


def words(text: str) -> list[str]:
    return text.split()


NUMBERS = (0, 1, -1, 2, 3, 7, 10**4, 10**9, 2**31, 2**63, 10**23, -(10**23))
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 1e23, math.inf, -math.inf, math.nan)
WORDS = words("""
    x 0 1e23 nan null é ../../x /etc/passwd / . a/b package:torch package:x/../.. bpe:1:x bytes
    { } {} {0} {sentence:d} {sentence!x} {sentence:>300000000} {sentence.a} %s ' =1+1 <script>
    http://[::1 2026-01-01 lora acceptability bert-base full mha
""")
TEXTS = ("", " ", "x" * 5000, "\0", "\x1b[31m", "\x07", "\ud800", "\u202e", *WORDS)
TREES = ([], {}, [[]], [None], [{}], {"": None}, {"a": {"b": [1]}}, [1, 1], ["x", "x"], [7] * 200)
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *FLOATS, *TEXTS, *TREES)
LIKELY = (
    1,
    2,
    3,
    4,
    5,
    8,
    12,
    16,
    0.0,
    0.01,
    0.1,
    0.5,
    1.0,
    True,
    False,
    None,
    "lora",
    "bitfit",
    "mha",
    "mqa",
)
"""Values that are often right, so that an input comes further than the check of its types."""
TOKENS = (
    *words(".inf -.inf .nan 1e23 1.0e+999 1:30:00 0b_ 0x_ ._ 2026-02-30 << = ~ ? - : | > --- ..."),
    *words(
        """[ { ] } ' " %YAML "\\0" "\\ud800" "\\x07" [[[[[[[[ {a:{a:{a: *a !!null !!timestamp"""
    ),
    *("!!timestamp x", "!!bool x", "!!int x", "!!float x", "!!binary é", "!!set {a}", "!!omap x"),
    *("!x y", "&a x", "%YAML 9", "9" * 30, "9" * 200),
    *("\x07", "\x00", "\x85", "\u2028", "\ufeff", "\t"),
)
KEYS = words("""
    rank alpha dropout learning_rate seed phase decoder_objective limit.train training training.epochs
    training.batch_size training.max_length training.weight_decay training.zero_stage backbone.config
    backbone.config.vocab_size backbone.config.num_attention_heads backbone.config.hidden_size
    backbone.drop_layers backbone.tokenizer attention.options attention.options.kv_heads architecture
""")
"""What `suite trial` and `suite params` know after `--set`."""
ODD_KEYS = ("", ".", "a..b", "name.x", "backbones.0", "x" * 300, "\x07", "training.")
ODD_BYTES = b'|\0|\xff|\x07|{|]|,|"|-|1e999|null|NaN|\n|\\ud800'.split(b"|")
PIECES = (*ODD_BYTES, b"9" * 25, b"[" * 3000)

SWEEP = """
name: odd
description: what the changes start from
backbones:
- {name: bert-base, tokenizer: bytes, config: {hidden_size: 32, intermediate_size: 64, num_attention_heads: 4, num_hidden_layers: 2,
   max_position_embeddings: 128, vocab_size: 384}}
- {name: t5-small, tokenizer: bytes, config: {d_model: 32, d_kv: 8, d_ff: 64, num_heads: 4, num_layers: 2, num_decoder_layers: 2, vocab_size: 384}}
attention: [pretrained, {name: gqa, options: {kv_heads: 2}}]
methods: [full, {name: lora, architecture: {rank: 4}, learning_rate: {low: 1.0e-5, high: 1.0e-2}}, bitfit]
tasks: [acceptability]
architectures: first
search: {sampler: gp, trials: 4, startup_trials: 2, seed: 0, edge_guard: {extensions: 1, trials: 2}, stop: {tolerance: 0.1}, lanes: 2}
confirm: {seeds: [1, 2]}
limit: {train: 64, validation: 32, test: 32}
training: {epochs: 2, batch_size: 8, max_length: 64, warmup_frac: 0.1, weight_decay: 0.0, precision: fp32, patience: 2}
resources: {workers: 2, cpus_per_worker: 1.0, workers_by_backbone: {bert-base: 2}}
timeouts: {setup_s: 60.0, epoch_s: 60.0}
failures: {retries: 1, grace_s: 5.0}
tracking: {artifacts: false}
"""
GENERATED = """
description: is this order of words a sentence
source: ours
version: 1
data: {generator: acceptability, options: {seed: 0, train: 24, validation: 8, test: 8}}
inputs: [sentence]
text_to_text: "acceptability sentence: {sentence}"
label: {column: label, words: [unacceptable, acceptable]}
metrics: [accuracy]
splits: {rule: named, train: train, validation: validation, test: test}
"""
FROM_FILES = "description: a toy\nsource: ours\ndata: {hub: odd/rows}\n"
TASKS = (
    GENERATED,
    FROM_FILES
    + """inputs: [text]
label: {column: number, range: [0.0, 10.0], step: 1.0}
text_to_text: "how many: {text}"
metrics: [pearson, spearman]
splits: {rule: named, test: test}
""",
    FROM_FILES
    + """kind: generation
inputs: [text]
target: other
text_to_text: "say: {text}"
answer: "(\\\\d+)"
metrics: [exact_match, bleu]
splits: {rule: held-out, held_out: 2}
""",
    FROM_FILES
    + """kind: instruction
inputs: [text, other]
target: text2
text_to_text: "do {text} with {other}: "
without_input: "do {text}: "
metrics: [perplexity]
splits: {rule: named, test: test}
""",
    FROM_FILES
    + """kind: language-model
inputs: [text]
metrics: [perplexity]
splits: {rule: named, test: test}
""",
    FROM_FILES
    + """kind: multiple-choice
inputs: [text]
choices: [other, text2]
stem: "{text}"
text_to_text: "{text}? {other} {text2}"
label: {column: label, words: [a, b]}
splits: {rule: named, test: test}
""",
)
READERS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("status",), 6),
    (("status", "--format", "json"), 4),
    (("status", "--format", "csv"), 2),
    (("leaderboard", "--all"), 8),
    (("leaderboard", "--format", "json"), 4),
    (("curves",), 5),
    (("compare", "--all-pairs"), 5),
    (("report", "--format", "csv", "--out", "out"), 3),
    (("report", "--out", "out"), 1),
    (("sync",), 1),
    (("sync", "--verify"), 1),
    (("export-results", "out.json"), 3),
    (("export", "lora/agreement", "out-model"), 2),
    (("run", "sweep.yaml", "--dry-run", "--set", "name=demo"), 3),
)
"""Commands that read a home, and how often each is drawn: those that take seconds seldom."""
SHARES = {"sweeps": 25, "set": 25, "tasks": 20, "imports": 14, "records": 10, "stores": 6}
"""How many of a hundred inputs are of which kind."""


@dataclass
class Findings:
    """What went wrong, by what it was and where.

    Attributes:
        first: The first input of each kind of finding, as `--only` takes it.
        ended: How many commands ended with which exit code.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.first.setdefault(what, example)

    def merge(self, other: Findings) -> None:
        self.counts += other.counts
        self.ended += other.ended
        for what, example in other.first.items():
            self.first.setdefault(what, example)


class TooLongError(BaseException):
    """A command took more than `PATIENCE_S`; no `except Exception` of a command may swallow it."""


class Feeder:
    """Whole inputs in a folder, which each call changes in copies, and the commands that read them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        self.findings = Findings()
        self.loud = False
        self._errors: list[str] = []
        self._example = ""
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            "sweeps": self.sweeps,
            "set": self.set_items,
            "tasks": self.tasks,
            "records": self.records,
            "stores": self.stores,
            "imports": self.imports,
        }
        self.home = root / "home"
        self._whole = root / "whole"
        self._make()

    def _make(self) -> None:
        empty_db = make_store(self.root / "empty.db")
        # the paths in the database are those of the copies
        make_home(Home(self.home), empty_db)
        (self.root / "sweep.yaml").write_text(SWEEP)
        for name in ("results.json", "results.parquet"):
            self.call("export-results", self.root / name, "--home", self.home)
        shutil.move(self.home, self._whole)
        self.call("run", self.root / "sweep.yaml", "--dry-run", "--home", self.home)
        # changes of what is refused already would reach nothing
        assert self.findings.ended == {"0": 3}, self.findings
        rows = {
            "text": ["a b", "c", "", "d e f", "g", "h"],
            "other": ["x 1", "y 22", "z", "", "v", "w 3"],
            "text2": ["1", "2", "3", "4", "5", "6"],
            "label": [0, 1, 0, 1, 0, 1],
            "number": [0.0, 1.0, 2.0, 3.0, 4.0, 10.0],
        }
        folder = self.root / "data" / "odd" / "rows" / "default"
        folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            pq.write_table(pa.table(rows), folder / f"{split}.parquet")

    def feed(self, kind: str, number: int) -> None:
        """Make one input and give it to its commands; the same number gives the same input."""
        self._example = f"{kind}:{number}"
        self.kinds[kind](random.Random(f"{self.seed}:{kind}:{number}"))

    def call(self, *arguments: object) -> None:
        """Run one command here."""
        given = [str(argument) for argument in arguments]
        self.watch(" ".join(given), lambda: command_line.main(given))

    def watch(self, told: str, command: Callable[[], object]) -> None:
        # strict, as a terminal's: a text that is no UTF-8 must not reach it
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        found = None
        code: object = 0
        self._errors.clear()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patience():
                command()
                out.flush()
        except SystemExit as ended:
            code = ended.code or 0
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a command lets through
            code = "traceback"
            found = f"{type(error).__name__} at {_place(error)}"
            if self.loud:
                traceback.print_exc()
        printed = _printed(out) + _printed(err)
        if found is None and code not in (0, 1, 2):
            found = f"exit code {code}"
        if found is None and "Traceback (most recent call last)" in printed:
            found = "a traceback was printed"
        if found is None and self._errors:
            found = f"in a thread: {self._errors[0]}"
        self.findings.ended[str(code)] += 1
        if found is not None:
            self.findings.add(found, self._example)
        if self.loud:
            print(f"$ {told}\n{printed}\n-> {code}, {found or 'no finding'}")

    def heard(self, args: Any) -> None:
        """An exception that ended a thread."""
        self._errors.append(f"{args.exc_type.__name__} at {_place(args.exc_value)}")

    # Kinds of inputs

    def sweeps(self, chance: random.Random) -> None:
        path = self.root / "odd.yaml"
        path.write_bytes(changed_yaml(chance, SWEEP))
        self.call(
            "run",
            path,
            "--dry-run",
            "--home",
            self.home,
            "--format",
            chance.choice(("table", "json")),
        )

    def set_items(self, chance: random.Random) -> None:
        command = chance.choices(("run", "params", "trial"), (6, 2, 2))[0]
        known = KEYS
        if command == "run":
            known = [".".join(map(str, place)) for place in places(tree_of(SWEEP)) if place]
        items = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            key = chance.choice(known)
            if chance.random() < 0.1:
                key = chance.choice(ODD_KEYS)
            # a NUL cannot be typed
            value = chance.choice(TOKENS).replace("\0", "")
            if chance.random() < 0.7:
                value = _as_text(odd_value(chance)).replace("\0", "")
            items.append(f"{key}={value}")
        options = [word for item in items for word in ("--set", item)]
        if command == "run":
            sweep = self.root / "sweep.yaml"
            self.call("run", sweep, "--dry-run", "--home", self.home, *options)
        elif command == "params":
            self.call("params", "--backbone", "bert-base", "--method", "lora", *options)
        else:
            # what `suite trial` does before it trains
            self.watch(f"trial {items}", lambda: _check_trial(items))

    def tasks(self, chance: random.Random) -> None:
        folder = self.root / "tasks-of-mine"
        folder.mkdir(exist_ok=True)
        path = folder / "acceptability.yaml"
        path.write_bytes(changed_yaml(chance, chance.choice(TASKS)))
        if chance.random() < 0.5:
            self.call(
                "task",
                "check",
                path,
                "--data-root",
                self.root / "data",
                "--backbone",
                "minilm",
                "--format",
                "json",
            )
        else:
            self.call(
                "run", self.root / "sweep.yaml", "--dry-run", "--tasks", folder, "--home", self.home
            )

    def records(self, chance: random.Random) -> None:
        with self._copy():
            files = [
                path
                for path in sorted(self.home.rglob("*"))
                if path.is_file() and path.suffix != ".db"
            ]
            for _ in range(chance.choice((1, 1, 2))):
                spoil(chance, chance.choice(files))
            self._read(chance)

    def stores(self, chance: random.Random) -> None:
        with self._copy():
            database = self.home / "mlflow.db"
            if chance.random() < 0.15:
                database.write_bytes(changed_bytes(chance, database.read_bytes()))
            elif chance.random() < 0.2:
                spoil(
                    chance,
                    chance.choice(sorted(self.home.glob("mlartifacts/**/*.parquet")) or [database]),
                )
            else:
                for _ in range(chance.randint(1, 3)):
                    spoil_row(chance, database)
            self._read(chance)

    def imports(self, chance: random.Random) -> None:
        with self._copy():
            path = self.root / chance.choice(("odd.json", "odd.json", "odd.parquet"))
            whole = (self.root / f"results{path.suffix}").read_bytes()
            if path.suffix == ".parquet" and chance.random() < 0.7:
                pq.write_table(changed_table(chance, pq.read_table(io.BytesIO(whole))), path)
            else:
                path.write_bytes(changed_json(chance, whole))
            self.call("import-results", path, "--home", self.home)
            self._read(chance)

    @contextmanager
    def _copy(self) -> Iterator[None]:
        """A fresh copy of the whole home at `self.home`."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self._whole, self.home)
        try:
            yield
        finally:
            shutil.rmtree(self.home, ignore_errors=True)

    def _read(self, chance: random.Random) -> None:
        commands = [command for command, _ in READERS]
        weights = [weight for _, weight in READERS]
        command, *rest = chance.choices(commands, weights)[0]
        given = [
            str(self.root / word) if word.startswith(("out", "sweep.")) else word for word in rest
        ]
        self.call(command, *given, "--home", self.home)
        for name in ("out", "out-model"):
            shutil.rmtree(self.root / name, ignore_errors=True)


def make_home(home: Home, empty_db: Path) -> None:
    """A small sweep that has ended: two methods on a task, two seeds each, and a trial that failed and was given up."""
    write_definition(home, ["lora", "read"], ["agreement"], trials=2, seeds=(1, 2))
    chance = np.random.default_rng(0)
    for method, share in (("lora", 0.9), ("read", 0.6)):
        write_confirmed(home, method, some_right(chance, share, items=20, seeds=2))
    spec = write_trial(home, make_spec("lora", number=1))
    for _ in range(2):
        home.trial(spec).add_failure(FailureRecord(type="LostError", message="its host was lost"))
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None


def _check_trial(items: Sequence[str]) -> None:
    """Check a trial's settings, and end as the command does where they are refused."""
    try:
        build_spec("bert-base", "lora", "acceptability", overrides=items)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\ud800", "")
    return json.dumps(value)


def _printed(stream: io.TextIOWrapper) -> str:
    with contextlib.suppress(ValueError):
        stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(errors="replace")


def _place(error: BaseException) -> str:
    """The innermost line of ours that an error passed through."""
    place = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        if SUITE in frame.filename and "site-packages" not in frame.filename:
            place = f"{frame.filename.rpartition(SUITE)[2]}:{frame.lineno}"
    return place


@contextmanager
def patience() -> Iterator[None]:
    """Ends the block after `PATIENCE_S`."""

    def end(number: int, frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Changes


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a tree."""
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
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        ways = [way for way in places(tree) if way]
        if not ways:
            return chance.choice(VALUES)
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
                with contextlib.suppress(KeyError, IndexError, TypeError):
                    other = other[part]
            target[last] = copy.deepcopy(other)
        elif isinstance(target, dict):
            target[str(chance.choice(VALUES))[:50]] = target.pop(last)
        else:
            target.append(odd_value(chance))
    return tree


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
    if how < 0.6:
        tree = changed_tree(chance, tree_of(text))
        # JSON is YAML, and quick to write, but has other words for what is not finite
        written = json.dumps(tree, ensure_ascii=chance.random() < 0.5)
        for theirs, ours in (("Infinity", ".inf"), ("NaN", ".nan")):
            written = written.replace(theirs, ours)
        return written.encode("utf-8", "surrogatepass")
    if how < 0.85:
        words = list(re.finditer(r"[^\s:,{}\[\]]+", text))
        word = chance.choice(words)
        return (text[: word.start()] + chance.choice(TOKENS) + text[word.end() :]).encode(
            "utf-8", "surrogatepass"
        )
    return changed_bytes(chance, text.encode())


def changed_json(chance: random.Random, data: bytes) -> bytes:
    """JSON changed as a tree or as bytes; a checksum is made anew in half of the cases."""
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
    names = table.column_names
    name = chance.choice(names)
    place = names.index(name)
    if chance.random() < 0.2:
        return table.remove_column(place)
    values = table.column(name).to_pylist()
    for _ in range(chance.randint(1, 2)):
        values[chance.randrange(len(values))] = chance.choice(
            [value for value in VALUES if value != "\ud800"]
        )
    try:
        made = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError):
        made = pa.array([str(value) for value in values])
    # parquet has no such type
    if pa.types.is_nested(made.type):
        made = pa.array([json.dumps(value) for value in values])
    return table.set_column(place, name, made)


def spoil(chance: random.Random, path: Path) -> None:
    """Change, cut, empty or remove a file, or put a folder or a link in its place."""
    if not path.is_file():
        return
    how = chance.random()
    if how < 0.75:
        data = path.read_bytes()
        if path.suffix == ".parquet":
            if chance.random() < 0.6:
                with contextlib.suppress(pa.ArrowException):
                    pq.write_table(changed_table(chance, pq.read_table(path)), path)
                return
            path.write_bytes(changed_bytes(chance, data))
            return
        path.write_bytes(changed_json(chance, data))
        return
    path.unlink()
    if how < 0.8:
        path.write_bytes(b"")
    elif how < 0.87:
        path.mkdir()
    elif how < 0.92:
        path.symlink_to(path)
    elif how < 0.95:
        path.parent.joinpath("failure-0.json").write_bytes(b'{"type": "Lost')


def spoil_row(chance: random.Random, database: Path) -> None:
    """Put another value into one field of one row, or remove the row."""
    with closing(sqlite3.connect(database)) as connection:
        tables = (
            "experiments",
            "experiment_tags",
            "runs",
            "tags",
            "tags",
            "tags",
            "metrics",
            "latest_metrics",
            "params",
            "alembic_version",
        )
        table = chance.choice(tables)
        rows = connection.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid").fetchall()
        if not rows:
            return
        columns = [about[1] for about in connection.execute(f"PRAGMA table_info({table})")]
        row = chance.choice(rows)[0]
        value = chance.choice(
            [
                v
                for v in VALUES
                if isinstance(v, str | float | None) or (type(v) is int and abs(v) < 2**63)
            ]
        )
        if isinstance(value, str):
            value = value.replace("\ud800", "")
        # what holds a row in its place may not be broken, and sqlite may refuse
        with contextlib.suppress(sqlite3.Error, UnicodeError):
            if chance.random() < 0.15:
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
            else:
                connection.execute(
                    f"UPDATE {table} SET {chance.choice(columns)} = ? WHERE rowid = ?", (value, row)
                )
            connection.commit()


# Running


@contextmanager
def feeder(seed: int) -> Iterator[Feeder]:
    """A feeder in a folder of its own, with nothing of this user's and no network."""
    before = dict(os.environ)
    hook = threading.excepthook
    app = command_line.app
    with tempfile.TemporaryDirectory(prefix="suite-odd-") as folder:
        for name in (
            "SUITE_HOME",
            "SUITE_PATH",
            "SUITE_TASKS",
            "SUITE_STORAGE",
            "SUITE_OPTUNA",
            "MLFLOW_TRACKING_URI",
            "SUITE_DATA_ROOT",
        ):
            os.environ.pop(name, None)
        os.environ |= {"XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
        try:
            # the commands as `app` makes them anew for every call, which takes longer than most inputs
            command_line.app = typer.main.get_command(app)  # type: ignore[assignment]
            made = Feeder(Path(folder), seed)
            threading.excepthook = made.heard
            yield made
        finally:
            threading.excepthook = hook
            command_line.app = app
            os.environ.clear()
            os.environ.update(before)


OPEN = contextlib.ExitStack()
"""What a process of a pool keeps until it ends."""


def start(seed: int) -> None:
    """Give this process of a pool its feeder."""
    global FEEDER
    FEEDER = OPEN.enter_context(feeder(seed))
    atexit.register(OPEN.close)
    # what imports a library is no measure of what an input takes
    for kind in SHARES:
        for number in range(5):
            FEEDER.feed(kind, -number)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # an input that fills the memory must not take this machine along
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))


def work(share: Sequence[tuple[str, int]]) -> Findings:
    """Feed some inputs in a process of a pool."""
    FEEDER.findings = Findings()
    for kind, number in share:
        FEEDER.feed(kind, number)
    return FEEDER.findings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(SHARES))
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input, with all that it prints")
    options = parser.parse_args()
    if options.only:
        kind, _, number = options.only.partition(":")
        with feeder(options.seed) as made:
            made.loud = True
            made.feed(kind, int(number))
        return
    began = time.monotonic()
    inputs = numbered(options.inputs, options.kinds.split(","))
    found = Findings()
    with ProcessPoolExecutor(
        options.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start,
        initargs=(options.seed,),
    ) as pool:
        jobs = [
            pool.submit(work, inputs[first : first + CHUNK])
            for first in range(0, len(inputs), CHUNK)
        ]
        for done, job in enumerate(as_completed(jobs), 1):
            try:
                new = job.result()
            except BaseException:
                # a defect of the feeder: nobody waits for the rest
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            for what in new.counts.keys() - found.counts.keys():
                print(f"{what}  ({new.first[what]})", flush=True)
            found.merge(new)
            if done % 40 == 0:
                print(
                    f"{done * CHUNK:,} inputs, {sum(found.counts.values())} findings, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    show(found, inputs, options.seed, time.monotonic() - began)
    if found.counts:
        raise SystemExit(1)


def numbered(inputs: int, kinds: Sequence[str]) -> list[tuple[str, int]]:
    """So many inputs by kind and number, mixed, as `SHARES` has it."""
    shares = {kind: SHARES[kind] for kind in kinds}
    found = []
    for kind, share in shares.items():
        found += [(kind, number) for number in range(round(inputs * share / sum(shares.values())))]
    random.Random(0).shuffle(found)
    return found


def show(found: Findings, inputs: Sequence[tuple[str, int]], seed: int, seconds: float) -> None:
    for what, count in found.counts.most_common():
        print(f"{count:6}  {what}  (first: {found.first[what]})")
    of_kind = Counter(kind for kind, _ in inputs)
    print(
        f"seed {seed}: {len(inputs):,} inputs in {seconds:.0f} s: "
        + ", ".join(f"{kind} {count:,}" for kind, count in of_kind.items())
    )
    print(
        "commands that ended with exit code "
        + ", ".join(f"{code}: {count:,}" for code, count in sorted(found.ended.items()))
    )
    print(f"findings: {sum(found.counts.values())}")


if __name__ == "__main__":
    main()
