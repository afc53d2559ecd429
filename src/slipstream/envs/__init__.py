"""Environments: tasks, conversations about them, and their rewards. One environment serves SFT, RL and evaluation.

This package starts no engine and no training. It is given a policy to talk to (`policy.py` records its tokens) and
computes rewards, which are user code, in processes that can be killed (`scoring/pool.py`).
"""

from slipstream.envs.base import ContextFull, Environment, Episode, Policy, Reply, Score, Scorer, Split, ToolResult
from slipstream.envs.single_turn import SingleTurn
from slipstream.envs.split import split_of
from slipstream.records import Message, Task, ToolCall

__all__ = [
    "ContextFull",
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
    "ToolCall",
    "ToolResult",
    "split_of",
]
