"""Environment process, `python -P host.py`: hosts an environment with packages for an interpreter of their own.

Its standard input is a connected socket for frames of JSON both ways, framed as in `processes/channel.py`. It is moved
away first: an environment may print and read. First comes the setup; the answer holds facts of the environment. Then
come requests: rows of its data sets, `serve` and `close` (of a context held while episodes run), and episodes, many at
once on one event loop. Each turn of an episode is a `chat` frame, answered by `reply` or
`refused`. The other end is `hosted/process.py`.

On SIGUSR1 it writes its stacks. It ends when its input closes; its guard (`processes/guard.py`) ends its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

PACKAGE = "slipstream_environment_process"
_LENGTH = 4
_MAX_BYTES = 64 * 2**20
_MAX_TEXT = 20_000


class Refused(Exception):
    """The environment cannot be used as it is; the text is one sentence with the remedy."""


class ContextFull(Exception):
    """The conversation leaves no room for another turn."""


class RewardRaised(Exception):
    """A reward function raised; the text names it and holds the traceback."""


class Hosted(Protocol):
    """An environment of one kind of package."""

    def facts(self) -> dict[str, Any]:
        """Facts for Slipstream before the first episode: `max_turns` and the `splits` there are."""
        ...

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """The next tasks of a split, fewer at the end: `prompt` (messages), `answer`, and `task`, for `play`."""
        ...

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Held while episodes run."""
        ...

    async def play(self, task: Any, turns: Turns) -> dict[str, Any]:
        """One episode, graded."""
        ...


class Turns:
    """The policy, for one episode."""

    def __init__(self, channel: Channel, episode: str) -> None:
        self._channel = channel
        self._episode = episode
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.context_full = False
        self.last: dict[str, Any] = {}
        """The last reply."""

    async def chat(self, messages: list[Any], tools: list[Any] | None, max_tokens: int | None) -> dict[str, Any]:
        """The policy's next turn. Raises `ContextFull`."""
        answer = await self.ask({"op": "chat", "messages": messages, "tools": tools or [], "max_tokens": max_tokens})
        if answer["op"] == "refused":
            self.context_full = True
            raise ContextFull(answer["message"])
        self.last = answer
        return answer

    async def ask(self, frame: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of the episode."""
        number = self._number
        self._number += 1
        coming = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send({**frame, "id": self._episode, "call": number})
            return await coming
        finally:
            del self._waiting[number]

    def answered(self, frame: dict[str, Any]) -> None:
        """Takes the answer to a call; drops one without a waiting caller."""
        coming = self._waiting.get(frame["call"])
        if coming is not None and not coming.done():
            coming.set_result(frame)


class Channel:
    """Reads the run's frames, and writes this process's own."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._own = os.getpid()
        self._writing = threading.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def read(self) -> dict[str, Any] | None:
        """The next frame, before there is an event loop; None at the end of the input."""
        head = self._exactly(_LENGTH)
        return json.loads(self._exactly(int.from_bytes(head, "big"))) if head else None

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = os.read(self._end, count - len(data))
            if not part:
                return b""
            data += part
        return data

    async def receive(self) -> dict[str, Any] | None:
        """The next frame; None at the end of the input."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(self._end)))
        try:
            head = await self._reader.readexactly(_LENGTH)
            return json.loads(await self._reader.readexactly(int.from_bytes(head, "big")))
        except asyncio.IncompleteReadError:
            return None

    def send(self, frame: dict[str, Any]) -> None:
        """Writes a frame, only in the process of the start: not in its forks."""
        if os.getpid() != self._own:
            return
        data = json.dumps(frame).encode()
        if len(data) > _MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: at most {_MAX_BYTES} can be sent")
        view = memoryview(len(data).to_bytes(_LENGTH, "big") + data)
        with self._writing:
            while view:
                select.select([], [self._end], [])  # the loop's transport has made it non-blocking
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._end, view) :]


async def serve(channel: Channel, hosted: Hosted, interrupt_s: float | None = None) -> None:
    """Answers requests until the input ends. `interrupt_s`: how long a synchronous call of an episode may block; it may
    for ever by default."""
    from .watch import Watch  # this file, started as a program, belongs to no package

    episodes: dict[str, tuple[Turns, asyncio.Task[None]]] = {}

    def ended(name: str, task: asyncio.Task[None]) -> None:
        episodes.pop(name, None)
        if task.cancelled():  # before it had begun; otherwise `_play` has said so
            with contextlib.suppress(OSError):
                channel.send({"op": "cancelled", "id": name})

    if interrupt_s is not None:

        def tell(where: str, seconds: float, is_new: bool) -> None:
            channel.send({"op": "blocks", "where": where, "seconds": seconds, "is_new": is_new})

        Watch(interrupt_s, tell)
    async with contextlib.AsyncExitStack() as stack:
        is_serving = False
        while (frame := await channel.receive()) is not None:
            op, name = frame["op"], frame.get("id", "")
            if op in ("serve", "run") and not is_serving:
                is_serving = await _answered(channel, op, stack.enter_async_context(hosted.serving()))
            if op == "rows":
                channel.send(_rows(hosted, frame))
            elif op == "run":
                turns = Turns(channel, name)
                episodes[name] = (turns, asyncio.create_task(_play(channel, hosted, frame, turns)))
                episodes[name][1].add_done_callback(lambda task, name=name: ended(name, task))
            elif op == "close":
                await _cancel_all(episodes)
                is_serving = not await _answered(channel, op, stack.aclose())
            elif name in episodes:
                turns, task = episodes[name]
                if op == "cancel":
                    task.cancel()
                else:
                    turns.answered(frame)
        await _cancel_all(episodes)


async def _answered(channel: Channel, op: str, work: Awaitable[Any]) -> bool:
    """Awaits `work`, and answers the request `op` by whether it ended well; a failure ends this process if no such
    request was made."""
    try:
        await work
    except Exception as error:
        if op == "run":
            raise
        text = str(error) if isinstance(error, Refused) else f"it raised {_one_line(error)}"
        channel.send({"op": "failed", "message": text, "details": _traceback(error)})
        return False
    if op != "run":
        channel.send({"op": "ended"})
    return True


async def _cancel_all(episodes: dict[str, tuple[Turns, asyncio.Task[None]]]) -> None:
    under_way = [task for _, task in episodes.values()]
    for task in under_way:
        task.cancel()
    if under_way:
        await asyncio.wait(under_way)


def _rows(hosted: Hosted, frame: dict[str, Any]) -> dict[str, Any]:
    try:
        rows = hosted.rows(frame["split"], frame["start"], frame["count"])
        json.dumps(rows)
    except Refused as error:
        return {"op": "failed", "message": str(error)}
    except BaseException as error:  # noqa: BLE001 (any error of the environment's code)
        return {"op": "failed", "message": f"its data set raised {_one_line(error)}", "details": _traceback(error)}
    return {"op": "rows", "rows": rows}


async def _play(channel: Channel, hosted: Hosted, frame: dict[str, Any], turns: Turns) -> None:
    from .watch import EPISODE, Blocked

    answer: dict[str, Any] = {"op": "cancelled"}
    EPISODE.set(frame["id"])
    try:
        answer = {"op": "done", "context_full": turns.context_full, **await hosted.play(frame["task"], turns)}
        json.dumps(answer, allow_nan=True)
    except RewardRaised as error:
        answer = {"op": "raised", "kind": "reward", "details": str(error)[-_MAX_TEXT:]}
    except asyncio.CancelledError:
        pass
    except Blocked as error:
        answer = {"op": "raised", "kind": "blocked", "details": _traceback(error)}
    except BaseException as error:  # noqa: BLE001 (any error of the environment's code)
        answer = {"op": "raised", "kind": "environment", "details": _traceback(error)}
    finally:
        with contextlib.suppress(OSError):
            channel.send({**answer, "id": frame["id"]})


def _traceback(error: BaseException) -> str:
    if isinstance(error, Refused):
        return str(error)
    return "".join(traceback.format_exception(error))[-_MAX_TEXT:]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _take_standard_streams() -> Channel:
    """Moves the channel from standard input to a private descriptor, closed in forks. Printed text goes to stderr, and
    reading returns nothing."""
    end = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: os.close(end))
    return Channel(end)


def load(setup: dict[str, Any]) -> Hosted:
    """The setup's environment, by `load` of its module, here or in its folder."""
    if folder := setup.get("folder"):
        sys.modules[PACKAGE].__path__.append(folder)
    return importlib.import_module(f"{PACKAGE}.{setup['module']}").load(setup)


def main() -> int:
    """Loads the environment and serves; the exit code is 1 if it could not be loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _live_on)
    os.register_at_fork(after_in_child=_as_usual)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = _take_standard_streams()
    setup = channel.read()
    if setup is None:
        return 0
    try:
        hosted = load(setup)
        facts = hosted.facts()
    except Refused as error:
        channel.send({"op": "failed", "message": str(error)})
        return 1
    except BaseException as error:  # noqa: BLE001 (any error of the environment's code)
        channel.send({"op": "failed", "message": f"it raised {_one_line(error)}", "details": _traceback(error)})
        return 1
    channel.send({"op": "ready", **facts})
    asyncio.run(serve(channel, hosted, setup.get("interrupt_s")))
    return 0


def _live_on(*_: object) -> None:
    """SIGTERM may come to all processes of a run: the trainer ends it. The guard ends this one."""


def _as_usual() -> None:
    if signal.getsignal(signal.SIGTERM) is _live_on:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_package() -> Any:
    """This file as a module of the package in its folder; no module of the environment's can hide it."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.host")


if __name__ == "__main__":
    sys.exit(_as_package().main())
