"""Facts of a run's artifacts, in `service/artifacts.json` of its folder: one process at a time writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.processes.files import write_whole
from slipstream.runlog.files import SERVICE_FOLDER, read_record

STORE_VARIABLE = "SLIPSTREAM_STORE"
"""Environment variable: the address of the store."""
OUTGOING = f"{SERVICE_FOLDER}/outgoing"
"""Checkpoints to upload, below the run folder."""
_FACTS = f"{SERVICE_FOLDER}/artifacts.json"


class StepFacts(msgspec.Struct, frozen=True):
    """An uploaded checkpoint."""

    identity: str
    """See `layout.identity_of`."""
    uploaded: float
    """Unix time."""
    is_adapter: bool


class Facts(msgspec.Struct, frozen=True):
    """The state of the uploads."""

    token: str = ""
    """This run folder's name in the store, if it is the one to write."""
    steps: dict[int, StepFacts] = {}
    error: str = ""
    """Why the last pass failed; empty after success."""
    failed_since: float = 0.0
    is_taken_over: bool = False
    """Another run folder continues the run."""
    is_done: bool = False
    """Whether `DONE` is there, of this attempt's run."""


def read_facts(folder: Path) -> Facts:
    """The facts of the run in `folder`."""
    return read_record(folder / _FACTS, Facts) or Facts()


def write_facts(folder: Path, facts: Facts) -> None:
    """Replace them."""
    (folder / SERVICE_FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(folder / _FACTS, msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
