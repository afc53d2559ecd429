"""Checkpoints: their contents, their schedule, and asynchronous writing."""
