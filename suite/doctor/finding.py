"""A finding is one line of `suite doctor`; checks return findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial


class Level(StrEnum):
    """How bad a finding is.

    `WARN`: sweeps run, but something is missing or will cause trouble. `FAIL`: sweeps do not run,
    or their results cannot be trusted.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: The name of the check.
        level: How bad it is.
        found: What was seen, never a secret.
        remedy: What to do; empty where nothing is to be done.
        node: The node, as Ray names it; empty for this machine, "all" for every node of a cluster.
    """

    check: str
    level: Level
    found: str
    remedy: str = ""
    node: str = ""


ok = partial(Finding, level=Level.OK)
"""Makes a finding of a level: `ok("memory", found="...")`."""
warn = partial(Finding, level=Level.WARN)
fail = partial(Finding, level=Level.FAIL)

Check = Callable[[], Finding | list[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Run named checks one after another.

    A check that breaks is itself a finding, and the others still run.
    """
    found: list[Finding] = []
    for name, check in checks:
        try:
            result = check()
        except Exception as error:  # noqa: BLE001 - whatever is broken here is what the doctor was asked about
            text = f"the check itself ended with {type(error).__name__}: {error}"
            result = fail(name, found=text, remedy="see the message")
        if isinstance(result, list):
            found += result
        else:
            found.append(result)
    return found


def merge_nodes(found: Sequence[Finding], nodes: int) -> list[Finding]:
    """Merge findings that differ in their node alone into one that names all these nodes.

    Args:
        found: The findings; each keeps the place of the first of its kind.
        nodes: How many nodes were asked.
    """
    # A finding is frozen and so can be a key; without their nodes, equal findings share one key.
    places: dict[Finding, list[str]] = {}
    for finding in found:
        places.setdefault(replace(finding, node=""), []).append(finding.node)
    merged: list[Finding] = []
    for finding, where in places.items():
        # Findings about the cluster as a whole name no node.
        node = ", ".join(filter(None, where))
        if len(where) == nodes > 1:
            node = "all"
        merged.append(replace(finding, node=node))
    return merged
