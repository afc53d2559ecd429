"""Entry point of an engine's process: vLLM behind an HTTP server on a private Unix socket.

Bodies are MessagePack records of `slipstream.records`; `/health` is JSON, for people and probes. The process dies with
its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from slipstream.inference.plugin import ENGINE_VARIABLE, start_marks
from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.inference.plugin.hosts import create_host
from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.preimport import settings_later
from slipstream.inference.plugin.routes import listen
from slipstream.inference.plugin.server import HUNG_S, EngineServer
from slipstream.inference.settings import INFERENCE_SOCKET, SOCKET, EngineSettings
from slipstream.processes import heartbeat, lifeline, stacks
from slipstream.processes.child import END
from slipstream.processes.exits import leave


async def serve(settings: EngineSettings) -> bool:
    """Serve on the socket until `END`, or until vLLM dies or hangs; returns False when it died."""
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
    gc.enable()
    runner = await listen(server, str(Path(tempfile.gettempdir()) / SOCKET))
    guests: list[Any] = []
    if settings.inference_socket or settings.inference_host:
        from slipstream.inference.plugin.http.listener import listen_inference  # it imports vLLM's front end

        names = [Path(settings.model).name, settings.model]
        if settings.inference_socket:
            path = str(Path(tempfile.gettempdir()) / INFERENCE_SOCKET)
            guests.append(await listen_inference(server, socket=path, names=names))
        if host := settings.inference_host:
            key = os.environ[settings.inference_key_variable] if settings.inference_key_variable else ""
            port = settings.inference_port
            guests.append(await listen_inference(server, host=host, port=port, key=key, names=names))
    start_marks.mark(start_marks.READY)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(END, stop.set)
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
    for each in guests:
        await each.close()
    await runner.cleanup()
    server.host.shutdown()
    lifeline.remove_files()
    return not died


def main() -> None:
    """Run an engine; its settings are a JSON file, named on the command line or in a message."""
    gc.disable()  # until `serve` has loaded all: collections take a fifth of the start and free nothing
    os.environ[ENGINE_VARIABLE] = "1"
    lifeline.leave_signals_to_trainer()
    if len(sys.argv) > 1:
        stacks.register()
    order = lifeline.Parent().receive
    with open(sys.argv[1] if len(sys.argv) > 1 else settings_later(order), "rb") as file:
        settings = msgspec.json.decode(file.read(), type=EngineSettings)
    lifeline.name_shared_memory()
    lifeline.shield_children(Path(tempfile.gettempdir()))
    os.environ[patch_table.VARIABLE] = settings.patches
    os.environ[patch_table.ASKED] = ",".join(patch.setting for patch in patch_table.asking(settings))
    import uvloop

    if uvloop.run(serve(settings)):
        leave(0)
    print("the engine core died", file=sys.stderr)
    leave(1)


if __name__ == "__main__":
    main()
