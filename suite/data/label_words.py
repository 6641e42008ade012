"""Labels as words: a class by its name, a number by its digits, and back."""

from __future__ import annotations

import math
from decimal import Decimal

from transformers import PreTrainedTokenizerBase

from suite.config.task import LabelConfig
from suite.data.tokenizer import as_written
from suite.errors import IncompatibleError

NO_LABEL = -1
"""Class id of a text that names no label; it counts as wrong."""


class LabelWords:
    """The label texts of a task, as one tokenizer reads them.

    Args:
        label: The task's label.
        tokenizer: The backbone's tokenizer.
        where: The task, for errors.

    Raises:
        IncompatibleError: Two words are the same to this tokenizer.
    """

    def __init__(
        self, label: LabelConfig, tokenizer: PreTrainedTokenizerBase, *, where: str
    ) -> None:
        self.label = label
        self.tokenizer = tokenizer
        words = label.words or []
        self.ids: dict[str, int] = {}
        for number, word in enumerate(words):
            self.ids[self._as_read(word)] = number
        # such as words that a tokenizer reads in lower case, or that it does not know
        if len(self.ids) < len(words):
            raise IncompatibleError(
                f"{where}: to this backbone's tokenizer label.words {words} are not distinct; "
                "choose other words"
            )

    def text(self, value: float) -> str:
        """The label of a row as the model must write it.

        Numbers are rounded to steps of `label.step` from the low end, as in T5 ("3.8").
        """
        if self.label.words is not None:
            return self.label.words[int(value)]
        step = self.label.step
        low, _ = self._range()
        place = min(max(round((value - low) / step), 0), self._last_step())
        # Decimal counts the digits of 0.2 as they are written
        digits = [-int(Decimal(str(number)).as_tuple().exponent) for number in (low, step)]
        return f"{low + place * step:.{max(0, *digits)}f}"

    def texts(self) -> list[str]:
        """Every text that a row may ask for."""
        if self.label.words is not None:
            return list(self.label.words)
        low, _ = self._range()
        return [self.text(low + i * self.label.step) for i in range(self._last_step() + 1)]

    def value(self, written: str) -> float:
        """The class id of a text, -1 if it names no class; or the number, clipped to `label.range`.

        A text that is no number becomes the low end of the range: T5 gives it the value -1, which
        for STS-B is the low end after clipping.
        """
        if self.label.words is not None:
            return self.ids.get(written.strip(), NO_LABEL)
        low, high = self._range()
        try:
            number = float(written.strip())
        except ValueError:
            return low
        # "nan" and "inf" are numbers to Python
        if not math.isfinite(number):
            return low
        return min(max(number, low), high)

    def _last_step(self) -> int:
        low, high = self._range()
        # a little more, as 0.3 / 0.1 is 2.9999999999999996
        return math.floor((high - low) / self.label.step + 1e-9)

    def _range(self) -> tuple[float, float]:
        low, high = self.label.range or (0.0, 0.0)
        return low, high

    def _as_read(self, word: str) -> str:
        """The word after tokenizing and decoding: the best that `generate` can give."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        return as_written(self.tokenizer, ids).strip()
