"""`EngineProcess`: the child process of one engine, its start, its end and its log.

Guarantees: `start` returns only when the engine is ready (and its version verified, where one was given), or raises
with the child's last error; `stop` leaves no process of the engine's group and no shared memory behind; the child ends
when this process does, however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.client import SILENCE_S, EngineClient
from slipstream.inference.plugin import start_marks
from slipstream.inference.preimport import MODULE, EngineAhead, check_plugin, engine_environment
from slipstream.inference.settings import INFERENCE_SOCKET, SOCKET, EngineSettings
from slipstream.patience import Patience
from slipstream.processes import exits, stacks
from slipstream.processes.launchers import LOCAL, Child, Launcher, Resources
from slipstream.processes.temporary import make_temporary, remove_shared, remove_temporary
from slipstream.weights.model_files import links_to_one_model

_POLL_S = 0.1


class EngineProcess:
    """One engine process on a node (empty: this host). `log_path` takes its output. It is killed when it is silent for
    `silence_s` during a call, or stopped (SIGSTOP) for as long during its start."""

    def __init__(
        self,
        settings: EngineSettings,
        log_path: Path,
        *,
        start_timeout_s: float,
        silence_s: float = SILENCE_S,
        ahead: EngineAhead | None = None,
        launcher: Launcher = LOCAL,
        node: str = "",
    ) -> None:
        self.settings = settings
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.process: Child | None = None
        self._launcher, self._node = launcher, node
        # Of mode 0700, and not in the run folder, whose path may be too long for a Unix socket (108 bytes).
        self._folder = exits.private_folder("engine")
        self._files = make_temporary("engine", log_path.parent) if node else self._folder
        """For the settings: on a disk of all nodes."""
        self.client = EngineClient(
            str(self._folder / SOCKET),
            is_alive=self.is_alive,
            describe=self.describe,
            give_up=self._give_up,
            silence_s=silence_s,
        )
        self._silence_s = silence_s
        self._was_silent = False
        self._stacks = ""
        """Its processes' stacks before it was killed for its silence."""
        self._giving_up = asyncio.Lock()
        self._ahead = ahead
        """A process that has imported vLLM, for the first launch."""
        self._marks = self._folder / "marks"

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        """The phases that its last start has begun, each with its time by `time.monotonic`; the last is
        `start_marks.READY` once it answers."""
        names = start_marks.phase_names(eager=self.settings.enforce_eager)
        return tuple((names.get(mark, mark), at) for mark, at in start_marks.read_marks(self._marks))

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def describe(self) -> str:
        """One sentence on the process's state or exit, with the path of its log."""
        if self.process is None:
            return "engine process never started"
        code = self.process.poll()
        if not self._was_silent:
            return f"engine process {self._where}{exits.ending(code, self.log_path)}"
        state = "said nothing, and cannot be killed" if code is None else "was killed, as it said nothing"
        stacks_said = f"; {self._stacks}" if self._stacks else ""
        return f"engine process {self._where}{state}; its log is {self.log_path}{stacks_said}"

    @property
    def _where(self) -> str:
        return f"on {self._node} " if self._node else ""

    def launch(self) -> None:
        """Start the process without waiting for it."""
        check_plugin()
        model, socket = links_to_one_model(Path(self.settings.model), self._files / "model"), self._folder / SOCKET
        for left in (socket, socket.with_name(INFERENCE_SOCKET)):
            left.unlink(missing_ok=True)
        path = self._files / "settings.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.settings, model=str(model))))
        process: Child | None = None
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._imports_since(ahead.began)
            process = ahead.take(path, self._resources.environment(self._environment(ahead.own)), self.log_path)
        if process is None:
            self._imports_since(time.monotonic())
            environment = self._environment(os.environ)
            launch, resources = self._launcher.launch, self._resources
            process = launch(MODULE, [str(path)], environment, resources, self._node, output=self.log_path)
            process.forward(socket)
        self.process = process
        self._was_silent = False

    @property
    def _resources(self) -> Resources:
        return Resources(threads=self.settings.threads, gpus=self.settings.gpus)

    def _imports_since(self, began: float) -> None:
        self._marks.write_text(f"{began:.3f} import\n")

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        environment = engine_environment(own, on_this_host=not self._node)
        environment |= {
            start_marks.VARIABLE: str(self._marks),
            # What vLLM leaves there when it is killed goes with the folder.
            "TMPDIR": str(self._folder),
        }
        if self.settings.threads is not None and self.settings.tensor_parallel_size > 1:
            # By default vLLM binds each worker to a NUMA node of its own.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return environment

    async def wait_ready(self) -> None:
        """Wait until the engine is in service. Raises `EngineError` with the child's error when it ends,
        `DeadlineError` after `start_timeout_s`."""
        num_stopped = 0  # looks, not seconds: while this process is stopped, it does not look
        with contextlib.suppress(TimeoutError):
            async with Patience(self.start_timeout_s):
                while not await self._is_ready():
                    is_stopped = self.process is not None and not self._node and exits.is_stopped(self.process.pid)
                    num_stopped = num_stopped + 1 if is_stopped else 0
                    if num_stopped * _POLL_S >= self._silence_s:
                        await self._give_up()
                    await asyncio.sleep(_POLL_S)
                return
        if await self._is_ready():  # once more: this process itself may have been held up
            return
        await self.stop()
        raise DeadlineError(
            f"the engine was not ready after {self.start_timeout_s:g} s (inference.start_timeout_s): {self.describe()}"
        )

    @property
    def was_killed(self) -> bool:
        """Whether it was ended from outside: by SIGKILL, as for want of memory, or here as it was silent."""
        return self._was_silent or (self.process is not None and self.process.poll() == -signal.SIGKILL)

    async def _is_ready(self) -> bool:
        if not self.is_alive():
            raise EngineError(f"the engine did not start: {self.describe()}")
        health = await self.client.health()
        return health is not None and health.status == "ready"

    async def _give_up(self) -> None:
        """Kill a silent engine, which may be stopped or frozen; it then counts as dead. All calls that waited for it
        come here at the same moment: the first one asks for the stacks, the others wait."""
        process = self.process
        async with self._giving_up:
            if process is not None and process.poll() is None:
                folder = stacks.prefix_of(self.log_path).parent
                self._stacks = stacks.sentence(folder, await asyncio.to_thread(stacks.ask, folder, process.pid))
                self._was_silent = True
                await asyncio.to_thread(process.end, 0.0)

    async def start(self) -> None:
        """Launch and wait."""
        self.launch()
        await self.wait_ready()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the process and its group: `child.END` first, SIGKILL after `timeout_s`."""
        await self.client.close()
        await asyncio.to_thread(self.kill, timeout_s)

    def kill(self, timeout_s: float = 0.0) -> None:
        """As `stop`, from any thread and without an event loop."""
        if self.process is not None:
            self.process.end(timeout_s)
            remove_shared(self._folder)

    def remove_files(self) -> None:
        """Remove the socket's folder; the process can not be started again afterwards."""
        remove_temporary(self._folder)
        remove_temporary(self._files)
