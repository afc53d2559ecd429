"""The doctor of another node, started by its agent: `python -m slipstream.doctor.on_node FILE TEXT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from slipstream.doctor import CHECKS, examine
from slipstream.doctor.findings import Finding
from slipstream.processes.lifeline import Parent
from slipstream.runlog.writer import versions


class Report(msgspec.Struct, frozen=True):
    """A node's findings, and facts to compare."""

    findings: list[Finding]
    seconds: float
    """The node's clock, since 1970."""
    versions: dict[str, str]
    reads_folder: bool
    """Whether the run's host and this node have the same run folder."""


def main(file: str, text: str) -> None:
    """Send the report."""
    parent = Parent()
    findings = list(examine(CHECKS))
    try:
        reads = Path(file).read_text() == text
    except OSError:
        reads = False
    parent.send(msgspec.json.encode(Report(findings, time.time(), versions(), reads)))


if __name__ == "__main__":
    main(*sys.argv[1:])
