"""A run on this machine: trainer in the main thread, orchestrator in another, the engine in a child process.

Guarantees: whatever ends the run, the engine and the reward workers end with it and `exit.json` says why; the
engine starts while the trainer loads, so that neither waits for the other's imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

from slipstream.config import dump_resolved, needs_engine_logprobs
from slipstream.config.traits import apply_timeout_s, update_phase
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.launch.batch_order import START_GRACE_S, Draws, quiet_s, waits_of
from slipstream.launch.build import (
    Trained,
    build,
    build_objective,
    build_sharded,
    compile_ahead,
    import_ahead,
    share_weights,
)
from slipstream.launch.engine_sleep import Turns
from slipstream.launch.engines import EngineMaker, RunEngine, create_engine, engine_plan
from slipstream.launch.fallbacks import with_fallbacks
from slipstream.launch.log_events import logged_as_events
from slipstream.launch.plan.memory.last_run import record_memory
from slipstream.launch.prepare import Prepared
from slipstream.launch.progress import Progress, title_of, warn
from slipstream.launch.ranks.processes import RankCrew, rank_threads
from slipstream.launch.recovery.out_of_memory import told_of_memory
from slipstream.launch.recovery.restarts import WeightsLost, earlier_attempts, has_lost_weights, start_again
from slipstream.launch.recovery.resume import changed_settings, identity_of, refuse_to_resume
from slipstream.launch.recovery.shortages import begun_with
from slipstream.launch.result import RunResult
from slipstream.launch.signals import StopRequest
from slipstream.launch.startup.compile_caches import lasting_caches
from slipstream.launch.startup.stages import WAIT, Stages
from slipstream.launch.teacher import RunTeacher, launch_teacher
from slipstream.launch.weight_sync import repeats_updates, run_bridge, travelled, update_metrics
from slipstream.orchestrator.batcher import Batcher
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.event_loop_watch import blame
from slipstream.orchestrator.probe import Probe
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.orchestrator.sft_batches import GoldReader
from slipstream.orchestrator.thread import EventLoopThread, Orchestrator, RolloutReader
from slipstream.orchestrator.versions import Versions
from slipstream.records import ApplyReport, EngineHealth, SamplingParams, Ticket
from slipstream.runlog import RunLog, read_events, read_settings, sample_of
from slipstream.sinks import MetricSinks, run_of
from slipstream.weights import Announce
from slipstream.weights.bridges.single_copy import SharedWeights

if TYPE_CHECKING:
    from slipstream.trainer.loop import TrainingLoop

_HEALTH_SHOWN = ("vllm_version", "plugin_version", "patches", "patches_left_out")


def train(
    prepared: Prepared,
    folder: Path,
    progress: Progress,
    *,
    resume: bool = False,
    make_engine: EngineMaker = create_engine,
    stages: Stages | None = None,
) -> RunResult:
    """Carry out the plan in `folder`. Raises what ended the run early, after everything was stopped, and `StartsAgain`
    where it has not ended. `stages` may have some already."""
    stages, step = stages or Stages(), refuse_to_resume(folder, prepared.config) if resume else 0
    with (
        StopRequest(on_first=lambda: progress.message("stopping at the next safe place; again to end at once")) as stop,
        RunLog.create(folder, resume=resume) as log,
        logged_as_events(log, progress.message),
    ):
        before = read_settings(folder) if resume else {}
        log.resolved(dump_resolved(prepared.loaded, prepared.plan.derived))
        changed = changed_settings(before, read_settings(folder)) if before else []
        warnings = list(prepared.plan.warnings)
        memory = begun_with(prepared.config)
        found = {"dropped": prepared.dropped, "warnings": warnings, "changed": changed}
        log.event("start", resume=resume, **found, memory=memory)
        for text in warnings:
            progress.message(text, "warning")
        for text in prepared.plan.notices:
            progress.message(text)
        for reason, count in prepared.dropped.items():
            progress.message(f"left out: {count} ({reason})")
        if changed:
            progress.message(f"resumed with other settings than before: {'; '.join(changed)}", "warning")
        with MetricSinks(prepared.config.run.sinks, run_of(folder, log.lineage, read_settings(folder)), log) as sinks:
            log.listen(sinks.put)
            log.listen(stages.on_row)
            stages.attach(log, progress)
            progress.start(title_of(prepared.config), prepared.config.training.steps, step)
            try:
                with lasting_caches(partial(warn, log, progress)):
                    return with_fallbacks(
                        prepared,
                        lambda planned: _Run(planned, progress, log, stop, make_engine, stages).carry_out(resume),
                        log,
                        progress,
                    )
            except WeightsLost as lost:
                start_again(lost, log, progress, prepared.config.run.max_restarts, stop)
            finally:
                stages.end()
                progress.stop()


class _Run:
    """The parts of one run and their order of coming and going."""

    def __init__(
        self,
        prepared: Prepared,
        progress: Progress,
        log: RunLog,
        stop: StopRequest,
        make_engine: EngineMaker,
        stages: Stages,
    ) -> None:
        self._stages = stages
        self.prepared = prepared
        self.config = prepared.config
        self.folder = log.folder
        self.progress = progress
        self.log = log
        self.should_stop = stop
        self._exits = contextlib.ExitStack()
        self._draws = Draws(prepared)
        self._make_engine = make_engine
        self._engine: RunEngine | None = None
        self._teacher: RunTeacher | None = None
        self._crew: RankCrew | None = None
        self._health: EngineHealth | None = None
        self._loop: TrainingLoop | None = None
        self._thread: EventLoopThread | None = None
        self._scorer: ScorerPool | None = None
        stop.at_once = self._kill

    def _kill(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, whatever becomes of the first
            for child in (self._engine, self._teacher, self._crew):
                if child is not None:
                    stack.callback(child.kill)

    def _warn(self, text: str) -> None:
        warn(self.log, self.progress, text)

    def _held_up(self, stack: Sequence[FrameSummary], seconds: float) -> None:
        """The orchestrator's loop stands still."""
        where, warning = blame(stack, seconds, self.prepared.environment)
        self.log.event("loop_held_up", seconds=seconds, where=where)
        if warning:
            self._warn(warning)

    def carry_out(self, resume: bool) -> RunResult:
        """Start what is needed, train, say what came of it, and end everything in the opposite order."""
        with self._exits:
            try:
                with told_of_memory(self.prepared, self.log):
                    return self._train(resume)
            except Exception as error:
                if not has_lost_weights(error, self._engine):
                    raise
                raise WeightsLost(error, self._loop.trained_s if self._loop else 0.0) from error

    def _train(self, resume: bool) -> RunResult:
        config = self.config
        begins = f"starting vLLM (its log: {self.folder / 'logs'}) and " if self.prepared.uses_engine else ""
        self.progress.message(f"{begins}loading the model")
        if self.prepared.uses_engine and config.weights.bridge != "restart":
            self._create_engine().launch()
        if config.teacher is not None:
            self._teacher = launch_teacher(self.prepared, self.folder, self.log, self.progress, self._make_engine)
            self._exits.callback(self._teacher.kill)
        loop = self._loop = self._build_loop(resume)
        self.log.listen(record_memory(self.log, self.prepared.config.model.path))
        self.progress.ready()
        self._stages.begin_steps(loop.step)
        loop.run()
        checkpoint, best = loop.store.latest(resumable=False), loop.store.best()
        orchestrator = loop.engine if isinstance(loop.engine, Orchestrator) else None
        return RunResult(
            self.folder,
            loop.step,
            orchestrator.last_evaluation if orchestrator else None,
            checkpoint / "weights" if checkpoint else None,
            best / "weights" if best else None,
        )

    def _create_engine(self) -> RunEngine:
        from slipstream.trainer.model.policy import resolve_folder

        if self._engine is None:
            import torch

            folder, on_cpu = resolve_folder(self.config.model.path), not torch.cuda.is_available()
            plan = engine_plan(self.config, str(folder), on_cpu=on_cpu)
            self._engine = self._make_engine(plan, self.folder / "logs", self.log.event)
            self._exits.callback(self._engine.kill)
            self._stages.watch(self._engine)
            for replica, path in enumerate(self._engine.sockets):
                self.log.event("engine_socket", path=path, replica=replica)
        return self._engine

    def _build_loop(self, resume: bool) -> TrainingLoop:
        """Load the model while the engine starts, and put the loop together."""
        with self._stages.stage("import the trainer"):
            import torch

            from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
            from slipstream.trainer.loop import TrainingLoop

        config, algorithm = self.config, self.config.algorithm
        torch.set_num_threads(rank_threads(config))
        torch.manual_seed(config.run.seed)
        store = CheckpointStore(self.folder / "checkpoints", config.run.keep_checkpoints, config.run.keep_weights)
        sampling = self.prepared.sampling() if self.prepared.uses_engine else SamplingParams(max_tokens=1)
        trained = self._trained(sampling)
        loop = TrainingLoop(
            config=config,
            learner=trained.learner,
            objective=build_objective(config, sampling),
            reader=GoldReader(
                self.prepared.conversations,
                self.prepared.tokenizer,
                self._draws.items,
                train_on=algorithm.train_on if algorithm.kind == "sft" else "all",
            ),
            engine=None,
            store=store,
            log=self.log,
            progress=self.progress,
            sampling=sampling,
            reference=trained.reference,
            critic=trained.critic,
            should_stop=self.should_stop,
            num_items=self.prepared.num_items,
            identity=identity_of(
                config, self.prepared.train_tasks, self.prepared.conversations, trained.learner.model.folder
            ),
        )
        if resume:
            self._resume(loop)
        elif self._teacher is not None and (config.lora is None or config.lora.path is None):
            # A fresh adapter changes nothing.
            learner = trained.learner
            self._teacher.refuse_itself(learner.named_weights if config.lora is None else learner.base_weights)
        if self.prepared.uses_engine:
            self._attach_orchestrator(loop)
        return loop

    def _trained(self, sampling: SamplingParams) -> Trained:
        """The models, in this process or over ranks."""
        config, workers = self.config, self._share_weights()
        planned_bytes, stage = self.prepared.plan.trainer_bytes, self._stages.stage
        if config.training.ranks == 1:
            return build(config, workers, planned_bytes, stage)
        self._crew = RankCrew(config, sampling, self.folder / "logs", workers)
        self._exits.callback(self._crew.close)
        return build_sharded(config, sampling, self._crew, planned_bytes, stage)

    def _event_loop(self) -> EventLoopThread:
        """The orchestrator's thread. What ends it ends the engine and the reward workers first."""
        if self._thread is None:
            thread = self._thread = EventLoopThread(self.should_stop, self._held_up)

            async def close() -> None:
                if self._scorer is not None:
                    await self._scorer.__aexit__(None, None, None)
                for child in (self._engine, self._teacher):
                    if child is not None:
                        await child.stop()

            def wind_up() -> None:
                if not thread.stop(close()):
                    self.log.warning(
                        "work of the environment did not end when it was cancelled: the engine is killed now"
                    )

            self._exits.callback(wind_up)
        return self._thread

    async def _engine_ready(self) -> EngineHealth:
        """What the engine says once it has started; one that shares its weights is then out of service for a while."""
        if self._health is None:
            self._health = await self._create_engine().wait_ready()
        return self._health

    def _share_weights(self) -> tuple[SharedWeights, ...]:
        """Where one copy of the weights serves both: the engine's, for which it must be up."""
        config = self.config
        if not self.prepared.uses_engine or config.weights.bridge != "single_copy":
            return ()
        thread, waits_for = self._event_loop(), "the engine to start and to share its weights"
        timeout_s = config.inference.start_timeout_s + START_GRACE_S
        with self._stages.stage("import what loading needs"):
            import_ahead(config)
        if config.training.compile is True and config.lora is None and config.training.ranks == 1:
            with self._stages.stage("compile layers like the model's"):
                compile_ahead(config)
        with self._stages.stage(WAIT):
            thread.call(self._engine_ready(), timeout_s, waits_for)
        sharing = share_weights(config, self._create_engine())
        return thread.call(sharing, config.weights.apply_timeout_s, waits_for)

    def _resume(self, loop: TrainingLoop) -> None:
        latest = loop.store.latest()
        if latest is not None:
            loop.resume(latest)
        for attempt in earlier_attempts(read_events(self.folder), self.log.lineage)[:1]:
            loop.trained_before_s = float(attempt["trained_s"])
        self.log.resumed(loop.step, checkpoint=latest.name if latest else None)

    def _attach_orchestrator(self, loop: TrainingLoop) -> None:
        """The generating side: engine, bridge, environment, and for RL the rollouts in the background."""
        config, prepared = self.config, self.prepared
        assert prepared.environment is not None
        assert config.environment is not None
        engine = self._create_engine()
        scorer = self._scorer = ScorerPool(config.environment, warn=self._warn)

        thread = self._event_loop()
        bridge, published = run_bridge(config, loop.learner, engine, self.folder / "weights", thread)
        self._exits.callback(bridge.publisher.close)
        versions = Versions(bridge.receiver, apply_timeout_s=apply_timeout_s(config), fence=bridge.fence)

        async def start_engine() -> None:
            health = await self._engine_ready()
            versions.allow_in_flight()
            self.log.event("engine", **{name: getattr(health, name) for name in _HEALTH_SHOWN})

        async def start() -> None:
            # The restart bridge starts the engine itself, on the first version.
            waits: list[Coroutine[Any, Any, object]] = [scorer.__aenter__()]
            if config.weights.bridge != "restart":
                waits.append(start_engine())
            if self._teacher is not None:
                waits.append(self._teacher.start())
            await all_of(waits)

        runner = RolloutRunner(
            prepared.environment,
            scorer,
            prepared.tokenizer,
            engine,
            request_timeout_s=config.inference.request_timeout_s,
            run_timeout_s=config.environment.run_timeout_s,
        )

        def publish(step: int, announce: Announce) -> Ticket:
            ticket = bridge.publisher.publish(published(), step, self.log.lineage, announce)
            self.log.published(ticket, **travelled(ticket))
            self.log.note(update_metrics(ticket))
            return ticket

        turns = Turns(
            thread,
            engine,
            self.log,
            sleeps=config.inference.sleep is True,
            timeout_s=config.weights.apply_timeout_s,
        )
        loop.engine = Orchestrator(
            thread,
            versions,
            publish=publish,
            probe=self._probe(engine).sample,
            evaluate=self._evaluation(runner),
            on_applied=self._applied,
            wake=turns.wake,
            rest=turns.sleep if config.algorithm.kind == "sft" else lambda: None,
            on_evaluated=self._evaluated,
            publishes_again=repeats_updates(config, engine, self.log),
            start=start,
            starting=contextlib.nullcontext if config.weights.bridge == "restart" else self._starting,
            waits=waits_of(config, lambda: runner.num_signs),
        )
        if config.algorithm.kind != "sft":
            loop.reader = self._rollouts(thread, versions, runner, loop.step, turns)

    @contextlib.contextmanager
    def _starting(self) -> Generator[None]:
        """The first update waits for the engine: that is told as what it is."""
        with self._stages.stage(WAIT):
            yield
        self.progress.phase(update_phase(self.config))

    def _probe(self, engine: RunEngine) -> Probe:
        """Prompts of the first held-out tasks, or of the first training tasks."""
        config, prepared = self.config, self.prepared
        tasks = (prepared.eval_tasks or prepared.train_tasks)[: config.weights.probe_tasks]
        prompts = [prepared.tokenizer.render(task.prompt) for task in tasks]
        return Probe(
            engine,
            prompts,
            prepared.sampling(),
            max_tokens=config.weights.probe_tokens,
            seed=config.run.seed,
            timeout_s=config.inference.request_timeout_s,
        )

    def _evaluation(self, runner: RolloutRunner) -> Callable[[], Awaitable[Evaluation]]:
        evaluation, section = self.config.evaluation, self.config.environment
        assert section is not None

        async def run() -> Evaluation:
            assert evaluation is not None
            self.progress.phase("evaluate", len(self.prepared.eval_tasks))
            try:
                return await evaluate(
                    runner,
                    self.prepared.eval_tasks,
                    sampling=self.prepared.sampling(evaluation.temperature),
                    threshold=evaluation.threshold,
                    seed=evaluation.seed,
                    max_failures=section.max_reward_failures,
                    on_rollout=self.progress.advance,
                    warn=self._warn,
                )
            finally:
                self.progress.end_phase()

        return run

    def _evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Keep the answers to the first held-out tasks, which are the same in every evaluation."""
        for rollout in evaluation.rollouts[: self.config.run.save_samples]:
            self.log.sample(sample_of(rollout, step, f"{self.log.lineage}.{step}", split="eval"))

    def _applied(self, report: ApplyReport) -> None:
        self.log.event(
            "apply",
            version=report.version.name,
            digest=report.version.digest,
            transfer_s=report.transfer_s,
            verify_s=report.verify_s,
            num_bytes=report.num_bytes,
            stall_s=report.stall_s,
        )
        if report.stall_s:
            self.log.note({"update/stall_s": report.stall_s})
        if self._engine is not None:
            self.log.note(self._engine.take_metrics())

    def _rollouts(
        self, thread: EventLoopThread, versions: Versions, runner: RolloutRunner, first_step: int, turns: Turns
    ) -> RolloutReader:
        config, algorithm = self.config, self.config.algorithm
        assert algorithm.kind != "sft"
        assert config.environment is not None

        def begin(num_tasks: int) -> None:
            self.progress.phase("generate", num_tasks * algorithm.group_size)

        batcher = Batcher(
            runner,
            group_size=algorithm.group_size,
            sampling=self.prepared.sampling(),
            seed=config.run.seed,
            max_reward_failures=config.environment.max_reward_failures,
            needs_logprobs=needs_engine_logprobs(algorithm),
            staleness=config.training.staleness,
            refills=self._draws.refills(begin),
            on_rollout=self.progress.advance,
            teacher=self._teacher,
            warn=self._warn,
        )
        reader = RolloutReader(
            thread,
            versions,
            batcher,
            self._draws.tasks,
            should_stop=self.should_stop,
            timeout_s=quiet_s(config),
            signs=lambda: runner.num_signs,
            staleness=config.training.staleness,
            on_begin=begin,
            on_end=self.progress.end_phase,
            on_taken=turns.sleep,
        )
        reader.start(first_step, config.training.steps)
        return reader
