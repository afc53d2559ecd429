"""Python's garbage collector in a process that makes rollouts.

By default it looks for garbage whenever 700 objects more live than before, which is 15 rollouts that wait, and at all
objects, imported modules included, whenever there are a quarter more. Rollouts wait for seconds and leave few cycles,
so that it found next to nothing, in half of the processor time of a rollout whose engine costs none.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

_THRESHOLDS = (10_000, 20, 10)


def freeze() -> None:
    """Collect garbage, then exclude all existing objects from later collections: for a process that does nothing else
    and has imported what it needs."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def fewer_collections() -> Generator[None]:
    """Collects less often inside."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
