"""The vLLM plugin: patches, the workers' weight receiver, and the server around the engine.

vLLM calls `register` (entry point `vllm.general_plugins`) in each of its processes. Outside of a Slipstream engine it
does nothing.
"""

from __future__ import annotations

import os

from slipstream.processes.temporary import FOLDER_VARIABLE

ENGINE_VARIABLE = "SLIPSTREAM_ENGINE"
"""Set in the environment of every engine process that Slipstream starts."""


def register() -> None:
    """Apply the patches, end this process with its parent and not by the trainer's signals, name its shared memory, and
    answer for its stacks; called by vLLM."""
    if not os.environ.get(ENGINE_VARIABLE):
        if os.environ.get(FOLDER_VARIABLE):  # vLLM's own server, whose shared memory goes with a folder
            from slipstream.processes import lifeline

            lifeline.name_shared_memory()
        if os.environ.get("SLIPSTREAM_NAMED_ADAPTERS"):
            from slipstream.inference.plugin import named_adapters

            named_adapters.register()
        return
    from slipstream.inference.plugin import start_marks
    from slipstream.inference.plugin.patches import patch_table
    from slipstream.processes import lifeline, stacks

    stacks.register()
    lifeline.name_shared_memory()
    patch_table.apply_all()
    start_marks.follow_executor()
    lifeline.follow_parent()
    lifeline.follow_end()
