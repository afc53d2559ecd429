"""Checkpoints: what is in them, when they are due, and how they are written beside training."""
