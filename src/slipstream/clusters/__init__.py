"""Runs as jobs of a cluster's scheduler: Slurm so far."""
