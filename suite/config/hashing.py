"""Canonical hashes: the same configuration always gets the same short name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# built once: `json.dumps` with such options would build an encoder in every call, and hashes of
# rows need many calls
_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and shortest round-trip floats; NaN is refused."""
    return _ENCODER.encode(value)


def short_hash(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `canonical_json(value)`."""
    # 64 bits: short enough for a folder's name, and no two of some million trials get the same
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def derive_seed(*parts: Any) -> int:
    """An independent 31-bit seed for each combination of parts: (task, replicate, "data order").

    Streams are named, so that two arms of a comparison draw the same data order, whatever else they
    draw.
    """
    digest = hashlib.sha256(canonical_json(list(parts)).encode()).digest()
    # little-endian on every machine; 31 bits, because some libraries take seeds as signed numbers
    return int.from_bytes(digest[:4], "little") >> 1
