"""The artifacts of runs in a store: a folder, an S3 bucket or any address of fsspec.

A run lies at `<store>/<run>/`: its records, and `checkpoints/step-N/` as in the run folder. The store keeps the weights
of its steps, and the resume state of the newest. Guarantees: a checkpoint is in the store when its `manifest.json` is,
the last of its files; `DONE` comes last of all, and names every file with its digest; one run folder at a time writes.
"""
