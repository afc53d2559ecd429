"""An executor of the parts that a test has."""

from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.control.executor import Executor


async def nothing():
    """What a test does not look at."""


def executor_of(engine=None, versions=None, **parts):
    """The other parts do nothing."""
    names = ("probe", "evaluate", "roll_out", "start", "make_batches", "make_batch")
    unseen = dict.fromkeys(names, nothing) | {name: lambda step: None for name in ("close", "open_ledger", "settle")}
    unseen |= {"num_ended": lambda: 0, "change_weights": nothing, "teacher_digest": "", "idle": IdleTime()}
    return Executor(engine, versions, **(unseen | parts))
