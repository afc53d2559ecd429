"""Environments kept by the digest of their content in a folder, a registry, and named `name@digest` in run files."""
