"""Sweeps side by side: ranks, intervals and rates by arm, and what became of the leader and of the pairs that were told apart."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import transfer
from suite.record.folder import Home
from suite.tracking import sync
from tests.answers import some_right, write_confirmed
from tests.records import define

SMALL = {"full": 0.9, "lora": 0.6, "read": 0.75}
LARGE = {"full": 0.6, "lora": 0.9, "read": 0.62}
"""`lora` overtakes both others, and the others cannot be told apart any more."""


def fill(home: Home, sweep: str, shares: Mapping[str, float]) -> None:
    rng = np.random.default_rng(1)
    for method, share in shares.items():
        right = some_right(rng, [share - 0.01, share, share + 0.01], items=400)
        write_confirmed(home, method, right, sweep=sweep)
    define(home, sweep)


def test_ranks_stand_side_by_side_and_pairs_that_turn_are_counted(
    tmp_path: Path,
    empty_db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = Home(tmp_path)
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    fill(home, "small", SMALL)
    fill(home, "large", LARGE)
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    monkeypatch.setattr(sys, "argv", ["transfer", f"{tmp_path}:small", f"{tmp_path}:large"])
    transfer.main()
    heads, _, *lines = capsys.readouterr().out.splitlines()
    assert heads == (
        "| task | arm | rank, small | score, small | rate, small"
        " | rank, large | score, large | rate, large |"
    )
    cells = {}
    for line in lines[:3]:
        _, arm, *found = [cell.strip() for cell in line.strip("|").split("|")]
        cells[arm] = found
    rank, score, rate, rank_after, _, rate_after = cells["tiny-bert pretrained full"]
    assert (rank, rate) == ("1", "0.0001 (edge)") and (rank_after, rate_after) == (
        "2-3",
        "0.0001 (edge)",
    )
    low, _, high = score.partition("(")[2].rstrip(")").partition(" to ")
    assert float(low) < 90 < float(high)
    assert cells["tiny-bert pretrained lora"][3] == "1"
    assert lines[-1] == (
        "- agreement, small to large: the leader, tiny-bert pretrained full, has rank 2-3 there"
        " (of 3 arms), 27.7 from the best score. Of 3 pairs told apart, 0 stand the same way there,"
        " 2 the other way, and 1 are not told apart."
        " Rates moved by 0.00 decades (median), at most by +0.00 (tiny-bert pretrained full)."
    )


def test_no_verdict_is_carried_over_from_rows_that_are_rejected_or_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = {"task": "t", "backbone": "b", "attention": "pretrained", "attention_options": {}}
    shown: list[dict[str, Any]] = []
    for method, status, admitted in (
        ("full", "done", True),
        ("lora", "done", None),
        ("nan", "done", False),
        ("begun", "partial", None),
    ):
        row = {"method": method, "arm": method, "status": status, "admitted": admitted}
        shown.append({**common, **row, "score_mean": 90.0})
    pairs = []
    for a, b in (("full", "lora"), ("nan", "lora"), ("begun", "lora")):
        pairs.append({"task": "t", "arm_a": a, "arm_b": b, "better": "a"})
    monkeypatch.setattr(transfer, "read", lambda home, sweep: SimpleNamespace(shown=shown))
    monkeypatch.setattr(transfer, "compare_arms", lambda *given, **more: pairs)
    found = transfer.read_sweep("runs:small")
    assert list(found.rows["t"]) == ["b pretrained full", "b pretrained lora"]
    assert found.apart == {"t": {("b pretrained full", "b pretrained lora")}}
