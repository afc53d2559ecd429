"""Optimizers in two halves: the update's arithmetic, then the write to the live weights."""
