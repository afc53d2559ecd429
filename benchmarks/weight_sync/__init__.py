"""Measures what one weight update costs by each bridge: bytes, seconds, generation stall and memory.

`python -m benchmarks.weight_sync` runs it (`__main__`); `measure` starts the trainer and the engine and times the
updates.
"""
