"""Where processes of a run find one another, to form a process group: the trainer's ranks, and trainer and engines.

The address is a file in a private folder (mode 0700) of one attempt. It is no TCP address: torch's TCPStore asks nobody
who they are and lists its keys, so that another user of the host could take a rank's place.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any


def address_in(folder: Path, attempt: str = "") -> str:
    """The address of an attempt to meet, whose private folder it is."""
    return str(folder / f"store{attempt}")


def meet(address: str, rank: int, size: int, timeout_s: float) -> Any:
    """The store of the processes 0 to `size - 1`, when all have come. Raises RuntimeError after `timeout_s`; NCCL
    itself would wait for ever for one that never starts."""
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    store: Any = distributed.FileStore(address, size)
    store.set_timeout(timeout)
    store.set(f"here-{rank}", b"1")
    store.wait([f"here-{other}" for other in range(size)], timeout)
    return store
