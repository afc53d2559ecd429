"""Rollouts: environments are run against the engine, batches are cut, versions applied, held-out tasks graded."""
