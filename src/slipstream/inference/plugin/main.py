"""Entry point of an engine's process: vLLM behind an HTTP server on a private Unix socket, or at addresses of its own.

Bodies are MessagePack records of `slipstream.records`; `/health` is JSON, for people and probes. A run's engine dies
with its supervisor; a server (`--serve`, see `serving.py`) ends at SIGTERM and SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from slipstream.errors import ConfigError, one_line
from slipstream.inference.plugin import ENGINE_VARIABLE, serving, start_marks
from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.inference.plugin.hosts import create_host
from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.preimport import settings_later
from slipstream.inference.plugin.routes import listen
from slipstream.inference.plugin.server import HUNG_S, EngineServer
from slipstream.inference.settings import INFERENCE_SOCKET, SOCKET, EngineSettings
from slipstream.processes import heartbeat, lifeline, stacks
from slipstream.processes.child import END
from slipstream.processes.exits import leave, private_folder
from slipstream.processes.temporary import remove_temporary

_GC_THRESHOLDS = (10_000, 20, 10)
"""By default the garbage of 256 requests of agents is looked for hundreds of times: a quarter of a request's time."""
Open = Callable[[EngineServer, contextlib.AsyncExitStack], Awaitable[None]]
"""Begins to answer; the stack ends it."""


async def serve(
    settings: EngineSettings,
    open_doors: Open,
    ends: Sequence[int] = (END,),
    busy: AbstractContextManager[None] | None = None,
) -> bool:
    """Serve until one of the signals `ends`, or until vLLM dies or hangs; returns False when it died. `busy`: entered
    until it answers."""
    with busy or contextlib.nullcontext():
        server = EngineServer(settings, create_host(engine_arguments(settings), own_process=settings.own_process))
        start_marks.mark("verify")
        try:
            await server.start()
        except BaseException:
            lifeline.begin_end()
            server.host.shutdown()  # a vLLM in processes of its own would keep this one from ending
            raise
        gc.collect()
        gc.freeze()  # what is imported stays: a full collection takes longer than an update may
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()
    doors = contextlib.AsyncExitStack()
    await open_doors(server, doors)
    start_marks.mark(start_marks.READY)
    stop = asyncio.Event()
    for number in ends:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while not (stop.is_set() or server.host.is_dead or server.is_hung()):
        heartbeat.doing(server.doing)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
    if server.is_hung():
        print(f"vLLM has made no token for {HUNG_S:.0f} s while it computes requests: it hangs", file=sys.stderr)
        lifeline.remove_files()
        os._exit(1)  # what hangs would not let itself be shut down
    died = server.host.is_dead
    lifeline.begin_end()
    await doors.aclose()
    server.host.shutdown()
    lifeline.remove_files()
    return not died


async def _open_sockets(server: EngineServer, stack: contextlib.AsyncExitStack) -> None:
    """Those of a run's engine, in its temporary folder."""
    folder = Path(tempfile.gettempdir())
    runner = await listen(server, str(folder / SOCKET))
    stack.push_async_callback(runner.cleanup)
    settings = server.settings
    if not (settings.inference_socket or settings.inference_host):
        return
    from slipstream.inference.plugin.http.listener import listen_inference  # it imports vLLM's front end

    if settings.inference_socket:
        guests = await listen_inference(server, socket=str(folder / INFERENCE_SOCKET))
        stack.push_async_callback(guests.close)
    if host := settings.inference_host:
        key = os.environ[settings.inference_key_variable] if settings.inference_key_variable else ""
        names = [Path(settings.model).name, settings.model]  # Atropos names a model by its folder
        guests = await listen_inference(server, host=host, port=settings.inference_port, key=key, names=names)
        stack.push_async_callback(guests.close)


def _use_patches(settings: EngineSettings) -> None:
    os.environ[patch_table.VARIABLE] = settings.patches
    os.environ[patch_table.ASKED] = ",".join(patch.setting for patch in patch_table.asking(settings))


def run_server(text: str) -> int:
    """Be a server with the settings in this JSON text; returns the exit code."""
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    lifeline.outlive_parent()  # a shell; vLLM registers its plugins in this process, too
    folder = private_folder("engine")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    doors: serving.Doors | None = None
    try:
        lifeline.name_shared_memory()
        lifeline.shield_children(folder)
        doors = serving.Doors(msgspec.json.decode(text, type=serving.ServerSettings))
        doors.announce()
        os.dup2(2, 1)  # vLLM's log is no output
        import uvloop

        with doors.busy():
            settings = serving.with_digests(doors.settings.engine)
        _use_patches(settings)
        return 0 if uvloop.run(serve(settings, doors.open, serving.ENDS, doors.busy())) else 1
    finally:
        if doors is not None:
            doors.close()
        lifeline.remove_files()
        remove_temporary(folder)


def main() -> None:
    """Run an engine; its settings are a JSON file, named on the command line or in a message, or JSON after
    `--serve`."""
    gc.disable()  # until `serve` has loaded all: collections take a fifth of the start and free nothing
    os.environ[ENGINE_VARIABLE] = "1"
    if sys.argv[1:2] == ["--serve"]:
        try:
            leave(run_server(sys.argv[2]))
        except (ConfigError, RuntimeError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
            leave(error.exit_code if isinstance(error, ConfigError) else 1)
    lifeline.leave_signals_to_trainer()
    if len(sys.argv) > 1:
        stacks.register()
    order = lifeline.Parent().receive
    with open(sys.argv[1] if len(sys.argv) > 1 else settings_later(order), "rb") as file:
        settings = msgspec.json.decode(file.read(), type=EngineSettings)
    lifeline.name_shared_memory()
    lifeline.shield_children(Path(tempfile.gettempdir()))
    _use_patches(settings)
    import uvloop

    if uvloop.run(serve(settings, _open_sockets)):
        leave(0)
    print("the engine core died", file=sys.stderr)
    leave(1)


if __name__ == "__main__":
    main()
