"""The task of `against_trl.py`: completions whose lengths have a long tail.

A prompt names four letters. Demonstrations are letters drawn at random from these, as many as a log-normal draw
says, so a model that was fitted to them ends its completions after log-normally distributed lengths, also within one
group. The reward is the share of the first letter: it varies in every group and does not depend on the length.
"""

from __future__ import annotations

import random
import string
from typing import Any

from slipstream.envs import split_of

LONGEST = 383
"""Letters; the end token is one more."""


def tasks(split: str, num_tasks: int, seed: int, median: float = 24.0, sigma: float = 1.0) -> list[dict[str, str]]:
    """Prompts of four different letters, each with a demonstration as its answer."""
    numbers = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < num_tasks:
        letters = "".join(numbers.sample(string.ascii_lowercase, 4))
        length = min(LONGEST, max(1, round(median * numbers.lognormvariate(0.0, sigma))))
        answer = "".join(numbers.choices(letters, k=length))
        if split_of(letters) == split:
            found.setdefault(letters, {"prompt": letters, "answer": answer})
    return list(found.values())


def share(letters: str, completion: str) -> float:
    """The part of `completion` that is the first of `letters`."""
    return completion.count(letters[0]) / max(1, len(completion))


def reward(task: Any, completion: str) -> float:
    """See `share`."""
    return share(task.prompt[-1].content, completion)
