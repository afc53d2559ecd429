"""Continues runs: resume by the user, restart after an engine's death, smaller plans after out of memory, fallbacks."""
