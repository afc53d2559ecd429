"""Environments of other packages, each in a process of its own with an interpreter of its own: `verifiers/<name>`."""
