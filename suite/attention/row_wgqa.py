"""Row-weighted grouped-query attention: one learned weight per input feature of each head.

The heads are the key heads and the value heads.

Source: WGQA, arXiv 2407.10855, section 3 (ROWWGQA); h·d_model weights each for keys and values of a
    layer.
Deviations: those of `_weighted`.
"""

from __future__ import annotations

from suite.attention._weighted import Weighted


class RowWgqa(Weighted):
    description = (
        "grouped-query attention; each input feature of a head enters its group's"
        " with a learned weight"
    )
    source = "WGQA, arXiv 2407.10855, section 3"
    form = "row"
