"""Weighted grouped-query attention: one learned weight for each key head and each value head.

Source: WGQA, arXiv 2407.10855, section 3; h weights each for keys and values of a layer.
Deviations: those of `_weighted`.
"""

from __future__ import annotations

from suite.attention._weighted import Weighted


class Wgqa(Weighted):
    description = "grouped-query attention; each head enters its group's with a learned weight"
    source = "WGQA, arXiv 2407.10855, section 3"
    form = "head"
