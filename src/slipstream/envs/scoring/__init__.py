"""Reward workers: killable processes with deadlines for the user's `score`."""
