"""Environments: tasks, conversations about them, and their rewards. One environment serves SFT, RL and evaluation.

This package starts no engine and no training. It is given a policy to talk to (`policy.py` records its tokens) and
computes rewards, as they are user code, in killable processes (`scoring/pool.py`).
"""

from slipstream.envs.base import (
    ContextFull,
    Environment,
    Episode,
    Policy,
    Reply,
    RewardFailed,
    Score,
    Scorer,
    Split,
    ToolResult,
)
from slipstream.envs.openai_messages import as_message
from slipstream.envs.single_turn import SingleTurn, shown_settings
from slipstream.envs.split import EVAL_ONE_IN, split_of, text_of
from slipstream.envs.tools.schemas import with_tools
from slipstream.records import Message, Task, ToolCall

__all__ = [
    "EVAL_ONE_IN",
    "ContextFull",
    "Environment",
    "Episode",
    "Message",
    "Policy",
    "Reply",
    "RewardFailed",
    "Score",
    "Scorer",
    "SingleTurn",
    "Split",
    "Task",
    "ToolCall",
    "ToolResult",
    "as_message",
    "shown_settings",
    "split_of",
    "text_of",
    "with_tools",
]
