"""A small share of what `python -m benchmarks.odd_inputs` feeds the command line: nothing ends in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.odd_inputs import SHARES, Feeder, Findings, Record, feeder

SEED = 1


@pytest.fixture(scope="module")
def made() -> Iterator[Feeder]:
    with feeder(SEED) as one:
        yield one


@pytest.mark.parametrize("kind", SHARES)
def test_odd_inputs_are_refused_with_a_message(kind: str, made: Feeder) -> None:
    made.findings = Findings()
    for number in range(SHARES[kind]):
        made.feed(kind, number)
    assert not made.findings.first, (
        "see: python -m benchmarks.odd_inputs --seed 1 --only KIND:NUMBER"
    )
    # Of a database, a reader shows the rows that it can read
    if kind != "stores":
        assert made.findings.ended["2"], "nothing was refused, so the changes change nothing"


def test_the_feeder_finds_what_no_command_may_do(made: Feeder) -> None:
    made.findings = Findings()
    made.watch("raises", lambda: {}["x"])
    made.watch("surrogate", lambda: print("\ud800"))
    made.watch("exit", lambda: exit(3))
    assert {found.partition(" ")[0] for found in made.findings.first} == {
        "KeyError",
        "UnicodeEncodeError",
        "exit",
    }


def test_a_run_that_was_cut_goes_on_with_what_it_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    first = Record(path, "seed 1, 100 inputs")
    found = Findings()
    found.add("KeyError at x.py:1", "sweeps:3")
    found.ended["2"] += 25
    found.kinds["sweeps"] += 25
    first.add(50, found, 2.0)

    again = Record(path, "seed 1, 100 inputs")

    assert again.done == {50}
    assert again.findings == found
    assert again.seconds == 2.0
    with pytest.raises(SystemExit, match="of another run"):
        Record(path, "seed 2, 100 inputs")
