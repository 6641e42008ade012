"""How good texts are: perplexity of given ones, BLEU and ROUGE of written ones; always over a whole corpus."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

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


def score_texts(metrics: Sequence[str], written: Sequence[str], golds: Sequence[str]) -> dict[str, float]:
    """Every metric over all rows at once, in percent (0 to 100).

    BLEU counts n-grams over the corpus (sacreBLEU, its default tokeniser 13a); ROUGE is the mean F-measure of rows
    (rouge_score with Porter's stemmer, as Google's own evaluation of summaries and T5's). Neither is a mean over batches.

    Args:
        metrics: Of "bleu", "rouge1", "rouge2", "rougeL".
        written: What the model wrote.
        golds: One reference each.

    Raises:
        ValueError: No rows, or not as many references.
    """
    if len(written) != len(golds) or not len(golds):
        raise ValueError(f"{len(written)} texts for {len(golds)} references; expected the same number, at least one")
    scores: dict[str, float] = {}
    if "bleu" in metrics:
        scores["bleu"] = float(_bleu().corpus_score(list(written), [list(golds)]).score)
    if asked := [name for name in metrics if name in ROUGE]:
        scorer = _rouge(tuple(asked))
        rows = [scorer.score(gold, text) for text, gold in zip(written, golds, strict=True)]
        scores |= {name: 100.0 * math.fsum(row[name].fmeasure for row in rows) / len(rows) for name in asked}
    return {name: scores[name] for name in metrics}


@functools.cache
def signatures(metrics: tuple[str, ...]) -> dict[str, str]:
    """What exactly a metric was computed with: sacreBLEU's signature; library and settings of ROUGE."""
    from importlib.metadata import version

    found: dict[str, str] = {}
    if "bleu" in metrics:
        bleu = _bleu()
        bleu.corpus_score(["a"], [["a"]])  # the signature names the number of references only after a score
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
