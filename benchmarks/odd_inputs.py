"""Feed the command line what nobody should write, and look for tracebacks.

    python -m benchmarks.odd_inputs --inputs 20000 --seed 1
    python -m benchmarks.odd_inputs --inputs 20000 --record odd.jsonl   # cut it, and go on later
    python -m benchmarks.odd_inputs --only records:17    # one of them again, with what it printed

An input is something whole (benchmarks/odd_home.py) with one to three random changes
(benchmarks/odd_changes.py): a sweep, `--set`, a task, a home's files, its MLflow database, a file of
results, a backbone's folder, a file of rows, `--tracking-uri`. Each goes to a real command in this
process. A command may refuse it (exit code 1 or 2, and a message). A finding is
anything else: a traceback, another exit code, more than two minutes, or more than 6 GiB of memory.
`tests/test_odd_inputs.py` feeds a small share of the same inputs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer.main

from benchmarks.odd_changes import (
    SURROGATE,
    TOKENS,
    change_file,
    changed_bytes,
    changed_json,
    changed_table,
    changed_yaml,
    odd_value,
    places,
    spoil,
    spoil_row,
    tree_of,
    words,
)
from benchmarks.odd_home import claim, driven, make_backbone, make_home, make_rows
from suite.cli import app as command_line
from suite.errors import SuiteError
from suite.record.folder import Home
from suite.train.by_hand import build_spec
from tests.records import make_store

PATIENCE_S = 120
MEMORY_BYTES = 6 * 2**30
SHARE = 25
"""Inputs that a process takes at a time."""
SUITE = f"{os.sep}suite{os.sep}"
KEYS = words("""
    rank alpha dropout learning_rate seed phase decoder_objective limit.train training
    training.epochs training.batch_size training.max_length training.weight_decay
    training.zero_stage backbone.config backbone.config.vocab_size backbone.drop_layers
    backbone.config.num_attention_heads backbone.config.hidden_size backbone.tokenizer
    attention.options attention.options.kv_heads architecture
""")
"""What `suite trial` and `suite params` know after `--set`."""
ODD_KEYS = ("", ".", "a..b", "name.x", "backbones.0", "x" * 300, "\x07", "training.")

SWEEP = """
name: odd
description: what the changes start from
backbones:
- {name: bert-base, tokenizer: bytes,
   config: {hidden_size: 32, intermediate_size: 64, num_attention_heads: 4, num_hidden_layers: 2,
            max_position_embeddings: 128, vocab_size: 384}}
- {name: t5-small, tokenizer: bytes,
   config: {d_model: 32, d_kv: 8, d_ff: 64, num_heads: 4, num_layers: 2, num_decoder_layers: 2,
            vocab_size: 384}}
attention: [pretrained, {name: gqa, options: {kv_heads: 2}}]
methods:
- full
- {name: lora, architecture: {rank: 4}, learning_rate: {low: 1.0e-5, high: 1.0e-2}}
- bitfit
tasks: [acceptability]
architectures: first
search: {sampler: gp, trials: 4, startup_trials: 2, seed: 0, lanes: 2,
  edge_guard: {extensions: 1, trials: 2}, stop: {tolerance: 0.1}}
confirm: {seeds: [1, 2]}
limit: {train: 64, validation: 32, test: 32}
training: {epochs: 2, batch_size: 8, max_length: 64, warmup_frac: 0.1, weight_decay: 0.0,
  precision: fp32, patience: 2}
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
# One of each kind of task, over the same file of rows
OF_FILES = r"""
inputs: [text]
label: {column: number, range: [0.0, 10.0], step: 1.0}
text_to_text: "how many: {text}"
metrics: [pearson, spearman]
splits: {rule: named, test: test}
---
kind: generation
inputs: [text]
target: other
text_to_text: "say: {text}"
answer: "(\\d+)"
metrics: [exact_match, bleu]
splits: {rule: held-out, held_out: 2}
---
kind: instruction
inputs: [text, other]
target: text2
text_to_text: "do {text} with {other}: "
without_input: "do {text}: "
metrics: [perplexity]
splits: {rule: named, test: test}
---
kind: language-model
inputs: [text]
metrics: [perplexity]
splits: {rule: named, test: test}
---
kind: multiple-choice
inputs: [text]
choices: [other, text2]
stem: "{text}"
text_to_text: "{text}? {other} {text2}"
label: {column: label, words: [a, b]}
splits: {rule: named, test: test}
"""
OWN = "description: a toy\nsource: ours\ndata: "
TASKS = [GENERATED]
for of_files in OF_FILES.split("---"):
    TASKS.append(f"{OWN}{{hub: odd/rows}}{of_files}")
ROWS = {
    "text": ["a b", "c", "", "d e f", "g", "h"],
    "other": ["x 1", "y 22", "z", "", "v", "w 3"],
    "text2": ["1", "2", "3", "4", "5", "6"],
    "label": [0, 1, 0, 1, 0, 1],
    "number": [0.0, 1.0, 2.0, 3.0, 4.0, 10.0],
}
READERS = {
    "status": 6,
    "status --format json": 4,
    "status --format csv": 2,
    "leaderboard --all": 8,
    "leaderboard --format json": 4,
    "curves": 5,
    "compare --all-pairs": 5,
    "report --format csv --out out": 3,
    "report --out out": 1,
    "sync": 1,
    "sync --verify": 1,
    "export-results out.json": 3,
    "export lora/agreement out-model": 2,
    "run sweep.yaml --dry-run --set name=demo": 3,
}
"""Commands that read a home, and how often each is drawn: those that take seconds seldom."""
OF_A_STORE = (
    "leaderboard",
    "leaderboard --format json",
    "curves",
    "export-results out.json",
    "sync",
)
"""Commands that are given a `--tracking-uri`."""
URI_PARTS = {
    "scheme": words("""
        sqlite sqlite sqlite http https postgresql postgresql+psycopg postgres mysql mysql+pymysql
        mssql+pyodbc oracle file ftp x SQLITE sqlite+pysqlite
    """),
    "user": ("", "", "", "me@", "me:@", ":@", "@", "\x1b[31m@", "me%00@"),
    "host": ("127.0.0.1", "127.0.0.1", "[::1]", "[::1", "::1]", "", "a b", "\x07", "\udcff", "%00"),
    "port": ("", ":9", ":9", ":abc", ":-1", ":99999999", ":", ":9:9", ":é", ":9.5"),
    "name": (
        *(
            "",
            "/",
            "/y",
            "//y",
            "/y.db",
            "/%00.db",
            "/\0.db",
            "/\udcff.db",
            "/é.db",
            "/\x1b[31m.db",
        ),
        *("/a%3Fb.db", "/a#b.db", "/%zz.db", f"/{'x' * 300}.db", f"/{'x/' * 3000}y.db", "/../y.db"),
        *("/sweep.yaml", "/sweep.yaml/y.db", "/data", "/:memory:"),
    ),
    "query": (
        "",
        "",
        "",
        "?",
        "?mode=ro",
        "?timeout=x",
        "?host=/nowhere",
        "?connect_timeout=x",
        "?=&",
    ),
}
"""Of what a `--tracking-uri` is put together; no host but this machine is asked."""
SHARES = {
    "sweeps": 22,
    "set": 22,
    "tasks": 17,
    "imports": 12,
    "records": 12,
    "stores": 5,
    "backbones": 4,
    "rows": 4,
    "uris": 2,
}
"""How many of a hundred inputs are of which kind."""
OF_A_USER = words("""
    SUITE_HOME SUITE_PATH SUITE_TASKS SUITE_STORAGE SUITE_OPTUNA SUITE_DATA_ROOT
    MLFLOW_TRACKING_URI
""")
"""Variables that would take the commands to this user's own files."""


@dataclass
class Findings:
    """What went wrong, by what it was and where.

    Attributes:
        first: The first input of each kind of finding, as `--only` takes it.
        ended: How many commands ended with which exit code.
        kinds: How many inputs of each kind were fed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.first.setdefault(what, example)

    def merge(self, other: Findings) -> None:
        self.counts += other.counts
        self.ended += other.ended
        self.kinds += other.kinds
        for what, example in other.first.items():
            self.first.setdefault(what, example)


class TooLongError(BaseException):
    """A command took more than `PATIENCE_S`; no `except Exception` of a command may swallow it."""


class Feeder:
    """Whole inputs in a folder, of which each call changes copies, and the commands for them."""

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
            "backbones": self.backbones,
            "rows": self.rows,
            "uris": self.uris,
        }
        self.home = root / "home"
        self._whole = root / "whole"
        self._make()

    def _make(self) -> None:
        empty_db = make_store(self.root / "empty.db")
        # Made where the copies will lie, because the database holds paths
        make_home(Home(self.home), empty_db)
        (self.root / "sweep.yaml").write_text(SWEEP)
        for name in ("results.json", "results.parquet"):
            self.call("export-results", self.root / name, "--home", self.home)
        shutil.move(self.home, self._whole)
        self.call("run", self.root / "sweep.yaml", "--dry-run", "--home", self.home)
        make_backbone(self.root / "backbone")
        self._use(self.root / "backbone", "params")
        make_rows(self.root / "rows")
        self._check_rows(self.root / "rows" / "rows.csv", TASKS[1])
        # Changes of what is refused already would reach nothing
        assert self.findings.ended == {"0": 5}, self.findings
        folder = self.root / "data" / "odd" / "rows" / "default"
        folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            pq.write_table(pa.table(ROWS), folder / f"{split}.parquet")

    def feed(self, kind: str, number: int) -> None:
        """Make one input and give it to its commands; the same number gives the same input."""
        self._example = f"{kind}:{number}"
        self.findings.kinds[kind] += 1
        self.kinds[kind](random.Random(f"{self.seed}:{kind}:{number}"))

    def call(self, *arguments: object) -> None:
        """Run one command here."""
        given = [str(argument) for argument in arguments]
        self.watch(" ".join(given), lambda: command_line.main(given))

    def watch(self, told: str, command: Callable[[], object]) -> None:
        # Strict, as a terminal is: a text that is no UTF-8 must not reach it
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
        form = chance.choice(("table", "json"))
        self.call("run", path, "--dry-run", "--home", self.home, "--format", form)

    def set_items(self, chance: random.Random) -> None:
        command = chance.choices(("run", "params", "trial"), (6, 2, 2))[0]
        known = KEYS
        if command == "run":
            known = [".".join(map(str, place)) for place in places(tree_of(SWEEP))[1:]]
        items = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            key = chance.choice(known)
            if chance.random() < 0.1:
                key = chance.choice(ODD_KEYS)
            value = chance.choice(TOKENS)
            if chance.random() < 0.7:
                value = _as_text(odd_value(chance))
            # No shell can hand a NUL on
            items.append(f"{key}={value}".replace("\0", ""))
        options = []
        for item in items:
            options += ["--set", item]
        if command == "run":
            sweep = self.root / "sweep.yaml"
            self.call("run", sweep, "--dry-run", "--home", self.home, *options)
        elif command == "params":
            self.call("params", "--backbone", "bert-base", "--method", "lora", *options)
        else:
            # What `suite trial` does before it trains
            self.watch(f"trial {items}", lambda: _check_trial(items))

    def tasks(self, chance: random.Random) -> None:
        folder = self.root / "tasks-of-mine"
        folder.mkdir(exist_ok=True)
        path = folder / "acceptability.yaml"
        path.write_bytes(changed_yaml(chance, chance.choice(TASKS)))
        if chance.random() < 0.5:
            options = ["--backbone", "minilm", "--format", "json"]
            self.call("task", "check", path, "--data-root", self.root / "data", *options)
        else:
            sweep = self.root / "sweep.yaml"
            self.call("run", sweep, "--dry-run", "--tasks", folder, "--home", self.home)

    def records(self, chance: random.Random) -> None:
        with self._copy():
            files = []
            for path in sorted(self.home.rglob("*")):
                # The database is a kind of its own
                if path.is_file() and path.suffix != ".db":
                    files.append(path)
            for _ in range(chance.choice((1, 1, 2))):
                spoil(chance, chance.choice(files))
            how = chance.random()
            if how < 0.1:
                # What `suite run` does before it starts Ray
                self.watch("the claims of run", lambda: claim(Home(self.home)))
            elif how < 0.4:
                with driven(Home(self.home)):
                    self._read(chance)
            else:
                self._read(chance)

    def stores(self, chance: random.Random) -> None:
        with self._copy():
            database = self.home / "mlflow.db"
            if chance.random() < 0.15:
                database.write_bytes(changed_bytes(chance, database.read_bytes()))
            elif chance.random() < 0.2:
                tables = sorted(self.home.glob("mlartifacts/**/*.parquet"))
                spoil(chance, chance.choice(tables or [database]))
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

    def backbones(self, chance: random.Random) -> None:
        folder = self.root / "odd-backbone"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / "backbone", folder)
        for _ in range(chance.choice((1, 1, 2))):
            spoil(chance, chance.choice(sorted(folder.glob("*.json"))))
        self._use(folder, chance.choice(("params", "params", "run")))

    def _use(self, folder: Path, command: str) -> None:
        if command == "params":
            self.call("params", "--backbone", folder, "--method", "lora")
            return
        # One cell, because each builds a model
        only = [f"backbones=[{{name: {folder}}}]", "attention=[pretrained]", "methods=[lora]"]
        options = []
        for item in only:
            options += ["--set", item]
        sweep = self.root / "sweep.yaml"
        self.call("run", sweep, "--dry-run", "--home", self.home, *options)

    def rows(self, chance: random.Random) -> None:
        path = (
            self.root
            / "odd-rows"
            / chance.choice(("rows.csv", "rows.jsonl", "rows.jsonl", "rows.json", "rows.parquet"))
        )
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        shutil.copy(self.root / "rows" / path.name, path)
        if path.suffix == ".jsonl" and chance.random() < 0.7:
            lines = path.read_bytes().splitlines()
            place = chance.randrange(len(lines))
            lines[place] = changed_json(chance, lines[place])
            path.write_bytes(b"\n".join(lines))
        elif chance.random() < 0.5:
            change_file(chance, path)
        else:
            spoil(chance, path)
        if path.is_file() and chance.random() < 0.2:
            packed = gzip.compress(path.read_bytes())
            path = path.with_name(f"{path.name}.gz")
            path.write_bytes(chance.choice((packed, changed_bytes(chance, packed))))
        if chance.random() < 0.7:
            self._check_rows(path, chance.choice(TASKS[1:]))
            return
        # It writes a task into the working folder
        with contextlib.chdir(path.parent):
            columns = ["--text", "text", "--label", chance.choice(("label", "number"))]
            self.call("init", "own.yaml", "--data", path, *columns, "--yes")

    def _check_rows(self, path: Path, task: str) -> None:
        given = self.root / "own-rows.yaml"
        task = task.replace("{hub: odd/rows}", json.dumps({"files": str(path)}))
        # One file has no splits by name, so they are drawn
        given.write_text(re.sub("splits: .*\n", "", task))
        self.call("task", "check", given, "--backbone", "minilm", "--format", "json")

    def uris(self, chance: random.Random) -> None:
        folder = self.root / "uris"
        (folder / "data").mkdir(parents=True)
        shutil.copy(self.root / "sweep.yaml", folder)
        part = {name: chance.choice(values) for name, values in URI_PARTS.items()}
        uri = f"{part['scheme']}://{part['user']}{part['host']}{part['port']}{part['name']}"
        # A file that is written lies here
        if part["scheme"].startswith(("sqlite", "SQLITE", "file", "x")):
            uri = f"{part['scheme']}:///{folder}{part['name']}"
        uri += part["query"]
        if chance.random() < 0.1:
            uri = chance.choice(
                ("", " ", "mlruns", "sqlite:", "sqlite://", "http:", "://", "\0", uri[1:])
            )
        with self._copy():
            command = words(chance.choice(OF_A_STORE))
            given = [self.root / word if word.startswith("out") else word for word in command]
            self.call(*given, "--home", self.home, "--tracking-uri", uri)
        shutil.rmtree(folder)

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
        command = chance.choices(list(READERS), list(READERS.values()))[0]
        given: list[object] = []
        for word in words(command):
            if word.startswith(("out", "sweep.")):
                given.append(self.root / word)
            else:
                given.append(word)
        self.call(*given, "--home", self.home)
        for name in ("out", "out-model"):
            shutil.rmtree(self.root / name, ignore_errors=True)


def _check_trial(items: Sequence[str]) -> None:
    """Check a trial's settings, and end as the command does where they are refused."""
    try:
        build_spec("bert-base", "lora", "acceptability", overrides=items)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value.replace(SURROGATE, "")
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


# Running


@contextmanager
def feeder(seed: int) -> Iterator[Feeder]:
    """A feeder in a folder of its own, with nothing of this user's and no network."""
    before = dict(os.environ)
    hook = threading.excepthook
    app = command_line.app
    with tempfile.TemporaryDirectory(prefix="suite-odd-") as folder:
        for name in OF_A_USER:
            os.environ.pop(name, None)
        os.environ |= {"XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
        try:
            # `app` makes all commands anew in every call, which takes longer than most inputs
            command_line.app = typer.main.get_command(app)  # type: ignore[assignment]
            made = Feeder(Path(folder), seed)
            threading.excepthook = made.heard
            yield made
        finally:
            threading.excepthook = hook
            command_line.app = app
            os.environ.clear()
            os.environ.update(before)


FEEDER: Feeder
"""Of a process of a pool."""
OPEN = contextlib.ExitStack()
"""What a process of a pool keeps until it ends."""


def start(seed: int) -> None:
    """Give this process of a pool its feeder."""
    global FEEDER
    FEEDER = OPEN.enter_context(feeder(seed))
    atexit.register(OPEN.close)
    # Libraries are loaded before the limit: they are no measure of what an input takes
    for kind in SHARES:
        for number in range(5):
            FEEDER.feed(kind, -number)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # An input that fills the memory must not take this machine along
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
    parser.add_argument("--record", type=Path, help="file of what is done; the next run goes on")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input, with all that it prints")
    options = parser.parse_args()
    if options.only:
        kind, _, number = options.only.partition(":")
        with feeder(options.seed) as made:
            made.loud = True
            made.feed(kind, int(number))
        return
    inputs = numbered(options.inputs)
    record = Record(options.record, f"seed {options.seed}, {options.inputs} inputs")
    try:
        feed_all(inputs, record, seed=options.seed, processes=options.processes)
    except KeyboardInterrupt:
        print("cut", file=sys.stderr)
    show(record, options.seed)
    if record.findings.counts:
        raise SystemExit(1)


class Record:
    """What each share of the inputs came to: in a file, so that a run may be cut and goes on.

    Args:
        path: Gets a line of JSON for each share; None keeps nothing.
        of: The run that the file belongs to.

    Raises:
        SystemExit: The file is of another run.
    """

    def __init__(self, path: Path | None, of: str) -> None:
        self.findings = Findings()
        self.seconds = 0.0
        self.done: set[int] = set()
        self._path = path
        self._of = of
        if path is None or not path.exists():
            return
        for line in path.read_text().splitlines():
            kept = json.loads(line)
            if kept["of"] != of:
                raise SystemExit(f"{path} is of another run ({kept['of']}): name another file")
            counts = Counter(kept["counts"])
            findings = Findings(
                counts, kept["first"], Counter(kept["ended"]), Counter(kept["kinds"])
            )
            self._count(kept["share"], findings, kept["seconds"])

    def add(self, share: int, findings: Findings, seconds: float) -> None:
        """Count a share, and keep it."""
        self._count(share, findings, seconds)
        if self._path is not None:
            kept = {"of": self._of, "share": share, "seconds": seconds} | vars(findings)
            with self._path.open("a") as file:
                file.write(json.dumps(kept) + "\n")

    def _count(self, share: int, findings: Findings, seconds: float) -> None:
        self.done.add(share)
        self.findings.merge(findings)
        self.seconds += seconds


def feed_all(
    inputs: Sequence[tuple[str, int]], record: Record, *, seed: int, processes: int
) -> None:
    """Feed every share that the record does not have, and say how far it is."""
    shares = range(0, len(inputs), SHARE)
    began = time.monotonic()
    with ProcessPoolExecutor(
        processes,
        # A fork would copy what threads of libraries hold locked
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start,
        initargs=(seed,),
    ) as pool:
        jobs = {}
        for first in shares:
            if first not in record.done:
                jobs[pool.submit(work, inputs[first : first + SHARE])] = first
        try:
            for job in as_completed(jobs):
                new = job.result()
                for what in new.counts.keys() - record.findings.counts.keys():
                    print(f"{what}  ({new.first[what]})", flush=True)
                now = time.monotonic()
                record.add(jobs[job], new, now - began)
                began = now
                if len(record.done) % 20 == 0:
                    tell(record, len(inputs))
        except BaseException:
            # Ctrl-C, or a defect of the feeder: nobody waits for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def tell(record: Record, inputs: int) -> None:
    findings = sum(record.findings.counts.values())
    fed = min(inputs, len(record.done) * SHARE)
    said = f"{fed:,} of {inputs:,} inputs, {findings} findings, {record.seconds:.0f} s"
    print(said, file=sys.stderr, flush=True)


def numbered(inputs: int) -> list[tuple[str, int]]:
    """So many inputs by kind and number, as `SHARES` has it.

    They are mixed, so that a run that is cut has fed every kind.
    """
    found = []
    for kind, percent in SHARES.items():
        found += [(kind, number) for number in range(round(inputs * percent / 100))]
    random.Random(0).shuffle(found)
    return found


def show(record: Record, seed: int) -> None:
    found = record.findings
    for what, count in found.counts.most_common():
        print(f"{count:6}  {what}  (first: {found.first[what]})")
    fed = sum(found.kinds.values())
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in found.kinds.items())
    codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(found.ended.items()))
    print(f"seed {seed}: {fed:,} inputs in {record.seconds:.0f} s: {kinds}")
    print(f"commands that ended with exit code {codes}")
    print(f"findings: {sum(found.counts.values())}")


if __name__ == "__main__":
    main()
