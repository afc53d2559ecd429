"""Assigns tasks to the training or the held-out split, by the task's text alone.

The two splits are therefore disjoint for all sizes, seeds and orders: a prompt that one run trains on is never in
another run's evaluation, not even after SFT and RL with different seeds.
"""

from __future__ import annotations

import hashlib

from slipstream.envs.base import Split
from slipstream.records import Task

EVAL_ONE_IN = 10


def text_of(task: Task) -> str:
    """The text of the task's prompt, without the system prompt."""
    return "\n".join(message.content for message in task.prompt if message.role != "system")


def split_of(text: str) -> Split:
    """`eval` for one text in ten, by its SHA-256; `train` for the others."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0 else "train"
