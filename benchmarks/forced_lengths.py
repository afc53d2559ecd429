"""Completions of drawn lengths, whatever the model: one with random weights hardly ever ends them by itself.

A task names the lengths of its completions, log-normal draws as in `long_tail.py` (median 24 tokens, up to 384, both
times `scale`); each completion is cut there, which counts as truncated and is trained on. The reward is the part of the
completion's words that end with a 7: it varies in every group and does not depend on the length.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from typing import Any

from slipstream.envs import Environment, Episode, Message, Task

MEDIAN, SIGMA, LONGEST = 24.0, 1.0, 384


class ForcedLengths(Environment):
    """Prompts of about 100 tokens; completions of the lengths that the task names, one after the other."""

    max_turns = 1

    def __init__(self, seed: int = 0, scale: float = 4.0, group_size: int = 8) -> None:
        super().__init__(seed)
        self.scale, self.group_size = scale, group_size
        self._started: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def tasks(self, split: str, num_tasks: int) -> list[Task]:
        draw = random.Random(f"{split}-{self.seed}")
        found: list[Task] = []
        for number in range(num_tasks):
            prompt = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=95))
            lengths = [
                round(self.scale * min(LONGEST, max(1, round(MEDIAN * draw.lognormvariate(0.0, SIGMA)))))
                for _ in range(self.group_size)
            ]
            found.append(Task(f"{split}-{number}", (Message("user", prompt),), "", {"lengths": lengths}))
        return found

    async def run(self, task: Task, policy: Any) -> Episode:
        lengths = task.info["lengths"]
        length = lengths[next(self._started[task.id]) % len(lengths)]
        reply = await policy.chat(task.prompt, max_tokens=length)
        return Episode(reply.text, "truncated", stop="length")

    def score(self, task: Task, completion: str) -> float:
        words = completion.split()
        return sum(word.endswith("7") for word in words) / max(1, len(words))
