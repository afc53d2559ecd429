"""Where processes of a run find one another, to form a process group: the trainer's ranks, and trainer and engines.

The address is a file in a private folder (mode 0700) of one attempt, or `tcp://HOST:PORT/SECRET` where an engine is a
server that sees no folder of the run (`tcp_store.py`).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

INTERFACE = "SLIPSTREAM_INTERFACE"
"""In the environment of a run's processes: the network interface of their node towards the others."""


def interface_variables() -> dict[str, str]:
    """Variables by which gloo and NCCL take the node's interface. On one host gloo has loopback, and NCCL chooses."""
    found = {"GLOO_SOCKET_IFNAME": (interface := os.environ.get(INTERFACE, "lo"))}
    if interface != "lo":
        found["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", interface)
    return found


def address_in(folder: Path, attempt: str = "") -> str:
    """The address of an attempt to meet, whose private folder it is."""
    return str(folder / f"store{attempt}")


def meet(address: str, rank: int, size: int, timeout_s: float) -> Any:
    """The store of the processes 0 to `size - 1`, when all have come. Raises RuntimeError after `timeout_s`; NCCL
    itself would wait for ever for one that never starts."""
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    if address.startswith("tcp://"):
        from slipstream.processes.tcp_store import TCPStore

        store: Any = TCPStore(address, timeout_s)
    else:
        store = distributed.FileStore(address, size)
    store.set_timeout(timeout)
    store.set(f"here-{rank}", b"1")
    store.wait([f"here-{other}" for other in range(size)], timeout)
    return store
