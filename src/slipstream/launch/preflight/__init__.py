"""Checks of the model's files, vLLM's options and the tasks' characters, before a process is started."""
