"""Sampling seeds, derived from which rollout it is and not from when it is made, so that a run is repeatable."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed in [0, 2^31) that depends on all parts and on their order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
