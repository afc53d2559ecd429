"""An endpoint for Prometheus: the newest row of metrics, and whether the run lives and gets on, as text over HTTP.

It listens on 127.0.0.1 alone, answers `GET /metrics` from a thread, but no web page whose name was pointed there
(`Host`), and ends with the run. A run is never held up: rows are handed over without waiting, and a client has
`_CLIENT_S` for its request. Counters begin with the sums of the run
folder's rows, so they continue after a resume; repeated steps count once.
"""

from __future__ import annotations

import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, Self

from slipstream.config.addresses import names_this_machine
from slipstream.errors import ConfigError
from slipstream.processes.heartbeat import read_heartbeat, read_processes
from slipstream.runlog import read_metrics

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_S = 10.0
_END_S = 2.0
_POLL_S = 0.2
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_COUNTED = {
    "dropped": ("rollouts_dropped", "Rollouts not trained on, by reason."),
    "dropped_groups": ("groups_dropped", "Groups not trained on as a whole, by reason."),
    "dropped_tokens": ("tokens_dropped", "Sampled tokens not trained on, by reason."),
    "retry": ("requests_retried", "Requests tried again, by reason."),
}
"""Groups of metrics that are counts by reason: the counter of each, and what it is."""
_IDLE = re.compile(r"idle/(engine|trainer)_(\w+)_s")


class Log(Protocol):
    """The run's log."""

    folder: Path
    lineage: int
    num_restarts: int

    @property
    def step(self) -> int:
        """Step of the last row."""
        ...

    @property
    def progress_at(self) -> float:
        """Unix time of the last event, row or sample."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Writes one event."""
        ...

    def listen(self, listener: Callable[[int, Mapping[str, float | None]], None]) -> None:
        """Calls `listener` with every later row."""
        ...


@dataclass(frozen=True)
class Family:
    """One metric: its name, what it is, and its values with labels beside those of the run."""

    name: str
    help: str
    kind: str
    values: Sequence[tuple[Mapping[str, str], float | None]]


@dataclass
class Totals:
    """Counters over all rows."""

    rollouts: float = 0.0
    tokens: float = 0.0
    generated: float = 0.0
    given_up: float = 0.0
    """Requests that have used all of their tries."""
    by_reason: dict[str, dict[str, float]] = field(default_factory=lambda: {group: {} for group in _COUNTED})
    """By the group of the metrics."""
    idle: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Seconds by side and reason."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row of metrics. A batch that was skipped was not trained on."""
        if not row.get("train/skipped"):
            self.rollouts += row.get("rollout/num") or 0.0
            sampled, written = row.get("tokens/trained"), row.get("train/num_tokens")
            self.tokens += (written if sampled is None else sampled) or 0.0
        self.generated += row.get("tokens/generated") or 0.0
        for name, value in row.items():
            group, _, reason = name.partition("/")
            if name == "retry/exhausted":
                self.given_up += value or 0.0
            elif (counts := self.by_reason.get(group)) is not None:
                counts[reason] = counts.get(reason, 0.0) + (value or 0.0)
            elif found := _IDLE.fullmatch(name):
                self.idle[found[1], found[2]] = self.idle.get((found[1], found[2]), 0.0) + (value or 0.0)

    def families(self) -> list[Family]:
        """As metrics; those that no row had are left out."""

        def by_reason(counts: Mapping[str, float]) -> list[tuple[dict[str, str], float]]:
            return [({"reason": reason}, count) for reason, count in sorted(counts.items())]

        idle = [({"side": side, "reason": reason}, value) for (side, reason), value in sorted(self.idle.items())]
        given_up: list[tuple[dict[str, str], float]] = [({}, self.given_up)]
        found = [
            Family("slipstream_rollouts_trained_total", "Rollouts trained on.", "counter", [({}, self.rollouts)]),
            Family("slipstream_tokens_trained_total", "Tokens trained on.", "counter", [({}, self.tokens)]),
            Family("slipstream_tokens_generated_total", "Tokens sampled.", "counter", [({}, self.generated)]),
            *(
                Family(f"slipstream_{name}_total", text, "counter", by_reason(self.by_reason[group]))
                for group, (name, text) in _COUNTED.items()
            ),
            Family("slipstream_requests_given_up_total", "Requests without a try left.", "counter", given_up),
            Family("slipstream_idle_seconds_total", "Seconds that a side had to wait, by reason.", "counter", idle),
        ]
        return [family for family in found if any(value for _, value in family.values)]


class MetricsServer:
    """The endpoint of one run, or nothing without a port. As a context manager it holds the port, and ends with it."""

    def __init__(self, port: int | None) -> None:
        """`port`: 0 for any free one. Raises `ConfigError` if nothing can listen there."""
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        if port is None:
            return
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"run.metrics_port = {port}: nothing can listen on that port of {HOST} ({error.strerror}): name "
                "another one, or 0 for any that is free"
            ) from error

    @property
    def url(self) -> str:
        """Where Prometheus finds the metrics; empty without a port."""
        return f"http://{HOST}:{self._server.server_address[1]}/metrics" if self._server is not None else ""

    def serve(self, log: Log, name: str) -> None:
        """Answer with the metrics of the run of `log` from here on; `name` is its label `run`. Its address is told in
        an event `metrics_server`."""
        if self._server is None:
            return
        self._server.page = _Page(log, name).text
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics-server", daemon=True
        )
        self._thread.start()
        log.event("metrics_server", url=self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._server is None:
            return
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(_END_S)
        self._server.server_close()


class _Page:
    """What is answered."""

    def __init__(self, log: Log, name: str) -> None:
        self._log, self._labels = log, {"run": name, "lineage": str(log.lineage)}
        self._guard = threading.Lock()
        self._row: Mapping[str, float | None] = {}
        self._step = -1
        self._totals = Totals()
        for row in read_metrics(log.folder) if (log.folder / "metrics.jsonl").exists() else []:
            self._take(int(row["step"]), {name: value for name, value in row.items() if "/" in name})
        self._step = -1  # the first row is whole, whatever its step
        log.listen(self._take)

    def _take(self, step: int, row: Mapping[str, float | None]) -> None:
        with self._guard:
            # Of a step that was taken before, further numbers come beside the newest row's.
            self._row = row if step > self._step else {**self._row, **row}
            self._step = max(self._step, step)
            self._totals.add(row)

    def text(self) -> str:
        """The page."""
        log, now = self._log, time.time()
        beat = read_heartbeat(log.folder)
        with self._guard:
            row, totals = self._row, self._totals.families()
        ours = [
            _gauge("slipstream_step", "Steps made.", log.step),
            _gauge("slipstream_restarts", "Automatic restarts of the run, over all lineages.", log.num_restarts),
            _gauge(
                "slipstream_progress_age_seconds",
                "Seconds since the run wrote anything.",
                max(0.0, now - log.progress_at),
            ),
        ]
        if beat is not None:
            age = max(0.0, now - beat.time)
            ours.append(_gauge("slipstream_heartbeat_age_seconds", "Seconds since the last heartbeat.", age))
        if others := read_processes(log.folder):
            ages = [({"process": each.name}, max(0.0, now - each.time)) for each in others]
            text = "Seconds since the last heartbeat of each further process."
            ours.append(Family("slipstream_process_heartbeat_age_seconds", text, "gauge", ages))
            ages = [({"process": each.name}, max(0.0, now - each.progress_at)) for each in others]
            text = "Seconds since each further process began or got on with what it does."
            ours.append(Family("slipstream_process_progress_age_seconds", text, "gauge", ages))
        return render([*ours, *totals, *families_of(row, {family.name for family in (*ours, *totals)})], self._labels)


def _gauge(name: str, text: str, value: float | None) -> Family:
    return Family(name, text, "gauge", [({}, value)])


def families_of(row: Mapping[str, float | None], taken: Iterable[str] = ()) -> list[Family]:
    """A row's numbers as gauges `slipstream_<group>_<name>`, whose help is the row's own name. Of names that differ in
    other characters only, or are `taken`, the later ones in the alphabet get a number at their end."""
    found, used = list[Family](), set(taken)
    for original in sorted(row):
        base = name = f"slipstream_{_NOT_IN_A_NAME.sub('_', original)}"
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        found.append(_gauge(name, f"{original} of the newest step.", row[original]))
    return found


def render(families: Iterable[Family], labels: Mapping[str, str]) -> str:
    """Prometheus' text format, version 0.0.4; `labels` are those of every value. A value that is None is NaN."""
    lines: list[str] = []
    for family in families:
        lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for more, value in family.values:
            pairs = [f'{name}="{_escaped(text, quoted=True)}"' for name, text in {**labels, **more}.items()]
            lines.append(f"{family.name}{{{','.join(pairs)}}} {'NaN' if value is None else repr(float(value))}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: Callable[[], str] = staticmethod(lambda: "\n")

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # `HTTPServer` asks a name server for this machine's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that is gone is no matter of the run."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server_version, sys_version = "slipstream", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if not all(map(names_this_machine, hosts)):
            self.send_error(421, "this server answers requests to 127.0.0.1 and localhost")
            return
        found = self.path.partition("?")[0] == "/metrics"
        assert isinstance(self.server, _Server)
        body = (self.server.page() if found else "the metrics are at /metrics\n").encode(errors="replace")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the run's."""
