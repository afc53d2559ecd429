"""Carries out a plan on this machine: trainer in the main thread, orchestrator in another, engine in a child process.

Guarantees: whatever ends the run, the engine and the reward workers end with it and `exit.json` says why; the engine
starts while the trainer loads, so that neither waits for the other's imports.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.artifacts.outgoing import hold_for_upload
from slipstream.config import PlannedConfig, SFTConfig, dump_resolved
from slipstream.config.traits import asks_teacher, begins_early, has_curriculum
from slipstream.data.curriculum import MixtureCurriculum
from slipstream.data.examples import SFTReader
from slipstream.errors import one_line
from slipstream.launch.build import (
    Trained,
    build,
    build_objective,
    build_sharded,
    capture_graphs,
    import_trainer,
    most_row_tokens,
    rehearse,
    share_weights,
)
from slipstream.launch.children import Children, RunContext
from slipstream.launch.engines import EngineMaker, create_engine
from slipstream.launch.messages import title_of, trainer_logs_as_events
from slipstream.launch.parts.start import Generation, start_generation
from slipstream.launch.parts.supervised import SupervisorWatch
from slipstream.launch.parts.watchdog import watched
from slipstream.launch.prepare import Prepared
from slipstream.launch.provenance.stock import Stock, take_stock
from slipstream.launch.ranks.processes import rank_threads
from slipstream.launch.recovery.fallbacks import with_fallbacks
from slipstream.launch.recovery.grace import GraceEnd, LastWords
from slipstream.launch.recovery.out_of_memory import reports_out_of_memory
from slipstream.launch.recovery.restarts import AttemptFailed, has_lost_weights, is_retriable, start_again
from slipstream.launch.recovery.resume import changed_settings, identity_of, refuse_to_resume
from slipstream.launch.recovery.retry_policy import trained_before
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.launch.startup.stages import WAIT, Stages
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller, Orchestrator, RolloutReader
from slipstream.orchestrator.control.weight_sync import RunHooks, connect
from slipstream.orchestrator.deadlines import waits_of
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.method import Material, method_of
from slipstream.orchestrator.teacher_engine import refuse_itself
from slipstream.plan.machine import gpus_at_start
from slipstream.plan.memory.last_run import record_memory
from slipstream.plan.memory.shortages import memory_at_start
from slipstream.plan.memory.sizes import engine_bytes_per_gpu
from slipstream.processes import stacks
from slipstream.processes.heartbeat import Beating
from slipstream.processes.signals import StopRequest
from slipstream.progress import Progress
from slipstream.records import SamplingParams
from slipstream.runlog import RunLog, read_events, read_settings
from slipstream.sinks import MetricSinks, run_of
from slipstream.sinks.prometheus import MetricsServer
from slipstream.weights.bridges.single_copy import SharedWeights

if TYPE_CHECKING:
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
    from slipstream.trainer.checkpoints.resumed import Identity, Resumed
    from slipstream.trainer.checkpoints.writer import CheckpointWriter
    from slipstream.trainer.learner import Learner
    from slipstream.trainer.loop import Reader, TrainingLoop
    from slipstream.trainer.steps import Steps


Restarts = Literal["here", "outside", "nowhere"]
"""A restart of the run is carried out by this command, by the process above it, or by nobody."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run has made."""

    folder: Path
    steps: int
    evaluation: Evaluation | None
    held_out_loss: dict[str, float]
    """`eval/loss` and what belongs to it, measured last; empty without held-out rows."""
    checkpoint: Path | None
    """Deployable weights of the last step."""
    best: Path | None = None
    """With `evaluation.patience`: those of the most accurate step."""


def train(
    prepared: Prepared,
    folder: Path,
    progress: Progress,
    *,
    resume: bool = False,
    make_engine: EngineMaker = create_engine,
    stages: Stages | None = None,
    last_words: LastWords = lambda error: None,
    supervisor: SupervisorWatch | None = None,
    restarts: Restarts = "here",
    owns_process: bool = False,
) -> RunResult:
    """Carry out the plan in `folder`. Raises the error that ended the run early, after everything was stopped, or
    `StartsAgain` where the caller is to start the run again. `stages`: those recorded so far. `last_words` is called in
    the place of raising, from another thread, where the process ends by itself at `run.grace_s`. `supervisor`: what
    watches the process that started this one and passes signals on. `restarts`: see `Restarts`. `owns_process`: whether
    this process does nothing else, so that it may be killed where it stands still."""
    stages, step = stages or Stages(), refuse_to_resume(folder, prepared.config) if resume else 0
    with stages.stage("compute digests"):
        stock = take_stock(prepared, folder, progress, resume=resume)
    grace = GraceEnd(prepared.config.run.grace_s, progress, last_words)
    num_passed_on = supervisor.num_passed_on if supervisor is not None else None
    is_watched = owns_process and supervisor is None
    with (
        StopRequest(on_first=grace.say_first, grace=grace, num_passed_on=num_passed_on) as stop,
        opened(prepared, folder, stock, step if resume else None, progress, stages, is_watched=is_watched) as found,
    ):
        log, beating = found
        grace.log, grace.beating = log, beating
        if supervisor is not None:
            supervisor.warn = log.warning
        is_supervised = supervisor is not None or restarts == "outside"
        about = (log, progress, stages, stop, make_engine)

        def carry_out(planned: Prepared) -> RunResult:
            run = RunContext(planned, *about, may_differ=stock.may_differ, is_supervised=is_supervised)
            with started(run) as parts:
                loop = parts.loop(resume=resume)
                loop.run()
                return _result_of(loop)

        try:
            return with_fallbacks(prepared, carry_out, log)
        except AttemptFailed as lost:
            most = prepared.config.run.max_restarts if restarts != "nowhere" else 0
            start_again(lost, log, progress, most, stop)


@contextmanager
def opened(
    prepared: Prepared,
    folder: Path,
    stock: Stock,
    resumed_step: int | None,
    progress: Progress,
    stages: Stages,
    *,
    is_watched: bool = False,
) -> Generator[tuple[RunLog, Beating]]:
    """The run folder, with everything that follows it. `resumed_step`: the step of the checkpoint to go on from; None
    for a new run. `is_watched`: a watchdog ends this process if it stands still."""
    resume, step = resumed_step is not None, resumed_step or 0
    with (
        MetricsServer(prepared.config.run.metrics_port) as server,
        RunLog.create(folder, resume=resume) as log,
        watched(folder, log.warning) if is_watched else nullcontext(),
        Beating(log) as beating,
        stacks.kept_in(folder),
        trainer_logs_as_events(log),
    ):
        log.warning_listeners.append(lambda text: progress.message(text, "warning"))
        before = read_settings(folder) if resume else {}
        log.resolved(dump_resolved(prepared.loaded, prepared.plan.derived))
        changed = changed_settings(before, read_settings(folder)) if before else []
        warnings = list(prepared.plan.warnings)
        memory = memory_at_start(prepared.config)
        found = {"dropped": prepared.dropped, "warnings": warnings, "changed": changed}
        log.event("start", resume=resume, **found, memory=memory)
        if prepared.facts.num_gpus and (gpus := gpus_at_start()):
            log.event("gpus", gpus=gpus)
        stock.record(log)
        for text in warnings:
            progress.message(text, "warning")
        for text in prepared.plan.notices:
            progress.message(text)
        for reason, count in prepared.dropped.items():
            progress.message(f"left out: {count} ({reason})")
        if changed:
            progress.message(f"resumed with other settings than before: {'; '.join(changed)}", "warning")
        described = run_of(folder, log.lineage, read_settings(folder), resumed_step)
        with MetricSinks(prepared.config.run.sinks, described, log, tell=progress.message) as sinks:
            log.listeners.append(sinks.put)
            if prepared.config.run.sink_samples:
                log.sample_listeners.append(sinks.put_sample)
            log.listeners.append(stages.on_row)
            server.serve(log, prepared.config.run.name or folder.resolve().name)
            if server.url:
                progress.message(f"metrics for Prometheus: {server.url}")
            stages.attach(log, progress)
            progress.start(title_of(prepared.config), prepared.config.training.steps, step)
            try:
                with persistent_caches(log.warning):
                    yield log, beating
            finally:
                stages.end()
                progress.stop()


@contextmanager
def started(run: RunContext) -> Generator[Parts]:
    """Start the plan's processes and load the models; at the end, end all processes in reverse order. Raises
    `AttemptFailed` for an error before another possible attempt."""
    parts: Parts | None = None
    generation: Generation | None = None
    with Children(run) as children:
        try:
            with reports_out_of_memory(run.prepared, run.log), stacks.asked_at_deadlines(run.log):
                begins = f"starting vLLM (its log: {run.folder / 'logs'}) and " if run.prepared.uses_engine else ""
                children.join_nodes(run.log.lineage)
                children.meet_servers()
                run.progress.message(f"{begins}loading the model")
                if run.prepared.uses_engine:
                    end = lambda: _end_of(run.log, parts.steps if parts else None, children.error)  # noqa: E731
                    generation = start_generation(run, children, end)
                parts = _load(run, children, generation)
                yield parts
        except Exception as error:
            may_go_on = run.is_supervised and is_retriable(error)
            if not may_go_on and not has_lost_weights(error, generation.caller if generation else None):
                raise
            trained_s = parts.steps.trained_s if parts and parts.steps else 0.0
            raise AttemptFailed(error, trained_s) from error
        finally:
            gc.unfreeze()


@dataclass
class Parts:
    """The loaded models of a run; a training program is made of them."""

    run: RunContext
    children: Children
    generation: Generation | None
    trained: Trained
    store: CheckpointStore
    sampling: SamplingParams
    identity: Identity
    curriculum: MixtureCurriculum | None
    steps: Steps | None = None

    def loop(self, *, resume: bool) -> TrainingLoop:
        """The run's own order of steps."""
        from slipstream.trainer.loop import TrainingLoop

        run = self.run
        common, hooks = self._common(resume=resume)
        engine, resumed = common["engine"], common["resumed"]
        reader = _reader(run, self.generation, engine, hooks, resumed, self.curriculum)
        environment = run.prepared.environment
        early = begins_early(run.config) and environment is not None and environment.begins_with_turn
        prepare = partial(capture_graphs, common["learner"], most_row_tokens(run.config, run.prepared.facts))
        loop = TrainingLoop(reader=reader, should_stop=run.should_stop, begins_early=early, prepare=prepare, **common)
        self._begin(loop)
        return loop

    def session(self, *, resume: bool) -> Steps:
        """Steps in an order of the caller's."""
        from slipstream.trainer.steps import Steps

        common, _ = self._common(resume=resume)
        gc.unfreeze()  # some objects are the caller's
        steps = Steps(**common, state=dict(common["resumed"].state))
        self._begin(steps)
        return steps

    def _common(self, *, resume: bool) -> tuple[dict[str, Any], RunHooks | None]:
        """The fields of `Steps`, and the hooks of its engine."""
        from slipstream.trainer.checkpoints.resumed import Resumed
        from slipstream.trainer.checkpoints.writer import create_writer

        run, config, trained = self.run, self.run.config, self.trained
        log, generation, learner = run.log, self.generation, trained.learner
        resumed = Resumed()
        if resume:
            resumed = _resume(log, self.store, trained, self.identity, self.curriculum, config)
        elif generation is not None:
            _refuse_own_teacher(config, learner, generation.caller)
        writer = create_writer(config, self.store, learner, trained.critic, log)
        engine, hooks = None, None
        if generation is not None:
            engine, hooks = _connect(run, self.children, generation.caller, writer, learner, resumed.step)
        common = {
            "config": config,
            "learner": learner,
            "objective": build_objective(config, self.sampling, run.prepared.tokenizer),
            "engine": engine,
            "writer": writer,
            "log": log,
            "progress": run.progress,
            "sampling": self.sampling,
            "reference": trained.reference,
            "method": method_of(config),
            "critic": trained.critic,
            "held_out": run.prepared.held_out,
            "identity": self.identity,
            "resumed": resumed,
            "curriculum": self.curriculum,
        }
        return common, hooks

    def _begin(self, steps: Steps) -> None:
        self.steps, run = steps, self.run
        run.log.listeners.append(record_memory(run.log, run.config.model.path))
        run.progress.ready()
        run.stages.begin_steps(steps.step)


def _end_of(log: RunLog, loop: Steps | None, error: BaseException | None) -> commands.Close:
    """How far the run came, and why it ends."""
    step, reason = loop.step if loop else 0, ""
    if error is not None:
        reason = log.scrub(one_line(error))  # the ledger keeps it
    elif loop is not None:
        training = loop.config.training
        late = f"training.max_seconds = {training.max_seconds:g} has passed" if training.max_seconds is not None else ""
        early = loop.evaluations.early_stop.reason or late or "the session ended"
        reason = f"all {step} steps are made" if step >= training.steps else early
    return commands.Close(step, reason)


def _result_of(loop: TrainingLoop) -> RunResult:
    checkpoint, best = loop.writer.store.latest(resumable=False), loop.writer.store.best()
    return RunResult(
        loop.log.folder,
        loop.step,
        loop.engine.last_evaluation if isinstance(loop.engine, Orchestrator) else None,
        loop.held_out_loss,
        checkpoint / "weights" if checkpoint else None,
        best / "weights" if best else None,
    )


def _load(run: RunContext, children: Children, generation: Generation | None) -> Parts:
    """Load the models while the engine starts."""
    config, prepared = run.config, run.prepared
    with run.stages.stage("import the trainer"):
        import torch

        from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
        from slipstream.trainer.checkpoints.manifest import Identity
        from slipstream.weights.usage import EndTokens

    torch.set_num_threads(rank_threads(config))
    torch.manual_seed(config.run.seed)
    store = CheckpointStore(
        run.folder / "checkpoints",
        config.run.keep_checkpoints,
        config.run.keep_weights,
        ends=EndTokens(*prepared.tokenizer.end_tokens),
        on_whole=partial(hold_for_upload, run.folder),
    )
    sampling = prepared.sampling() if prepared.uses_engine else SamplingParams(max_tokens=1)
    trained = _build_models(run, children, generation, sampling)
    digests = identity_of(config, prepared.train_tasks, prepared.conversations, trained.learner.model.folder)
    identity = Identity(prepared.num_items, digests, run.may_differ)
    curriculum = MixtureCurriculum(config) if has_curriculum(config) else None
    return Parts(run, children, generation, trained, store, sampling, identity, curriculum)


def _connect(
    run: RunContext, children: Children, caller: Caller, writer: CheckpointWriter, learner: Learner, step: int
) -> tuple[Orchestrator, RunHooks]:
    """Open the ledger under RL, and create the loop's engine."""
    config, log = run.config, run.log
    if not isinstance(config.algorithm, SFTConfig):
        waits_for = "the orchestrator to plan the run and to open the ledger"
        caller.call(commands.OpenLedger(step), commands.Done, waits_of(config).start_s, waits_for)
    planned_bytes = engine_bytes_per_gpu(config, run.prepared.facts.model)
    waiting = partial(run.stages.stage, WAIT)
    hooks = RunHooks(config, log, run.progress, caller, waiting=waiting, planned_bytes=planned_bytes)
    servers = run.prepared.facts.servers
    engine, publisher = connect(config, learner, caller, hooks, log, lambda: writer.saved_step, servers)
    children.at_exit(publisher.close)
    return engine, hooks


def _reader(
    run: RunContext,
    generation: Generation | None,
    engine: Orchestrator | None,
    hooks: RunHooks | None,
    resumed: Resumed,
    curriculum: MixtureCurriculum | None,
) -> Reader:
    """The source of batches; under RL their making begins."""
    config, prepared, order = run.config, run.prepared, run.prepared.batch_order()
    if (method := method_of(config)) is not None:
        context = prepared.facts.model.context_length
        given = Material(config, prepared.train_tasks, prepared.examples, prepared.tokenizer, context, order.items)
        if engine is not None and hooks is not None:
            given = replace(given, roll_out=engine.roll_out, on_rollouts=hooks.rolled_out)
        return method.batches(given)
    if isinstance(config.algorithm, SFTConfig):
        return SFTReader(prepared.examples, order.items)
    assert generation is not None
    assert hooks is not None
    assert engine is not None
    mend = engine.mend
    reader = RolloutReader(generation.caller, generation.batches, waits=waits_of(config), hooks=hooks, mend=mend)
    changes = curriculum.changes if curriculum is not None else []
    reader.start(commands.MakeBatches(resumed.step, config.training.steps, resumed.draws.state(), changes))
    return reader


def _refuse_own_teacher(config: PlannedConfig, learner: Learner, caller: Caller) -> None:
    """Raise `ConfigError` for a teacher that is the policy. A new adapter leaves the policy equal to its base."""
    if not asks_teacher(config) or (config.lora is not None and config.lora.path is not None):
        return
    command, timeout_s = commands.AskTeacher(), config.inference.start_timeout_s
    waits_for = "the orchestrator to say what the teacher holds"
    digest = caller.call(command, commands.TeacherDigest, timeout_s, waits_for).digest
    refuse_itself(config, digest, learner.named_weights if config.lora is None else learner.base_weights)


def _resume(
    log: RunLog,
    store: CheckpointStore,
    trained: Trained,
    identity: Identity,
    curriculum: MixtureCurriculum | None,
    config: PlannedConfig,
) -> Resumed:
    """Load the latest checkpoint, if any, and the training time of earlier attempts of the same command. A damaged
    one is renamed, and the one before it is loaded."""
    from slipstream.trainer.checkpoints.checkpoint import DamagedCheckpoint
    from slipstream.trainer.checkpoints.resumed import Resumed, load_resumed

    resumed, size = Resumed(), config.training.prompts_per_batch
    while (latest := store.latest()) is not None:
        try:
            resumed = load_resumed(
                store, latest, trained.learner, trained.critic, identity, curriculum, prompts_per_batch=size
            )
        except DamagedCheckpoint as damaged:
            aside = store.set_aside(latest)
            if aside is None:
                raise
            log.warning(f"{damaged}: the run continues from the one before, and this one is now {aside.name}")
        else:
            break
    resumed = replace(resumed, trained_s=trained_before(read_events(log.folder), log.lineage))
    log.resumed(resumed.step, checkpoint=latest.name if latest else None)
    return resumed


def _build_models(
    run: RunContext, children: Children, generation: Generation | None, sampling: SamplingParams
) -> Trained:
    """Load policy, reference and critic, in this process or over ranks."""
    config, workers = run.config, _share_weights(run, generation)
    planned_bytes, stage = run.prepared.plan.trainer_bytes, run.stages.stage
    if config.training.ranks == 1:
        return build(config, workers, planned_bytes, stage)
    ranks = children.start_ranks(sampling, workers)
    return build_sharded(config, sampling, ranks, planned_bytes, stage)


def _share_weights(run: RunContext, generation: Generation | None) -> tuple[SharedWeights, ...]:
    """Under the single_copy bridge, wait for the engine and return where its workers hold the weights that the trainer
    will train in place; empty under other bridges."""
    config = run.config
    if generation is None or config.weights.bridge != "single_copy":
        return ()
    caller, waits_for = generation.caller, "the engine to start and to share its weights"
    starting = caller.submit(commands.Start())
    with run.stages.stage("import what loading needs"):
        from slipstream.trainer import garbage_collection

        import_trainer(config)
    costs_time = config.training.compile is True or run.prepared.facts.num_gpus > 0
    if costs_time and config.lora is None and config.training.ranks == 1:
        with run.stages.stage("rehearse a training step"):
            rehearse(config)
    garbage_collection.freeze()
    with run.stages.stage(WAIT):
        caller.wait(starting, commands.Done, waits_of(config).start_s, waits_for)
    share_s = config.weights.apply_timeout_s
    return share_weights(config, lambda command: caller.call(command, commands.Answer, share_s, waits_for))
