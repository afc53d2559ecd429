"""The orchestrator's process: `python -m slipstream.launch.parts.child SETTINGS`.

It plans the run again from its settings, starts engine, reward workers and teacher, and carries out the trainer's
commands until it is told to end, or the process that started it ends.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import msgspec

from slipstream.config import Loaded, PlannedConfig, RunConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.launch.children import Children, Context
from slipstream.launch.engines import EngineMaker, create_engine
from slipstream.launch.generation import build_executor
from slipstream.launch.parts.process import Queues, Settings, tasks_of
from slipstream.launch.parts.start import begin
from slipstream.launch.prepare import Prepared, prepare
from slipstream.launch.startup import preimport_vllm
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.launch.startup.stages import Stages
from slipstream.orchestrator import garbage_collection
from slipstream.orchestrator.control.remote import Beats, NoticeLog, NoticeProgress, Outbox, serve
from slipstream.processes import heartbeat, lifeline, stacks
from slipstream.processes.exits import leave
from slipstream.processes.signals import StopRequest

_NEVER_S = 365 * 24 * 3600.0
"""A run lasts no longer."""


def main(path: str) -> int:
    """Serve until the end; returns the exit code."""
    stacks.register()
    heartbeat.doing("planning the run again")
    lifeline.Parent()
    lifeline.leave_signals_to_trainer()
    settings = msgspec.json.decode(Path(path).read_bytes(), type=Settings)
    config = RunConfig.model_validate_json(settings.config)
    planned = PlannedConfig.model_validate_json(settings.planned)
    try:
        with persistent_caches(lambda text: None), preimport_vllm(config) as ahead:
            with Beats(_queues(planned, settings).messages):
                prepared = plan_again(config, planned, settings.tasks)
            garbage_collection.freeze()
            carry_out(settings, prepared, partial(create_engine, ahead=ahead))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def plan_again(config: RunConfig, planned: PlannedConfig, tasks: str) -> Prepared:
    """Read environment, data and tokenizer again. Raises ConfigError where that gives another plan or other tasks than
    the trainer has, whose digest is `tasks`."""
    prepared = prepare(Loaded(config, {}))
    ours, theirs = prepared.config.model_dump(mode="json"), planned.model_dump(mode="json")
    differ = [name for name in theirs if ours[name] != theirs[name]]
    if differ:
        raise ConfigError(
            f"the orchestrator plans other settings than the trainer in [{'], ['.join(differ)}]: did files that the "
            "run file names, or this machine's memory, change since the start?"
        )
    if tasks_of(prepared) != tasks:
        raise ConfigError(
            "the environment gives the orchestrator other tasks, or another order, than it gave the trainer: make "
            'tasks follow from split, number and seed alone (a set has no order), or use run.streams = "memory"'
        )
    return prepared


def carry_out(settings: Settings, prepared: Prepared, make_engine: EngineMaker) -> None:
    """Start the generating side of the run in `settings.folder`, and serve."""
    folder, outbox, stages = Path(settings.folder), Outbox(), Stages(settings.began)
    log, progress = NoticeLog(outbox, folder, settings.lineage), NoticeProgress(outbox)
    queues = _queues(prepared.config, settings)
    stages.attach(log, progress)
    context = Context(prepared, log, progress, stages, StopRequest(), make_engine, settings.orchestrator)
    try:
        with Beats(queues.messages), Children(context) as children:
            begin(context, children)
            executor = build_executor(context, children, queues.batches)
            serving = serve(executor, queues.requests, queues.messages, outbox)
            children.event_loop().submit(serving).result(_NEVER_S)
    finally:
        stages.end()
        # The trainer reads no more notices: those of the end are in this process's log.
        for warning in outbox.take_warnings():
            print(f"warning: {warning}", file=sys.stderr, flush=True)


def _queues(config: PlannedConfig, settings: Settings) -> Queues:
    return Queues(config, Path(settings.folder), settings.lineage, settings.orchestrator)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
