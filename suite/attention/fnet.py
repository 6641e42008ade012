"""FNet's mixing: the real part of the discrete Fourier transform over tokens and features; no parameters.

Source: FNet, arXiv 2105.03824, section 3.2, eq. 3, and its official code: Re(F_seq(F_hidden(X))), without normalisation.
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
            features = torch.fft.fft(precise, dim=-1)  # (B, L, d)
            cosine, sine = _waves(real)
            mixed = cosine @ features.real + sine @ features.imag
        return mixed.to(x.dtype)


def _waves(real: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi i j / n between the n real tokens of each row, numbered without padding; 0 elsewhere. (B, L, L) each."""
    number, lengths = real.cumsum(dim=1) - 1, real.sum(dim=1).clamp(min=1)[:, None, None]
    turns = (
        number[:, :, None] * number[:, None, :] % lengths
    ) / lengths  # the remainder keeps angles small, and so exact
    both = real[:, :, None] & real[:, None, :]
    return (2 * math.pi * turns).cos() * both, (2 * math.pi * turns).sin() * both


class Fnet(TokenMixer):
    description = "Fourier transform over tokens and features in place of attention; no parameters"
    source = "FNet, arXiv 2105.03824, section 3.2"

    def mixer(self, model: PreTrainedModel, site: AttentionSite) -> Fourier:
        return Fourier()
