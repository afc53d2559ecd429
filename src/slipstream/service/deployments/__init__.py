"""Deployed checkpoints: adapters of one base on one vLLM server, a whole model on its own, behind one OpenAI address.

Guarantees:

- A deployment is `ready` after a greedy completion with finite log-probabilities, and not before.
- The servers and the address belong to the host (`host.py`), a process of its own: they outlive commands and services.
  A killed server is started again, or its deployments have failed with a reason. A pass over the queue starts a killed
  host again.
- Clients reach names in the registry alone. Adapters are copies by their digest, so a run's clean-up changes nothing.
- Without a key the address answers processes of the same Unix user on this machine alone.

Pure: `records.py`. Files: `registry.py`. Checks of a checkpoint: `making.py`. The interface: `deployments.py`.
Processes: `host.py`, with its vLLM servers (`servers.py`) and its address (`gateway.py`).
"""
