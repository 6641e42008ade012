"""Linear mixing: a learned matrix over positions and one over features in place of attention.

Source: FNet, arXiv 2105.03824, section 4 ("Linear" encoder), and its official code:
    W_seq X W_hidden, no biases, N(0, 0.02).
Deviations: as `_mixers`, and
    - W_seq has the backbone's number of positions, and a batch uses its upper left part; the
      official code has one length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._mixers import Mixer, TokenMixer
from suite.backbones.base import AttentionSite

STD = 0.02


class LinearMixing(Mixer):
    """W_seq X W_hidden.

    Args:
        positions: L_max, the largest number of tokens.
        width: d, the size of the residual stream.
        like: A tensor whose dtype and device the matrices get.
    """

    def __init__(self, positions: int, width: int, like: Tensor) -> None:
        super().__init__()
        # hidden before sequence: another order would change every seed's numbers
        self.hidden = self._drawn(width, like)
        self.sequence = self._drawn(positions, like)

    @staticmethod
    def _drawn(size: int, like: Tensor) -> nn.Parameter:
        matrix = torch.empty(size, size, dtype=like.dtype, device=like.device)
        return nn.Parameter(matrix.normal_(0.0, STD))

    def mix(self, x: Tensor, real: Tensor | None) -> Tensor:
        if real is not None:
            x = x * real[..., None]  # padding adds nothing to other tokens
        mixed = nn.functional.linear(x, self.hidden)  # (B, L, d)
        length = x.shape[1]
        # a copy, as autograd would keep a view, and with it ZeRO-3's gathered matrix
        return self.sequence[:length, :length].clone() @ mixed


class Linear(TokenMixer):
    description = "a learned matrix over positions and one over features in place of attention"
    source = "FNet, arXiv 2105.03824, section 4 (its Linear encoder)"

    def mixer(self, model: PreTrainedModel, site: AttentionSite) -> LinearMixing:
        config: Any = model.config
        query: Any = site.module.get_submodule(site.q)
        return LinearMixing(config.max_position_embeddings, config.hidden_size, query.weight)
