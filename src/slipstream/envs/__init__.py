"""Environments: tasks, the conversation about each, and the judgement of it.

One environment serves SFT, RL and evaluation. This package starts no engine and no training: it is handed a
policy to talk to (`policy.py` keeps its tokens) and runs rewards, which are other people's code, where they can be
killed (`scoring/pool.py`).
"""

from slipstream.envs.base import Environment, Episode, Policy, Reply, Score, Scorer, Split
from slipstream.envs.single_turn import SingleTurn
from slipstream.envs.split import split_of
from slipstream.records import Message, Task

__all__ = [
    "Environment",
    "Episode",
    "Message",
    "Policy",
    "Reply",
    "Score",
    "Scorer",
    "SingleTurn",
    "Split",
    "Task",
    "split_of",
]
