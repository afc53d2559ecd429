"""The orchestrator's process, as the trainer's process starts, watches and ends it.

Guarantees: it ends with the process that started it, whose end closes its channel, and its engines end with it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.config import PlannedConfig, RunConfig, with_values
from slipstream.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EnvironmentFault,
    OrchestratorError,
    SlipstreamError,
)
from slipstream.launch.children import RunContext
from slipstream.launch.parts import PROGRAM
from slipstream.launch.prepare import Prepared
from slipstream.launch.recovery.resume import tasks_digest
from slipstream.launch.startup.stages import Stage
from slipstream.orchestrator.control import commands, remote
from slipstream.orchestrator.control.remote import Message, RemoteCaller, Request
from slipstream.processes import exits, stacks
from slipstream.processes.launchers import LOCAL, Child
from slipstream.processes.temporary import make_temporary, remove_left, remove_temporary
from slipstream.progress import Progress
from slipstream.records import Batch
from slipstream.runlog.ledger import paths_of
from slipstream.transport import FileStreams, RedisStreams, Transport, open_transport

_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CLOSE_S, _END_S = 30.0, 15.0
"""How long it may take to write what is left, and to end with its engines."""
_FINAL = (ConfigError, DataError, EnvironmentFault)
"""Errors that it would end with again."""


class Settings(msgspec.Struct, frozen=True):
    """What the process is started with: a JSON file that only this user may read."""

    config: str
    """The `RunConfig` as JSON, with what the plan derived."""
    planned: str
    """The `PlannedConfig` that it must plan again, as JSON."""
    tasks: str
    """Digest of all tasks, see `tasks_of`."""
    folder: str
    lineage: int
    began: float
    """When the command began, by `time.monotonic`."""
    orchestrator: int = 0
    """Which of several it is."""


def tasks_of(prepared: Prepared) -> str:
    """Digest of the tasks to train and to evaluate on."""
    return f"{tasks_digest(prepared.train_tasks)} {tasks_digest(prepared.eval_tasks)}"


class Queues:
    """The three queues between trainer and one orchestrator."""

    def __init__(self, config: PlannedConfig, folder: Path, lineage: int, number: int) -> None:
        self._streams = streams = _streams(config, folder, lineage)
        trainer, orchestrator = "the trainer", name_of(config, number)
        suffix, places = f"-{number}" if number else "", remote.PLACES
        self.requests: Transport[Request] = open_transport(
            streams, f"requests{suffix}", Request, capacity=places, producer=trainer, consumer=orchestrator
        )
        self.messages: Transport[Message] = open_transport(
            streams, f"messages{suffix}", Message, capacity=places, producer=orchestrator, consumer=trainer
        )
        # Every slot's batch fits, so that groups begin while a batch waits for the trainer.
        self.batches: Transport[Batch] = open_transport(
            streams,
            f"batches{suffix}",
            Batch,
            capacity=config.training.staleness + 1,
            producer=orchestrator,
            consumer=trainer,
        )

    def remove(self) -> None:
        """Leave nothing of them behind."""
        for queue in (self.requests, self.messages, self.batches):
            try:
                queue.remove()
            except DeadlineError:  # the server does not answer, to the others neither
                return
            except SlipstreamError:  # it has lost this one
                continue


def name_of(config: PlannedConfig, number: int) -> str:
    """What an orchestrator is called in messages."""
    return f"orchestrator {number}" if config.run.orchestrators > 1 else "the orchestrator"


class OrchestratorProcess:
    """The process, and the caller that brings it commands."""

    def __init__(self, run: RunContext, number: int) -> None:
        self._run, self._number = run, number
        self._name = name_of(run.config, number)
        self._log = run.folder / "logs" / f"orchestrator{f'-{number}' if run.config.run.orchestrators > 1 else ''}.log"
        further = range(run.config.run.orchestrators, len(paths_of(run.folder))) if number == 0 else ()
        for earlier in range(run.log.lineage):  # what an attempt that was killed has left, with more of them, too
            for other in (number, *further):
                Queues(run.config, run.folder, earlier, other).remove()
        self._queues = Queues(run.config, run.folder, run.log.lineage, number)
        self._folder = make_temporary("orchestrator")
        try:
            self._process = self._launch()
        except BaseException:
            self._queues.remove()
            remove_temporary(self._folder)
            raise
        self.caller = RemoteCaller(
            self._queues.requests,
            self._queues.messages,
            on_notice=self._on_notice,
            ended=self._ended,
            silent=self._silent,
            should_stop=run.should_stop,
        )

    @property
    def batches(self) -> Transport[Batch]:
        """What it makes."""
        return self._queues.batches

    def _launch(self) -> Child:
        run = self._run
        asked = run.prepared.loaded.config.model_copy(update={"model": run.config.model})
        config: RunConfig = with_values(asked, {item.name: item.value for item in run.prepared.plan.derived})
        settings = Settings(
            config.model_dump_json(),
            run.config.model_dump_json(),
            tasks_of(run.prepared),
            str(run.folder.absolute()),
            run.log.lineage,
            run.stages.began,
            self._number,
        )
        path = self._folder / "settings.json"
        path.write_bytes(msgspec.json.encode(settings))
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **exits.SAFE_PATH}
        return LOCAL.launch(PROGRAM, [str(path)], environment, output=self._log)

    def _ended(self) -> SlipstreamError | None:
        code = self._process.poll()
        if code is None:
            return None
        what = f"{self._name} {exits.ending(code, self._log)}"
        kind = next((kind for kind in _FINAL if kind.exit_code == code), None)
        return OrchestratorError(what, was_killed=-code in _KILLS) if kind is None else kind(what)

    def _silent(self, seconds: float) -> SlipstreamError:
        """Kill a process that gives no sign of life, and say what it was doing."""
        pid, folder = self._process.pid, stacks.folder_of(self._run.folder)
        is_stopped = exits.is_stopped(pid)
        how = "was stopped (state T), gave" if is_stopped else "gave"
        what = stacks.sentence(folder, stacks.ask(folder, only_group=pid))
        self.kill()
        return OrchestratorError(
            f"{self._name}, process {pid}, {how} no sign of life for {seconds:g} s and was killed"
            f"{f': {what}' if what else ''}",
            was_killed=is_stopped,
        )

    def _on_notice(self, notice: remote.Notice) -> None:
        run, progress = self._run, self._run.progress
        if isinstance(notice, remote.Progressed):
            if self._number == 0:
                _show(progress, notice)
        elif isinstance(notice, remote.Counted):
            run.log.count(notice.values)
        elif isinstance(notice, remote.Sampled):
            run.log.sample(notice.fields)
        elif notice.kind == "warning":
            run.log.warning(**notice.fields)
        else:
            run.log.event(notice.kind, **notice.fields)
            if notice.kind == "stage":
                run.stages.ended_elsewhere(msgspec.convert(notice.fields, Stage))

    def close(self, end: commands.Close) -> None:
        """End it: it writes how the last groups ended, and stops its engines."""
        try:
            if self._process.poll() is None:
                waits_for = f"{self._name} to write how the last groups of rollouts ended"
                self.caller.call(end, commands.Done, _CLOSE_S, waits_for, may_stop=False)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        except SlipstreamError as error:  # the error that ended the run is worth more
            with suppress(SlipstreamError):  # a full disk, which takes no warning either
                self._run.log.warning(f"the ledger may lack how the last groups ended: {error}")
        finally:
            self.caller.close()
            self._process.end(0.0)
            self._queues.remove()
            remove_temporary(self._folder)
            remove_left()  # of one that was killed

    def kill(self) -> None:
        """End it at once, from any thread; its engines end with it."""
        self._process.kill()


def _show(progress: Progress, notice: remote.Progressed) -> None:
    """Call the method of `progress` that the other process has called."""
    match notice.method, notice.arguments:
        case "phase", [str(name), int() | None as total]:
            progress.phase(name, total)
        case "advance", [int(count)]:
            progress.advance(count)
        case "end_phase", []:
            progress.end_phase()
        case "message", [str(text), str(level)]:
            progress.message(text, level)
        case _:
            raise ValueError(f"{notice.method} is nothing to show")


def _streams(config: PlannedConfig, folder: Path, lineage: int) -> FileStreams | RedisStreams:
    if config.run.streams == "redis":
        assert config.redis is not None
        place = f"{socket.gethostname()}:{folder.absolute()}"
        run_id = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        return RedisStreams(config.redis.url, run_id, lineage, config.redis.password_variable)
    return FileStreams(folder / "streams", lineage)
