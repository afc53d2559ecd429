"""Ends a child process with its parent, by the end of its channel (`Parent`), and not by signals that are meant for the
trainer. vLLM starts its own processes, which poll their parent's pid (`follow_parent`). A child's shared memory is
named after its temporary folder: the folder's owner removes both when the child was killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from types import FrameType

from slipstream.processes.channel import Channel, Garbage
from slipstream.processes.temporary import FOLDER_VARIABLE, PREFIX, named_after, note_shared, remove_shared

_POLL_S = 0.5
_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ENDING = "SLIPSTREAM_ENDING"
"""Environment variable of vLLM's processes: a file that exists from when their engine ends."""
_to_remove: set[str] = set()
_following: set[int] = set()


def follow_parent() -> None:
    """Kill this process within half a second of its parent's death."""
    pid, parent = os.getpid(), os.getppid()
    if pid in _following:
        return
    _following.add(pid)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def outlive_parent() -> None:
    """A server stays when its parent ends: `follow_parent` has no effect in this process."""
    _following.add(os.getpid())


class Parent:
    """The process that started this one: its messages, and this one's answers. When its end of the channel closes, as
    the kernel does however it ends, this process's whole group is killed. (PR_SET_PDEATHSIG would follow the *thread*
    that started this process, which may end early.)"""

    def __init__(self, at_end: Callable[[], object] = lambda: None) -> None:
        """`at_end` is called before the group is killed."""
        self._channel = Channel.of_parent()
        self._at_end = at_end
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.receive = self._messages.get
        """Waits for the next message."""
        threading.Thread(target=self._follow, name="follow-parent", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send it a message. Raises `ChannelClosed`."""
        self._channel.send(message)

    def _follow(self) -> None:
        try:
            while True:
                self._messages.put(self._channel.receive())
        except Garbage as error:
            print(f"the parent's channel brings {error}: it is closed", file=sys.stderr, flush=True)
        finally:  # after any error: the parent's end would go unnoticed
            self._at_end()
            remove_files()
            os.killpg(os.getpgrp(), signal.SIGKILL)


def leave_signals_to_trainer() -> None:
    """Live on when a scheduler or systemd signals all processes of a run: the trainer saves a checkpoint first, for
    which it needs this one. What this process forks or executes is ended by such a signal as usual."""
    for number in _FOR_THE_TRAINER:
        signal.signal(number, _live_on)
    os.register_at_fork(after_in_child=_as_usual)


def _live_on(number: int, frame: FrameType | None) -> None:
    pass


def _as_usual() -> None:
    for number in _FOR_THE_TRAINER:
        if signal.getsignal(number) is _live_on:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def shield_children(folder: Path) -> None:
    """Have vLLM's other processes, which end on SIGTERM, do so only after `begin_end`; `folder` is this engine's."""
    path = folder / "ending"
    path.unlink(missing_ok=True)  # of the one before
    os.environ[_ENDING] = str(path)


def begin_end() -> None:
    """From now on SIGTERM ends them."""
    if path := os.environ.get(_ENDING):
        with contextlib.suppress(OSError):
            Path(path).touch()


def follow_end() -> None:
    """In one of them, after vLLM has set its handlers."""
    path = os.environ.get(_ENDING)
    if path is None or multiprocessing.parent_process() is None:
        return
    signal.signal(signal.SIGUSR1, _live_on)
    for number in (signal.SIGTERM, signal.SIGINT):
        ends = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, ends: object = ends) -> None:
            if os.path.exists(path) and callable(ends):
                ends(number, frame)

        if callable(ends):
            signal.signal(number, handle)


def remove_at_end(path: str) -> None:
    """Have `path` removed when this process ends, also by `Parent`."""
    _to_remove.add(path)
    if folder := _own_folder():
        note_shared(folder, path)


def name_shared_memory() -> None:
    """Have what `multiprocessing` makes in shared memory, here and in children, named after this process's temporary
    folder, where it has one of its own."""
    if not (folder := _own_folder()):
        return
    memory, semaphore = named_after(folder)
    if hasattr(shared_memory, "_make_filename"):
        setattr(shared_memory, "_make_filename", lambda: f"/{memory}{secrets.token_hex(8)}")  # noqa: B010
    config = getattr(multiprocessing.current_process(), "_config", {})
    if "semprefix" in config:  # it adds a dash itself
        config["semprefix"] = f"/{semaphore.removesuffix('-')}"


def _own_folder() -> Path | None:
    """The temporary folder that whoever started this process made for it."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or os.environ.get("TMPDIR", ""))
    return folder if folder.name.startswith(PREFIX) else None


def remove_files() -> None:
    """Remove them now, and all shared memory of this process's folder."""
    for path in _to_remove:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _to_remove.clear()
    if folder := _own_folder():
        remove_shared(folder)
