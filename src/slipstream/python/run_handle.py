"""A run as a Python program sees it: its numbers, its weights, and while it goes on its process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from slipstream import errors
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.processes import exits, launchers
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.python.protocol import Call, Outcome
from slipstream.runlog import (
    checkpoints_of,
    holds_run,
    read_events,
    read_metrics,
    read_run,
    read_samples,
    read_settings,
    summarize,
)
from slipstream.runlog.files import Row, Rows

_POLL_S = 0.1
_OUTPUT_S = 10.0
"""Longest wait for the last output of an ended process."""
OnStep = Callable[[int, Mapping[str, Any]], object]
"""Called with the step and its row of metrics after each step, and once before the first: with step 0 or, in a resumed
run, with the step of its checkpoint."""


class Job:
    """A call in its child process. Only one thread may call `follow`."""

    def __init__(self, call: Call, *, shown: bool) -> None:
        self._call = call
        self._shown = shown
        self._stop_asked = False
        self._start()

    def _start(self) -> None:
        is_seen = self._shown and _is_terminal(sys.stdout) and _is_terminal(sys.stderr)
        self.process = launchers.LOCAL.launch(
            "slipstream.python.child",
            environment={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **exits.SAFE_PATH},
            output=None if is_seen else launchers.PIPE,
        )
        self._channel = Channel(self.process.socket)
        self._received = b""
        with contextlib.suppress(ChannelClosed):  # it has just ended
            self._channel.send(msgspec.msgpack.encode(self._call))
        self._tail: list[str] = []
        self._reader = threading.Thread(target=self._read_output, name="slipstream-output", daemon=True)
        if not is_seen:
            self._reader.start()

    def _read_output(self) -> None:
        with open(self.process.output, "rb", closefd=False) as output:
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                self._tail = [*self._tail[-20:], text]
                if self._shown:
                    print(text, flush=True)

    def stop(self) -> None:
        """Ask it to end at the next safe place; a second time, to end at once."""
        self._stop_asked = True
        self.process.send_signal(signal.SIGINT)

    def follow(self, each: Callable[[], None] = lambda: None) -> Outcome:
        """Wait for its end and call `each` meanwhile; its outcome. An interrupt of this process is passed on: the first
        asks it to stop, the second ends it at once. Any other exception meanwhile does the same, and the first one is
        raised again when the process has ended."""
        raised: BaseException | None = None
        while True:
            try:
                self._wait(each)
            except KeyboardInterrupt:
                self.stop()
                continue
            except BaseException as error:  # noqa: BLE001 - of a callback, or of a handler of the caller's signals
                raised = raised or error
                self.stop()
                continue
            outcome = self._outcome()
            if raised is not None:
                raise raised
            if not outcome.again:
                return outcome
            self._call = msgspec.structs.replace(self._call, resume=True)
            self._start()

    def _wait(self, each: Callable[[], None]) -> None:
        while self.process.poll() is None:
            self._receive()
            each()
            time.sleep(_POLL_S)
        if self._reader.is_alive():
            self._reader.join(_OUTPUT_S)
        self._receive()
        each()

    def _receive(self) -> None:
        """Take the sent outcome from the child: it would otherwise wait for this side."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._received = self._received or self._channel.receive(0.0)

    def _outcome(self) -> Outcome:
        self._channel.close()
        if self._received:
            return msgspec.msgpack.decode(self._received, type=Outcome)
        code = self.process.wait()
        if self._stop_asked and code == errors.Interrupted.exit_code:
            return Outcome(error="Interrupted", message="ended at once", exit_code=code)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = f": {' '.join(self._tail[-3:])}" if self._tail else ""
        return Outcome(error="SlipstreamError", message=f"the call's process ended with {how}{said}", exit_code=1)


class Run:
    """A run and its folder. `train` and `sft` return one, `load_run` opens one of a folder."""

    def __init__(self, folder: Path, start: Callable[[], Job] | None = None, on_step: OnStep | None = None) -> None:
        """`start` starts the call's process, after the earlier rows have been counted."""
        self.folder = folder
        """All files of the run: metrics, events, rollouts, settings, checkpoints."""
        self.summary: dict[str, Any] = {}
        """The output of `slipstream train --json`, once a run of this program has made all its steps."""
        self._on_step = on_step
        self._offset = len(_whole_lines(self._metrics_file))
        """Bytes of `metrics.jsonl` before the first new row for `on_step`. The rows of an earlier call are not new."""
        self._called = -1
        """The last step in a call of `on_step`."""
        self._error: BaseException | None = None
        self._was_interrupted = False
        self._ended = threading.Event()
        self._job = start() if start is not None else None
        if self._job is None:
            self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether this program waits for it still, or another process writes its folder."""
        return not self._ended.is_set() or self.status == "running"

    @property
    def status(self) -> str:
        """As `slipstream runs` shows it: running, finished, interrupted, failed or killed."""
        if holds_run(self.folder):
            return summarize(self.folder).status
        return "running" if not self._ended.is_set() else "interrupted" if self._was_interrupted else "failed"

    @property
    def step(self) -> int:
        """The last step made."""
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def rows(self) -> Rows:
        """The metrics of every step so far, a flat dictionary each; docs/metrics.md explains the names."""
        return read_metrics(self.folder) if self._metrics_file.exists() else []

    @property
    def _metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def metrics(self) -> Any:
        """The same as a pandas.DataFrame, a row for each step; `rows` if pandas is not installed."""
        if importlib.util.find_spec("pandas") is None:
            return self.rows
        import pandas  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        return pandas.DataFrame(self.rows)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    @property
    def samples(self) -> Rows:
        """The kept rollouts of the run: prompts, completions and rewards."""
        return read_samples(self.folder)

    @property
    def events(self) -> Rows:
        """Its events, in order: versions applied, checkpoints, warnings."""
        return read_events(self.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with its value, as the plan derived them, by dotted name."""
        return read_settings(self.folder)

    @property
    def weights(self) -> Path | None:
        """The newest checkpoint's model folder (with LoRA: adapter), for Transformers and vLLM to load."""
        found = [path / "weights" for path in checkpoints_of(self.folder)]
        return next((path for path in reversed(found) if path.exists()), None)

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy, from 0 to 1."""
        return next((row["eval/accuracy"] for row in reversed(self.rows) if row.get("eval/accuracy") is not None), None)

    @property
    def gained(self) -> tuple[float, float, float] | None:
        """How much the held-out accuracy has grown since the first evaluation, and the ends of the 95 % interval."""
        from slipstream.report.headline import headline

        return headline(read_run(self.folder)).gained if len(self.rows) > 1 else None

    def report(self, out: str | Path | None = None) -> Path:
        """Write the HTML report; its path."""
        from slipstream.report import write_report

        return write_report([self.folder], None if out is None else Path(out))

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end; a second call ends it at once. Does not wait (`wait` does)."""
        if self._job is None:
            raise ConfigError(f"run {self.folder} was not started by this program: stop it where it was started")
        if not self._ended.is_set():
            self._job.stop()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end. Raises the run's error, unless the run was stopped as asked; `TimeoutError` if it goes on
        after `timeout_s` seconds."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"run {self.folder} goes on after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self

    def follow(self) -> None:
        """Wait for the process and call `on_step` meanwhile; in one thread, once, as `train` does."""
        assert self._job is not None
        try:
            outcome = self._job.follow(self._call_back)
            self.summary = outcome.summary
            self._was_interrupted = outcome.error == "Interrupted"
            if outcome.error and not self._was_interrupted:
                self._error = error_of(outcome)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        finally:
            self._ended.set()

    def _call_back(self) -> None:
        """Pass new rows to the callback: the first line of each step, and none of a step repeated by an automatic
        restart. An exception of the callback ends the calls; KeyboardInterrupt does not."""
        for line in _whole_lines(self._metrics_file, self._offset).splitlines(keepends=True):
            if self._on_step is None:
                return
            self._offset += len(line)
            row: Row = msgspec.json.decode(line)
            step = int(row["step"])
            if step <= self._called:
                continue
            self._called, on_step = step, self._on_step
            try:
                on_step(step, row)
            except KeyboardInterrupt:  # the user's, during the call
                raise
            except BaseException:
                self._on_step = None
                raise

    def __repr__(self) -> str:
        state = "running" if not self._ended.is_set() else self.status
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        if accuracy and (gained := self.gained) is not None:
            points, low, high = (100 * value for value in gained)
            accuracy += f" ({points:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f})"
        return f"Run({str(self.folder)!r}, {state}, step {self.step}{accuracy})"


def load_run(folder: str | Path) -> Run:
    """The run in `folder`; it may go on in another process. Raises ConfigError if there is none."""
    folder = Path(folder).expanduser().resolve()
    if not holds_run(folder):
        raise ConfigError(f"{folder} is no run folder: it has no events.jsonl")
    return Run(folder)


def _whole_lines(file: Path, offset: int = 0) -> bytes:
    """The file's whole lines from `offset` on: the last one may be in the making, or torn by a dead process."""
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            data = opened.read()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def error_of(outcome: Outcome) -> SlipstreamError:
    """The exception at the child's end."""
    kind: Any = getattr(errors, outcome.error, None)
    if not (isinstance(kind, type) and issubclass(kind, SlipstreamError)):
        kind = SlipstreamError
    return kind(outcome.message)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and stream.fileno() in (1, 2)
    except (OSError, ValueError, AttributeError):
        return False
