"""A fingerprint of weights that does not depend on how many ranks hold them, and gathers none of them.

It is a sum, so that ranks add up what they hold: sum over i of bits[i] x weight[i] modulo 2^64, with a fixed pseudo-random odd weight for
every place. One changed element always changes it; several, but for a chance of about 2^-60. It finds what broke or was mixed up; against
an adversary there are the SHA-256 of the files.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import torch

BLOCK = 1 << 16
_MODULUS = 1 << 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place_sum(values: torch.Tensor, start: int) -> int:
    """The sum over a run of elements.

    Args:
        values: Elements `start`, `start + 1`, ... of the flattened whole; (n,), any dtype.
    """
    bits = values.detach().contiguous().view(_BITS[values.element_size()])
    total, at, end = 0, start, start + len(bits)
    while at < end:
        block, place = divmod(at, BLOCK)
        size = min(BLOCK - place, end - at)
        weights = _weights(str(bits.device))[place : place + size]
        total += int((bits[at - start : at - start + size].to(torch.int64) * weights).sum()) * (
            _mixed(block) | 1
        )
        at += size
    return total % _MODULUS


def together(parts: list[dict[str, int]], sizes: Mapping[str, int]) -> str:
    """The fingerprint of all: the ranks' sums by name, added up."""
    sums = {name: sum(part.get(name, 0) for part in parts) % _MODULUS for name in sizes}
    return hashlib.sha256(
        json.dumps([[name, sizes[name], sums[name]] for name in sizes]).encode()
    ).hexdigest()


@functools.cache
def _weights(device: str) -> torch.Tensor:
    odd = [_mixed(-1 - i) | 1 for i in range(BLOCK)]
    return torch.tensor(
        [w - _MODULUS if w >= _MODULUS // 2 else w for w in odd], dtype=torch.int64, device=device
    )


def _mixed(number: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % _MODULUS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _MODULUS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _MODULUS
    return x ^ (x >> 31)
