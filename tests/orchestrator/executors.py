"""An executor of the parts that a test has."""

from slipstream.orchestrator.control.executor import Executor


async def nothing():
    """What a test does not look at."""


def executor_of(engine=None, versions=None, **parts):
    names = ("probe", "evaluate", "launch", "start", "make_batches")
    return Executor(engine, versions, **dict.fromkeys(names, nothing) | {"close": lambda step: None} | parts)
