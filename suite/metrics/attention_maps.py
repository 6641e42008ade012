"""How alike the attention probabilities of layers are, and how much they vary.

Source: Shared Attention (arXiv 2407.12866), figure 2 (similarity) and figure 5 (variance).
    `padded` is the paper's similarity: maps are zero-padded to a common length and averaged over
    the data; the cosine is that between the averages of two layers. The paper does not say whether
    heads are averaged first, so both are given.
Deviations:
    Averages hide what differs from input to input, and every map of a causal model falls off in
    the same way. So there are two more measures, ours. `valid` is the cosine on each input's own
    pairs of tokens (no padding; for causal models the lower triangle), averaged over inputs.
    `centred` is the same after each query's uniform attention is taken away, so that layers which
    merely spread out do not count as alike: 1 for the same pattern, 0 for unrelated ones. A layer
    with a window has fewer keys, and its variance fewer pairs.
    The paper weights its sums of variances "by the average of these summed variances" without a
    formula. Here are the plain sums over this and all later layers, and their means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MEASURES = ("padded", "valid", "centred")


class Reach(NamedTuple):
    """How far a layer sees.

    Attributes:
        window: Tokens to either side, the query's own among them; None = all.
        sinks: First tokens of a text that are seen from everywhere.
    """

    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MapStatistics:
    """Statistics of the maps of L layers with H heads.

    Attributes:
        inputs: How many inputs were seen.
        by_head: Measure -> similarity of the same head in two layers, (H, L, L).
        head_mean: Measure -> similarity of two layers' maps averaged over heads, (L, L).
        variance: Variance of the probabilities over an input's valid pairs, averaged over inputs,
            (L, H).
        downstream_sum: Sum over this and all later layers of the head mean of `variance`, (L,).
        downstream_mean: `downstream_sum` divided by the number of its terms, (L,).
    """

    inputs: int
    by_head: dict[str, Tensor]
    head_mean: dict[str, Tensor]
    variance: Tensor
    downstream_sum: Tensor
    downstream_mean: Tensor


class AttentionMaps:
    """Takes maps in batch by batch and keeps only their sums.

    Args:
        causal: Whether a query attends to no later token.
        reach: How far each layer sees; None = every layer sees all.
    """

    def __init__(self, *, causal: bool, reach: Sequence[Reach] | None = None) -> None:
        self.causal = causal
        self.reach = reach
        self.inputs = 0
        # sum over inputs, (L, H, M, M) with M the longest input so far
        self._padded = torch.zeros(0, 0)
        self._cosines: dict[str, tuple[Tensor, Tensor]] = {}
        self._variance = torch.zeros(())

    def add(self, maps: Sequence[Tensor], mask: Tensor) -> None:
        """Take in one batch.

        Args:
            maps: Probabilities of each layer, (B, H, T, T).
            mask: Which positions hold tokens, (B, T).
        """
        stacked = torch.stack([layer.detach().float() for layer in maps], dim=1)  # (B, L, H, T, T)
        of_layers = self.reach or [Reach()] * len(maps)
        pairs = [valid_pairs(mask, causal=self.causal, reach=reach) for reach in of_layers]
        valid = torch.stack(pairs, dim=1)  # (B, L, T, T)
        kept = stacked * valid[:, :, None]
        self._padded = sum_padded(self._padded, kept.double().sum(0))
        self._add_cosines("valid", kept)
        self._add_cosines("centred", centred(kept, valid))
        self._variance = self._variance + variances(kept, valid).double().sum(0)  # (L, H)
        self.inputs += len(mask)

    def statistics(self) -> MapStatistics:
        """The means over all inputs that were added.

        Raises:
            ValueError: None was added.
        """
        if not self.inputs:
            raise ValueError("got no attention maps, expected those of at least one input")
        by_head: dict[str, Tensor] = {}
        head_mean: dict[str, Tensor] = {}
        for name, (heads, mean) in self._cosines.items():
            by_head[name] = heads / self.inputs
            head_mean[name] = mean / self.inputs
        # a cosine is the same for sums as for means
        by_head["padded"] = cosines(self._padded.transpose(0, 1))
        head_mean["padded"] = cosines(self._padded.mean(1))
        variance = self._variance / self.inputs
        # flipped, because cumsum adds up from the front
        sums = variance.mean(1).flip(0).cumsum(0).flip(0)  # (L,)
        terms = torch.arange(len(sums), 0, -1)  # L, ..., 1
        return MapStatistics(
            inputs=self.inputs,
            by_head=by_head,
            head_mean=head_mean,
            variance=variance,
            downstream_sum=sums,
            downstream_mean=sums / terms,
        )

    def _add_cosines(self, name: str, kept: Tensor) -> None:
        heads = cosines(kept.transpose(1, 2)).double().sum(0)  # (H, L, L)
        mean = cosines(kept.mean(2)).double().sum(0)  # (L, L)
        before = self._cosines.get(name, (torch.zeros(()), torch.zeros(())))
        self._cosines[name] = before[0] + heads, before[1] + mean


def valid_pairs(mask: Tensor, *, causal: bool, reach: Reach) -> Tensor:
    """Which pairs of query and key are tokens, and the query may attend: (B, T) to (B, T, T)."""
    tokens = mask.bool()
    pairs = tokens[:, :, None] & tokens[:, None, :]
    if causal:
        pairs = pairs.tril()
    if reach.window is not None:
        places = torch.arange(mask.shape[-1], device=mask.device)
        near = (places[:, None] - places).abs() < reach.window  # (T, T)
        is_sink = tokens.cumsum(-1) <= reach.sinks  # (B, T)
        pairs = pairs & (near | is_sink[:, None])
    return pairs


def cosines(maps: Tensor) -> Tensor:
    """Cosine between the maps of every two layers: (..., L, n, m) to (..., L, L).

    0 where a map is all zeros.
    """
    unit = torch.nn.functional.normalize(maps.flatten(-2), dim=-1)  # (..., L, n·m)
    return unit @ unit.transpose(-1, -2)


def centred(maps: Tensor, valid: Tensor) -> Tensor:
    """Maps less uniform attention over each query's valid keys; zero elsewhere.

    Args:
        maps: (B, L, H, T, T), zero where a pair is not valid.
        valid: (B, L, T, T).
    """
    keys = valid.sum(-1, keepdim=True)  # (B, L, T, 1)
    uniform = valid / keys.clamp(min=1)
    return maps - uniform[:, :, None]


def variances(maps: Tensor, valid: Tensor) -> Tensor:
    """Population variance of an input's probabilities over its valid pairs, (B, L, H).

    Args:
        maps: (B, L, H, T, T), zero where a pair is not valid.
        valid: (B, L, T, T).
    """
    pairs = valid.sum((-2, -1))[:, :, None]  # (B, L, 1)
    mean = maps.sum((-2, -1)) / pairs
    deviations = (maps - mean[..., None, None]) * valid[:, :, None]
    return deviations.square().sum((-2, -1)) / pairs


def sum_padded(one: Tensor, other: Tensor) -> Tensor:
    """Sum of maps of different sizes; the smaller one gets zeros after its last query and key."""
    size = max(one.shape[-1], other.shape[-1])
    return _pad_to(one, size) + _pad_to(other, size)


def _pad_to(maps: Tensor, size: int) -> Tensor:
    more = size - maps.shape[-1]
    return torch.nn.functional.pad(maps, (0, more, 0, more))
