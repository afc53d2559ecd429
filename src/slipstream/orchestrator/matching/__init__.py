"""Rollout matching in a run: from tasks with objects and rollouts to the sequences that are trained on."""
