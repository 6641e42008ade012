"""Labels as words: a class by its name, a number by its digits, and back."""

from __future__ import annotations

import math
from decimal import Decimal

from transformers import PreTrainedTokenizerBase

from suite.config.task import LabelConfig
from suite.errors import IncompatibleError

NO_LABEL = -1
"""The answer of a model that names no label; it counts as wrong."""


class LabelWords:
    """The label texts of a task as one tokenizer reads them.

    Args:
        label: Of the task.
        tokenizer: The backbone's.
        where: Task, for errors.

    Raises:
        IncompatibleError: Two words are the same to this tokenizer.
    """

    def __init__(
        self, label: LabelConfig, tokenizer: PreTrainedTokenizerBase, *, where: str
    ) -> None:
        self.label, self.tokenizer = label, tokenizer
        self.ids = {self._as_read(word): number for number, word in enumerate(label.words or ())}
        if len(self.ids) < len(label.words or ()):
            raise IncompatibleError(
                f"{where}: to this backbone's tokenizer label.words {label.words} are not distinct; choose other words"
            )

    def text(self, value: float) -> str:
        """The label of a row as the model must write it; numbers are rounded to `label.step` as in T5 ("3.8")."""
        if self.label.words is not None:
            return self.label.words[int(value)]
        decimals = max(0, -int(Decimal(str(self.label.step)).as_tuple().exponent))
        return f"{round(value / self.label.step) * self.label.step:.{decimals}f}"

    def texts(self) -> list[str]:
        """Every text that may be asked for."""
        if self.label.words is not None:
            return list(self.label.words)
        low, high = self.label.range or (0.0, 0.0)
        return [
            self.text(low + i * self.label.step)
            for i in range(math.floor((high - low) / self.label.step) + 1)
        ]

    def value(self, written: str) -> float:
        """The class id of a text, or -1; the number, clipped to `label.range`, or the range's low end if it is none.

        T5 gives unreadable numbers the value -1, which for STS-B is the low end after clipping.
        """
        if self.label.words is not None:
            return self.ids.get(written.strip(), NO_LABEL)
        low, high = self.label.range or (0.0, 0.0)
        try:
            number = float(written.strip())
        except ValueError:
            return low
        return min(max(number, low), high) if math.isfinite(number) else low

    def _as_read(self, word: str) -> str:
        """The word after tokenizing and back, as `generate` can give it at best."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
