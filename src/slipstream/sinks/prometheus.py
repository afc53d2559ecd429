"""An endpoint for Prometheus: the newest row of metrics, whether the run lives, and its progress, over HTTP.

It listens on 127.0.0.1 only and refuses requests with another `Host`: a web page whose name was pointed here sends one.
It answers from a thread and ends with the run. A run is never held up: rows are handed over without waiting, and a
client has `_CLIENT_S` for its request. Counters begin with the sums of the run folder's rows, so they continue after a
resume; repeated steps count once.
"""

from __future__ import annotations

import math
import re
import socketserver
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import ThreadingHTTPServer
from typing import Any, Self

from prometheus_client import CollectorRegistry, Metric, MetricsHandler
from prometheus_client.registry import Collector

from slipstream.config.addresses import names_this_machine
from slipstream.errors import ConfigError
from slipstream.processes.heartbeat import read_heartbeat, read_processes
from slipstream.runlog import RunLog, read_metrics

HOST = "127.0.0.1"
_CLIENT_S = 10.0
_END_S = 2.0
_POLL_S = 0.2
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_COUNTERS = {
    "rollouts_trained": "Rollouts trained on.",
    "tokens_trained": "Tokens trained on.",
    "tokens_generated": "Tokens sampled.",
    "rollouts_dropped": "Rollouts not trained on, by reason.",
    "groups_dropped": "Groups not trained on as a whole, by reason.",
    "tokens_dropped": "Sampled tokens not trained on, by reason.",
    "requests_retried": "Requests tried again, by reason.",
    "requests_given_up": "Requests without a try left.",
    "idle_seconds": "Seconds that a side had to wait, by reason.",
}
_BY_REASON = {
    "dropped": "rollouts_dropped",
    "dropped_groups": "groups_dropped",
    "dropped_tokens": "tokens_dropped",
    "retry": "requests_retried",
}
"""Groups of metrics that are counts by reason, and the counter of each."""
_IDLE = re.compile(r"idle/(engine|trainer)_(\w+)_s")
Labels = tuple[tuple[str, str], ...]
Values = Sequence[tuple[Mapping[str, str], float | None]]
"""Values of one metric, each with its labels beside those of the run."""


def counts_of(row: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    """The additions of a row of metrics: counter, labels, number. A skipped batch was not trained on."""
    if not row.get("train/skipped"):
        sampled, written = row.get("tokens/trained"), row.get("train/num_tokens")
        yield "rollouts_trained", (), row.get("rollout/num") or 0.0
        yield "tokens_trained", (), (written if sampled is None else sampled) or 0.0
    yield "tokens_generated", (), row.get("tokens/generated") or 0.0
    for name, value in row.items():
        group, _, reason = name.partition("/")
        if name == "retry/exhausted":
            yield "requests_given_up", (), value or 0.0
        elif group in _BY_REASON:
            yield _BY_REASON[group], (("reason", reason),), value or 0.0
        elif found := _IDLE.fullmatch(name):
            yield "idle_seconds", (("side", found[1]), ("reason", found[2])), value or 0.0


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

    def serve(self, log: RunLog, name: str) -> None:
        """Answer with the metrics of the run of `log` from here on; `name` is its label `run`. Its address is told in
        an event `metrics_server`."""
        if self._server is None:
            return
        registry = CollectorRegistry()
        registry.register(_Page(log, name))
        self._server.RequestHandlerClass = _Handler.factory(registry)
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


class _Page(Collector):
    """Computes the metrics of an answer."""

    def __init__(self, log: RunLog, name: str) -> None:
        self._log, self._labels = log, {"run": name, "lineage": str(log.lineage)}
        self._guard = threading.Lock()
        self._row: Mapping[str, float | None] = {}
        self._step = -1
        self._totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        for row in read_metrics(log.folder) if (log.folder / "metrics.jsonl").exists() else []:
            self._take(int(row["step"]), {name: value for name, value in row.items() if "/" in name})
        self._step = -1  # the first row is whole, whatever its step
        log.listeners.append(self._take)

    def _take(self, step: int, row: Mapping[str, float | None]) -> None:
        with self._guard:
            # Of a step that was taken before, further numbers come beside the newest row's.
            self._row = row if step > self._step else {**self._row, **row}
            self._step = max(self._step, step)
            for counter, labels, number in counts_of(row):
                self._totals[counter, labels] += number

    def collect(self) -> Iterable[Metric]:
        """See `Collector`. Counters that no row had are left out."""
        with self._guard:
            row, totals = self._row, dict(self._totals)
        ours = [self._metric(f"slipstream_{name}", text, values) for name, text, values in self._gauges()]
        for name, text in _COUNTERS.items():
            values = [(dict(labels), count) for (each, labels), count in totals.items() if each == name]
            if any(count for _, count in values):
                ours.append(self._metric(f"slipstream_{name}", text, values, "counter"))
        taken = {sample.name for metric in ours for sample in metric.samples} | {metric.name for metric in ours}
        names = gauge_names(row, taken)
        return [*ours, *(self._metric(names[key], f"{key} of the newest step.", [({}, row[key])]) for key in names)]

    def _gauges(self) -> Iterator[tuple[str, str, Values]]:
        """Name, text and values of each."""
        log, now = self._log, time.time()

        def age(since: float) -> float:
            return max(0.0, now - since)

        yield "step", "Steps made.", [({}, log.step)]
        yield "restarts", "Automatic restarts of the run, over all lineages.", [({}, log.num_restarts)]
        yield "progress_age_seconds", "Seconds since the run wrote anything.", [({}, age(log.progress_at))]
        if (beat := read_heartbeat(log.folder)) is not None:
            yield "heartbeat_age_seconds", "Seconds since the last heartbeat.", [({}, age(beat.time))]
        if others := read_processes(log.folder):
            values = [({"process": each.name}, age(each.time)) for each in others]
            yield "process_heartbeat_age_seconds", "Seconds since the last heartbeat of each further process.", values
            values = [({"process": each.name}, age(each.progress_at)) for each in others]
            text = "Seconds since each further process began or got on with what it does."
            yield "process_progress_age_seconds", text, values

    def _metric(self, name: str, text: str, values: Values, kind: str = "gauge") -> Metric:
        found = Metric(name, text, kind)
        for labels, value in values:
            sample = f"{name}_total" if kind == "counter" else name
            found.add_sample(sample, {**self._labels, **labels}, math.nan if value is None else value)
        return found


def gauge_names(row: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """The names of a row's numbers as gauges, `slipstream_<group>_<name>`. Names may differ in other characters
    only, or be `taken`: the later ones in the alphabet get a number at their end."""
    found, used = dict[str, str](), set(taken)
    for original in sorted(row):
        base = name = f"slipstream_{_NOT_IN_A_NAME.sub('_', original)}"
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        found[original] = name
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # `HTTPServer` asks a name server for this machine's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that is gone is no matter of the run."""


class _Handler(MetricsHandler):
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        if all(map(names_this_machine, self.headers.get_all("Host") or [])):
            super().do_GET()
        else:
            self.send_error(421, "this server answers requests to 127.0.0.1 and localhost")
