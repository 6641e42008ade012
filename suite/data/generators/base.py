"""What a task generator is: it turns options into rows of each split, always the same rows."""

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
MISSES = 500
"""After so many draws in a row that bring nothing new, the words count as used up."""
Size = Annotated[int, Field(ge=4, multiple_of=4)]


class Options(Strict):
    """Seed, and rows per split.

    The numbers of rows are multiples of 4, because rows come in groups with both labels.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    train: Size = 640
    validation: Size = 200
    test: Size = 400


OptionsT = TypeVar("OptionsT", bound=Options)


class Generator(ABC, Generic[OptionsT]):
    """One file per generator in `suite/data/generators/`; the file's stem is its name.

    Attributes:
        description: One line that says what the rows are, and why spotting words cannot solve them.
        Options: The keys that `data.options` of a task may hold.
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
            ConfigError: A key is unknown, or a value is out of range.
        """
        where = where or f"data.options of generator {cls.name}"
        return cls(validate(cls.Options, options, where=where))

    @abstractmethod
    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        """Two or four rows, half of them with either label.

        Whatever word tells the label must not occur in another split.

        Args:
            split: The split whose words to use.
            rng: The only source of chance.
        """

    def rows(self, split: str) -> list[Row]:
        """All rows of a split, shuffled.

        No row occurs twice, and no split depends on the size of another.

        Raises:
            ConfigError: The words do not give so many rows.
        """
        # a stream for each split, so that a larger one leaves the others as they are
        rng = random.Random(derive_seed(self.name, self.options.seed, split))
        wanted: int = getattr(self.options, split)
        rows: list[Row] = []
        seen: set[tuple[Any, ...]] = set()
        misses = 0  # in a row
        while len(rows) < wanted:
            group = self.group(split, rng)
            # a group is taken whole or not at all, so that labels stay balanced
            keys = {tuple(row.values()) for row in group}
            if not keys & seen:
                misses = 0
                seen |= keys
                rows += group
                continue
            misses += 1
            if misses > MISSES:
                raise ConfigError(
                    f"generator {self.name}: {split}: {wanted:,} rows, but its words give about "
                    f"{len(rows):,}; ask for fewer"
                )
        # the rows of a group would otherwise follow one another
        rng.shuffle(rows)
        return rows

    def share(self, words: str, split: str) -> list[str]:
        """The words that only `split` uses: 60% train, 20% validation, 20% test, dealt by seed.

        Args:
            words: Separated by spaces.
            split: Name of the split.
        """
        dealt = words.split()
        # the same deal for every split, or a word could be in two of them
        random.Random(derive_seed(self.name, self.options.seed, "words")).shuffle(dealt)
        first = round(0.6 * len(dealt))
        second = round(0.8 * len(dealt))
        if split == "train":
            return dealt[:first]
        if split == "validation":
            return dealt[first:second]
        return dealt[second:]
