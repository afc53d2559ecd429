"""Reward workers: processes in which the user's `score` runs, with deadlines, and that can be killed."""
