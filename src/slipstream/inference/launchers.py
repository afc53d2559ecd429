"""Who starts the processes of a run: the process that needs them, or a command of their own.

`SUBPROCESSES` starts a child of this process. `Elsewhere` writes an order into the run folder, and a command that the
user has started (`slipstream orchestrator`, `slipstream engine`) takes it (`take_orders`) and starts the process.
Guarantees of the latter: the process ends when the one that ordered it ends, or the command; each hears of the other's
end by a file lock, which the kernel releases (not while the command is stopped). Orders name no program, and hold only
the environment variables in `SENT`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from slipstream.errors import ConfigError, DataError, DeadlineError
from slipstream.processes import child_process
from slipstream.processes.files import UNDECODABLE, open_own
from slipstream.regular_files import read_regular
from slipstream.runlog.files import usable

ORDERS = "parts"
"""Folder of the orders in a run folder."""
TAKEN_S = 300.0
"""How long an order may wait for a command that takes it."""
SENT = {
    *child_process.OFFLINE,
    *child_process.SAFE_PATH,
    "CUDA_VISIBLE_DEVICES",
    "KMP_BLOCKTIME",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "SLIPSTREAM_ENGINE",
    "SLIPSTREAM_GPUS_IN_USE",
    "SLIPSTREAM_MARKS",
    "SLIPSTREAM_PATCHES",
    "TMPDIR",
    "VLLM_CPU_ATTN_SPLIT_KV",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_PLUGINS",
}
"""Variables that Slipstream sets for a process; all others are those of the command that starts it."""
_POLL_S = 0.1
_ENDING_S = 30.0
_LOOK_S = 5.0
"""`is_locked` holds a lock for an instant, or as long as its process is stopped in it."""


class Child(Protocol):
    """A started process, as `subprocess.Popen` describes it."""

    @property
    def pid(self) -> int:
        """Its number; 0 while it is not known."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ...


class Launcher(Protocol):
    """Starts and ends processes that run a module of Slipstream."""

    def launch(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Start one without waiting for it; its output is appended to `log`."""
        ...

    def end(self, child: Child, timeout_s: float) -> None:
        """End it and its process group: `child_process.END` first, unless `timeout_s` is 0, and SIGKILL at the
        deadline."""
        ...

    def kill(self, child: Child) -> None:
        """Kill it and its process group without waiting."""
        ...


class Subprocesses:
    """Children of this process."""

    def launch(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """See `Launcher`."""
        return child_process.launch([sys.executable, "-m", module, *arguments], environment, log)

    def end(self, child: Child, timeout_s: float) -> None:
        """See `Launcher`."""
        assert isinstance(child, subprocess.Popen)
        child_process.end(child, timeout_s)

    def kill(self, child: Child) -> None:
        """See `Launcher`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


SUBPROCESSES = Subprocesses()


class Order(msgspec.Struct, frozen=True):
    """What one process of a run asks for, in `<name>.order`."""

    id: str
    arguments: list[str]
    variables: dict[str, str]
    log: str
    ends_in_s: float | None = None
    """Set when the process is to end: seconds from `child_process.END` to SIGKILL, 0 for SIGKILL at once."""


class State(msgspec.Struct, frozen=True):
    """What has become of an order, in `<name>.state`."""

    id: str
    pid: int
    code: int | None = None


class Orders:
    """The files of one part of a run, such as `engine-0`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.order, self.state = folder / f"{name}.order", folder / f"{name}.state"
        self.owner, self.server = folder / f"{name}.owner", folder / f"{name}.server"
        """Locked by the process that gave the newest order, and by the command that takes orders."""

    def read_order(self) -> Order | None:
        """The newest one."""
        return _read(self.order, Order)

    def read_state(self) -> State | None:
        """Of the order that was taken last."""
        return _read(self.state, State)


class Elsewhere:
    """Processes that a command of the user's starts; `folder` is where the orders are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._children: dict[str, ChildElsewhere] = {}

    def launch(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ChildElsewhere:
        """See `Launcher`. The part's name is that of the log."""
        del module  # the command knows it
        own = {name: value for name, value in environment.items() if name in SENT}
        order = Order(uuid.uuid4().hex, list(arguments), own, str(log.absolute()))
        name = name_of_part(log.stem)
        if (before := self._children.get(name)) is not None:
            before.end(0.0)
        child = self._children[name] = ChildElsewhere(Orders(self._folder, name), order)
        return child

    def end(self, child: Child, timeout_s: float) -> None:
        """See `Launcher`."""
        assert isinstance(child, ChildElsewhere)
        child.end(timeout_s)

    def kill(self, child: Child) -> None:
        """See `Launcher`."""
        assert isinstance(child, ChildElsewhere)
        child.ask_to_end(0.0)


class ChildElsewhere:
    """A process that was ordered."""

    def __init__(self, orders: Orders, order: Order) -> None:
        self._orders, self._order = orders, order
        orders.order.unlink(missing_ok=True)  # that of an attempt that was killed
        self._deadline = time.monotonic() + TAKEN_S
        self._code: int | None = None
        self._ending = threading.Lock()
        self._lock = lock(orders.owner, _ENDING_S)
        if self._lock is None:
            raise DeadlineError(
                f"another process still waits for {orders.name} after {_ENDING_S:.0f} s: end what an earlier attempt "
                "of the run has left"
            )
        try:
            _write(orders.order, order)
        except BaseException:
            self.release()
            raise

    @property
    def pid(self) -> int:
        """See `Child`."""
        state = self._state()
        return state.pid if state is not None else 0

    @property
    def is_taken(self) -> bool:
        """Whether a command has started it."""
        return self._state() is not None

    def poll(self) -> int | None:
        """See `Child`; 1 where nobody took the order in `TAKEN_S`, -9 where the command that did has ended."""
        if self._code is None:
            state, kind = self._state(), self._orders.name.rpartition("-")[0]
            if state is not None and state.code is not None:
                self._code = state.code
            elif state is None and time.monotonic() > self._deadline:
                self._fail(1, f"nobody has started `slipstream {kind}` for this run in {TAKEN_S:.0f} s (run.elsewhere)")
            elif state is not None and not is_locked(self._orders.server):
                last = self._state()
                if last is not None and last.code is None:
                    why = f"the command `slipstream {kind}` that had started this process has ended"
                    self._fail(-signal.SIGKILL, why)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """See `Child`."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self._orders.name, timeout or 0.0)
            time.sleep(_POLL_S / 2)
        return code

    def ask_to_end(self, timeout_s: float) -> None:
        """Order its end without waiting for it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk: it ends when the lock is released
                _write(self._orders.order, msgspec.structs.replace(self._order, ends_in_s=timeout_s))

    def end(self, timeout_s: float) -> None:
        """See `Launcher`."""
        if self._lock is None:
            return
        self.ask_to_end(timeout_s)
        try:
            if self.is_taken:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.wait(timeout_s + _ENDING_S)
            else:
                self._code = -signal.SIGKILL
        finally:
            self.release()

    def release(self) -> None:
        """Need it no more: it ends. Threads may do so at the same time."""
        with self._ending:
            handle, self._lock = self._lock, None
        if handle is not None:
            unlock(handle)

    def _state(self) -> State | None:
        state = self._orders.read_state()
        return state if state is not None and state.id == self._order.id else None

    def _fail(self, code: int, why: str) -> None:
        self._code = code
        _note(self._order, f"{'EngineError' if 'engine' in self._orders.name else 'OrchestratorError'}: {why}")


def take_orders(
    orders: Orders,
    module: str,
    is_over: Callable[[], bool],
    patience_s: float,
    say: Callable[[str], None],
    ends_at: Callable[[], float] = lambda: math.inf,
) -> bool:
    """Start what is ordered, one process after the other, until `is_over` and nobody is left who could order. Returns
    False where nobody has ordered anything for `patience_s`. Raises ConfigError where another command does the same.
    `ends_at`: by `time.monotonic`, when a process that is still needed is killed; once it is known, none follows."""
    with _serving(orders):
        last, until = "", time.monotonic() + patience_s
        if (before := orders.read_state()) is not None:  # of a command that was killed, and its process with it
            last = before.id
            if before.code is None:
                _write(orders.state, msgspec.structs.replace(before, code=-signal.SIGKILL))
        while True:
            order, has_owner = orders.read_order(), is_locked(orders.owner)
            if ends_at() < math.inf:
                return True
            if order is not None and order.id != last and order.ends_in_s is None and has_owner:
                last = order.id
                code = _carry_out(orders, order, module, say, ends_at)
                say(f"{orders.name} ended with code {code}")
                until = time.monotonic() + patience_s
            elif not has_owner and is_over():
                return True
            elif time.monotonic() > until:
                return False
            time.sleep(_POLL_S)


def _carry_out(
    orders: Orders, order: Order, module: str, say: Callable[[str], None], ends_at: Callable[[], float]
) -> int:
    """Start the process of an order; end it when that is ordered, when nobody waits for it, or at `ends_at`."""
    own = {name: value for name, value in order.variables.items() if name in SENT}
    try:
        child = SUBPROCESSES.launch(module, order.arguments, {**os.environ, **own}, Path(order.log))
    except OSError as error:
        say(f"{orders.name} cannot be started: {error}")
        _note(order, f"OSError: the command could not start it: {error}")
        _write(orders.state, State(order.id, 0, 1))
        return 1
    _write(orders.state, State(order.id, child.pid))
    say(f"{orders.name} is process {child.pid}; its log is {order.log}")
    killed_at = None
    try:
        while child.poll() is None:
            newest, now = orders.read_order(), time.monotonic()
            if not is_locked(orders.owner):
                say(f"{orders.name} ends: the process that needed it has ended")
                killed_at = now
            elif newest is None or newest.id != order.id or now >= ends_at():
                killed_at = now
            elif newest.ends_in_s is not None:
                if killed_at is None and newest.ends_in_s:
                    child.send_signal(child_process.END)
                killed_at = min(killed_at or math.inf, now + newest.ends_in_s)  # a later order may be shorter
            if killed_at is not None and now >= killed_at:
                child_process.end(child, 0.0)
            else:
                time.sleep(_POLL_S)
    finally:
        child_process.end(child, 0.0)
    code = int(child.returncode)
    _write(orders.state, State(order.id, child.pid, code))
    return code


@contextlib.contextmanager
def _serving(orders: Orders) -> Generator[None]:
    handle = lock(orders.server, _LOOK_S)
    if handle is None:
        raise ConfigError(f"another process takes the orders for {orders.name} of {orders.order.parent}: end it first")
    try:
        yield
    finally:
        unlock(handle)


def _note(order: Order, text: str) -> None:
    """Write into the process's log, where the run looks for a reason."""
    with contextlib.suppress(OSError):
        Path(order.log).parent.mkdir(parents=True, exist_ok=True)
        with open(open_own(Path(order.log), os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(f"{text}\n")


def name_of_part(stem: str) -> str:
    """`engine-0` of the only engine, whose log has no number."""
    return stem if stem.rpartition("-")[2].isdigit() else f"{stem}-0"


def lock(path: Path, timeout_s: float) -> int | None:
    """Lock a file until `unlock`, or until this process ends; None where another one has it for `timeout_s`."""
    handle = open_own(path, os.O_RDWR)
    until = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(handle)
                return None
            time.sleep(_POLL_S / 5)
        else:
            return handle


def unlock(handle: int) -> None:
    """End a lock, also where a forked process has a copy of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


R = TypeVar("R", Order, State)


def _read(path: Path, kind: type[R]) -> R | None:
    try:
        with usable(path):
            return msgspec.json.decode(read_regular(path), type=kind)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise DataError(f"{path} is damaged ({error}): end the run, remove the file, and resume") from error


def _write(path: Path, record: msgspec.Struct) -> None:
    """Replace the file at once, readable for this user only."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    handle = open_own(new, os.O_WRONLY | os.O_TRUNC)
    with open(handle, "wb") as file:
        file.write(msgspec.json.encode(record))
    new.replace(path)
