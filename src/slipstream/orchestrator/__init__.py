"""Generates rollouts: runs environments, makes batches, applies versions, evaluates held-out tasks."""
