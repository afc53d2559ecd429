"""Slipstream from Python: `train`, `sft`, `evaluate`, `load_run` and `new_model`, as `import slipstream` offers them.

Each call runs in a child process of its own, as a command of the shell would: the caller's process imports neither
torch nor vLLM, keeps its event loop, and gets no memory of a GPU; what ends it ends the child. A task, a reward and
rows are objects of the caller's (`config/python_objects.py`).
"""

from slipstream.python.entry_points import Evaluation, evaluate, new_model, sft, train
from slipstream.python.run_handle import Run, load_run

__all__ = ["Evaluation", "Run", "evaluate", "load_run", "new_model", "sft", "train"]
