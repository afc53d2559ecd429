"""Times the bare collective of the bridge `broadcast`: the same number of bytes, without packing, loading or
fingerprints. Each receiver is a process of its own, as an engine is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from slipstream.errors import WeightsError, first_line
from slipstream.processes.temporary import make_temporary, remove_temporary
from slipstream.weights.bridges.broadcast import Group, Rendezvous

_POLL_S = 0.5
MESSAGE_BYTES = 1 << 30
"""Larger than any message of a bridge, so that the cost per message is negligible."""


def raw_broadcast_s(
    num_bytes: int,
    backend: Literal["gloo", "nccl"],
    receivers: Sequence[tuple[str, ...]] = ((),),
    *,
    repeats: int = 9,
    timeout_s: float,
) -> float:
    """Return the median seconds that broadcasting `num_bytes` to all `receivers` takes.

    A receiver is the tuple of GPUs that its process sees as CUDA_VISIBLE_DEVICES; empty: this process's GPUs. Raises
    `WeightsError` if a receiver does not join or ends early.
    """
    folder = make_temporary("raw")
    rendezvous = Rendezvous(str(folder / "store"), len(receivers), timeout_s, backend)
    arguments = [str(os.getpid()), msgspec.json.encode(rendezvous).decode(), str(num_bytes), str(repeats)]
    children = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, *arguments, str(rank)],
            stdout=subprocess.PIPE,
            env=dict(os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})),
        )
        for rank, gpus in enumerate(receivers, start=1)
    ]
    try:
        group = Group(rendezvous, rank=0)
        ours = passes(group, num_bytes, repeats)
        answers = [child.communicate(timeout=timeout_s)[0] for child in children]
        group.leave()  # after all receivers have answered
        theirs: list[list[float]] = [json.loads(answer) for answer in answers]
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        raise WeightsError(
            f"{num_bytes} bytes could not be sent over {backend} to {len(receivers)} other process(es) within "
            f"{timeout_s:g} s ({first_line(error)}): see what they printed"
        ) from error
    finally:
        for child in children:
            child.kill()
            child.wait(30)
        remove_temporary(folder)
    return statistics.median(map(max, zip(ours, *theirs, strict=True)))


def passes(group: Group, num_bytes: int, repeats: int) -> list[float]:
    """Send or receive `num_bytes` once to warm up and then `repeats` times; return the seconds of each repeat."""
    buffer = torch.zeros(min(num_bytes, MESSAGE_BYTES), dtype=torch.uint8, device=group.device)
    seconds: list[float] = []
    for _ in range(repeats + 1):
        group.broadcast(buffer[:1])  # synchronises sender and receivers
        group.finish()
        began = time.perf_counter()
        for start in range(0, num_bytes, MESSAGE_BYTES):
            group.broadcast(buffer[: num_bytes - start])
        group.finish()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _exit_with(parent: int) -> None:
    """End this process once its parent, process `parent`, has ended."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    """Run a receiver: print its seconds as JSON. The process ends when its parent does."""
    parent, rendezvous, num_bytes, repeats, rank = sys.argv[1:]
    threading.Thread(target=_exit_with, args=(int(parent),), daemon=True).start()
    group = Group(msgspec.json.decode(rendezvous, type=Rendezvous), rank=int(rank))
    print(json.dumps(passes(group, int(num_bytes), int(repeats))))
    group.leave()


if __name__ == "__main__":
    main()
