"""The generating side of a run, in the trainer's process or in one of its own (`run.streams`)."""

PROGRAM = "slipstream.launch.parts.child"
"""The module that the orchestrator's process runs."""
