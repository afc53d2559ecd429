"""Reward workers: killable processes with deadlines that run the user's `score`."""
