"""A child process in a group of its own, its output in a log, and its life on its standard input.

The child is to end when its standard input closes (`plugin/lifeline.py`), which happens however this process ends; or
when another descriptor does that it inherits. `leave` is how a child of ours ends by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every vLLM that Slipstream starts: it reports to nobody."""


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
    os._exit(code)


def last_lines(log_path: Path, count: int = 15) -> str:
    """The end of what it printed; empty when there is no log."""
    with contextlib.suppress(FileNotFoundError), log_path.open(errors="replace") as file:
        return "".join(deque(file, maxlen=count)).rstrip()
    return ""


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
