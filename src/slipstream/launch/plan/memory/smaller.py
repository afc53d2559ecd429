"""What is planned smaller once a run has run out of memory. Pure.

What is set stays as it is. A trainer that had too little gets rows of half the length, down to its longest sequence;
then its layers are computed again in the backward pass; then the engine on the same card, if there is one, gets room
for half as many sequences. An engine that had too little gets that at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.launch.plan.facts import Shortage


def fewer_tokens(shortages: Iterable[Shortage], tokens: int, least: int) -> tuple[int, str]:
    """`tokens` of a row, or fewer, at least `least`; and why, empty where they stay."""
    failed = min((s for s in shortages if s.side == "trainer"), key=lambda s: s.row_tokens, default=None)
    fewer = tokens if failed is None else max(least, min(tokens, failed.row_tokens // 2))
    if failed is None or fewer == tokens:
        return tokens, ""
    return fewer, f"the trainer of {failed.run} ran out of memory with rows of {failed.row_tokens} tokens"


def must_compute_again(shortages: Iterable[Shortage], least: int) -> str:
    """Why layers are computed again: rows could not be shorter than the `least` tokens; empty where they could."""
    for failed in shortages:
        if failed.side == "trainer" and failed.row_tokens <= least and failed.checkpointing is not True:
            return f"the trainer of {failed.run} ran out of memory with rows of {failed.row_tokens} tokens"
    return ""


def fewer_sequences(shortages: Iterable[Shortage], number: int, least: int, *, shared: bool) -> tuple[int, str]:
    """`number` of sequences that an engine generates at once, or fewer; and why, empty where it stays. `least` tokens
    are those of the shortest rows that a trainer can have; `shared`: it takes memory of the same device."""
    why = ""
    for failed in shortages:
        is_last_resort = shared and failed.row_tokens <= least and failed.checkpointing is True
        half = max(1, failed.max_num_seqs // 2)
        if failed.max_num_seqs and half < number and (failed.side == "engine" or is_last_resort):
            number = half
            why = f"the {failed.side} of {failed.run} ran out of memory beside a KV cache for {failed.max_num_seqs}"
    return number, why
