"""How good texts are: perplexity of given ones, BLEU, ROUGE and exact match of written ones; always over a whole corpus."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from suite.metrics.quality import Values

ROUGE = ("rouge1", "rouge2", "rougeL")


def perplexity(nll: Sequence[float], tokens: Sequence[float]) -> float:
    """exp of the mean negative log-likelihood per token; infinite where that overflows.

    Args:
        nll: Negative log-likelihood per item, in nats, summed over its tokens.
        tokens: Tokens per item.

    Raises:
        ValueError: No token at all.
    """
    count = math.fsum(tokens)
    if not count:
        raise ValueError("no token to score")
    try:
        return math.exp(math.fsum(nll) / count)
    except OverflowError:
        return math.inf


def exact_matches(
    written: Sequence[str], golds: Sequence[str], *, answer: str | None = None
) -> Values:
    """1 for each row whose answer is the reference's, else 0.

    Args:
        answer: The answer is what the one group of this regular expression finds first, without commas, spaces around it and
            a full stop at its end (`1,000.` is `1000`), as GSM8K's own grader reads numbers (Cobbe et al., arXiv 2110.14168);
            a text in which it finds nothing is wrong. None: the whole text without spaces around it.
    """
    wanted, given = ([_answer(text, answer) for text in texts] for texts in (golds, written))
    return np.array(
        [w is not None and w == g for w, g in zip(wanted, given, strict=True)], dtype=np.float64
    )


def _answer(text: str, pattern: str | None) -> str | None:
    if pattern is None:
        return text.strip()
    found = re.search(pattern, text)
    return (
        None
        if found is None or found[1] is None
        else found[1].replace(",", "").strip().removesuffix(".").strip()
    )


def score_texts(
    metrics: Sequence[str],
    written: Sequence[str],
    golds: Sequence[str],
    *,
    answer: str | None = None,
) -> dict[str, float]:
    """Every metric over all rows at once, in percent (0 to 100).

    BLEU counts n-grams over the corpus (sacreBLEU, its default tokeniser 13a); ROUGE is the mean F-measure of rows
    (rouge_score with Porter's stemmer, as Google's own evaluation of summaries and T5's). Neither is a mean over batches.

    Args:
        metrics: Of "bleu", "rouge1", "rouge2", "rougeL", "exact_match".
        written: What the model wrote.
        golds: One reference each.
        answer: As in `exact_matches`.

    Raises:
        ValueError: No rows, or not as many references.
    """
    if len(written) != len(golds) or not len(golds):
        raise ValueError(
            f"{len(written)} texts for {len(golds)} references; expected the same number, at least one"
        )
    scores: dict[str, float] = {}
    if "bleu" in metrics:
        scores["bleu"] = float(_bleu().corpus_score(list(written), [list(golds)]).score)
    if asked := [name for name in metrics if name in ROUGE]:
        scorer = _rouge(tuple(asked))
        rows = [scorer.score(gold, text) for text, gold in zip(written, golds, strict=True)]
        scores |= {
            name: 100.0 * math.fsum(row[name].fmeasure for row in rows) / len(rows)
            for name in asked
        }
    if "exact_match" in metrics:
        scores["exact_match"] = 100.0 * float(exact_matches(written, golds, answer=answer).mean())
    return {name: scores[name] for name in metrics}


def bleu_counts(written: Sequence[str], golds: Sequence[str]) -> Values:
    """What each row adds to corpus BLEU, (rows, 10): tokens written and of the reference, matches and n-grams of orders 1 to 4."""
    return np.asarray(
        _bleu()._extract_corpus_statistics(list(written), [list(golds)]), dtype=np.float64
    )


def rouge_rows(name: str, written: Sequence[str], golds: Sequence[str]) -> Values:
    """The F-measure of each row, 0 to 1."""
    scorer = _rouge((name,))
    return np.array(
        [
            scorer.score(gold, text)[name].fmeasure
            for text, gold in zip(written, golds, strict=True)
        ],
        dtype=np.float64,
    )


@functools.cache
def signatures(metrics: tuple[str, ...]) -> dict[str, str]:
    """What exactly a metric was computed with: sacreBLEU's signature; library and settings of ROUGE."""
    from importlib.metadata import version

    found: dict[str, str] = {}
    if "bleu" in metrics:
        bleu = _bleu()
        bleu.corpus_score(
            ["a"], [["a"]]
        )  # the signature names the number of references only after a score
        found["bleu"] = str(bleu.get_signature())
    settings = f"rouge_score:{version('rouge_score')}|stemmer:porter|f-measure|mean over rows"
    return found | {name: settings for name in metrics if name in ROUGE}


def _bleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU()


@functools.cache
def _rouge(names: tuple[str, ...]) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(names), use_stemmer=True)
