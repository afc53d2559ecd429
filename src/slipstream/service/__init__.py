"""A queue of runs on this machine's GPUs, and a service over it: submit, watch, cancel.

Guarantees:

- A run's folder holds the truth: `service/record.json`, replaced atomically under a lock. A terminal state never
  changes, and a request to cancel wins against any other end.
- A run's processes outlive the command or service at their start. They end with the run's supervisor.
- A handle (pid, start time, boot) is stored before anything waits for a process.
- No run has two attempts at a time: a supervisor claims its attempt by compare-and-set before it starts anything.

Pure: `records.py` (states and transitions), `policy.py` (retries), `allocation.py` (order and placement).
Files: `store.py` (run folders, and their links in the state folder), `ending.py` (the end of an attempt), `figures.py`
(time, tokens, memory, cost).
From a run file to the queue: `submission.py`, `preflight.py`, `bundles.py`, `dotenv_file.py`. The queue: `dispatch.py`,
over providers (`provider.py`), of which `local.py` is one.
Processes of a run: `supervisor.py`, `worker.py`, `uploads.py`. Its checkpoints, also in a store: `checkpoints.py`.
HTTP: `runs.py` (the interface), `api.py`, `page.py`, `index.py`, `access.py`, `client.py`. For agents: `mcp_tools.py`.
"""
