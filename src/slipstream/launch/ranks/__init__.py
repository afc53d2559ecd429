"""Trainer processes beside the run's own (ranks 1 and up): started, commanded, watched, ended."""
