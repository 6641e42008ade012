"""What `benchmarks.odd_inputs` changes: a home with every kind of file, a backbone, files of rows.

python -m benchmarks.odd_inputs --help
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from transformers import BertTokenizerFast

from suite.backbones.heads import Head
from suite.backbones.loading import build, resolve
from suite.errors import SuiteError
from suite.files import write_json
from suite.plan.definition import lease_root, only_driver, read_plan, store_definition
from suite.record.folder import Home, TrialFolder
from suite.record.lm_eval import Evaluation, Score, Settings, TaskScores, add_evaluation
from suite.record.looks import keep_look
from suite.record.result import FailureRecord, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.identity import remember_token
from suite.storage.lease import acquire
from suite.storage.shared_run import SharedRun
from suite.tracking import sync
from tests.answers import some_right, write_confirmed
from tests.clocks import FakeClock
from tests.records import make_result, make_spec, write_definition, write_trial
from tests.tiny import tiny_choice

SWEEP = "demo"
PROPOSAL = {"hint": {"log_rates": [-4.0, -3.0], "values": [0.5, 0.6], "rate": 1e-3}}
TEXTS = ["a b", "c", "d e f", "g", "h", "i j"]


def make_home(home: Home, empty_db: Path) -> None:
    """A small sweep that has ended but for one trial, with every kind of file that a home holds.

    Two methods with two seeds each, a trial that was given up, and a cell on a pretrain run.
    """
    write_definition(home, ["lora", "read"], ["agreement"], trials=2, seeds=(1, 2))
    chance = np.random.default_rng(0)
    for method, share in (("lora", 0.9), ("read", 0.6)):
        confirmed = write_confirmed(home, method, some_right(chance, share, items=20, seeds=2))
        _evaluate(home.trial(confirmed[0]))
        keep_look(home, SWEEP, [3, 4], {confirmed[0].cell: (1e-3, 8)})
    spec = write_trial(home, make_spec("lora", number=1))
    failure = FailureRecord(type="LostError", message="its host was lost")
    for _ in range(2):
        home.trial(spec).add_failure(failure)
    _write_curve(home.trial(spec), make_result(spec))
    for folder in home.trials():
        result = folder.result()
        found = folder.spec()
        assert found is not None
        if result is not None:
            _write_curve(folder, result)
        if found.phase is Phase.SEARCH:
            folder.write_proposal(PROPOSAL)
    run = _pretrain(home)
    with only_driver(home, SWEEP) as lease:
        assert SharedRun(lease.fence, run.hash).take()
    remember_token(home, "0123456789ab")
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None


def _write_curve(folder: TrialFolder, result: TrialResult) -> None:
    lines = [epoch.model_dump_json() + "\n" for epoch in result.epochs]
    (folder.path / "epochs.jsonl").write_text("".join(lines))


def _evaluate(folder: TrialFolder) -> None:
    settings = Settings(
        task="piqa", max_length_tokens=64, dtype="float32", seed=0, lm_eval="0.4.9", limit=10
    )
    total = TaskScores(scores={"acc": Score(value=0.5, stderr=0.1)}, samples=10)
    add_evaluation(
        folder.path,
        Evaluation(
            settings=settings,
            total=total,
            device="cpu",
            batch_size="1",
            seconds=1.0,
            finished_at=1_700_000_000.0,
        ),
    )


def _pretrain(home: Home) -> TrialSpec:
    """Put a pretrain run into the home, and a cell that waits for it into its sweep."""
    run = make_spec("full", sweep="pretrained").model_copy(update={"phase": Phase.PRETRAIN})
    result = make_result(run)
    write_trial(home, run, result)
    folder = home.pretrained(run.hash)
    _write_curve(folder, result)
    folder.weights.write_bytes(b"\x10\0\0\0\0\0\0\0{}              ")
    plan = read_plan(home, SWEEP)
    arm = make_spec("bitfit").arm.model_copy(update={"pretrain": run.hash})
    waiting = replace(plan.cells[0], arm=arm)
    store_definition(replace(plan, cells=(*plan.cells, waiting), pretrains=(run,)), home)
    return run


@contextmanager
def driven(home: Home) -> Iterator[None]:
    """Hold the lock of the home's sweep, as its driver does; its file may be anything by now."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = held.enter_context((home.path / "sweeps" / f"{SWEEP}.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def claim(home: Home) -> None:
    """Take the sweep and its pretrain run as `suite run` does, and end as it does where it may not.

    The clock costs no time, or most changes of a claim would wait for three beats.
    """
    clock = FakeClock()
    runs = [path.name for path in home.path.glob("sweeps/claims/*")]
    try:
        lease = acquire(lease_root(home, None), SWEEP, clock=clock)
        try:
            for run in runs:
                SharedRun(lease.fence, run).take()
        finally:
            lease.release()
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def make_backbone(folder: Path) -> None:
    """A tiny BERT in shards with a tokenizer, in as many files of JSON as a checkpoint may have."""
    model = build(resolve(tiny_choice("bert")), Head("classification", 2)).base_model
    model.save_pretrained(folder, max_shard_size="40KB")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [*letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    # Older checkpoints have these beside.
    write_json(folder / "special_tokens_map.json", {"pad_token": "[PAD]", "unk_token": "[UNK]"})
    write_json(folder / "added_tokens.json", {"<x>": len(words)})
    assert (folder / "model.safetensors.index.json").exists()


def make_rows(folder: Path) -> None:
    """The same rows as CSV, JSON lines, JSON and parquet."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(40):
        text = TEXTS[number % len(TEXTS)]
        rows.append(
            {
                "text": f"{text} {number}",
                "other": f"x {number}",
                "text2": str(number % 6),
                "label": number % 2,
                "number": float(number % 11),
            }
        )
    table = pa.Table.from_pylist(rows)
    pacsv.write_csv(table, folder / "rows.csv")
    pq.write_table(table, folder / "rows.parquet")
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
