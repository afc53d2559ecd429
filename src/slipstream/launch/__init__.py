"""Carries out a plan: `prepare` reads and checks, `run` starts what the plan needs, `recovery/` starts it again.

Importing this package imports neither torch, transformers nor vLLM.
"""
