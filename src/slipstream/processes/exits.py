"""A child as it ends itself (`leave`, `become`), what its end and its log tell, and its variables and folder."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream.errors import ConfigError
from slipstream.processes.heartbeat import state_of
from slipstream.processes.temporary import make_temporary

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every vLLM of Slipstream's: no usage statistics."""
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment for `python -m` to import nothing from the current folder: a file may have the name of a module
of the standard library there."""

MAX_SOCKET_FOLDER = 48
"""Bytes of a temporary folder's name and a kind: a Unix socket's path has 107, our folder's own name takes 22 and
vLLM's of a socket in it 37."""
_TAIL_BYTES = 1 << 16
_LOGGED = re.compile(r"^(?:\([^()]* pid=\d+\) )?(?:(?:ERROR|CRITICAL) [^\]]*\] )?(?:\[rank\d+\]: *)?")
"""Prefix of a line from processes, vLLM's logger and torch.distributed."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Fault)(?::|$)")
_SECOND_HAND = re.compile(r"Engine core initialization failed|root cause|failed to be inspected")
"""Errors of vLLM that only report an earlier one."""
_BESIDE = re.compile(r"(?:DEBUG|INFO|WARNING) \d\d-\d\d ")

_SHARED = "/dev/shm"
"""The place of shared memory of vLLM's processes. Without it their errors name no file."""


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, but without freeing its objects: with torch and vLLM imported this takes
    seconds."""
    os._exit(_wind_up(code))


def become(arguments: Sequence[str], module: str) -> NoReturn:
    """Replace this process (exec) with a new Python for `module` with `arguments`, by this one's own command line
    if it is known. Its pid, terminal and environment stay."""
    begun, given = list(sys.orig_argv), sys.argv[1:]
    head = begun[1 : len(begun) - len(given)] if begun[len(begun) - len(given) :] == given else ["-P", "-m", module]
    prepare_exec()
    os.execv(sys.executable, [sys.executable, *head, *arguments])


def become_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process (exec) with `python -m module` in this environment."""
    prepare_exec()
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], dict(environment))


def prepare_exec() -> None:
    """Join threads, flush, and have descriptors closed by an exec: a driver's would keep its memory."""
    _wind_up(0)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)


def _wind_up(code: int) -> int:
    """Join threads, run exit functions but for those of torch and vLLM, and flush; returns the exit code."""
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
        except OSError as error:  # the printed text is lost: no success, as Python has it
            code = code or 120
            with contextlib.suppress(OSError):
                os.write(2, f"error: the output cannot be written ({error})\n".encode())
    return code


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, as by SIGSTOP, or by a debugger."""
    return state_of(pid) in ("T", "t")


def ending(code: int | None, log_path: Path) -> str:
    """Part of a sentence on a child's exit code (None: it runs), its last exception, and its log."""
    state = "is running" if code is None else f"ended with code {code}"
    reason = "" if code is None else last_error(log_path)
    shared = "" if not code or os.access(_SHARED, os.W_OK) else f", and nothing can be written to {_SHARED}"
    return f"{state}{f' ({reason})' if reason else ''}{shared}; its log is {log_path}"


def last_error(log_path: Path) -> str:
    """The last exception in a child's log on one line, or its last line; empty when there is no log."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    texts = (text for line in lines if (text := _LOGGED.sub("", line).strip()) and not _BESIDE.match(text))
    lines = list(_not_ignored(texts))
    raised = [place for place, line in enumerate(lines) if _RAISED.match(line) and not _SECOND_HAND.search(line)]
    text = " ".join(lines[raised[-1] : raised[-1] + 4] if raised else lines[-1:])
    return text if len(text) <= 300 else f"{text[:297]}..."


def _not_ignored(lines: Iterable[str]) -> Iterator[str]:
    """Lines without exceptions that Python reports and goes on, as those of an object's end."""
    is_ignored = False
    for line in lines:
        is_ignored = is_ignored or line.startswith("Exception ignored ")
        if not is_ignored:
            yield line
        elif _RAISED.match(line):
            is_ignored = False


def private_folder(kind: str) -> Path:
    """A new temporary folder for a child's sockets and files: in the usual place or, if its path is too long for a
    socket, in /tmp or /dev/shm. Raises ConfigError when none can be made."""
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) + len(kind) > MAX_SOCKET_FOLDER:
            continue
        with contextlib.suppress(OSError):
            return make_temporary(kind, Path(parent))
    raise ConfigError(
        f"there is no folder for the engine's socket: {tempfile.gettempdir()} and /tmp are full, not writable or have "
        f"names of more than {MAX_SOCKET_FOLDER} bytes: set TMPDIR"
    )
