"""The doctor of a node, started by its agent: `python -m slipstream.doctor.on_node`.

It answers each message of the run's doctor: `Look` with a `Report`, `Reduce` with a `Reduced`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.doctor import CHECKS, examine
from slipstream.doctor.collectives import Reduce, Reduced, reduce
from slipstream.doctor.findings import Finding
from slipstream.processes.lifeline import Parent, leave_signals_to_trainer
from slipstream.processes.rendezvous import interface_variables
from slipstream.runlog.writer import versions


class Look(msgspec.Struct, frozen=True, tag=True):
    """Look at this node."""

    file: str
    """In the run folder."""
    text: str
    """Its content."""
    paths: Sequence[str]
    is_full: bool
    """With all checks of one machine."""


class Report(msgspec.Struct, frozen=True):
    """A node's findings, and facts to compare."""

    findings: list[Finding]
    seconds: float
    """The node's clock, since 1970."""
    versions: dict[str, str]
    reads_folder: bool
    """Whether the run's host and this node have the same run folder."""
    contents: list[str]
    """See `contents_of`, for each path."""
    num_gpus: int
    interface: str


def contents_of(path: Path) -> str:
    """Number and bytes of the files there, without those of folders below; empty if nothing is."""
    try:
        files = [each for each in (path.iterdir() if path.is_dir() else [path]) if each.is_file()]
        size = sum(each.stat().st_size for each in files)
        return f"{len(files)} file{'s' * (len(files) != 1)} of {size:,} bytes" if path.exists() else ""
    except OSError:
        return ""


def look(asked: Look) -> Report:
    """Look at this node."""
    import torch

    findings = list(examine(CHECKS)) if asked.is_full else []
    try:
        reads = Path(asked.file).read_text() == asked.text
    except OSError:
        reads = False
    contents = [contents_of(Path(path)) for path in asked.paths]
    interface, gpus = interface_variables()["GLOO_SOCKET_IFNAME"], torch.cuda.device_count()
    return Report(findings, time.time(), versions(), reads, contents, gpus, interface)


def main() -> None:
    """Answer to the end of the channel."""
    leave_signals_to_trainer()
    parent = Parent()
    while True:
        asked = msgspec.json.decode(parent.receive(), type=Look | Reduce)
        answer: Report | Reduced = look(asked) if isinstance(asked, Look) else reduce(asked)
        parent.send(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
