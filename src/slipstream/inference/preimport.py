"""`EngineAhead`: a process for importing vLLM while the settings are still unknown; it then becomes the engine.

Its imports run beside the reading of model and data. Guarantees: it becomes the engine only if its environment equals
the engine's in everything libraries read at import; it ends with its parent process,
and when nobody takes it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.inference.plugin import ENGINE_VARIABLE, start_marks
from slipstream.processes import exits
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.files import open_own
from slipstream.processes.launchers import LOCAL, Child, Resources
from slipstream.processes.libraries import remove_unfinished
from slipstream.processes.temporary import cache_root, private_folder, remove_temporary

MODULE = "slipstream.inference.plugin.main"
_READ_LATER = {start_marks.VARIABLE, "TMPDIR"}
"""Environment variables not read at import."""


def engine_environment(own: Mapping[str, str], *, on_this_host: bool = True) -> dict[str, str]:
    """The environment of an engine's processes as far as it does not depend on settings: `own`, and ours on top."""
    environment = dict(own)
    environment |= {
        **exits.OFFLINE,
        **exits.SAFE_PATH,
        ENGINE_VARIABLE: "1",
        **({"VLLM_PLUGINS": _with_ours(environment["VLLM_PLUGINS"])} if "VLLM_PLUGINS" in environment else {}),
        # Idle OpenMP threads must not spin: the trainer needs the same cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
    if on_this_host and sys.pycache_prefix:  # by `compile_caches`; Python ignores an empty variable
        environment |= {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""}
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # A CPU's attention divides contexts among threads if there are few sequences. Sums then depend on a step's chance
    # requests, and the same run would not give the same bits.
    environment.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # Its usual place is in TMPDIR, another folder for each engine. Code is loaded from it, so it is private.
    if not environment.get("TORCHINDUCTOR_CACHE_DIR"):
        with contextlib.suppress(OSError, RuntimeError):  # no usable home: torch makes one in the engine's TMPDIR
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(cache_root(environment) / "engines"))
    if folder := environment.get("TORCHINDUCTOR_CACHE_DIR"):
        remove_unfinished(Path(folder))
    return environment


def _with_ours(plugins: str) -> str:
    """The user's VLLM_PLUGINS with ours added; without the variable vLLM loads all installed plugins."""
    return ",".join(dict.fromkeys([*filter(None, plugins.split(",")), "slipstream"]))


def check_plugin() -> None:
    """Raise `ConfigError` if vLLM would not find the entry point of Slipstream's plugin: vLLM would say so after its
    start of a minute."""
    if "slipstream" not in {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}:
        raise ConfigError(
            "vLLM will not load Slipstream's plugin, without which its tokens and updates cannot be trusted: install "
            "the package (pip install), so that its entry point in vllm.general_plugins is found"
        )


class EngineAhead:
    """One preimporting process, started at construction. Leaving the context ends it unless it was taken."""

    def __init__(self, threads: int | None) -> None:
        self.began = time.monotonic()
        self.own = dict(os.environ)
        """This process's environment at construction; libraries imported later may change it."""
        resources = Resources(threads=threads)
        self._environment = resources.environment(engine_environment(self.own))
        self._folder = exits.private_folder("ahead")
        self._output = self._folder / "output"
        self._process: Child | None = None
        self._process = LOCAL.launch(MODULE, (), self._environment, resources, output=self._output)

    def __enter__(self) -> EngineAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end(0.0)
            self._process = None
        remove_temporary(self._folder)

    def take(self, settings: Path, environment: Mapping[str, str], log_path: Path) -> Child | None:
        """Order the process to become the engine of `settings`, with its output in the log, and return it. None, with
        the reason in the log, when it has ended or `environment` differs in variables read at import; None when
        it was taken before."""
        process, self._process = self._process, None
        if process is None:
            return None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        names = {*environment, *self._environment} - _READ_LATER
        differ = sorted(name for name in names if environment.get(name) != self._environment.get(name))
        with open(open_own(log_path, os.O_WRONLY | os.O_APPEND), "ab") as log:
            log.write(self._output.read_bytes())
            if differ or process.poll() is not None:
                process.end(0.0)
                why = f"it had other values of {', '.join(differ)}" if differ else f"code {process.poll()}"
                log.write(f"a process that imported vLLM ahead does not become the engine: {why}\n".encode())
                return None
        later = {name: environment[name] for name in _READ_LATER & environment.keys()}
        order = {"settings": str(settings), "environment": later, "log": str(log_path)}
        with contextlib.suppress(ChannelClosed):  # it has just ended; `wait_ready` reports it
            Channel(process.socket).send(json.dumps(order).encode())
        return process
