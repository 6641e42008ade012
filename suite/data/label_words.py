"""Labels as words: a class by its name, a number by its digits, and back."""

from __future__ import annotations

import math
from decimal import Decimal

from transformers import PreTrainedTokenizerBase

from suite.config.task import LabelConfig
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

        Numbers are rounded to `label.step`, as in T5 ("3.8").
        """
        if self.label.words is not None:
            return self.label.words[int(value)]
        step = self.label.step
        # Decimal counts the digits of 0.2 as they are written
        decimals = max(0, -int(Decimal(str(step)).as_tuple().exponent))
        return f"{round(value / step) * step:.{decimals}f}"

    def texts(self) -> list[str]:
        """Every text that a row may ask for."""
        if self.label.words is not None:
            return list(self.label.words)
        low, high = self._range()
        steps = math.floor((high - low) / self.label.step)
        return [self.text(low + i * self.label.step) for i in range(steps + 1)]

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

    def _range(self) -> tuple[float, float]:
        low, high = self.label.range or (0.0, 0.0)
        return low, high

    def _as_read(self, word: str) -> str:
        """The word after tokenizing and decoding: the best that `generate` can give."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
