"""A queue of runs on this machine's GPUs, and a service over it: submit, watch, cancel.

Guarantees:

- A run's folder holds the truth: `service/record.json`, replaced atomically under a lock. A terminal state never
  changes, and a request to cancel wins against any other end.
- A run's processes outlive the command or service that started them. They end with the run's supervisor.
- A handle (pid, start time, boot) is stored before anything waits for a process.
- No run has two attempts at a time: a supervisor claims its attempt by compare-and-set before it starts anything.

| module | contents |
|---|---|
| `records.py`, `policy.py`, `allocation.py` | pure: states and transitions, retries, order and placement |
| `store.py` | run folders and their links in the state folder |
| `submission.py`, `preflight.py` | a run file becomes a queued run, planned and estimated |
| `local.py`, `dispatch.py` | the provider of this machine, and one pass over the queue |
| `supervisor.py`, `worker.py`, `ending.py` | the processes of a run, and how an attempt ended |
| `index.py`, `access.py`, `api.py`, `page.py`, `client.py` | the service over HTTP |
"""
