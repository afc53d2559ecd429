"""Metric sinks: send each step's metrics to TensorBoard, Weights & Biases or Trackio, beside the run folder.

`put` and `put_sample` never block and never raise. Each sink has its own thread and bounded queue; a row that it cannot
accept is dropped and counted, and its first failure is one warning. `close` has a deadline. Only the run folder's
record is complete. Samples are sent with each evaluation and at the end, the newest `MAX_SAMPLES` of them.

Each library finds its credentials itself (environment, login), so that none passes through the settings or the run
folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slipstream.errors import ConfigError, StartsAgain, one_line
from slipstream.regular_files import open_regular
from slipstream.runlog import ACCURACY, EventLog, exit_code_of
from slipstream.sinks.services import TARGETS, Run, Sink

__all__ = ["MetricSinks", "Run", "Sink", "require_sinks", "run_of"]

MAX_WAITING = 1000
MAX_SAMPLES = 64
CLOSE_TIMEOUT_S = 30.0


def require_sinks(names: Sequence[str]) -> None:
    """Raises `ConfigError` for the first sink whose library is not installed; imports nothing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # `find_spec` also finds a folder of that name in the current one, which is not the library.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f'run.sinks has "{name}", which is not installed: pip install "slipstream[{name}]", or leave it out'
            )


class MetricSinks:
    """All sinks of a run. As a context manager it closes them."""

    def __init__(
        self,
        names: Sequence[str],
        run: Run,
        log: EventLog,
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell` is called with where each sink shows the run, from its thread."""
        self._log = log
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._step = 0
        self._workers = [_Worker(name, TARGETS[name], run, log, tell) for name in dict.fromkeys(names)]

    def put(self, step: int, values: Mapping[str, float | None]) -> None:
        """Passes a step's metrics to every sink. Numbers of an earlier step may come later."""
        self._step = max(self._step, step)
        row = {name: value for name, value in values.items() if value is not None}
        samples = self._take_samples() if ACCURACY in row else []
        for worker in self._workers:
            worker.put(_Row(step, time.time(), row, samples))

    def put_sample(self, sample: Mapping[str, Any]) -> None:
        """Keeps a line of `samples.jsonl` for the sinks; any thread may call it."""
        self._samples.append(sample)

    def _take_samples(self) -> list[Mapping[str, Any]]:
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def close(self, exit_code: int = 0) -> None:
        """Lets the sinks write their queues within one deadline, tells them the run's exit code, and reports what each
        of them got."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        samples = self._take_samples()
        for worker in self._workers:
            if samples:
                worker.put(_Row(self._step, time.time(), {}, samples))
            worker.ask_to_end(exit_code)
        for worker in self._workers:
            worker.wait(deadline)
            self._log.event("sink", name=worker.name, num_written=worker.num_written, num_lost=worker.num_lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0 if isinstance(error, StartsAgain) else exit_code_of(error))


@dataclass(frozen=True)
class _Row:
    step: int
    when: float
    values: dict[str, float]
    """Empty: there are only samples."""
    samples: Sequence[Mapping[str, Any]]


@dataclass
class _Worker:
    """One sink in its own thread, which also imports the library."""

    name: str
    make: Callable[[Run], Sink]
    run: Run
    log: EventLog
    tell: Callable[[str], None]
    num_put: int = 0
    num_written: int = 0
    exit_code: int = 0
    has_warned: bool = False
    is_abandoned: bool = False

    def __post_init__(self) -> None:
        self._ends = threading.Event()
        self._rows: queue.Queue[_Row] = queue.Queue(MAX_WAITING)
        # A daemon: a library that hangs cannot keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Rows of metrics that were put and not written."""
        return self.num_put - self.num_written

    def put(self, row: _Row) -> None:
        self.num_put += bool(row.values)
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"is {self._rows.maxsize} rows behind, and further ones are lost to it")

    def ask_to_end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._ends.set()

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("did not end in time, and what it had not written is lost to it")
            self.is_abandoned = True

    def _work(self) -> None:
        try:
            if (own := self.run.folder / self.name).is_symlink():
                raise OSError(f"{own} is a link, and would be written elsewhere")
            sink = self.make(self.run)
        except BaseException as error:  # noqa: BLE001 (a library that exits must not end the run; it is reported)
            self._fail(f"cannot be opened ({one_line(error)})")
            return
        if (url := getattr(sink, "url", "")) and not self.is_abandoned:
            self.log.event("sink_opened", name=self.name, url=url)
            self.tell(f"metrics in {self.name}: {url}")
        while not (self._ends.is_set() and self._rows.empty()):
            try:
                row = self._rows.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                if row.values:
                    sink.write(row.step, row.when, row.values)
                    self.num_written += 1
                if row.samples:
                    sink.write_samples(row.step, row.when, row.samples)
            except BaseException as error:  # noqa: BLE001 (foreign code: its failure is counted, the run goes on)
                self._fail(f"did not take step {row.step} ({one_line(error)})")
        try:
            sink.close(self.exit_code)
        except BaseException as error:  # noqa: BLE001 (the same)
            self._fail(f"could not be closed ({one_line(error)})")

    def _fail(self, what: str) -> None:
        # An abandoned thread may return after the log was closed.
        if not self.has_warned and not self.is_abandoned:
            self.has_warned = True
            self.log.warning(
                f"the metric sink {self.name} {what}: training goes on, and metrics.jsonl has every row", sink=self.name
            )


def run_of(folder: Path, lineage: int, settings: Mapping[str, Any], resumed_from: int | None = None) -> Run:
    """The description of the run in `folder` for sinks; `settings` are those of the run folder, without secrets."""
    project, name, entity = (str(settings.get(f"run.{key}", "")) for key in ("project", "name", "entity"))
    with open_regular(folder / "events.jsonl") as file:
        first = file.readline()  # time, process and host of its first process: no other run has it
    key = hashlib.blake2b(first, digest_size=6).hexdigest()
    return Run(folder.resolve(), lineage, dict(settings), key, project, name, entity, resumed_from)
