"""Seeds of the engine's draws: from what a rollout is, not from when it was made, so that a run repeats."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^31) that depends on all parts and on their order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
