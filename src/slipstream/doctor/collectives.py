"""Collectives between all pairs of nodes, by gloo over the interfaces of the run.

Pairs meet in the rounds of a tournament, and no node is in two pairs of a round. Guarantees: each pair has a deadline;
a node without any success in two pairs is left out of further rounds.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from slipstream.doctor.findings import Finding
from slipstream.errors import one_line
from slipstream.processes.rendezvous import interface_variables, meet

Pair = tuple[str, str]
PAIR_S = 120.0
"""How long a pair may take."""
_MEETING_S = 60.0
"""One of the two may have to import torch first."""
_WAIT_S = 5.0
"""Timeout of gloo. It tries five times to connect."""
CHECK = "collectives"
_VALUES = 1 << 20
"""Numbers of four bytes in a message."""
_REPEATS = 3
_SLOW = 5.0
"""A pair is slow if the usual rate is so many times as high. Pairs of a round share switches."""
_LEAST_NODES = 3
"""Nodes with a usual rate."""
_TRIES = 2
"""Pairs without success, after which a node takes no further part."""
_PLACE = re.compile(r"\[[^\]]*/gloo/[^\]]*\] ")
"""A line of gloo's source in its errors."""
_MEETING, REDUCING = "files", "gloo"


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Meet the other node of a pair, and all-reduce and broadcast with it."""

    store: str
    rank: int


class Reduced(msgspec.Struct, frozen=True):
    """The rate of the fastest all-reduce, or an error."""

    bytes_per_s: float = 0.0
    error: str = ""
    stage: str = _MEETING


@dataclass(frozen=True)
class PairResult:
    """The collectives of two nodes."""

    pair: Pair
    bytes_per_s: float = 0.0
    error: str = ""
    stage: str = ""


def reduce(asked: Reduce) -> Reduced:
    """This node's part in the collectives of its pair."""
    import torch
    from torch import distributed

    stage = _MEETING
    try:
        store = meet(asked.store, asked.rank, 2, _MEETING_S)
        stage = REDUCING
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=_WAIT_S)
        options._devices = [gloo.create_device(interface=interface_variables()["GLOO_SOCKET_IFNAME"])]
        group = gloo(store, asked.rank, 2, options)
        rates = list[float]()
        for root in (0, 1):
            sent = torch.full((_VALUES,), float(asked.rank))
            group.broadcast(sent, root).wait()
            if not bool((sent == root).all()):
                return Reduced(error="a broadcast gave wrong numbers", stage=stage)
        for _ in range(_REPEATS):
            sent = torch.full((_VALUES,), asked.rank + 1.0)
            began = time.monotonic()
            group.allreduce([sent]).wait()
            rates.append(sent.nbytes / max(1e-6, time.monotonic() - began))
            if not bool((sent == 3.0).all()):
                return Reduced(error="an all-reduce gave wrong sums", stage=stage)
    except (RuntimeError, OSError, ValueError) as error:
        return Reduced(error=_PLACE.sub("", one_line(error)), stage=stage)
    return Reduced(max(rates), stage=stage)


def rounds(names: Sequence[str]) -> Iterator[list[Pair]]:
    """The rounds of a tournament: each pair once, each name once in a round (the circle method)."""
    ring = [*names, *[""] * (len(names) % 2)]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [pair for pair in pairs if all(pair)]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def hopeless(results: Sequence[PairResult]) -> set[str]:
    """Nodes with no more part in the rounds."""
    failed = Counter(name for each in results if each.error for name in each.pair)
    fine = {name for each in results if not each.error for name in each.pair}
    return {name for name, number in failed.items() if number >= _TRIES} - fine


def usual_rate(results: Sequence[PairResult]) -> float:
    """The median over all nodes of the rate of their best pair; 0 for few nodes. One slow node slows most pairs of a
    small cluster, so their own median would be slow."""
    best = dict[str, float]()
    for each in results:
        for name in each.pair if not each.error else ():
            best[name] = max(best.get(name, 0.0), each.bytes_per_s)
    return statistics.median(best.values()) if len(best) >= _LEAST_NODES else 0.0


def judge(
    results: Sequence[PairResult], interfaces: Mapping[str, str], num_nodes: int, folder: object
) -> Iterator[Finding]:
    """Name broken and slow pairs. `folder`: of the run."""
    fine = [each for each in results if not each.error]
    usual = usual_rate(results)
    alone = hopeless(results) if num_nodes > 2 else set[str]()
    found = [*(_of_node(name, results, interfaces, folder) for name in sorted(alone))]
    found += [
        _broken(each, _named(each.pair, interfaces), folder)
        for each in results
        if each.error and not alone.intersection(each.pair)
    ]
    for each in fine:
        if each.bytes_per_s * _SLOW < usual:
            reason = (
                f"{_named(each.pair, interfaces)} all-reduce {_rate(each.bytes_per_s)}, and the median of the "
                f"nodes' best pairs is {_rate(usual)}"
            )
            remedy = "compare the two links (ethtool, ip -s link), or leave a node out"
            found.append(Finding(CHECK, "warning", reason, remedy))
    yield from found
    if not found and fine:
        rates = sorted(each.bytes_per_s for each in fine)
        said = _rate(rates[0]) if len(rates) == 1 else f"{_rate(rates[0])} to {_rate(rates[-1])}"
        total = num_nodes * (num_nodes - 1) // 2
        yield Finding(CHECK, "ok", f"all-reduces of {len(fine)} of {total} pairs: {said}")


def _of_node(name: str, results: Sequence[PairResult], interfaces: Mapping[str, str], folder: object) -> Finding:
    """All pairs of a node are broken."""
    first = next(each for each in results if each.error and name in each.pair)
    own = f"{name} ({interfaces.get(name, '?')}) and any other node"
    return _broken(first, own, folder)


def _broken(result: PairResult, named: str, folder: object) -> Finding:
    if result.stage == _MEETING:
        remedy = "put the run folder on a file system with locks, shared by all nodes"
        reason = f"{named} did not meet through files in {folder} ({result.error})"
    else:
        remedy = "open all TCP ports between nodes in the firewall, or name another interface in SLIPSTREAM_INTERFACE"
        reason = f"no collective between {named} ({result.error})"
    return Finding(CHECK, "fault", reason, remedy)


def _named(pair: Pair, interfaces: Mapping[str, str]) -> str:
    return " and ".join(f"{name} ({interfaces.get(name, '?')})" for name in pair)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s < 9.995e8 else f"{bytes_per_s / 1e9:.3g} GB/s"
