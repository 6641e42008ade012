"""Weighted multi-query attention: as `wgqa`, with one group of all heads.

Source: WGQA, arXiv 2407.10855, section 3 (WMQA).
Deviations: those of `_weighted`.
"""

from __future__ import annotations

from suite.attention._weighted import WeightedToOne


class Wmqa(WeightedToOne):
    description = "multi-query attention; each head enters the shared one with a learned weight"
    source = "WGQA, arXiv 2407.10855, section 3"
    form = "head"
