"""A fingerprint of weights that does not depend on how many ranks hold them, and gathers none.

It is a sum, so that the ranks add up what they hold: sum over i of bits[i] x weight[i] modulo 2^64,
with a fixed pseudo-random odd weight for every place. One changed element always changes the sum,
and several leave it as it was with a chance of about 2^-60. So it finds damage and mix-ups; the
SHA-256 of the files guards against an adversary.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import nn

# A table of 512 KiB serves parameters of any size.
BLOCK = 1 << 16
BLOCKS_AT_ONCE = 16
"""So many blocks are widened to int64 at a time: 8 MiB."""
_MODULUS = 1 << 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place_sum(values: torch.Tensor, start: int) -> int:
    """Return the weighted sum over a run of elements.

    Args:
        values: Elements `start`, `start + 1`, ... of the flattened whole; (n,), any dtype.
    """
    # Bits, not values: NaN equals nothing, and -0.0 equals 0.0.
    bits = values.detach().contiguous().view(_BITS[values.element_size()])
    total = 0
    at = start
    end = start + len(bits)
    while at < end:
        block, place = divmod(at, BLOCK)
        # The table of weights covers one block: many whole blocks, or a part of one.
        size = min(BLOCK - place, end - at)
        if size == BLOCK:
            size = min((end - at) // BLOCK, BLOCKS_AT_ONCE) * BLOCK
        run = bits[at - start : at - start + size].to(torch.int64)
        weights = _weights(str(bits.device))[place : place + size]
        # int64 wraps around at 2^64, which is the modulus.
        sums = (run.view(-1, len(weights)) * weights).sum(1)
        for i, of_block in enumerate(sums.tolist()):
            # A factor of its own tells blocks apart. It is odd, so that it has an inverse and no
            # change is multiplied away.
            total += of_block * (_mixed(block + i) | 1)
        at += size
    return total % _MODULUS


def frozen_fingerprint(model: nn.Module) -> str:
    """The fingerprint of a whole model's frozen parameters, as its engine gives it."""
    sums = {}
    sizes = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            sums[name] = place_sum(parameter.reshape(-1), 0)
            sizes[name] = parameter.numel()
    return together([sums], sizes)


def together(parts: list[dict[str, int]], sizes: Mapping[str, int]) -> str:
    """Add up the ranks' sums by name, and return the fingerprint of the whole."""
    entries = []
    for name, size in sizes.items():
        # A rank has no sum of a parameter that it holds nothing of, or that rank 0 counts.
        total = sum(part.get(name, 0) for part in parts) % _MODULUS
        entries.append([name, size, total])
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


@functools.cache
def _weights(device: str) -> torch.Tensor:
    weights = []
    for i in range(BLOCK):
        # Made from negative numbers, because the factors of blocks are made from the others.
        weight = _mixed(-1 - i) | 1
        # torch has no unsigned 64-bit products: the upper half of the range becomes negative.
        if weight >= _MODULUS // 2:
            weight -= _MODULUS
        weights.append(weight)
    return torch.tensor(weights, dtype=torch.int64, device=device)


def _mixed(number: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % _MODULUS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _MODULUS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _MODULUS
    return x ^ (x >> 31)
