"""Checks of the other nodes of a run, by the doctors that their agents start."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from slipstream.clusters.opening import open_nodes
from slipstream.doctor.findings import Finding
from slipstream.doctor.on_node import Report
from slipstream.errors import SlipstreamError, one_line
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import JOIN_AGAIN
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.temporary import temporary
from slipstream.runlog.writer import versions

PROGRAM = "slipstream.doctor.on_node"
_LOOKING_S = 300.0
_AT_ONCE = 64
_CLOCKS_S = 5.0
"""Clocks may differ by so much: file times and leases tolerate it."""


def check_nodes(
    run_file: Path, overrides: Sequence[str] = (), warn: Callable[[str], object] = lambda text: None
) -> Iterator[Finding]:
    """Each node of the run has joined, is healthy, has this host's versions and clock, and the run folder."""
    from slipstream.config import load_config

    try:
        config = load_config(run_file, overrides).config
        cluster, folder = config.cluster, config.run.folder or Path("runs")
        run_id = cluster.run_id or folder.name
        if cluster.nodes == 1:
            yield Finding("nodes", "ok", "cluster.nodes is 1: there is only this host")
            return
        nodes = open_nodes(cluster, run_id)
    except SlipstreamError as error:
        yield Finding("nodes", "fault", str(error))
        return
    try:
        nodes.wait(cluster.join_timeout_s, warn)
        folder.mkdir(parents=True, exist_ok=True)
        with temporary("doctor", folder.absolute()) as shared, ThreadPoolExecutor(_AT_ONCE) as pool:
            for found in pool.map(lambda name: list(_of_node(name, nodes, shared)), nodes.names):
                yield from found
    except (SlipstreamError, OSError) as error:
        yield Finding("nodes", "fault", one_line(error))
    finally:
        nodes.close(JOIN_AGAIN)  # agents await the run


def _of_node(name: str, nodes: Nodes, shared: Path) -> Iterator[Finding]:
    file, text = shared / name, secrets.token_hex(8)
    file.write_text(text)
    try:
        child = nodes.launch(PROGRAM, [str(file), text], node=name, output=shared / f"{name}.log")
        try:
            report = msgspec.json.decode(Channel(child.socket).receive(_LOOKING_S), type=Report)
        finally:
            child.end(0.0)
    except (ChannelClosed, OSError, msgspec.DecodeError) as error:
        reason = f"its doctor gave no report ({one_line(error) or type(error).__name__})"
        yield Finding(name, "fault", reason, f"run slipstream doctor on {name}")
        return
    found = [each for each in report.findings if each.verdict != "ok"]
    yield from (replace(each, check=f"{name} {each.check}") for each in found)
    yield from (each for each in _compared(name, report, shared.parent) if each.verdict != "ok" or not found)


def _compared(name: str, report: Report, folder: Path) -> Iterator[Finding]:
    """Differences from this host."""
    own, is_fine = versions(), True
    theirs = report.versions.items()
    differ = [f"{each} {version} (here {own.get(each)})" for each, version in theirs if own.get(each) != version]
    if differ:
        is_fine = False
        yield Finding(name, "fault", f"it has {', '.join(differ)}", "install the same packages on all nodes")
    if not report.reads_folder:
        is_fine = False
        yield Finding(name, "fault", f"{folder} is another folder there", "put the run folder on a shared file system")
    if abs(apart := report.seconds - time.time()) > _CLOCKS_S:
        is_fine = False
        yield Finding(name, "warning", f"its clock is {apart:+.0f} s off", "timedatectl set-ntp true")
    if is_fine:
        yield Finding(name, "ok", "healthy; the same packages, clock and run folder")
