"""The artifacts of runs in a store: a folder, an S3 bucket or any address of fsspec.

A run lies at `<store>/<run>/`: its records, and `checkpoints/step-N/` as in the run folder. The store keeps the weights
of its steps, and the resume state of the newest. Guarantees: the last file of a checkpoint is its `manifest.json`.
`DONE` comes last of all, and names every file with its digest. One run folder at a time writes.
"""
