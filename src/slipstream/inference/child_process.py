"""A child process in a group of its own, its output in a log, and its life on its standard input.

The child is to end when its standard input closes (`plugin/lifeline.py`), which happens however this process ends; or
when another descriptor does that it inherits. `leave` is how a child of ours ends by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream.errors import ConfigError
from slipstream.runlog.temporary import make_temporary

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every vLLM that Slipstream starts: it reports to nobody."""
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment in which `python -m` imports nothing from the current folder, where a file may have the name of a module
of the standard library."""

MAX_SOCKET_FOLDER = 60
"""Bytes of a folder's name: a Unix socket's path has 107, and libraries add names of up to 46 to it."""
_TAIL_BYTES = 1 << 16
_LOGGED = re.compile(r"^(?:\([^()]* pid=\d+\) )?(?:(?:ERROR|CRITICAL) [^\]]*\] )?")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Fault)(?::|$)")
_SECOND_HAND = re.compile(r"Engine core initialization failed|root cause")
"""What vLLM raises because one of its processes raised."""

_DYING_S = 30.0
"""How long a killed process may take to be gone."""

popen: type[subprocess.Popen[bytes]] = subprocess.Popen
"""What starts a child. Tests put a class in its place that forks a process which has imported the libraries already."""


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    *,
    stdin: int = subprocess.PIPE,
    inherits: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start it without waiting for it; what it prints is added to the log, and it has the descriptors `inherits`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return popen(
            command,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=inherits,
            env=environment,
            start_new_session=True,
        )


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, but leave its objects to the kernel: with torch and vLLM imported, it takes
    seconds to take back operators and to free everything one by one."""
    os._exit(_wind_up(code))


def become(arguments: Sequence[str], module: str) -> NoReturn:
    """Go on as a new Python that runs `module`, begun as this one was where that can be told, with `arguments`: of this
    process are left its number, its terminal and its environment."""
    begun, given = list(sys.orig_argv), sys.argv[1:]
    head = begun[1 : len(begun) - len(given)] if begun[len(begun) - len(given) :] == given else ["-P", "-m", module]
    _wind_up(0)
    for name in os.listdir("/proc/self/fd"):  # a driver's would keep its memory
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    os.execv(sys.executable, [sys.executable, *head, *arguments])


def _wind_up(code: int) -> int:
    """Have other threads end, call what is to be called at the end, and flush; the exit code."""
    threading._shutdown()  # type: ignore[attr-defined]
    registry: dict[weakref.finalize[..., Any], Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer, call in list(registry.items()):
        if str(getattr(call.func, "__module__", "")).split(".")[0] in ("torch", "vllm"):
            finalizer.atexit = False
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:  # pyright: ignore[reportUnnecessaryComparison]
                stream.flush()
        except OSError as error:  # what was printed is lost: no success, as Python has it
            code = code or 120
            with contextlib.suppress(OSError):
                os.write(2, f"error: the output cannot be written ({error})\n".encode())
    return code


def ending(code: int | None, log_path: Path) -> str:
    """One sentence's part on how a child is, None: still running, and where its log is; with what it raised at last."""
    state = "is running" if code is None else f"ended with code {code}"
    reason = "" if code is None else last_error(log_path)
    return f"{state}{f' ({reason})' if reason else ''}; its log is {log_path}"


def last_error(log_path: Path) -> str:
    """The last exception that its log tells of, on one line; or its last line; empty when there is no log."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    lines = [text for line in lines if (text := _LOGGED.sub("", line).strip())]
    raised = [place for place, line in enumerate(lines) if _RAISED.match(line) and not _SECOND_HAND.search(line)]
    text = " ".join(lines[raised[-1] : raised[-1] + 4] if raised else lines[-1:])
    return text if len(text) <= 300 else f"{text[:297]}..."


def private_folder(kind: str) -> Path:
    """A new temporary folder for the sockets and files of a child: in the usual place or, where that has too long a
    name for a socket in it, in /tmp. Raises ConfigError when there is no room for one."""
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) + len(kind) > MAX_SOCKET_FOLDER:
            continue
        with contextlib.suppress(OSError):
            return make_temporary(kind, Path(parent))
    raise ConfigError(
        f"there is no folder for the engine's socket: {tempfile.gettempdir()} and /tmp are full, not writable or have "
        f"names of more than {MAX_SOCKET_FOLDER} bytes: set TMPDIR"
    )


def short_temporary_folder(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """TMPDIR for a child whose libraries make sockets too: `folder`, where the usual one has too long a name."""
    usual = environment.get("TMPDIR", "")
    return {"TMPDIR": str(folder)} if len(os.fsencode(usual)) > MAX_SOCKET_FOLDER else {}


def end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End it and everything it started: asked first, unless `timeout_s` is 0, and killed at the deadline. One that is
    held by the kernel (a driver that hangs) lives on, as `process.poll` then says."""
    if process.poll() is None and timeout_s > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    # The group outlives its leader when the leader died alone: always end the group too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DYING_S)
    if process.stdin is not None:
        process.stdin.close()
