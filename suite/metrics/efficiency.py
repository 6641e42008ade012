"""How much of multi-head attention's score is left (PRR), and what added parameters buy (PEoP).

Source: Xue and Aletras, MHE, arXiv 2310.07911, section 4: performance retention ratio and
performance elasticity of parameters.
"""

from __future__ import annotations


def prr(score: float, mha: float, *, higher_is_better: bool) -> float:
    """Performance retention ratio: the share of multi-head attention's score that a variant keeps.

    `score / mha`, or `1 - (score - mha) / mha` where less is better (perplexity).
    Source: MHE, arXiv 2310.07911, section 4.

    Args:
        score: The variant's, in any unit with a true zero.
        mha: Multi-head attention's in the same unit, above 0.
        higher_is_better: False for perplexity and the like.

    Returns:
        Percent: 100 for multi-head attention itself, above 100 where the variant is better, below 0
        for more than twice its perplexity.

    Raises:
        ValueError: `mha` is not above 0, so there is no share of it.
    """
    _check_baseline("multi-head attention", mha)
    if higher_is_better:
        return 100 * (score / mha)
    return 100 * (1 - (score - mha) / mha)


def peop(
    score: float, sha: float, parameters: int, sha_parameters: int, *, higher_is_better: bool
) -> float:
    """Performance elasticity of parameters: percent of score per percent of parameters added.

    Both are relative to single-head attention:
    `(score / sha - 1) / (parameters / sha_parameters - 1)`,
    with the sign turned where less is better. Source: MHE, arXiv 2310.07911, section 4; the paper's
    numbers follow from exact counts, not from its rounded millions.

    Args:
        score: The variant's, in any unit with a true zero.
        sha: Single-head attention's in the same unit, above 0.
        parameters: Parameters of the variant's attention: the weights of all sublayers with their
            output projections, without biases.
        sha_parameters: Parameters of single-head attention, counted in the same way, above 0.
        higher_is_better: False for perplexity and the like.

    Returns:
        A ratio without unit.

    Raises:
        ValueError: `sha` or `sha_parameters` is not above 0, or the variant has as many parameters
            as single-head attention.
    """
    _check_baseline("single-head attention", sha)
    if sha_parameters <= 0 or parameters == sha_parameters:
        raise ValueError(
            f"{parameters:,} attention parameters beside single-head attention's "
            f"{sha_parameters:,}: no elasticity is defined"
        )
    gained = score / sha - 1
    if not higher_is_better:
        gained = 1 - score / sha
    return gained / (parameters / sha_parameters - 1)


def _check_baseline(name: str, score: float) -> None:
    if not score > 0:
        raise ValueError(f"{name} scores {score:g}: a ratio to it means nothing")
