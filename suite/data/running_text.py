"""Running text for language models: token sequences joined into one stream, and cut again.

Text to train on is cut into blocks, as in GPT-2's training (Radford et al. 2019: documents joined
by an end-of-text token). Text to score is cut into windows, as MHE scores perplexity (arXiv
2310.07911, appendix: stride 256); this is the scheme of Transformer-XL and of transformers' guide
to perplexity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
CHUNK_ITEMS = 1000
"""Blocks or windows held in memory at a time."""


def stream(sequences: Iterable[Sequence[int]], *, separator: int | None) -> Iterator[int]:
    """The tokens of all sequences in order.

    Each sequence that is not empty ends with `separator`; None = with nothing.
    """
    for sequence in sequences:
        if sequence:
            yield from sequence
            if separator is not None:
                yield separator


def blocks(
    sequences: Iterable[Sequence[int]], length: int, *, separator: int | None
) -> Iterator[list[int]]:
    """Join sequences and cut them into blocks of equal length.

    What is left at the end is less than a block and is dropped. Blocks come one at a time, because
    a corpus need not fit into memory.

    Args:
        sequences: Token ids, without special tokens.
        length: Tokens per block, at least 1.
        separator: Token put after every sequence; None = none.
    """
    tokens = stream(sequences, separator=separator)
    # a shorter one is the rest at the end, and is dropped
    while len(block := list(itertools.islice(tokens, length))) == length:
        yield block


def named_chunks(items: Iterable[Item], split: str) -> Iterator[tuple[list[str], list[Item]]]:
    """The items of a split with their names, some at a time.

    An item is no row of the data, so its name is its number in the split.
    """
    source = iter(items)
    start = 0
    while chunk := list(itertools.islice(source, CHUNK_ITEMS)):
        numbers = range(start, start + len(chunk))
        yield [f"{split}/{number}" for number in numbers], chunk
        start += len(chunk)


def windows(tokens: Iterable[int], length: int, *, stride: int) -> Iterator[tuple[list[int], int]]:
    """Overlapping windows over a stream, and how many tokens at the end of each are to be scored.

    Every token but the first of the stream is scored exactly once. It has at least
    `length - stride` tokens before it, once the stream has so many. Each window ends `stride`
    tokens after the one before; the last one ends with the stream.

    Args:
        tokens: The stream; its first token is context only.
        length: Tokens of a window, at most.
        stride: 1 to length - 1.
    """
    source = iter(tokens)
    window = list(itertools.islice(source, length))
    # a single token has nothing before it, and is not scored
    if len(window) > 1:
        yield window, len(window) - 1
    while new := list(itertools.islice(source, stride)):
        window = [*window, *new][-length:]
        yield window, len(new)
