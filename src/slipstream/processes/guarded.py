"""A child below a guard (`guard.py`), in its owner's event loop: what it says and prints, how it is stopped and killed.

Guarantees: `stop` and `kill` leave none of its descendants, and every wait has a deadline. One that hangs writes its
stacks before it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.processes import guard
from slipstream.processes.channel import AsyncChannel
from slipstream.processes.launchers import LOCAL, PIPE, Child, Launcher, Resources

_TAIL_BYTES = 8192
_OUTPUT_WAIT_S = 2.0
_MORE_OUTPUT_S = 0.1
_POLL_S = 0.005
_CHUNK = 1 << 16


class Guarded:
    """One child. `channel` brings its messages."""

    def __init__(self, child: Child, channel: AsyncChannel, on_output: Callable[[bytes], None]) -> None:
        self._child, self.channel = child, channel
        self._on_output = on_output
        self._output = os.dup(child.output)
        self._seen, self.has_ended_output = asyncio.Event(), asyncio.Event()
        self.tail = b""
        """The end of its output."""
        os.set_blocking(self._output, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._output, self._take_output)

    @classmethod
    async def start(
        cls,
        module: str | Path,
        environment: Mapping[str, str],
        resources: Resources,
        *,
        max_bytes: int,
        on_output: Callable[[bytes], None] = lambda chunk: None,
        launcher: Launcher = LOCAL,
    ) -> Guarded:
        """Start it; its messages have at most `max_bytes`. `on_output` gets its output piece by piece, and at the end
        nothing."""
        child = await asyncio.to_thread(launcher.launch, module, (), environment, resources, output=PIPE)
        return cls(child, await AsyncChannel.over(child.socket, max_bytes), on_output)

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._child.pid

    def poll(self) -> int | None:
        """See `Child`; the guard ends like the child, when all of its descendants have ended."""
        return self._child.poll()

    def _take_output(self) -> None:
        try:
            chunk = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._seen.set()
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        if chunk:
            self._on_output(chunk)
        else:
            self._close_output()

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
            self._on_output(b"")
        self.has_ended_output.set()

    async def output_ended(self) -> None:
        """Wait for the last of its output, for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_WAIT_S):
                await self.has_ended_output.wait()

    async def has_ended(self, within_s: float | None = None) -> bool:
        """Whether it ends in time, by default as long as its output may take."""
        due = self._loop.time() + (_OUTPUT_WAIT_S if within_s is None else within_s)
        while self.poll() is None and self._loop.time() < due:
            await asyncio.sleep(_POLL_S)
        return self.poll() is not None

    async def stop(self) -> None:
        """Close its channel, so that it ends; kill it if it does not."""
        self.channel.close()
        await self.has_ended(guard.GRACE_S)
        await self._end()

    async def kill(self) -> None:
        """Kill it with all its descendants. It writes its stacks first, into `tail`, where it still can."""
        if self.poll() is None and not self.channel.is_closed and not self.has_ended_output.is_set():
            self._seen.clear()
            self._child.send_signal(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OUTPUT_WAIT_S):
                    # On a busy machine its output comes late and in pieces.
                    await self._seen.wait()
                    await asyncio.sleep(_MORE_OUTPUT_S)
        await self._end()

    async def _end(self) -> None:
        self._child.send_signal(signal.SIGCONT)
        self._child.send_signal(guard.END)
        self.channel.close()
        if not await self.has_ended(guard.END_S + _OUTPUT_WAIT_S):
            self._child.send_signal(signal.SIGKILL)
            await self.has_ended()
        await self.output_ended()
        self._close_output()  # even if another process holds the other end


def ending(code: int | None, too_many: str) -> str:
    """Part of a sentence on an exit code; `too_many` where the guard has ended it for its number of processes."""
    if code is None:
        return "a closed pipe"
    if code == guard.TOO_MANY:
        return too_many
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
