"""Question and context as one sequence; a long context becomes several overlapping windows.

Source: BERT (Devlin et al. 2019, arXiv 1810.04805), 4.2 and 4.3, and the data code of its SQuAD
experiments (`doc_stride`).
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
        input_ids: Tokens, special ones included.
        token_type_ids: What the tokenizer gives: 0 for the question, 1 for the context. None where
            it gives nothing.
        first: Place in `input_ids` of the stretch's first token.
        offsets: For each token of the stretch, the first character of the context that it covers,
            and the one after the last.
    """

    input_ids: list[int]
    token_type_ids: list[int] | None
    first: int
    offsets: list[Span]

    def place(self, span: Span) -> Span:
        """First and last token of a stretch of characters.

        Where the window does not hold all of the stretch this is (0, 0), the window's first token.
        """
        inside = []
        for number, (low, high) in enumerate(self.offsets):
            if high > span[0] and low < span[1]:
                inside.append(number)
        if not inside:
            return 0, 0
        # the answer reaches out of the window on the left or on the right
        begins_before = self.offsets[inside[0]][0] > span[0]
        ends_after = self.offsets[inside[-1]][1] < span[1]
        if begins_before or ends_after:
            return 0, 0
        return self.first + inside[0], self.first + inside[-1]


class Windows:
    """Cuts contexts into windows for one tokenizer.

    Args:
        tokenizer: The backbone's tokenizer. It must be fast, or of bytes, because its tokens are
            found again in the text.
        at_most: Tokens of a window.
        stride: Tokens of context from one window to the next. It is never more than half a window,
            so that an answer which one window cuts is whole in the next.
        where: The task, for errors.

    Raises:
        IncompatibleError: The tokenizer is of another kind, or there is no room for a context.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, at_most: int, stride: int, where: str
    ) -> None:
        if not tokenizer.is_fast and not isinstance(tokenizer, ByT5Tokenizer):
            raise IncompatibleError(
                f"{where}: a {type(tokenizer).__name__} does not say where in the text its tokens "
                "are; use a fast one"
            )
        self.tokenizer = tokenizer
        self.at_most = at_most
        self.stride = stride
        self.template = _Template(tokenizer)
        # a question may take half of the room, so that every window has at least half for context
        self.longest_question = (at_most - self.template.special) // 2
        if self.longest_question < 1:
            raise IncompatibleError(
                f"{where}: training.max_length {at_most} leaves no room for question and context; "
                "raise it"
            )

    def cut(self, questions: Sequence[str], contexts: Sequence[str]) -> Iterator[list[Window]]:
        """The windows of every question in turn; a question that is too long loses its end."""
        asked = _plain(self.tokenizer, questions)
        read = _plain(self.tokenizer, contexts)
        for (question, _), (ids, offsets) in zip(asked, read, strict=True):
            yield list(self._windows(question[: self.longest_question], ids, offsets))

    def _windows(
        self, question: list[int], ids: list[int], offsets: list[Span]
    ) -> Iterator[Window]:
        # a short question leaves more room for its context
        room = self.at_most - self.template.special - len(question)
        stride = min(self.stride, (room + 1) // 2)
        # an empty context has one window too
        for start in range(0, max(1, len(ids) - room + stride), stride):
            end = start + room
            yield self.template.join(question, ids[start:end], offsets[start:end])


class _Template:
    """Where a tokenizer puts special tokens around a pair of texts.

    It is learnt from a pair of one letter each, because tokenizers have no common way to say it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        a = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        b = list(tokenizer("b", add_special_tokens=False)["input_ids"])
        pair = tokenizer("a", "b")
        ids = list(pair["input_ids"])
        # everything around and between the two letters is special
        one = _find(ids, a, 0)
        # after the first letter, since b's tokens may occur before it among the special ones
        two = _find(ids, b, one + len(a))
        between = slice(one + len(a), two)
        after = slice(two + len(b), None)
        self.before = ids[:one]
        self.between = ids[between]
        self.after = ids[after]
        self.special = len(self.before) + len(self.between) + len(self.after)
        types = pair.get("token_type_ids")
        self.has_types = types is not None
        if types is not None:
            self.types_before = types[:one]
            self.types_between = types[between]
            self.types_after = types[after]
            self.question_type = types[one]
            self.context_type = types[two]

    def join(self, question: list[int], context: list[int], offsets: list[Span]) -> Window:
        ids = [*self.before, *question, *self.between, *context, *self.after]
        types = None
        if self.has_types:
            types = [
                *self.types_before,
                *[self.question_type] * len(question),
                *self.types_between,
                *[self.context_type] * len(context),
                *self.types_after,
            ]
        first = len(self.before) + len(question) + len(self.between)
        return Window(ids, types, first, offsets)


def _find(ids: list[int], wanted: list[int], start: int) -> int:
    """Where `wanted` begins in `ids`, from `start` on."""
    for place in range(start, len(ids)):
        if ids[place : place + len(wanted)] == wanted:
            return place
    raise ValueError(f"tokens {wanted} are not in {ids}: a pair changes how texts are tokenised")


def _plain(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[tuple[list[int], list[Span]]]:
    """Tokens without special ones, and the characters that each covers."""
    # it is slow and gives no offsets, but bytes are easily counted
    if isinstance(tokenizer, ByT5Tokenizer):
        return [_bytes(text, tokenizer.offset) for text in texts]
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    found = []
    for ids, spans in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        found.append((list(ids), list(map(tuple, spans))))
    return found


def _bytes(text: str, offset: int) -> tuple[list[int], list[Span]]:
    """Every byte is a token; all bytes of a character cover the whole of it."""
    tokens = []
    spans = []
    for number, character in enumerate(text):
        for byte in character.encode():
            tokens.append(byte + offset)
            spans.append((number, number + 1))
    return tokens, spans
