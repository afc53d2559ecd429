"""Optimizers in two halves: computing the update, then writing it to the live weights."""
