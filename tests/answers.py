"""Confirm runs with the answers behind their scores: which of the test items each seed gets right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from suite.metrics.items import Items
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.stats.answers import Answers
from tests.records import make_result, make_spec, make_task, write_trial

Right = Sequence[Sequence[bool]]
"""Whether an item is answered rightly, by seed and item."""


def some_right(
    rng: np.random.Generator, shares: float | Sequence[float], *, items: int = 100, seeds: int = 3
) -> list[list[bool]]:
    """Every seed right on about this share of items, mostly the same ones."""
    ease = rng.random(items)
    shares = [shares] * seeds if isinstance(shares, float) else shares
    return [(ease + rng.normal(0, 0.05, items) < share).tolist() for share in shares]


def make_answers(
    right: Right, *, task: str = "agreement", seeds: Sequence[int] | None = None
) -> Answers:
    """Half of the golds are 1."""
    golds = [i % 2 for i in range(len(right[0]))]
    runs = {
        s: Items([float(g if r else 1 - g) for g, r in zip(golds, row, strict=True)], golds)
        for s, row in zip(seeds or range(1, 1 + len(right)), right, strict=True)
    }
    scores = {s: 100 * float(np.mean(row)) for s, row in zip(runs, right, strict=True)}
    return Answers(make_task(task), tuple(f"test/{i}" for i in range(len(golds))), runs, scores)


def write_answers(home: Home, spec: TrialSpec, table: Mapping[str, Sequence[Any]]) -> None:
    pq.write_table(pa.table(dict(table)), home.trial(spec).predictions("test"))


def write_confirmed(
    home: Home,
    method: str,
    right: Right,
    task: str = "agreement",
    *,
    sweep: str = "demo",
    **changes: Any,
) -> list[TrialSpec]:
    """A cell with one search trial and a confirm run per seed, 1, 2, ..., and its answers; returns the confirm runs' specifications."""
    search = make_spec(method, task, sweep=sweep, **changes)
    write_trial(home, search, make_result(search, score=50.0))
    answers = make_answers(right, task=task)
    specs = []
    for seed, items in answers.runs.items():
        spec = make_spec(
            method, task, seed=seed, learning_rate=search.learning_rate, sweep=sweep, **changes
        )
        write_trial(home, spec, make_result(spec, score=answers.scores[seed]))
        write_answers(
            home,
            spec,
            {"index": answers.index, "gold": items.golds, "prediction": items.predictions},
        )
        specs.append(spec)
    return specs
