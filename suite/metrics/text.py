"""How good texts are, over a whole corpus.

Perplexity scores given texts; BLEU, ROUGE and exact match score texts that a model wrote.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from suite.metrics.values import Values

ROUGE = ("rouge1", "rouge2", "rougeL")


def perplexity(nll: Sequence[float], tokens: Sequence[float]) -> float:
    """exp of the mean negative log-likelihood per token; infinite where that overflows.

    Args:
        nll: Negative log-likelihood of each item, in nats, summed over its tokens.
        tokens: Number of tokens of each item.

    Raises:
        ValueError: There is no token at all.
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
    """1 for each row whose answer is the reference's, else 0, (rows,).

    Args:
        written: What the model wrote.
        golds: One reference for each.
        answer: A regular expression with one group. The answer is what the group finds first,
            without commas, spaces around it and a full stop at its end (`1,000.` is `1000`), as
            GSM8K's own grader reads numbers (Cobbe et al., arXiv 2110.14168). A text in which it
            finds nothing is wrong. None: the answer is the whole text without spaces around it.
    """
    matches = []
    for text, gold in zip(written, golds, strict=True):
        wanted = _answer(gold, answer)
        matches.append(wanted is not None and wanted == _answer(text, answer))
    return np.array(matches, dtype=np.float64)


def _answer(text: str, pattern: str | None) -> str | None:
    if pattern is None:
        return text.strip()
    found = re.search(pattern, text)
    # the group may stand in an alternative that did not match
    if found is None or found[1] is None:
        return None
    return found[1].replace(",", "").strip().removesuffix(".").strip()


def score_texts(
    metrics: Sequence[str],
    written: Sequence[str],
    golds: Sequence[str],
    *,
    answer: str | None = None,
) -> dict[str, float]:
    """Every metric over all rows at once, in percent (0 to 100).

    BLEU counts n-grams over the corpus (sacreBLEU with its default tokeniser 13a). ROUGE is the
    mean F-measure of rows (rouge_score with Porter's stemmer, as in Google's own evaluation of
    summaries and in T5's). Neither is a mean over batches.

    Args:
        metrics: Of "bleu", "rouge1", "rouge2", "rougeL", "exact_match".
        written: What the model wrote.
        golds: One reference for each.
        answer: As in `exact_matches`.

    Raises:
        ValueError: There are no rows, or the numbers of texts and references differ.
    """
    if len(written) != len(golds) or not len(golds):
        raise ValueError(
            f"{len(written)} texts for {len(golds)} references; "
            "expected the same number, at least one"
        )
    rouge_rows_by_name = _rouge_rows([name for name in metrics if name in ROUGE], written, golds)
    scores: dict[str, float] = {}
    for name in metrics:
        if name == "bleu":
            scores[name] = float(_bleu().corpus_score(list(written), [list(golds)]).score)
        elif name == "exact_match":
            scores[name] = 100.0 * float(exact_matches(written, golds, answer=answer).mean())
        else:
            scores[name] = 100.0 * math.fsum(rouge_rows_by_name[name]) / len(golds)
    return scores


def bleu_counts(written: Sequence[str], golds: Sequence[str]) -> Values:
    """What each row adds to corpus BLEU, (rows, 10).

    The columns are tokens written, tokens of the reference, and the matches and then all n-grams
    of orders 1 to 4.
    """
    # sacreBLEU has no public call that gives the counts of single rows
    counts = _bleu()._extract_corpus_statistics(list(written), [list(golds)])
    return np.asarray(counts, dtype=np.float64)


def rouge_rows(name: str, written: Sequence[str], golds: Sequence[str]) -> Values:
    """The F-measure of each row, 0 to 1, (rows,)."""
    return np.array(_rouge_rows([name], written, golds)[name], dtype=np.float64)


def _rouge_rows(
    names: Sequence[str], written: Sequence[str], golds: Sequence[str]
) -> dict[str, list[float]]:
    """The F-measure of each row, by metric; one pass for all of them, because stemming is slow."""
    found: dict[str, list[float]] = {name: [] for name in names}
    if not names:
        return found
    scorer = _rouge(tuple(names))
    for text, gold in zip(written, golds, strict=True):
        scores = scorer.score(gold, text)
        for name in names:
            found[name].append(scores[name].fmeasure)
    return found


@functools.cache
def signatures(metrics: tuple[str, ...]) -> dict[str, str]:
    """How exactly each metric was computed: sacreBLEU's signature, library and settings of ROUGE.

    Metrics that come in one version only have no signature.
    """
    from importlib.metadata import version

    found: dict[str, str] = {}
    for name in metrics:
        if name == "bleu":
            bleu = _bleu()
            # the signature names the number of references only after a score
            bleu.corpus_score(["a"], [["a"]])
            found[name] = str(bleu.get_signature())
        elif name in ROUGE:
            library = f"rouge_score:{version('rouge_score')}"
            found[name] = f"{library}|stemmer:porter|f-measure|mean over rows"
    return found


def _bleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU()


@functools.cache
def _rouge(names: tuple[str, ...]) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(names), use_stemmer=True)
