"""Starts an environment process and talks to it; the other end is `inside/host.py`.

A guard (`processes/guard.py`) is the process's parent and ends it with all its descendants. The process gets none of the
run's keys. What it prints goes into a log, if there is one, and its end into error messages. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from slipstream.envs.hosted import inside
from slipstream.envs.scoring.process import worker_environment
from slipstream.patience import lasting
from slipstream.processes import guard
from slipstream.processes.files import open_own

LOAD_TIMEOUT_S = 600.0
"""Time limit of loading an environment, which may fetch data."""
ROWS_TIMEOUT_S = 110.0
MAX_LOG_BYTES = 16 * 2**20
MAX_PROCESSES = 4096
"""That an environment process may have below it, for all its episodes together."""
_HOST = Path(str(inside.__file__)).with_name("host.py")
_NOT_FOR_OTHERS = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_PRELOAD")
"""What describes this interpreter and would mislead another."""
_MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = 4
_TAIL_BYTES = 8192
_OUTPUT_WAIT_S = 2.0
_MORE_OUTPUT_S = 0.1
_POLL_S = 0.005

LAST = ("done", "raised", "cancelled")
"""An episode's last frame."""

Frame = dict[str, Any]


class HostDied(Exception):
    """The environment process ended, or wrote what cannot be read; the text says how, and what it wrote last."""


class HostFailed(Exception):
    """The environment process refuses; the text is its own, and `details` a traceback, if there is one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def host_environment(python: str, names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of `own` that an environment process with the interpreter `python` gets."""
    found = worker_environment(names, own)
    if os.path.realpath(os.path.dirname(python)) != os.path.realpath(os.path.dirname(sys.executable)):
        for name in _NOT_FOR_OTHERS:
            found.pop(name, None)
        # Programs that its packages brought come before others.
        found["PATH"] = os.pathsep.join([os.path.dirname(python), found.get("PATH", os.defpath)])
    return found


class Host:
    """One environment process, in one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._log = log
        self._tail = b""
        self._output_seen = asyncio.Event()
        self._frames: dict[str, asyncio.Queue[Frame | None]] = {"": asyncio.Queue()}
        self._end = ""
        self.is_held_up: Callable[[], bool] = lambda: False
        """Whether a call blocks it that is going to be interrupted, so that it is not taken for hanging."""
        self.facts: Frame = {}
        """What it said of the environment when it had loaded it."""
        self.num_ended = 0
        """Episodes that it has ended."""
        self.on_blocks: Callable[[Frame], None] = lambda frame: None
        """Told where a synchronous call blocks it, and when that has ended."""
        self._drain = lasting(self._keep_output())
        self._reading = lasting(self._read())

    @classmethod
    async def start(
        cls,
        python: str,
        setup: Frame,
        *,
        variables: Iterable[str] = (),
        log: Path | None = None,
        user_namespace: bool = True,
    ) -> Host:
        """Starts a process and waits until it has loaded the environment. Raises `HostDied`, `HostFailed`, or
        `TimeoutError`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(guard.__file__)), str(MAX_PROCESSES)),
            guard.NAMESPACE if user_namespace else guard.NO_NAMESPACE,
            *(python, "-P", "-u", str(_HOST)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=host_environment(python, variables, os.environ),
            start_new_session=True,  # Ctrl-C must reach the run only
        )
        host = cls(process, log)
        try:
            host.facts = await host.ask(setup, LOAD_TIMEOUT_S)
        except BaseException:
            await host.kill()
            raise
        return host

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._end

    async def ask(self, frame: Frame, timeout_s: float) -> Frame:
        """Sends a request that is not an episode's, and returns the answer; one at a time. Raises as `start`."""
        self._send(frame)
        async with asyncio.timeout(timeout_s):
            answer = await self._next("")
        if answer["op"] == "failed":
            raise HostFailed(answer["message"], answer.get("details") or "")
        return answer

    def begin(self, episode: str, task: Any) -> None:
        """Starts an episode."""
        self._frames[episode] = asyncio.Queue()
        self._send({"op": "run", "id": episode, "task": task})

    async def next_of(self, episode: str) -> Frame:
        """The episode's next frame. Raises `HostDied`."""
        return await self._next(episode)

    def answer(self, episode: str, frame: Frame) -> None:
        """Answers a `chat` frame."""
        self._send({**frame, "id": episode})

    def finished(self, episode: str) -> None:
        """The episode has sent its last frame."""
        self._frames.pop(episode, None)
        self.num_ended += 1

    async def cancel(self, episode: str, within_s: float) -> bool:
        """Cancels an episode; false if the process does not confirm it in time, which begins again while it is held
        up."""
        if not self.alive:
            return True
        self._send({"op": "cancel", "id": episode})
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        while (await self._next(episode))["op"] not in LAST:
                            pass
                    return True
                if not self.is_held_up():
                    return False
        except HostDied:
            return True
        finally:
            self.finished(episode)

    def _send(self, frame: Frame) -> None:
        data = json.dumps(frame).encode()
        with contextlib.suppress(ConnectionError, RuntimeError):  # noticed where the answer is read
            self._stdin.write(len(data).to_bytes(_LENGTH, "big") + data)

    async def _next(self, episode: str) -> Frame:
        frame = await self._frames[episode].get() if not self._end or self._frames[episode].qsize() else None
        if frame is None:
            raise HostDied(f"{self._end}{self.last_lines()}")
        return frame

    async def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(await self._stdout.readexactly(_LENGTH), "big")
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(length)
                frame = cast("Frame", json.loads(await self._stdout.readexactly(length)))
                if frame.get("op") == "blocks":
                    self.on_blocks(frame)
                    continue
                queue = self._frames.get(frame.get("id", ""))
                if queue is not None:  # an episode that was given up may still say something
                    queue.put_nowait(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._has_ended(_OUTPUT_WAIT_S)
            code = self._process.returncode
            how = "closed its pipe" if code is None else _ended(code)
        except (ValueError, AttributeError):  # something else wrote to the pipe
            how = "wrote what cannot be read"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_WAIT_S):
                await asyncio.shield(self._drain)
        self._end = self._end or f"the environment process {how}"
        for queue in self._frames.values():
            queue.put_nowait(None)

    def last_lines(self) -> str:
        """What it wrote last, indented; empty if it wrote nothing."""
        lines = self._tail.decode(errors="replace").strip().splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)

    async def _keep_output(self) -> None:
        assert self._process.stderr is not None
        written = 0
        with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
            file = None
            if self._log is not None:
                with contextlib.suppress(OSError):
                    self._log.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(open(open_own(self._log, os.O_WRONLY | os.O_APPEND), "ab", buffering=0))
            while chunk := await self._process.stderr.read(65536):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                self._output_seen.set()
                if file is not None and written < MAX_LOG_BYTES:
                    written += len(chunk)
                    with contextlib.suppress(OSError):
                        file.write(chunk if written < MAX_LOG_BYTES else chunk + b"\n(further output is left out)\n")
        self._output_seen.set()

    async def stop(self) -> None:
        """Closes its input, which tells it to end; kills it if it does not."""
        self._end = self._end or "the environment process was stopped"
        self._stdin.close()
        await self._has_ended(guard.GRACE_S)
        await self._finish()

    async def kill(self, why: str = "was killed") -> None:
        """Kills the process and all its descendants. A process that hangs writes its stacks first."""
        self._end = self._end or f"the environment process {why}"
        if self._process.returncode is None and not self._drain.done():
            self._output_seen.clear()
            self._signal(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OUTPUT_WAIT_S):
                    # On a busy machine its output comes late and in pieces.
                    await self._output_seen.wait()
                    await asyncio.sleep(_MORE_OUTPUT_S)
        await self._finish()

    async def _finish(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(guard.END)
        self._stdin.close()
        if not await self._has_ended(guard.END_S + _OUTPUT_WAIT_S):
            self._signal(signal.SIGKILL)
            await self._has_ended(_OUTPUT_WAIT_S)
        for queue in self._frames.values():
            queue.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_WAIT_S):
                await asyncio.gather(self._drain, self._reading, return_exceptions=True)
        cast("Any", self._process)._transport.close()  # even if another process holds the other ends

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _has_ended(self, within_s: float) -> bool:
        loop = asyncio.get_running_loop()
        due = loop.time() + within_s
        while self._process.returncode is None and loop.time() < due:
            await asyncio.sleep(_POLL_S)
        return self._process.returncode is not None


def _ended(code: int) -> str:
    if code == guard.TOO_MANY:
        return f"was killed, as it had more than {MAX_PROCESSES} processes"
    return f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
