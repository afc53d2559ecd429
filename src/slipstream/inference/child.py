"""A child process in a group of its own, its output in a log, and its life on its standard input.

The child is to end when its standard input closes (`plugin/lifeline.py`), which happens however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every vLLM that Slipstream starts: it reports to nobody."""


def launch(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start it without waiting for it; what it prints is added to the log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def last_lines(log_path: Path, count: int = 15) -> str:
    """The end of what it printed; empty when there is no log."""
    with contextlib.suppress(FileNotFoundError), log_path.open(errors="replace") as file:
        return "".join(deque(file, maxlen=count)).rstrip()
    return ""


def end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End it and everything it started: asked first, unless `timeout_s` is 0, and killed at the deadline."""
    if process.poll() is None and timeout_s > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    # The group outlives its leader when the leader died alone: always end the group too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    if process.stdin is not None:
        process.stdin.close()
