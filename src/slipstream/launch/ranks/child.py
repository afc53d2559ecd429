"""A trainer rank other than 0: `python -m slipstream.launch.ranks.child SETTINGS DESCRIPTOR`.

It loads its shard of the models and executes the commands of rank 0. Guarantees: it ends, with all that it started, as
soon as its channel closes, which happens however rank 0 ends; an error here is sent to rank 0 before this process ends.
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

from slipstream.config import PlannedConfig
from slipstream.errors import ZeroGradientError, first_line
from slipstream.launch.ranks.channel import Channel, ChannelClosed
from slipstream.launch.ranks.processes import RankSettings, rank_threads
from slipstream.processes import heartbeat, lifeline, stacks
from slipstream.processes.child_process import leave


def main(path: str, descriptor: str) -> int:
    """Execute commands until the channel closes."""
    stacks.register()
    heartbeat.doing("importing torch")
    lifeline.leave_signals_to_trainer()
    file = Path(path)
    settings = msgspec.json.decode(file.read_bytes(), type=RankSettings)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, commands, file.parent), name="listen", daemon=True).start()
    try:
        _serve(settings, channel, commands)
    except BaseException as error:  # noqa: BLE001 (rank 0 must learn of any error)
        from slipstream.trainer.distributed.worker import Answer

        traceback.print_exc()
        reason = first_line(error)
        channel.send(msgspec.msgpack.encode(Answer(kind=type(error).__name__, error=reason)), None)
        return 1
    return 0


def _listen(channel: Channel, commands: queue.SimpleQueue[bytes], folder: Path) -> None:
    """Receive commands in a thread of its own, so that the end of rank 0 is noticed at any moment."""
    try:
        with contextlib.suppress(ChannelClosed, OSError):
            while True:
                commands.put(channel.receive(None))
    finally:  # after any error: the end of rank 0 would go unnoticed
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

    heartbeat.doing("loading its shard")
    config = PlannedConfig.model_validate_json(settings.config)
    torch.set_num_threads(rank_threads(config))
    torch.manual_seed(config.run.seed)
    answer(Answer())
    group = RankGroup(settings.store, settings.rank, settings.size, timeout_s=config.training.rank_timeout_s)
    parts = build_parts(config, settings.sampling, group, settings.shared, trains=settings.trains)
    answer(Answer())
    is_warm = False
    while True:
        heartbeat.doing("waiting for rank 0")
        command: AnyCommand = msgspec.msgpack.decode(commands.get(), type=AnyCommand)
        heartbeat.doing(f"the command {type(command).__name__}")
        try:
            answer(parts[command.model].do(command))
            if not is_warm and isinstance(command, Commit) and command.model == POLICY:
                garbage_collection.freeze()
                is_warm = True
        except ZeroGradientError:
            # The same on all ranks: rank 0 decides what follows.
            answer(Answer())


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
