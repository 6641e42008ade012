"""The search space of a method: its learning-rate range and its architecture choices."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict, load_yaml, validate
from suite.errors import ConfigError
from suite.registry import plug_in_roots, yaml_names

End = Literal["low", "high"]
# a study is extended by a factor of 10 at one end
DECADE = 10.0
MOST = 10.0
"""No learning rate is larger (ours)."""
EDGE_FRAC = 0.05
"""The share of the range, in log learning rate, that counts as its edge (ours)."""


class LearningRateRange(Strict):
    """A closed range, searched on a log scale (READ, appendix D: [1e-6, 3e-3]).

    A plain number is a fixed rate: only other choices, such as the batch size, are searched.
    """

    low: Annotated[float, Field(gt=0, le=MOST)]
    high: Annotated[float, Field(gt=0, le=MOST)]
    fixed: bool = Field(False, description="nothing is searched: low is high")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        if isinstance(given, (Mapping, LearningRateRange)):
            return given
        # True is a number too, for Python.
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if is_number and 0 < given <= MOST:
            return {"low": given, "high": given, "fixed": True}
        raise ValueError(
            f"got {given!r}, expected a number in (0, {MOST:g}], or {{low: ..., high: ...}}"
        )

    def trials(self, budget: int, choices: int) -> int:
        """How many trials of a sweep's budget a study uses.

        Args:
            budget: Trials of a study that searches the range.
            choices: Other things among which the study chooses; 0 = nothing else.
        """
        # A second trial with the same rate, choice and seed would repeat the first. With nothing to
        # choose the confirm runs alone say all.
        return choices if self.fixed else budget

    def extended(self, end: End) -> LearningRateRange:
        """The range with a decade more at one end, within (0, 10].

        Where there is no room this is the range itself.
        """
        if end == "low":
            return self.model_copy(update={"low": rounded(self.low / DECADE)})
        return self.model_copy(update={"high": min(MOST, rounded(self.high * DECADE))})

    def end_of(self, chosen: float, tried: Collection[float]) -> End | None:
        """The end of the range at which the chosen learning rate lies, if any.

        There it is the outermost one that was tried and near the range's end, so a better one may
        lie beyond.
        """
        if self.fixed:
            return None
        # on a log scale, as the range is searched
        low = math.log(self.low)
        high = math.log(self.high)
        place = math.log(chosen)
        margin = EDGE_FRAC * (high - low)
        # both are needed: a rate near the end says little if one further out was tried and is worse
        if chosen == min(tried) and place - low <= margin:
            return "low"
        if chosen == max(tried) and high - place <= margin:
            return "high"
        return None

    @model_validator(mode="after")
    def _ordered(self) -> LearningRateRange:
        if self.fixed and self.low != self.high:
            raise ValueError(f"fixed, but low {self.low} is not high {self.high}; leave fixed out")
        # equal ends get a message of their own, because a fixed rate was most likely meant
        if self.low >= self.high and not self.fixed:
            if self.low == self.high:
                raise ValueError(
                    "nothing to search: low is high; for a fixed learning rate write the number "
                    f"alone: {self.low}"
                )
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


def rounded(rate: float) -> float:
    """Round to four significant digits: a tenth of 3e-3 is 3e-4, not 0.00030000000000000003.

    They are readable in tables, and equal on machines whose last bits differ.
    """
    return float(f"{rate:.4g}")


class Near(Strict):
    """Where a method's best learning rate lies, by a published rule about another method's."""

    method: str
    times: Annotated[float, Field(gt=0, description="the best rate is so many times the other's")]
    source: str


class SearchSpace(Strict):
    """One file `search_spaces/<method>.yaml`."""

    description: str
    source: str
    near: Near | None = Field(
        None, description="where a study may begin while no study of the method itself has ended"
    )
    learning_rate: LearningRateRange
    architectures: Annotated[
        list[dict[str, Any]], Field(min_length=1, description="the first is the default")
    ]

    @model_validator(mode="after")
    def _distinct(self) -> SearchSpace:
        for place, choice in enumerate(self.architectures):
            if choice in self.architectures[:place]:
                raise ValueError(f"architectures: {choice} is listed twice; remove one of them")
        return self


FIRST_LINE = re.compile(r"description: (\w[^#:'\"]*)\n")
PEFT = "peft-"
"""Begin of the file names of the search spaces of peft's methods."""


def space_path(name: str) -> Path | None:
    """The file of a method's search space; None where there is none.

    That of `peft:ia3` is `peft-ia3.yaml`, as file names hold no colon.
    """
    # spaces of the user come first and hide those of the suite
    return yaml_names("search_spaces").get(_stem(name))


def _stem(name: str) -> str:
    return name.replace(":", "-")


def load_space(name: str, *, where: str = "") -> SearchSpace:
    """The search space of a method.

    Raises:
        ConfigError: There is no such file, or it is not valid.
    """
    path = space_path(name)
    if path is None:
        place = f"{where}: " if where else ""
        roots = dict.fromkeys([*plug_in_roots(), Path.cwd()])
        files = [str(root / "search_spaces" / f"{_stem(name)}.yaml") for root in roots]
        # no near names: the method is known, and the space of another would not fit it
        raise ConfigError(
            f"{place}method {name!r} has no search space; write {' or '.join(files)} "
            "(docs/adding.md shows one), or give its architecture and learning_rate in the sweep"
        )
    data, lines = load_yaml(path)
    return validate(SearchSpace, data, where=str(path), lines=lines)


def describe_space(name: str) -> str:
    """The description of a method's search space.

    It is taken from the file's first line where it stands there: to parse forty files takes half a
    second.
    """
    path = yaml_names("search_spaces")[_stem(name)]
    with path.open() as file:
        first = FIRST_LINE.fullmatch(file.readline())
    if first is None:
        return load_space(name).description
    return first[1]


def peft_spaces() -> list[str]:
    """Methods of the peft library that have a search space: `peft:ia3` for `peft-ia3.yaml`."""
    found = []
    for stem in yaml_names("search_spaces"):
        if stem.startswith(PEFT):
            found.append(f"peft:{stem.removeprefix(PEFT)}")
    return sorted(found)
