"""A trainer rank other than 0: `python -m slipstream.launch.ranks.child SETTINGS`.

It loads its shard of the models and executes the commands of rank 0. Guarantees: it ends, with all that it started, as
soon as its channel closes, which happens however rank 0 ends; an error here is sent to rank 0 before this process ends.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from pathlib import Path

import msgspec

from slipstream.config import PlannedConfig
from slipstream.errors import ZeroGradientError, first_line
from slipstream.launch.ranks.processes import RankSettings, rank_threads
from slipstream.plan.rank_layout import num_copies
from slipstream.processes import heartbeat, lifeline, stacks
from slipstream.processes.exits import leave


def main(path: str) -> int:
    """Execute commands until the channel closes."""
    stacks.register()
    heartbeat.doing("importing torch")
    lifeline.leave_signals_to_trainer()
    file = Path(path)
    settings = msgspec.json.decode(file.read_bytes(), type=RankSettings)
    parent = lifeline.Parent(at_end=lambda: shutil.rmtree(file.parent, ignore_errors=True))
    try:
        _serve(settings, parent)
    except BaseException as error:  # noqa: BLE001 (rank 0 must learn of any error)
        from slipstream.trainer.distributed.worker import Answer, encode

        traceback.print_exc()
        reason = first_line(error)
        parent.send(encode(Answer(kind=type(error).__name__, error=reason)))
        return 1
    return 0


def _serve(settings: RankSettings, parent: lifeline.Parent) -> None:
    import torch

    from slipstream.launch.build import POLICY, build_parts
    from slipstream.trainer import garbage_collection
    from slipstream.trainer.distributed.fsdp import RankGroup
    from slipstream.trainer.distributed.worker import Answer, AnyCommand, Commit, decode, encode

    def answer(value: Answer) -> None:
        parent.send(encode(value))

    heartbeat.doing("loading its shard")
    config = PlannedConfig.model_validate_json(settings.config)
    torch.set_num_threads(rank_threads(config))
    torch.manual_seed(config.run.seed)
    answer(Answer())
    group = RankGroup(
        settings.store,
        settings.rank,
        settings.size,
        timeout_s=config.training.rank_timeout_s,
        gpu=settings.gpu,
        num_together=config.training.context_parallel,
        num_copies=num_copies(config),
    )
    parts = build_parts(config, settings.sampling, group, settings.shared, trains=settings.trains)
    answer(Answer())
    is_warm = False
    while True:
        heartbeat.doing("waiting for rank 0")
        command: AnyCommand = decode(parent.receive(), AnyCommand)
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
