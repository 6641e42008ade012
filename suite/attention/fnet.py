"""FNet's mixing: the real part of the discrete Fourier transform over tokens and features.

It has no parameters.

Source: FNet, arXiv 2105.03824, section 3.2, eq. 3, and its official code: Re(F_seq(F_hidden(X))),
    without normalisation.
Deviations: as `_mixers`: each row is transformed over its own tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from suite.attention._mixers import Mixer, TokenMixer
from suite.backbones.base import AttentionSite


class Fourier(Mixer):
    """Re(F_seq(F_hidden(X)))."""

    def mix(self, x: Tensor, real: Tensor | None) -> Tensor:
        precise = x.float()  # the transform has no 16-bit form
        if real is None:
            mixed: Tensor = torch.fft.fft2(precise).real
        else:
            features = torch.fft.fft(precise, dim=-1)  # (B, L, d), complex
            # Re((cos - i sin) (a + i b)) = cos a + sin b, over the real tokens of each row
            cosine, sine = _fourier_basis(real)
            mixed = cosine @ features.real + sine @ features.imag
        return mixed.to(x.dtype)


def _fourier_basis(real: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi i j / n between the n real tokens of each row, (B, L, L) each.

    Tokens are numbered without padding; at padding both are 0.
    """
    number = real.cumsum(dim=1) - 1  # (B, L)
    lengths = real.sum(dim=1).clamp(min=1)[:, None, None]  # (B, 1, 1)
    products = number[:, :, None] * number[:, None, :]  # (B, L, L)
    # the remainder keeps angles small, and so exact
    turns = (products % lengths) / lengths
    angles = 2 * math.pi * turns
    both_real = real[:, :, None] & real[:, None, :]  # (B, L, L)
    return angles.cos() * both_real, angles.sin() * both_real


class Fnet(TokenMixer):
    description = "Fourier transform over tokens and features in place of attention; no parameters"
    source = "FNet, arXiv 2105.03824, section 3.2"

    def mixer(self, model: PreTrainedModel, site: AttentionSite) -> Fourier:
        return Fourier()
