"""What runs inside vLLM: patches, the weight receiver and our server around the engine.

`register` is the entry point that vLLM calls in each of its processes. Outside a Slipstream engine it does nothing.
"""

from __future__ import annotations

import os

ENGINE_VARIABLE = "SLIPSTREAM_ENGINE"
"""Set in the environment of every engine process that Slipstream starts."""


def register() -> None:
    """Apply our patches and tie this process's life to its parent's; called by vLLM."""
    if not os.environ.get(ENGINE_VARIABLE):
        return
    from slipstream.inference.plugin import lifeline, start_marks
    from slipstream.inference.plugin.patches import patch_table

    patch_table.apply_all()
    start_marks.follow_executor()
    lifeline.follow_parent()
