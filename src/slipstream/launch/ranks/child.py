"""One trainer process beside the run's own: `python -m slipstream.launch.ranks.child SETTINGS DESCRIPTOR`.

It loads its share of the model and does what rank 0 says. Guarantees: it ends, with all that it started, as soon as its
channel closes, which the kernel does however rank 0 ends; what goes wrong here is told there before this process ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from slipstream.config import RunConfig
from slipstream.errors import ZeroGradientError
from slipstream.inference.child_process import leave
from slipstream.launch.ranks.channel import Channel, ChannelClosed
from slipstream.launch.ranks.processes import RankSettings, rank_threads


def main(path: str, descriptor: str) -> int:
    """Serve until the channel closes."""
    file = Path(path)
    settings = msgspec.json.decode(file.read_bytes(), type=RankSettings)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, commands, file.parent), name="listen", daemon=True).start()
    try:
        _serve(settings, channel, commands)
    except BaseException as error:  # noqa: BLE001 (whatever it is, rank 0 must learn of it)
        from slipstream.trainer.distributed.worker import Answer

        traceback.print_exc()
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        channel.send(msgspec.msgpack.encode(Answer(kind=type(error).__name__, error=reason)), None)
        return 1
    return 0


def _listen(channel: Channel, commands: queue.SimpleQueue[bytes], folder: Path) -> None:
    """Take commands while others are carried out, so that the end of rank 0 is seen at any moment."""
    try:
        with contextlib.suppress(ChannelClosed, OSError):
            while True:
                commands.put(channel.receive(None))
    finally:  # whatever it was: nobody would see the end of rank 0 any more
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(settings: RankSettings, channel: Channel, commands: queue.SimpleQueue[bytes]) -> None:
    import torch

    from slipstream.launch.build import POLICY, build_parts
    from slipstream.trainer import garbage_collection
    from slipstream.trainer.distributed.fsdp import RankGroup
    from slipstream.trainer.distributed.worker import Answer, AnyCommand, Commit

    def answer(value: Answer) -> None:
        channel.send(msgspec.msgpack.encode(value), None)

    config = RunConfig.model_validate_json(settings.config)
    torch.set_num_threads(rank_threads(config))
    torch.manual_seed(config.run.seed)
    answer(Answer())
    group = RankGroup(settings.store, settings.rank, settings.size, timeout_s=config.training.rank_timeout_s)
    parts = build_parts(config, settings.sampling, group, settings.shared, trains=settings.trains)
    answer(Answer())
    is_warm = False
    while True:
        command: AnyCommand = msgspec.msgpack.decode(commands.get(), type=AnyCommand)
        try:
            answer(parts[command.model].do(command))
            if not is_warm and isinstance(command, Commit) and command.model == POLICY:
                garbage_collection.freeze()
                is_warm = True
        except ZeroGradientError:
            # Of all ranks alike: rank 0 decides what comes of it.
            answer(Answer())


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
