"""Slurm and Ray: jobs of runs, and agents of their nodes."""
