"""Running text for language models: token sequences joined into one stream, cut into blocks to train on or windows to score.

Source: blocks as in GPT-2's training (Radford et al. 2019: documents joined by an end-of-text token); windows as MHE scores
perplexity (arXiv 2310.07911, appendix: stride 256), the scheme of Transformer-XL and of transformers' guide to perplexity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence


def stream(sequences: Iterable[Sequence[int]], *, separator: int | None) -> Iterator[int]:
    """The tokens of all sequences in order; each sequence that has any is ended by `separator` (None = by nothing)."""
    for sequence in sequences:
        if sequence:
            yield from sequence
            if separator is not None:
                yield separator


def blocks(
    sequences: Iterable[Sequence[int]], length: int, *, separator: int | None
) -> Iterator[list[int]]:
    """As `pack`, one block at a time: a corpus need not fit into memory."""
    tokens = stream(sequences, separator=separator)
    while len(block := list(itertools.islice(tokens, length))) == length:
        yield block


def pack(
    sequences: Iterable[Sequence[int]], length: int, *, separator: int | None
) -> list[list[int]]:
    """Joined sequences cut into blocks of equal length; what is left at the end, less than a block, is dropped.

    Args:
        sequences: Token ids, without special tokens.
        length: Tokens per block, at least 1.
        separator: Token put after every sequence; None = nothing.
    """
    return list(blocks(sequences, length, separator=separator))


def windows(tokens: Iterable[int], length: int, *, stride: int) -> Iterator[tuple[list[int], int]]:
    """Overlapping windows over a stream and how many tokens at the end of each are to be scored.

    Every token but the first of the stream is scored exactly once, with at least `length - stride` tokens before it as
    soon as the stream has them. A window ends `stride` tokens after the one before; the last one ends with the stream.

    Args:
        tokens: The stream; its first token is context only.
        length: Tokens of a window, at most.
        stride: 1 to length - 1.
    """
    source = iter(tokens)
    window = list(itertools.islice(source, length))
    if len(window) > 1:
        yield window, len(window) - 1
    while new := list(itertools.islice(source, stride)):
        window = [*window, *new][-length:]
        yield window, len(new)
