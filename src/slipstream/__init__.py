"""Slipstream post-trains language models: vLLM generates, PyTorch trains, new weights slip into the running engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.python import Evaluation, Run, evaluate, load_run, new_model, sft, train

__version__ = "0.1.0"
__all__ = ["Evaluation", "Run", "__version__", "evaluate", "load_run", "new_model", "sft", "train"]


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first asked for: children of a run import this package too."""
    if name in __all__:
        from slipstream import python

        return getattr(python, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
