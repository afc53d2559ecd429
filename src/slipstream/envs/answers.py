"""Which part of a completion is graded: one rule for every text environment."""

from __future__ import annotations

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def final_answer(completion: str) -> str | None:
    """What follows the last `</think>`, without the white space between them; all of it where nothing was thought.

    None when a `<think>` never closes: nothing inside it is searched for an answer, so it grades as failed.
    """
    _, closed, answer = completion.rpartition(THINK_CLOSE)
    if THINK_OPEN in answer:
        return None
    return answer.lstrip() if closed else answer
