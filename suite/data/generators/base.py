"""What a task generator is: options in, rows of each split out, the same rows for ever."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from suite.config.hashing import derive_seed
from suite.config.loader import Strict, validate
from suite.errors import ConfigError

Row = dict[str, Any]
SPLITS = ("train", "validation", "test")
MISSES = 500
"""Draws in a row that bring nothing new, after which the words count as used up."""
Size = Annotated[int, Field(ge=4, multiple_of=4)]


class Options(Strict):
    """Seed and rows per split; multiples of 4, because rows come in groups in which every word has both labels."""

    seed: Annotated[int, Field(ge=0)] = 0
    train: Size = 640
    validation: Size = 200
    test: Size = 400


OptionsT = TypeVar("OptionsT", bound=Options)


class Generator(ABC, Generic[OptionsT]):
    """One file per generator in `suite/data/generators/`; the file's stem is its name.

    Attributes:
        description: One line: what the rows are and why spotting words cannot solve them.
        Options: What `data.options` of a task may hold.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Options: ClassVar[type[Any]] = Options

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @classmethod
    def configure(cls, options: Mapping[str, Any], *, where: str = "") -> Generator[Any]:
        """The generator with checked options.

        Raises:
            ConfigError: Unknown key or value out of range.
        """
        return cls(
            validate(cls.Options, options, where=where or f"data.options of generator {cls.name}")
        )

    @abstractmethod
    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        """Two or four rows in which every word occurs equally often with either label.

        Args:
            split: Whose words to use.
            rng: The only source of chance.
        """

    def rows(self, split: str) -> list[Row]:
        """All rows of a split, shuffled; no row occurs twice, and no split depends on the size of another.

        Raises:
            ConfigError: The words do not give so many rows.
        """
        rng = random.Random(derive_seed(self.name, self.options.seed, split))
        wanted: int = getattr(self.options, split)
        rows: list[Row] = []
        seen: set[tuple[Any, ...]] = set()
        misses = 0
        while len(rows) < wanted:
            group = self.group(split, rng)
            keys = {tuple(row.values()) for row in group}
            misses = misses + 1 if keys & seen else 0
            if misses > MISSES:
                raise ConfigError(
                    f"generator {self.name}: {split}: {wanted:,} rows, but its words give about {len(rows):,}; ask for fewer"
                )
            if not misses:
                seen |= keys
                rows += group
        rng.shuffle(rows)
        return rows

    def share(self, words: str, split: str) -> list[str]:
        """The part of a list of words, separated by spaces, that only `split` uses: 60% train, 20% validation, 20% test, dealt by seed."""
        dealt = words.split()
        random.Random(derive_seed(self.name, self.options.seed, "words")).shuffle(dealt)
        first, second = round(0.6 * len(dealt)), round(0.8 * len(dealt))
        return {"train": dealt[:first], "validation": dealt[first:second], "test": dealt[second:]}[
            split
        ]
