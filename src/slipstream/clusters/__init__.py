"""Starts the agents of a run's nodes by a cluster manager."""
