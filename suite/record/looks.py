"""Remember from which sets of confirm runs a cell's test score was read.

Whoever sees a test score and then changes the runs behind it gives luck another chance. A sweep's
`confirm.seeds` may change, so the driver keeps, before it takes over a definition with other seeds,
which cells had a test score under the old ones. Each such record is a file of its own,
`sweeps/looks/<sweep>/<hash of its content>.json`. It is made once and never changed, so that hosts
that share a storage can put theirs together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.config.hashing import short_hash
from suite.config.loader import Strict
from suite.errors import ConfigError
from suite.files import write_json
from suite.record.folder import Home, read_record

FOLDER = "looks"
Setting = tuple[float, int]
"""Learning rate and batch size of some confirm runs."""
RunSet = tuple[Setting, tuple[int, ...]]
"""The setting of some confirm runs, and their seeds, sorted."""


@dataclass(frozen=True, slots=True)
class Looks:
    """The sets of confirm runs that a cell's test score was read from.

    Attributes:
        sets: All of them; the present set comes first.
        choices: In how many ways the present set can be chosen from the runs that were tested with
            its setting; 1 unless some of these are left out.
        rivals: Test scores of other architectures of the method that were chosen before, on the
            same task.
    """

    sets: tuple[RunSet, ...] = ()
    choices: int = 1
    rivals: int = 0

    @property
    def count(self) -> int:
        """How many test scores there were to choose from; 0 before there is one."""
        if not self.sets:
            return 0
        return len(self.sets) - 1 + self.choices + self.rivals

    @property
    def warning(self) -> str | None:
        """What a reader must know of the row, in words; None where it was looked at once."""
        if self.count < 2:
            return None
        others = []
        (_, usual), _ = self.sets[0]
        for (rate, batch_size), seeds in self.sets[1:]:
            other = f"seeds {', '.join(map(str, seeds))} at {rate:.3g}"
            if batch_size != usual:
                other += f" in batches of {batch_size}"
            others.append(other)
        said = []
        if others:
            said.append(f"also tested with {'; '.join(others)}")
        if self.choices > 1:
            said.append(f"its seeds could be chosen in {self.choices} ways from those tested")
        if self.rivals:
            said.append(f"{self.rivals} of other architectures, which were chosen before")
        return f"{self.count} test looks: {', and '.join(said)}; p is multiplied by {self.count}"

    def as_json(self) -> dict[str, Any]:
        """The form in which a row keeps it."""
        sets = [[list(setting), list(seeds)] for setting, seeds in self.sets]
        return {"sets": sets, "choices": self.choices, "rivals": self.rivals}


def from_json(kept: Mapping[str, Any]) -> Looks:
    """What `Looks.as_json` gave; an empty mapping is a cell that nobody has looked at."""
    sets = []
    for (rate, batch_size), seeds in kept.get("sets", ()):
        sets.append(((float(rate), int(batch_size)), tuple(seeds)))
    return Looks(tuple(sets), kept.get("choices", 1), kept.get("rivals", 0))


def joint(cells: Iterable[Looks]) -> int:
    """How many test scores there were to choose from, over cells read together; at least 1.

    All cells of a sweep change their seeds at the same time, so a set of seeds counts once. Each
    cell changes its setting, and a method its architecture, at a time of its own, so each further
    one counts.
    """
    seeds = set()
    settings = 0
    choices = 1
    for looks in cells:
        own = {of_set for _, of_set in looks.sets}
        settings += len(looks.sets) - len(own) + looks.rivals
        seeds |= own
        choices = max(choices, looks.choices)
    return max(1, len(seeds) + settings + choices - 1)


def looks_of(
    present: RunSet | None,
    logged: Sequence[RunSet],
    tested: Mapping[Setting, set[int]],
) -> Looks:
    """The looks at one cell.

    Args:
        present: The setting that is confirmed and the sweep's seeds; None before one of these
            runs has a test score.
        logged: The sets that the driver kept when the seeds changed.
        tested: Seeds with a test score by setting, whether they count or not.
    """
    # A dictionary rather than a set, because it keeps the order.
    sets = dict.fromkeys(logged)
    explained: dict[Setting, set[int]] = defaultdict(set)
    for setting, seeds in logged:
        explained[setting] |= set(seeds)
    if present is not None:
        explained[present[0]] |= set(present[1])
    for setting in sorted(tested):
        # Runs that no record explains: of another setting, or of a home that kept no record.
        if not tested[setting] <= explained[setting]:
            sets[setting, tuple(sorted(tested[setting]))] = None
    if present is None:
        return Looks(tuple(sets))
    sets.pop(present, None)
    alike = tested.get(present[0], set())
    counted = len(alike & set(present[1]))
    return Looks((present, *sets), math.comb(len(alike), counted))


class KeptLook(Strict):
    """One record: the seeds that a sweep had, and the cells that had a test score with them."""

    seeds: list[int]
    settings: dict[str, Setting]


def folder(home: Home, sweep: str) -> Path:
    """The folder of a sweep's records."""
    return home.sweep_definition(sweep).parent / FOLDER / sweep


def keep_look(
    home: Home, sweep: str, seeds: Iterable[int], settings: Mapping[str, Setting]
) -> None:
    """Keep that cells had a test score with some seeds; done twice, it is kept once.

    Args:
        seeds: The sweep's seeds so far.
        settings: Of the confirm runs by key of the cell, for each cell with a score.
    """
    if not settings:
        return
    look = KeptLook(seeds=sorted(set(seeds)), settings=dict(settings)).model_dump(mode="json")
    write_json(folder(home, sweep) / f"{short_hash(look)}.json", look)


def names(home: Home, sweep: str) -> list[str]:
    """The names of a sweep's records, which change whenever there is a new one."""
    return sorted(path.stem for path in folder(home, sweep).glob("*.json"))


def read_looks(home: Home, sweep: str) -> dict[str, list[RunSet]]:
    """The sets of runs that were kept, by key of the cell.

    Raises:
        ConfigError: A record was cut or edited, or is not one of this version.
    """
    found: dict[str, list[RunSet]] = defaultdict(list)
    for name in names(home, sweep):
        path = folder(home, sweep) / f"{name}.json"
        look = read_record(path, KeptLook)
        if look is None or short_hash(look.model_dump(mode="json")) != name:
            raise ConfigError(
                f"{path}: this record of a test look was cut or edited, because its content has "
                "another hash than its name; copy it back from where it is whole (a storage or a "
                "backup), or remove it, and its look counts no more"
            )
        for key, setting in look.settings.items():
            found[key].append((setting, tuple(look.seeds)))
    return found
