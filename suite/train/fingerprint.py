"""A fingerprint of weights that does not depend on how many ranks hold them, and gathers none.

It is a sum, so that the ranks add up what they hold: sum over i of bits[i] x weight[i] modulo 2^64,
with a fixed pseudo-random odd weight for every place. One changed element always changes it.
Several do, but for a chance of about 2^-60. It finds what broke or was mixed up. Against an
adversary there are the SHA-256 of the files.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import torch

# A table of 512 KiB serves parameters of any size.
BLOCK = 1 << 16
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
        # The table of weights covers one block. A factor of its own tells blocks apart.
        block, place = divmod(at, BLOCK)
        size = min(BLOCK - place, end - at)
        weights = _weights(str(bits.device))[place : place + size]
        run = bits[at - start : at - start + size].to(torch.int64)
        # int64 wraps around at 2^64, which is the modulus. The factor is odd, so that it has
        # an inverse and no change is multiplied away.
        total += int((run * weights).sum()) * (_mixed(block) | 1)
        at += size
    return total % _MODULUS


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
