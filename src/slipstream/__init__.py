"""Slipstream post-trains language models: vLLM generates, PyTorch trains, new weights slip into the running engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.algo.algorithm import Algorithm, LossTerm
    from slipstream.algo.surrogate_losses import LossInputs
    from slipstream.python import (
        AsyncSession,
        Evaluation,
        Run,
        Session,
        evaluate,
        load_run,
        new_model,
        session,
        sft,
        train,
    )
    from slipstream.records import Message, Rollout, Sequence, Stream, Task

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "AsyncSession",
    "Evaluation",
    "LossInputs",
    "LossTerm",
    "Message",
    "Rollout",
    "Run",
    "Sequence",
    "Session",
    "Stream",
    "Task",
    "__version__",
    "evaluate",
    "load_run",
    "new_model",
    "session",
    "sft",
    "train",
]

_MODULES = {
    "Algorithm": "algo.algorithm",
    "LossInputs": "algo.surrogate_losses",
    "LossTerm": "algo.algorithm",
    "Message": "records",
    "Rollout": "records",
    "Sequence": "records",
    "Stream": "records",
    "Task": "records",
}
"""The others are in `slipstream.python`."""


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first asked for: children of a run import this package too."""
    if name in __all__:
        return getattr(import_module(f"slipstream.{_MODULES.get(name, 'python')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
