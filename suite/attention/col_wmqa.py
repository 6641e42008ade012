"""Column-weighted multi-query attention: as `col-wgqa`, with one group of all heads.

Source: WGQA, arXiv 2407.10855, section 3 (COLWMQA).
Deviations: those of `_weighted`.
"""

from __future__ import annotations

from suite.attention._weighted import WeightedToOne


class ColWmqa(WeightedToOne):
    description = (
        "multi-query attention; each output feature of a head enters the shared one"
        " with a learned weight"
    )
    source = "WGQA, arXiv 2407.10855, section 3"
    form = "column"
