"""Runs a model's programs in a sandbox.

With namespaces (`Limits.namespaces`, the default) a program has a file system in memory with Python's standard
library, read-only, and a folder of its own. It has no network, no sight of other processes and a user id without
privileges; CPU time, memory, file size and processes are limited. The kernel kills all its processes when it ends, at
its deadline, and when the caller dies. Limits of memory hold for each process; all together may take `processes` times
as much. The kernel itself is not hidden: a program that breaks it breaks out. System calls are not filtered.

With limits alone, for machines without namespaces, a program runs as the caller's user. It can reach the network and
read and write the user's files, and a daemon can outlive it if it kills its watching process. Its folder is left behind
if the caller is killed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.envs.rewards import sandbox_child
from slipstream.processes import guard
from slipstream.processes.temporary import make_temporary, remove_temporary

MIB = 2**20
_MOUNT_POINT = "/proc"
"""Mount point of a sandbox's file system, in its own namespace: a folder of every machine."""
_GRACE_S = 1.0
_STDERR_BYTES = 4096
_SERIAL = itertools.count(os.getpid() * 1009)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a program."""

    namespaces: bool = True
    memory_mib: int = 1024
    """Address space of each process."""
    processes: int = 16
    """Processes and threads."""
    folder_mib: int = 64
    """Files of its folder together, with namespaces; a file, with limits alone."""
    output_mib: float = 4.0
    """Its standard output."""


class Finished(msgspec.Struct, frozen=True):
    """How a program ended."""

    output: bytes
    status: int | None
    """Exit status, 128 and more after a signal; None if it was killed."""
    reason: str = ""
    """Why it was killed: `deadline` or `output`."""
    errors: bytes = b""
    """The end of its standard error stream."""


class SandboxFailed(Exception):
    """The sandbox itself could not be made."""


class Sandbox:
    """One program in its sandbox; use as a context manager: its end kills the program.

    `files`: texts by name, in the program's current folder. `command`: arguments of the interpreter, such as
    `["main.py"]`.
    """

    def __init__(self, files: Mapping[str, str], command: Sequence[str], limits: Limits, cpu_s: float) -> None:
        self._limits = limits
        self._temporary = None if limits.namespaces else make_temporary("sandbox")
        self._folder = ""
        self._received, self._errors, self._written = bytearray(), b"", 0
        self._exceeded = False
        try:
            self._process = self._start(files, command, cpu_s)
        except BaseException:
            self._remove_folder()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._open = {self._stdout.fileno(), self._stderr.fileno()}

    def _start(self, files: Mapping[str, str], command: Sequence[str], cpu_s: float) -> subprocess.Popen[bytes]:
        limits = self._limits
        if not limits.namespaces:
            assert self._temporary is not None
            self._folder = str(self._temporary / "work")  # beside the file with the folder's owner
            os.mkdir(self._folder, 0o700)
            for name, text in files.items():
                (Path(self._folder) / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        home = "/work" if limits.namespaces else self._folder
        orders = {
            "namespaces": limits.namespaces,
            "serial": next(_SERIAL),
            "folder": self._folder or _MOUNT_POINT,
            "guard": str(Path(guard.__file__).parent),
            "readable": _readable(),
            "files": dict(files),
            "command": [_python(), "-I", "-S", "-B", "-X", "utf8", *command],
            "environment": {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
            "cpu_s": int(cpu_s) + 1,
            "memory_bytes": limits.memory_mib * MIB,
            "folder_bytes": limits.folder_mib * MIB,
            # Without a namespace the kernel counts all processes of the user.
            "processes": limits.processes if limits.namespaces else None,
        }
        data = os.memfd_create("orders")
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        try:
            with os.fdopen(os.dup(data), "wb") as file:
                file.write(json.dumps(orders).encode())
            return subprocess.Popen(
                [_python(), "-I", "-S", "-B", sandbox_child.__file__, str(data), str(report)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(data, report),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(data)
            os.close(report)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, text: bytes, due: float) -> Finished:
        """Gives the program its input and waits for its end, until `due` (monotonic). Raises SandboxFailed."""
        self._send(text, due, close=True)
        while self._open and not self._exceeded and time.monotonic() < due:
            self._wait(due)
        if self._exceeded or self._open:
            self.end()
            return Finished(bytes(self._received), None, "output" if self._exceeded else "deadline", self._errors)
        try:
            status = self._process.wait(max(0.0, due - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return Finished(bytes(self._received), None, "deadline", self._errors)
        self._raise_if_failed(status)
        return Finished(bytes(self._received), status, "", self._errors)

    def send(self, line: bytes, due: float) -> None:
        """Gives the program a line of input; nothing happens if it has ended."""
        self._send(line + b"\n", due, close=False)

    def receive(self, due: float) -> bytes | None:
        """The next line of its output; None if it ends or is too late. Raises SandboxFailed."""
        while (end := self._received.find(b"\n")) < 0:
            if self._exceeded or time.monotonic() >= due:
                return None
            if self._stdout.fileno() not in self._open:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._raise_if_failed(self._process.wait(_GRACE_S))
                return None
            self._wait(due)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def end(self) -> None:
        """Kills the program with everything it started, and removes its folder."""
        if self._process.poll() is None and not self._limits.namespaces:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(guard.END_S + _GRACE_S)
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._temporary is not None:
            remove_temporary(self._temporary)

    def _raise_if_failed(self, status: int) -> None:
        if status != sandbox_child.FAILED:
            return
        with contextlib.suppress(BlockingIOError):
            if reason := os.read(self._report, _STDERR_BYTES):
                raise SandboxFailed(reason.decode(errors="replace"))

    def _send(self, data: bytes, due: float, *, close: bool) -> None:
        rest = memoryview(data)
        while rest and not self._exceeded and time.monotonic() < due and self._stdout.fileno() in self._open:
            try:
                rest = rest[os.write(self._stdin.fileno(), rest) :]
            except BlockingIOError:
                self._wait(due, writes=True)
            except OSError:  # it has ended, or reads nothing
                break
        if close:
            with contextlib.suppress(OSError):
                self._stdin.close()

    def _wait(self, due: float, *, writes: bool = False) -> None:
        """Waits for output, or for room for input, and takes the output."""
        waiting = [self._stdin.fileno()] if writes else []
        ready, _, _ = select.select(list(self._open), waiting, [], max(0.0, due - time.monotonic()))
        for fd in ready:
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                continue
            if not chunk:
                self._open.discard(fd)
            elif fd == self._stderr.fileno():
                self._errors = (self._errors + chunk)[-_STDERR_BYTES:]
            else:
                self._written += len(chunk)
                self._received += chunk
                self._exceeded = self._written > self._limits.output_mib * MIB


@functools.cache
def why_not(limits: Limits) -> str:
    """Why no sandbox of this kind can be made here; empty if one can."""
    try:
        with Sandbox({"main.py": "print(1)"}, ["main.py"], limits, 10.0) as sandbox:
            found = sandbox.run(b"", time.monotonic() + 20.0)
    except (SandboxFailed, OSError) as error:
        return str(error)
    if found.output != b"1\n":
        last = found.errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"a program that prints 1 ended with {found.reason or found.status} {' '.join(last)}".strip()
    return ""


@functools.cache
def _python() -> str:
    """The interpreter outside of any virtual environment."""
    return os.path.realpath(sys.executable)


@functools.cache
def _readable() -> list[str]:
    """The machine's files for the interpreter; a folder within another one is left out."""
    wanted = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = os.path.realpath(sys.base_prefix)
    wanted += [_python(), f"{prefix}/lib/{version}", *map(str, Path(f"{prefix}/lib").glob("lib*.so*"))]
    found = [path for path in wanted if os.path.lexists(path)]
    return [
        path
        for path in dict.fromkeys(found)
        if os.path.islink(path)
        or not any(path.startswith(f"{other}/") for other in found if other != path and not os.path.islink(other))
    ]
