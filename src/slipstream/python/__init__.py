"""Slipstream from Python: `train`, `sft`, `evaluate`, `load_run` and `new_model`, as `import slipstream` offers them.

Each call runs in a child process of its own, as a command of the shell would: the caller's process imports neither
torch nor vLLM, keeps its event loop, and gets no memory of a GPU; what ends it ends the child. A task, a reward and
rows are objects of the caller's (`config/python_objects.py`). `session` alone trains in the caller's process.
"""

from slipstream.python.async_session import AsyncSession
from slipstream.python.entry_points import Evaluation, evaluate, new_model, session, sft, train
from slipstream.python.run_handle import Run, load_run
from slipstream.python.session import Session

__all__ = [
    "AsyncSession",
    "Evaluation",
    "Run",
    "Session",
    "evaluate",
    "load_run",
    "new_model",
    "session",
    "sft",
    "train",
]
