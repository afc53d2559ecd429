"""What a process of a run starts: engine, teacher, trainer ranks, reward workers, the orchestrator's thread.

Guarantees: all of them end with the run, in the opposite order of their start, whatever ends it; `kill` ends the
processes at once, from any thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import FrameSummary
from types import TracebackType
from typing import Any, Self

from slipstream.atropos.entrance import Entrance
from slipstream.clusters.opening import open_nodes
from slipstream.config import PlannedConfig
from slipstream.doctor.nodes import examine_nodes
from slipstream.envs.base import Environment
from slipstream.envs.lifetime import set_up, shut_down
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, EngineError, Interrupted
from slipstream.inference.addresses import addresses_of, own_host_of
from slipstream.launch.engines import EngineMaker, RunEngine, engine_plan
from slipstream.launch.prepare import Prepared
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.launch.recovery.fallbacks import has_fallback
from slipstream.launch.recovery.restarts import cause_of
from slipstream.launch.startup.stages import Stages
from slipstream.launch.teacher import launch_teacher
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import JOIN_AGAIN, interface_of
from slipstream.orchestrator.event_loop_watch import blame
from slipstream.orchestrator.gateway import gateway_of
from slipstream.orchestrator.teacher_engine import RunTeacher
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.processes import stacks
from slipstream.processes.launchers import LOCAL
from slipstream.processes.rendezvous import INTERFACE
from slipstream.processes.signals import StopRequest
from slipstream.processes.variables import variables_set
from slipstream.progress import Progress
from slipstream.records import SamplingParams
from slipstream.runlog import EventLog, RunLog, exit_code_of
from slipstream.weights.bridges.single_copy import SharedWeights


@dataclass(frozen=True)
class Context:
    """What all parts of a run need: its plan, and where to write and show what happens."""

    prepared: Prepared
    log: EventLog
    progress: Progress
    stages: Stages
    should_stop: StopRequest
    make_engine: EngineMaker
    orchestrator: int = 0
    """Which of several this process is (`run.orchestrators`)."""

    @property
    def config(self) -> PlannedConfig:
        """The planned config."""
        return self.prepared.config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.log.folder


@dataclass(frozen=True)
class RunContext(Context):
    """The same in the process that writes the run folder."""

    log: RunLog
    may_differ: frozenset[str] = frozenset()
    """Names of the checkpoint's digests that a resume may find changed."""
    is_supervised: bool = False
    """Whether another process starts the run again where it says so."""


class Children:
    """The processes and the thread of one run; leaving the context ends those that were started."""

    def __init__(self, run: Context) -> None:
        self._run = run
        self._exits = contextlib.ExitStack()
        self.nodes: Nodes | None = None
        self.engine: RunEngine | None = None
        self.teacher: RunTeacher | None = None
        self.gateway = gateway_of(run.config, run.prepared.images_of_agents)
        """Of agents, if there are any; it ends with the event loop."""
        self.entrance: Entrance | None = None
        """Lets groups of rollouts in from outside."""
        self.model_urls: list[str] = []
        """Addresses of the engines for foreign clients, if there are any."""
        self._scorer: ScorerPool | None = None
        self._environment: Environment | None = None
        """Set once its `setup` has begun."""
        self._thread: EventLoopThread | None = None
        self.error: BaseException | None = None
        """What ended the run, once it ends; None where it ended by itself."""
        self._kills: list[Callable[[], None]] = []
        run.should_stop.at_once = self.kill

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.error = error
        self._exits.close()

    def kill(self) -> None:
        """End all processes at once, from any thread."""
        with contextlib.ExitStack() as stack:  # the others too when one of them raises
            for kill in self._kills:
                stack.callback(kill)

    def killed_by(self, kill: Callable[[], None]) -> None:
        """Another process of the run, which `kill` ends at once, from any thread."""
        self._kills.append(kill)

    def at_exit(self, end: Callable[[], None]) -> None:
        """Call `end` when the run ends, before what was started earlier ends."""
        self._exits.callback(end)

    def create_engine(self) -> RunEngine:
        """Create the run's engine, not launched yet; the same one in every call."""
        from slipstream.trainer.model.loading import resolve_folder

        if self.engine is None:
            import torch

            run, config = self._run, self._run.config
            folder, on_cpu = resolve_folder(config.model.path), not torch.cuda.is_available()
            launcher = LOCAL if self.nodes is None else self.nodes
            number = run.orchestrator
            plan = engine_plan(
                config,
                str(folder),
                on_cpu=on_cpu,
                orchestrator=number,
                launcher=launcher,
                servers=run.prepared.facts.servers,
            )
            self.model_urls = plan.model_urls(run.folder)
            self.engine = run.make_engine(plan, run.folder / "logs", self._engine_event)
            self.killed_by(self.engine.kill)
            self.at_exit(self.engine.kill)
            run.stages.watch(self.engine)
            for replica, path in enumerate(self.engine.sockets, plan.first_number):
                run.log.event("engine_socket", path=path, replica=replica)
        return self.engine

    def _engine_event(self, kind: str, **fields: Any) -> None:
        """Write an event of an engine; people see its warnings."""
        if kind == "warning":
            self._run.log.warning(**fields)
        else:
            self._run.log.event(kind, **fields)

    def launch_teacher(self) -> RunTeacher:
        """Begin to start the teacher."""
        run = self._run
        self.teacher = launch_teacher(run.prepared, run.folder, run.log, run.make_engine)
        self.killed_by(self.teacher.kill)
        self.at_exit(self.teacher.kill)
        return self.teacher

    def join_nodes(self, attempt: int) -> None:
        """Wait for the agents of other nodes, if there are any. At the end of the run they get its exit code."""
        cluster, run = self._run.config.cluster, self._run
        if cluster.nodes == 1:
            return
        run_id, log = cluster.run_id or run.folder.name, run.folder / "logs" / f"{cluster.launcher}.log"
        with run.stages.stage("wait for the nodes"):
            nodes = open_nodes(cluster, run_id, attempt, log, run.should_stop)
            self.at_exit(lambda: nodes.close(self._exit_code()))
            nodes.wait(cluster.join_timeout_s, run.log.warning, run.should_stop)
        if INTERFACE not in os.environ:
            self._exits.enter_context(variables_set({INTERFACE: nodes.interface}))
        self.nodes = nodes
        with run.stages.stage("compare the nodes"):
            found = [*examine_nodes(nodes, run.config, run.folder, is_full=False)]
        if run.should_stop():  # a scheduler's signal also ends the nodes' doctors
            raise Interrupted("stopped while the nodes were compared: continue with --resume")
        if nodes.lost:
            raise EngineError(f"{nodes.lost}: continue with --resume")
        run.log.event("nodes", findings=[asdict(each) for each in found])
        for each in found:
            if each.verdict == "warning":
                run.log.warning(str(each))
        if faults := [str(each) for each in found if each.verdict == "fault"]:
            raise ConfigError("; ".join(faults))

    def meet_servers(self) -> None:
        """Have weights go to servers over the interface towards them."""
        if not (servers := self._run.config.inference.servers) or INTERFACE in os.environ:
            return
        host = own_host_of(addresses_of(servers))
        if not (interface := interface_of(host)):
            raise ConfigError(f"no network interface has this host's address {host}: set {INTERFACE}")
        self._exits.enter_context(variables_set({INTERFACE: interface}))

    def _exit_code(self) -> int:
        """The run's, for agents."""
        if has_fallback(self.error, self._run.prepared.loaded.config):
            return JOIN_AGAIN
        return exit_code_of(cause_of(self.error))

    def start_ranks(self, sampling: SamplingParams, shared: tuple[SharedWeights, ...]) -> RankProcesses:
        """Start the trainer's ranks 1 and up; `shared`: the engine's weights that they train in place, if any."""
        ranks = RankProcesses(self._run.config, sampling, self._run.folder / "logs", shared, nodes=self.nodes)
        self.killed_by(ranks.kill)
        self.at_exit(ranks.close)
        return ranks

    def create_scorer(self) -> ScorerPool:
        """Create the pool of reward workers, which the caller enters in the event loop."""
        assert self._run.config.environment is not None
        if self._run.prepared.environment is not None:
            self._run.prepared.environment.attach(log_folder=self._run.folder / "logs")
        reward = stacks.folder_of(self._run.folder) / "reward"
        self._scorer = ScorerPool(self._run.config.environment, warn=self._run.log.warning, stacks=reward)
        return self._scorer

    async def set_up_environment(self) -> None:
        """Call the environment's `setup`; its `close` is called when the event loop ends."""
        section, environment = self._run.config.environment, self._run.prepared.environment
        assert section is not None
        assert environment is not None
        self._environment = environment
        environment.attach(self._run.log.warning)
        await set_up(environment, section.run_timeout_s)

    def event_loop(self) -> EventLoopThread:
        """The orchestrator's thread, started in the first call. Its end ends reward workers, engine and teacher."""
        if self._thread is None:
            thread = self._thread = EventLoopThread(self._run.should_stop, self._loop_blocked)

            async def close() -> None:
                if self.gateway is not None:
                    await self.gateway.close()
                if self._environment is not None:
                    await shut_down(self._environment, self._run.log.warning)
                if self._scorer is not None:
                    await self._scorer.__aexit__(None, None, None)
                for child in (self.entrance, self.engine, self.teacher):
                    if child is not None:
                        await child.stop()

            def stop() -> None:
                if not thread.stop(close()):
                    self._run.log.warning(
                        "work of the environment did not end when it was cancelled: the engine is killed now"
                    )

            self.at_exit(stop)
        return self._thread

    def _loop_blocked(self, stack: Sequence[FrameSummary], seconds: float) -> None:
        """Report a synchronous call that blocks the event loop."""
        where, warning = blame(stack, seconds, self._run.prepared.environment)
        self._run.log.event("loop_held_up", seconds=seconds, where=where)
        if warning:
            self._run.log.warning(warning)
