"""Environments of other packages, unchanged: `reasoning_gym/<task>` and `verifiers/<name>`.

Each adapts one package to `slipstream.envs.Environment`, on public names.
"""
