"""A small share of what `python -m benchmarks.odd_inputs` feeds the command line: nothing ends in a traceback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.odd_inputs import SHARES, Feeder, Findings, feeder

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
