"""Processes that are forked instead of started: a server imports vLLM, or torch and transformers, once, and whatever
needs them begins as a fork of it, seconds later instead of ten or twenty.

`ForkedPopen` is `subprocess.Popen` but for that: `ForkServers.install` puts it where Slipstream starts its children
(`slipstream.processes.launchers.popen`; `forked_workers` is the guard of a worker of rewards), in this process and in
those that are forked. What a child sees is what an executed one sees: its environment, arguments, descriptors,
folder, session and main module. Real starts are those of other modules, of environments that differ in what libraries
read while they are imported, of tests that are marked `real_start`, and all where SLIPSTREAM_REAL_STARTS is set.

A server has one thread and nothing computed, so a fork of it is whole. It ends with the process that it serves.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import setproctitle

from slipstream.processes import exits, launchers

VARIABLE = "SLIPSTREAM_REAL_STARTS"
ROOT = Path(__file__).parents[1]
KINDS = {
    "slipstream.inference.plugin.main": "engine",
    "slipstream.inference.plugin.try_settings": "engine",
    "slipstream.cli": "trainer",
    "slipstream.python.child": "trainer",
    "slipstream.launch.ranks.child": "trainer",
    "slipstream.launch.parts.child": "trainer",
    "slipstream.launch.parts.watchdog": "trainer",
    "benchmarks.weight_sync": "trainer",
    "tests.launch.quick_rank": "trainer",
    "tests.system.loops": "trainer",
    "tests.system.slow_end": "trainer",
    **{f"examples.algorithms.{name}": "trainer" for name in ("best_of_n", "echo", "self_play")},
    "tests.config.mutate": "engine",
}
"""Modules whose processes are forked, and the server that forks them."""
WORKER = ["-P", "-m", "slipstream.envs.scoring.worker"]
"""Of a worker of rewards or tools, which a guard of the same server starts."""
STARTS_WORKERS = "tests/envs/"
"""Tests of the workers themselves start them."""
PRELOADED = {
    "engine": (
        "slipstream.inference.plugin.main",
        "slipstream.inference.plugin.weights.receiver",
        "slipstream.inference.plugin.patches.patch_table",
        "vllm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "vllm.lora.punica_wrapper.punica_cpu",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.renderers.hf",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
    ),
    "trainer": (
        "slipstream.cli.app",
        "slipstream.launch.run",
        "slipstream.launch.build",
        "slipstream.launch.prepare",
        "slipstream.trainer.distributed.fsdp",
        "slipstream.trainer.distributed.worker",
        "slipstream.commands.small_models.tiny_qwen3",
        "slipstream.view",
        "transformers.models.qwen3.modeling_qwen3",
    ),
    "worker": ("slipstream.envs.scoring.worker",),
}
ENVIRONMENT = {
    "engine": {
        "SLIPSTREAM_ENGINE": "1",
        "VLLM_PLUGINS": "slipstream",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        **exits.OFFLINE,
    },
    "trainer": {},
    "worker": {},
}
"""What a server has beside its owner's variables; idle threads never spin, as in the children themselves."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
READ_EARLY = re.compile(
    r"(PYTHON|LD_|CUDA|TORCH|TRITON|VLLM|HF_|TRANSFORMERS|MKL|OPENBLAS|ATEN|DNNL|ONEDNN|XDG_|LANG|LC_).*|HOME|TZ"
)
"""Variables that libraries, or Python, read once, at import: a child whose differ is started for real."""
READ_LATER = {
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "VLLM_API_KEY",
    "PYTHONSAFEPATH",
    *ENVIRONMENT["engine"],
}
NUM_THREADS = "1"
"""OpenMP gives every new thread what it has read when it was loaded, so a fork has as many threads as its server."""
_FIRST_FREE = 64
"""Descriptors of a request are moved above this number before each gets the number that it is to have."""


def forks(command: list[str], environment: dict[str, str] | None) -> str | None:
    """The server that forks this command; None where it has to be started for real."""
    if environment is None:
        environment = dict(os.environ)
    if command[:3] == [sys.executable, "-I", "-S"] and command[-3:] == WORKER:
        return "worker" if _forks_worker(environment) else None
    program = command[1:] if command[1:2] != ["-P"] else command[2:]
    if command[0] != sys.executable or program[:1] != ["-m"] or program[1] not in KINDS:
        return None
    if environment.get("OMP_NUM_THREADS") != NUM_THREADS:
        return None
    theirs, ours = ({k: v for k, v in each.items() if v and _is_read_early(k)} for each in (environment, _usual))
    return KINDS[program[1]] if theirs == ours else None


def _forks_worker(environment: dict[str, str]) -> bool:
    process = sys.modules["slipstream.envs.scoring.process"]
    passed_on = process.worker_environment((), _usual)
    theirs, ours = ({k: v for k, v in each.items() if v and _is_read_early(k)} for each in (environment, passed_on))
    return theirs == ours and not _test.startswith(STARTS_WORKERS)


def take_for_usual(environment: Mapping[str, str]) -> None:
    """What libraries have set in it when they were imported is not a reason to start a child for real."""
    global _usual
    _usual = dict(environment)


def _is_read_early(name: str) -> bool:
    return READ_EARLY.fullmatch(name) is not None and name not in READ_LATER


_usual: dict[str, str] = dict(os.environ)
"""This process's environment before a test, or the child itself, changes it for its children."""
_sockets: Path | None = None
"""Folder of the servers' sockets, where there are any."""
_owned: ForkServers | None = None
"""In the process that starts servers when they are first needed; its children find them by their sockets."""
_test = ""
"""The test that runs."""


def name_context(test: str) -> None:
    """Where coverage is measured, note what runs from now on as run by this test."""
    global _test
    _test = test
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
        measured.switch_context(test)


class ForkedPopen(subprocess.Popen[Any]):
    """A child of a fork server, which is its parent and tells when it has ended."""

    _link: socket.socket | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest: Any) -> None:
        """As `Popen`'s: start it, and close its ends of the pipes."""
        kind = forks(list(args), env) if _sockets is not None else None
        if kind is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        pipes, start_new_session = rest[3:9], rest[14]  # as in Python 3.11 to 3.13
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": list(args),
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "new_session": bool(start_new_session),
            "descriptors": [0, 1, 2, *pass_fds],
        }
        if _owned is not None:
            _owned.start(kind)
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(str(_sockets / f"{kind}.sock"))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        fds = array.array("i", [*streams, *pass_fds])
        self._link.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        answer = self._link.recv(64)
        if not answer:
            raise OSError(f"the fork server for {kind} has ended: look at {_sockets / kind}.log")
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._link is None:
            return super()._try_wait(wait_flags)
        if self._link.fileno() < 0:  # nobody has waited for it, and both are garbage
            return self.pid, int(signal.SIGKILL)
        try:
            answer = self._link.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._link.close()
        # Without a server there is nobody to ask: it was killed, and its children are.
        return self.pid, int(answer) if answer else int(signal.SIGKILL)

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._link is None:
            return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class ForkServers:
    """The servers of this process, each started when it is first needed; they end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """From now on children are forked."""
        global _sockets, _owned
        importlib.import_module("slipstream.envs.scoring.process")
        _sockets, _owned, launchers.popen = self.folder, self, ForkedPopen
        try:
            yield
        finally:
            _sockets, _owned, launchers.popen = None, None, subprocess.Popen
            self.stop()

    def start(self, kind: str) -> None:
        """A trainer may ask for an engine or a worker, and cannot start its server."""
        with self._starting:
            for each in PRELOADED if kind == "trainer" else (kind,):
                if each not in self._servers:
                    self._servers[each] = self._start(each)

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(self.folder / f"{kind}.sock"))
        listening.listen(64)
        program = f"from {__name__} import serve; serve({kind!r}, {listening.fileno()}, {str(self.folder)!r})"
        environment = {**os.environ, **ENVIRONMENT[kind], **PASSIVE, "OMP_NUM_THREADS": NUM_THREADS}
        with listening, (self.folder / f"{kind}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listening.fileno()],
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def stop(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers.values():
            try:
                server.wait(2)
            except subprocess.TimeoutExpired:  # it is still importing, and has no children
                server.kill()
                server.wait(30)


def forked_by(pids: set[int], folder: Path | None = None) -> set[int]:
    """Processes that were forked for one of `pids`, which is not their parent."""
    folder = folder or _sockets
    if folder is None or not (folder / "forked").exists():
        return set()
    pairs = (line.split() for line in (folder / "forked").read_text().splitlines())
    return {int(forked) for requester, forked in pairs if int(requester) in pids}


class _Server:
    """Answers requests one after the other; the main loop of a server process."""

    def __init__(self, listening: socket.socket, folder: Path, set_by_imports: dict[str, str]) -> None:
        self._listening, self._folder, self._set_by_imports = listening, folder, set_by_imports
        self._links: dict[int, socket.socket] = {}
        """Children that have not ended, and whom to tell."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Until standard input closes; all children are killed then."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for source in (self._listening, self._wake, 0):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for pid in self._links:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is self._listening:
                    self._answer(self._listening.accept()[0])
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 512)
                    self._tell()

    def _answer(self, link: socket.socket) -> None:
        try:
            data, fds, *_ = socket.recv_fds(link, 1 << 20, 64)
        except ConnectionError:
            data = b""
        if not data:
            link.close()
            return
        request = json.loads(data)
        requester = _peer(link)
        sys.stdout.flush()
        sys.stderr.flush()
        begun, tells = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(begun)
            self._become(request, fds, link, tells)
        for fd in (*fds, tells):
            os.close(fd)
        os.read(begun, 1)  # as `Popen` returns when the program is executed: in its session and folder
        os.close(begun)
        with (self._folder / "forked").open("a") as file:
            file.write(f"{requester} {pid}\n")
        self._links[pid] = link
        with contextlib.suppress(OSError):
            link.send(str(pid).encode())

    def _tell(self) -> None:
        while self._links:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._links.pop(pid) as link, contextlib.suppress(OSError):
                link.send(str(status).encode())

    def _become(self, request: dict[str, Any], fds: list[int], link: socket.socket, tells: int) -> None:
        """Be what the request asks for, from here to the end of this process."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for each in (self._listening, link, *self._links.values()):
                each.close()
            for end in (self._wake, self._woken):
                os.close(end)
            tells = _take_descriptors(fds, request["descriptors"], tells)
            sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
            sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
            if request["new_session"]:
                os.setsid()
            os.environ.clear()
            os.environ.update(self._set_by_imports | request["environment"])
            take_for_usual(os.environ)
            name_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
            os.chdir(request["folder"])
            os.close(tells)
            global _sockets
            _sockets, launchers.popen = self._folder, ForkedPopen
            if request["command"][-3:] == WORKER:
                _be_guard(request["command"])
            code = _run(request["command"])
        except BaseException:  # noqa: BLE001 (as the interpreter does)
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                exits.leave(code)
            os._exit(code)


def _peer(link: socket.socket) -> int:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _take_descriptors(fds: list[int], numbers: list[int], own: int) -> int:
    """Each of `fds` becomes one of `numbers`; returns where `own` is now."""
    *high, moved = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE + max(numbers)) for fd in (*fds, own))
    for fd in (*fds, own):
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    return moved


def _stream(fd: int, before: Any) -> Any:
    """The text stream on what is a descriptor's file by now; the one `before` knows whether that before it can seek."""
    through = before.write_through
    binary = open(fd, "wb", buffering=0 if through else -1, closefd=False)  # noqa: SIM115 (open to the end)
    by_line = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(binary, before.encoding, before.errors, line_buffering=by_line, write_through=through)


def _be_guard(command: list[str]) -> None:
    from .forked_workers import be_guard

    setproctitle.setproctitle(" ".join(command))
    be_guard(command, _run, exits.leave)


def _run(command: list[str]) -> int:
    """`command` as the interpreter runs it; its exit code."""
    is_safe = command[1] == "-P"
    module, *arguments = command[2 + is_safe :]
    setproctitle.setproctitle(" ".join(command))
    tempfile.tempdir = None
    sys.orig_argv[:] = command
    sys.argv[:] = [module, *arguments]
    if not (is_safe or os.environ.get("PYTHONSAFEPATH")):
        sys.path.insert(0, os.getcwd())
    gc.unfreeze()
    gc.enable()
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def serve(kind: str, descriptor: int, folder: str) -> None:
    """Import, then answer requests."""
    gc.disable()
    setproctitle.setproctitle(f"fork server: {kind}")  # the first call finds its place by the environment
    before = dict(os.environ)
    for name in PRELOADED[kind]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vllm."):  # where this vLLM has another module, a child imports it
                raise
    set_by_imports = dict(os.environ.items() - before.items())
    for name in (*KINDS, WORKER[-1]):
        module = sys.modules.get(name)
        if module is not None and not hasattr(module, "__path__"):  # it runs as the main module, from its beginning
            package, _, attribute = name.rpartition(".")
            del sys.modules[name]
            delattr(sys.modules[package], attribute)
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    _Server(socket.socket(fileno=descriptor), Path(folder), set_by_imports).serve()
