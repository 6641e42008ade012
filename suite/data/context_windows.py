"""Question and context as pairs of tokens; a context that is too long becomes several overlapping windows.

Source: BERT (Devlin et al. 2019, arXiv 1810.04805), 4.2 and 4.3, and the data code of its SQuAD experiments (`doc_stride`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from suite.errors import IncompatibleError

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """A question with a stretch of its context.

    Attributes:
        input_ids: Tokens, special ones among them.
        token_type_ids: 0 for the question, 1 for the context, as the tokenizer says; None where it says nothing.
        first: Place of the stretch's first token in `input_ids`.
        offsets: From and to which character of the context each token of the stretch reaches.
    """

    input_ids: list[int]
    token_type_ids: list[int] | None
    first: int
    offsets: list[Span]

    def place(self, span: Span) -> Span:
        """First and last token of a stretch of characters, or (0, 0), the window's first token, where it is not whole in here."""
        inside = [
            n for n, (low, high) in enumerate(self.offsets) if high > span[0] and low < span[1]
        ]
        if (
            not inside
            or self.offsets[inside[0]][0] > span[0]
            or self.offsets[inside[-1]][1] < span[1]
        ):
            return 0, 0
        return self.first + inside[0], self.first + inside[-1]


class Windows:
    """Cuts contexts for one tokenizer.

    Args:
        tokenizer: Of the backbone; fast, or of bytes, as its tokens must be found again in the text.
        at_most: Tokens of a window.
        stride: Tokens of context from one window to the next; never more than half a window, so that what one cuts the next has whole.
        where: Task, for errors.

    Raises:
        IncompatibleError: Another tokenizer; no room for a context.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, at_most: int, stride: int, where: str
    ) -> None:
        if not tokenizer.is_fast and not isinstance(tokenizer, ByT5Tokenizer):
            raise IncompatibleError(
                f"{where}: a {type(tokenizer).__name__} does not say where in the text its tokens are; use a fast one"
            )
        self.tokenizer, self.at_most, self.stride = tokenizer, at_most, stride
        self.template = _Template(tokenizer)
        # a question may take half of the room, so that any window has the other half at least
        self.longest_question = (at_most - self.template.special) // 2
        if self.longest_question < 1:
            raise IncompatibleError(
                f"{where}: training.max_length {at_most} leaves no room for question and context; raise it"
            )

    def cut(self, questions: Sequence[str], contexts: Sequence[str]) -> Iterator[list[Window]]:
        """The windows of every question in turn; what is too long of a question is cut off."""
        asked = _plain(self.tokenizer, questions)
        for (question, _), (ids, offsets) in zip(
            asked, _plain(self.tokenizer, contexts), strict=True
        ):
            yield [*self._windows(question[: self.longest_question], ids, offsets)]

    def _windows(
        self, question: list[int], ids: list[int], offsets: list[Span]
    ) -> Iterator[Window]:
        room = self.at_most - self.template.special - len(question)
        stride = min(self.stride, (room + 1) // 2)
        for start in range(0, max(1, len(ids) - room + stride), stride):
            yield self.template.join(
                question, ids[start : start + room], offsets[start : start + room]
            )


class _Template:
    """Where a tokenizer puts special tokens around a pair of texts, learnt from a pair of one letter each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        a, b = ([*tokenizer(text, add_special_tokens=False)["input_ids"]] for text in ("a", "b"))
        pair = tokenizer("a", "b")
        ids, types = [*pair["input_ids"]], pair.get("token_type_ids")
        one = _find(ids, a, 0)
        two = _find(ids, b, one + len(a))
        cuts = (
            slice(0, one),
            slice(one, one + len(a)),
            slice(one + len(a), two),
            slice(two, two + len(b)),
            slice(two + len(b), None),
        )
        before, _, between, _, after = (ids[cut] for cut in cuts)
        self.before, self.between, self.after = before, between, after
        self.types = None if types is None else [types[cut] for cut in cuts]
        self.special = len(before) + len(between) + len(after)

    def join(self, question: list[int], context: list[int], offsets: list[Span]) -> Window:
        parts = (self.before, question, self.between, context, self.after)
        types = None
        if self.types is not None:
            own = (
                self.types[0],
                self.types[1][:1] * len(question),
                self.types[2],
                self.types[3][:1] * len(context),
                self.types[4],
            )
            types = [number for part in own for number in part]
        first = len(self.before) + len(question) + len(self.between)
        return Window([token for part in parts for token in part], types, first, offsets)


def _find(ids: list[int], wanted: list[int], start: int) -> int:
    return next(n for n in range(start, len(ids)) if ids[n : n + len(wanted)] == wanted)


def _plain(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[tuple[list[int], list[Span]]]:
    """Tokens without special ones, and the characters that each covers."""
    if isinstance(tokenizer, ByT5Tokenizer):
        return [_bytes(text, tokenizer.offset) for text in texts]
    found = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    return [
        ([*ids], [(low, high) for low, high in spans])
        for ids, spans in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


def _bytes(text: str, offset: int) -> tuple[list[int], list[Span]]:
    """Every byte is a token; all bytes of a character cover the whole of it."""
    pairs = [
        (byte + offset, (n, n + 1))
        for n, character in enumerate(text)
        for byte in character.encode()
    ]
    return [token for token, _ in pairs], [span for _, span in pairs]
