"""A run in the caller's order of steps: the parts of `launch.run`, without a loop and without signal handlers.

Guarantees: engine, ranks and reward workers end with the context, also by an exception, and `exit.json` says why.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from slipstream.config import Loaded, RunConfig, SFTConfig
from slipstream.config.atropos import atropos_settings
from slipstream.config.traits import has_curriculum
from slipstream.errors import ConfigError
from slipstream.launch.children import RunContext
from slipstream.launch.engines import create_engine
from slipstream.launch.prepare import Prepared, prepare
from slipstream.launch.provenance.stock import take_stock
from slipstream.launch.recovery.fallbacks import with_fallbacks
from slipstream.launch.recovery.restarts import AttemptFailed
from slipstream.launch.recovery.resume import refuse_to_resume, same_commit
from slipstream.launch.run import Parts, opened, started
from slipstream.launch.start import new_run_folder
from slipstream.launch.startup import preimport_vllm
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.launch.startup.stages import Stages
from slipstream.processes.signals import StopRequest
from slipstream.progress import Progress
from slipstream.runlog import holds_run
from slipstream.runlog.files import refuse_in_use


@dataclass(frozen=True)
class OpenSession:
    """The parts of a session."""

    parts: Parts
    stop: StopRequest
    resumed_step: int | None
    """The step of the folder's last checkpoint; None in a new folder."""


@contextmanager
def open_session(loaded: Loaded, progress: Progress) -> Generator[OpenSession]:
    """Start engine and ranks, and load the models, in `run.folder` or a new folder. Nothing starts
    a session again after an error."""
    refuse(loaded.config)
    folder = loaded.config.run.folder or new_run_folder("session")
    refuse_in_use(folder)
    resume, stages = holds_run(folder), Stages()
    with persistent_caches(lambda text: None), preimport_vllm(loaded.config) as ahead:
        with stages.stage("read model and data"):
            prepared = prepare(same_commit(loaded) if resume else loaded)
        step = refuse_to_resume(folder, prepared.config) if resume else None
        with stages.stage("compute digests"):
            stock = take_stock(prepared, folder, progress, resume=resume)
        # Signals are the caller's: Ctrl-C raises KeyboardInterrupt in his program.
        stop = StopRequest()
        stack = ExitStack()
        with opened(prepared, folder, stock, step, progress, stages) as (log, _):
            about = (log, progress, stages, stop, partial(create_engine, ahead=ahead))

            def start(planned: Prepared) -> Parts:
                with ExitStack() as begun:
                    parts = begun.enter_context(started(RunContext(planned, *about, may_differ=stock.may_differ)))
                    stack.push(begun.pop_all())
                    return parts

            try:
                parts = with_fallbacks(prepared, start, log)
                with stack:
                    yield OpenSession(parts, stop, step)
            except AttemptFailed as lost:
                raise lost.error from lost.error.__cause__


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for a run with an order of its own, or with a process above the trainer."""
    problem = ""
    if isinstance(config.algorithm, SFTConfig):
        kind = config.algorithm.kind
        problem = f'algorithm.kind = "{kind}" makes no rollouts: use another recipe, and s.train(..., loss="sft")'
    elif config.run.streams != "memory":
        problem = f'run.streams = "{config.run.streams}" has a supervisor, and a session has none: leave it out'
    elif config.cluster.nodes > 1:
        problem = f"cluster.nodes = {config.cluster.nodes}: a session runs on one node"
    elif atropos_settings(config.environment) is not None:
        problem = 'environment.name = "atropos" chooses its own tasks: use `slipstream train`'
    elif has_curriculum(config):
        problem = 'environment.curriculum = "adaptive" follows the order of a run: use "none", and choose the tasks'
    if problem:
        raise ConfigError(problem)
