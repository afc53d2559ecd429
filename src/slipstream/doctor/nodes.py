"""Checks of the nodes of a run, by a doctor on each. `slipstream train` has them compared before the run."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.clusters.opening import open_nodes
from slipstream.config.parse.paths import named_paths
from slipstream.config.schema import RunConfig
from slipstream.doctor.collectives import PAIR_S, REDUCING, Pair, PairResult, Reduce, Reduced, hopeless, judge, rounds
from slipstream.doctor.findings import Finding
from slipstream.doctor.on_node import Look, Report, contents_of
from slipstream.errors import SlipstreamError, one_line
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import JOIN_AGAIN
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.child import Child
from slipstream.processes.exits import last_error
from slipstream.processes.rendezvous import INTERFACE, address_in
from slipstream.processes.temporary import temporary
from slipstream.runlog.writer import versions

PROGRAM = "slipstream.doctor.on_node"
HERE = "node-0"
_LOOKING_S = 300.0
_AT_ONCE = 64
_CLOCKS_S = 5.0
"""Clocks may differ by so much: times of files and leases tolerate it."""
_ALL_PAIRS_S = 600.0
"""How long further rounds begin."""
_BEFORE_RUN_S = 20.0
"""The same before a run."""
_ON_EACH = ("model.path", "lora.path")
"""Every node reads these."""
Answer = TypeVar("Answer", Report, Reduced)


class NoReport(Exception):
    """A node's doctor gave no answer."""


class Doctor:
    """The doctor process of a node, started for the first question, and again after one without an answer."""

    def __init__(self, name: str, nodes: Nodes, shared: Path) -> None:
        self.name, self._nodes, self._log = name, nodes, shared / f"{name}.log"
        self._child: Child | None = None

    def ask(self, message: Look | Reduce, kind: type[Answer], timeout_s: float) -> Answer:
        """Raises NoReport."""
        try:
            if self._child is None:
                self._child = self._launch()
            channel = Channel(self._child.socket)
            channel.send(msgspec.json.encode(message), timeout_s)
            return msgspec.json.decode(channel.receive(timeout_s), type=kind)
        except (ChannelClosed, OSError, msgspec.DecodeError, SlipstreamError) as error:
            self.close()
            why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else last_error(self._log)
            raise NoReport(why or one_line(error)) from error

    def _launch(self) -> Child:
        if self.name == HERE:
            own = os.environ | ({} if INTERFACE in os.environ else {INTERFACE: self._nodes.interface})
            return self._nodes.launch(PROGRAM, environment=own, output=self._log)
        return self._nodes.launch(PROGRAM, node=self.name, output=self._log)

    def interrupt(self) -> None:
        """Have a question in another thread end; `close` must follow."""
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end(0.0)
            self._child = None


def check_nodes(
    run_file: Path, overrides: Sequence[str] = (), warn: Callable[[str], object] = lambda text: None
) -> Iterator[Finding]:
    """Each node of the run has joined, is healthy, has what this host has, and all-reduces with every other."""
    from slipstream.config import load_config

    try:
        config = load_config(run_file, overrides).config
        cluster, folder = config.cluster, config.run.folder or Path("runs")
        if cluster.nodes == 1:
            yield Finding("nodes", "ok", "cluster.nodes is 1: there is only this host")
            return
        nodes = open_nodes(cluster, cluster.run_id or folder.name)
    except SlipstreamError as error:
        yield Finding("nodes", "fault", str(error))
        return
    try:
        nodes.wait(cluster.join_timeout_s, warn)
        folder.mkdir(parents=True, exist_ok=True)
        yield from examine_nodes(nodes, config, folder)
    except (SlipstreamError, OSError) as error:
        yield Finding("nodes", "fault", one_line(error))
    finally:
        nodes.close(JOIN_AGAIN)  # agents await the run


def examine_nodes(nodes: Nodes, config: RunConfig, folder: Path, *, is_full: bool = True) -> Iterator[Finding]:
    """Check joined nodes. Without `is_full`, before a run, only differences between nodes and as many rounds of
    collectives as begin in `_BEFORE_RUN_S`."""
    chosen = {name: str(path) for name, path in named_paths(config).items() if name in _ON_EACH or is_full}
    paths = {name: path for name, path in chosen.items() if "path" in name and Path(path).exists()}
    with temporary("doctor", folder.absolute()) as shared, _doctors(nodes, shared) as (doctors, pool):

        def ask(name: str) -> Report | str:
            file, text = shared / name, secrets.token_hex(8)
            file.write_text(text)
            look = Look(str(file), text, [*paths.values()], is_full and name != HERE)
            try:
                report = doctors[name].ask(look, Report, _LOOKING_S)
            except NoReport as error:
                return str(error)
            return report if name == HERE else _since_then(report)

        reports = dict(zip(doctors, pool.map(ask, doctors), strict=True))
        own = reports[HERE]
        for name, report in reports.items():
            if isinstance(report, str):
                reason = f"its doctor gave no report ({report})"
                yield Finding(name, "fault", reason, f"run slipstream doctor on {name}")
            elif name != HERE:
                yield from _of_node(name, report, folder, paths, own if isinstance(own, Report) else None, config)
        met = {name: each for name, each in reports.items() if isinstance(each, Report) and each.reads_folder}
        results = _all_pairs(doctors, [*met], shared, _ALL_PAIRS_S if is_full else _BEFORE_RUN_S)
        interfaces = {name: each.interface for name, each in met.items()}
        yield from judge(results, interfaces, len(doctors), folder)


@contextlib.contextmanager
def _doctors(nodes: Nodes, shared: Path) -> Generator[tuple[dict[str, Doctor], ThreadPoolExecutor]]:
    """A doctor of each node, this host's first, and threads to ask them at once."""
    doctors = {name: Doctor(name, nodes, shared) for name in (HERE, *nodes.names)}
    with ThreadPoolExecutor(min(_AT_ONCE, len(doctors))) as pool:
        try:
            yield doctors, pool
        finally:
            list(pool.map(Doctor.close, doctors.values()))


def _since_then(report: Report) -> Report:
    """The report with the difference of the clocks as its time."""
    return msgspec.structs.replace(report, seconds=report.seconds - time.time())


def _of_node(
    name: str, report: Report, folder: Path, paths: dict[str, str], own: Report | None, config: RunConfig
) -> Iterator[Finding]:
    found = [replace(each, check=f"{name} {each.check}") for each in report.findings if each.verdict != "ok"]
    found += _compared(name, report, folder, paths)
    wanted = config.cluster.gpus_per_node
    wanted = (own.num_gpus if own else 0) if wanted == "auto" else wanted
    if report.num_gpus < wanted:
        reason = f"torch sees {report.num_gpus} GPUs there, and the run counts on {wanted} of each node"
        found.append(Finding(name, "fault", reason, f"run slipstream doctor on {name}, or set cluster.gpus_per_node"))
    yield from found or [Finding(name, "ok", "healthy; the same packages, clock, paths and run folder")]


def _compared(name: str, report: Report, folder: Path, paths: dict[str, str]) -> Iterator[Finding]:
    """Differences from this host."""
    own, theirs = versions(), report.versions
    differ = [
        f"{each} {theirs.get(each, 'missing')} (here {own.get(each, 'missing')})"
        for each in sorted(own.keys() | theirs.keys())
        if own.get(each) != theirs.get(each)
    ]
    if differ:
        yield Finding(name, "fault", f"it has {', '.join(differ)}", "install the same packages on all nodes")
    if not report.reads_folder:
        yield Finding(name, "fault", f"{folder} is another folder there", "put the run folder on a shared file system")
    for (setting, path), contents in zip(paths.items(), report.contents, strict=True):
        if contents != (here := contents_of(Path(path))):
            on_each = setting in _ON_EACH
            reason = f"{setting} = {path} has {contents or 'nothing'} there, and {here} here"
            why = (
                "every node reads it"
                if on_each
                else "images are read on every node, and any may be first after a requeue"
            )
            remedy = f"put it at the same path on all nodes: {why}"
            yield Finding(name, "fault" if on_each else "warning", reason, remedy)
    if abs(report.seconds) > _CLOCKS_S:
        yield Finding(name, "warning", f"its clock is {report.seconds:+.0f} s off", "timedatectl set-ntp true")


def _all_pairs(doctors: dict[str, Doctor], names: Sequence[str], shared: Path, within_s: float) -> list[PairResult]:
    """The collectives of all pairs, in rounds that begin within `within_s`."""
    results, deadline = list[PairResult](), time.monotonic() + within_s
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        for number, pairs in enumerate(rounds(names)):
            if time.monotonic() > deadline:
                break
            left_out = hopeless(results)
            pairs = [pair for pair in pairs if not left_out.intersection(pair)]
            stores = [address_in(shared, f"-{number}-{pair[0]}") for pair in pairs]
            results += pool.map(partial(_pair, doctors), pairs, stores)
    return results


def _pair(doctors: dict[str, Doctor], pair: Pair, store: str) -> PairResult:
    """The collectives of one pair. After the first error the other side, which would wait, is ended."""

    def ask(rank: int) -> Reduced:
        try:
            return doctors[pair[rank]].ask(Reduce(store, rank), Reduced, PAIR_S)
        except NoReport as error:
            return Reduced(error=str(error), stage=REDUCING)

    with ThreadPoolExecutor(2) as both:
        asked = [both.submit(ask, rank) for rank in (0, 1)]
        first = next(as_completed(asked))
        other = doctors[pair[1 - asked.index(first)]]
        if first.result().error:
            other.interrupt()
    if first.result().error:
        other.close()
    one, two = (each.result() for each in asked)
    failed = first.result() if first.result().error else max(one, two, key=lambda each: bool(each.error))
    return PairResult(pair, min(one.bytes_per_s, two.bytes_per_s), failed.error, failed.stage)
