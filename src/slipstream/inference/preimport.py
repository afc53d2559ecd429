"""A process that imports vLLM while nobody knows yet with which settings: it becomes the engine, and its imports took
place beside the reading of model and data.

Guarantees: an engine that comes of it is one that was started at once, as everything that libraries read while they are
imported is the same, or it is not taken; it ends with the process that started it, and where nobody takes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.inference import child_process
from slipstream.inference.plugin import ENGINE_VARIABLE, start_marks
from slipstream.inference.plugin.patches import patch_table
from slipstream.runlog.temporary import remove_temporary

MODULE = "slipstream.inference.plugin.main"
_READ_LATER = {patch_table.VARIABLE, start_marks.VARIABLE, "TMPDIR"}
"""Variables that decide nothing before an engine is made."""


def engine_environment(own: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """The environment of an engine's processes, as far as it does not depend on settings, in addition to our `own`;
    `threads` of a CPU."""
    environment = dict(own)
    environment |= {
        **child_process.OFFLINE,
        **child_process.SAFE_PATH,
        ENGINE_VARIABLE: "1",
        **({"VLLM_PLUGINS": _with_ours(environment["VLLM_PLUGINS"])} if "VLLM_PLUGINS" in environment else {}),
        # Idle OpenMP threads must not spin: the trainer needs the same cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    return environment


def _with_ours(plugins: str) -> str:
    """The user's list of vLLM's plugins, with ours; without a list vLLM loads all that are installed."""
    return ",".join(dict.fromkeys([*filter(None, plugins.split(",")), "slipstream"]))


class EngineAhead:
    """One such process, which begins to import when this is made. Leaving the context ends it, unless it was taken."""

    def __init__(self, threads: int | None) -> None:
        self.began = time.monotonic()
        self.own = dict(os.environ)
        """Our variables then; what libraries that are imported since have set is theirs."""
        self._environment = engine_environment(self.own, threads)
        self._folder = child_process.private_folder("ahead")
        self._output = self._folder / "output"
        self._process: subprocess.Popen[bytes] | None = None
        self._process = child_process.launch([sys.executable, "-m", MODULE], self._environment, self._output)

    def __enter__(self) -> EngineAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            child_process.end(self._process, 0.0)
            self._process = None
        remove_temporary(self._folder)

    def take(self, settings: Path, environment: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes] | None:
        """The engine's process, which from now on reads `settings` and writes to the log; None, with the reason in the
        log, where it has ended, or may have imported something else than it would have under `environment`; and where
        it was taken before."""
        process, self._process = self._process, None
        if process is None:
            return None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        names = {*environment, *self._environment} - _READ_LATER
        differ = sorted(name for name in names if environment.get(name) != self._environment.get(name))
        with log_path.open("ab") as log:
            log.write(self._output.read_bytes())
            if differ or process.poll() is not None:
                child_process.end(process, 0.0)
                why = f"it had other values of {', '.join(differ)}" if differ else f"code {process.returncode}"
                log.write(f"a process that imported vLLM ahead does not become the engine: {why}\n".encode())
                return None
        assert process.stdin is not None
        later = {name: environment[name] for name in _READ_LATER & environment.keys()}
        order = {"settings": str(settings), "environment": later, "log": str(log_path)}
        with contextlib.suppress(BrokenPipeError):  # it has just ended, as whoever waits for it will find
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        return process
