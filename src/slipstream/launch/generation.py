"""The generating side of a run: engine, bridge, environment and rewards, put together behind an `Orchestrator`."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.config import needs_engine_logprobs
from slipstream.config.traits import apply_timeout_s, update_phase
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import SlipstreamError
from slipstream.launch.batch_order import BatchOrder, retries_of, waits_of
from slipstream.launch.children import Children, RunContext
from slipstream.launch.engine_sleep import SleepWake
from slipstream.launch.engines import RunEngine
from slipstream.launch.startup.stages import WAIT
from slipstream.launch.weight_sync import publication_fields, repeats_update, run_bridge, update_metrics
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.batches.orders import InDataOrder, MakesBatches, ReadyFirst
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.hooks import Hooks
from slipstream.orchestrator.probe import Probe
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.orchestrator.thread import Orchestrator, RolloutReader
from slipstream.orchestrator.versions import Versions
from slipstream.records import ApplyReport, Ticket
from slipstream.runlog import sample_of
from slipstream.runlog.ledger import Ledger
from slipstream.weights import Announce

if TYPE_CHECKING:
    from slipstream.trainer.loop import TrainingLoop

_HEALTH_SHOWN = ("vllm_version", "plugin_version", "patches", "patches_left_out")


def attach_orchestrator(run: RunContext, children: Children, loop: TrainingLoop, order: BatchOrder) -> None:
    """Give `loop` its engine and, under RL, the reader of rollouts, whose making begins in the background."""
    config, log = run.config, run.log
    ledger = _ledger(run, children, loop) if config.algorithm.kind != "sft" else None
    engine, scorer, thread = children.create_engine(), children.create_scorer(), children.event_loop()
    bridge, published = run_bridge(config, loop.learner, engine, run.folder / "weights", thread)
    children.at_exit(bridge.publisher.close)
    versions = Versions(bridge.receiver, apply_timeout_s=apply_timeout_s(config), fence=bridge.fence)
    runner = _runner(run, engine, scorer)
    sleeps, timeout_s = config.inference.sleep is True, config.weights.apply_timeout_s
    hooks = RunHooks(run, engine, SleepWake(thread, engine, log, sleeps=sleeps, timeout_s=timeout_s))
    waits = waits_of(config, lambda: runner.num_ended)

    def publish(step: int, announce: Announce) -> Ticket:
        ticket = bridge.publisher.publish(published(), step, log.lineage, announce)
        log.published(ticket, **publication_fields(ticket))
        log.note(update_metrics(ticket))
        return ticket

    loop.engine = Orchestrator(
        thread,
        versions,
        publish=publish,
        probe=_probe(run, engine).sample,
        evaluate=partial(_evaluate, run, runner),
        start=partial(_start, run, children, scorer, versions),
        waits=waits,
        hooks=hooks,
    )
    if config.algorithm.kind != "sft":
        assert ledger is not None
        batcher = _batcher(run, children, runner, order, hooks, ledger)
        batches: MakesBatches = InDataOrder(batcher, versions, order.tasks, hooks)
        if config.training.order == "ready":
            size = config.training.prompts_per_batch
            batches = ReadyFirst(batcher, versions, order.tasks, hooks, size, loop.draws)
        # Every slot's batch fits, so that groups begin while a batch waits for the trainer.
        num_ahead = config.training.staleness + 1
        loop.reader = reader = RolloutReader(thread, batches, num_ahead=num_ahead, waits=waits, hooks=hooks)
        reader.start(loop.step, config.training.steps)


class RunHooks(Hooks):
    """Shows progress, writes events and samples, and has engine and trainer take turns on a shared GPU."""

    def __init__(self, run: RunContext, engine: RunEngine, sleep_wake: SleepWake) -> None:
        self._run = run
        self._config, self._log, self._progress = run.config, run.log, run.progress
        self._engine = engine
        self._sleep_wake = sleep_wake

    def round_began(self, num_tasks: int) -> None:
        """See `Hooks`."""
        assert self._config.algorithm.kind != "sft"
        self._progress.phase("generate", num_tasks * self._config.algorithm.group_size)

    def rollout_ended(self) -> None:
        """See `Hooks`."""
        self._progress.advance()

    def batch_ended(self) -> None:
        """See `Hooks`."""
        self._progress.end_phase()

    def warn(self, text: str) -> None:
        """See `Hooks`."""
        self._run.warn(text)

    @contextlib.contextmanager
    def waiting_for_engine(self) -> Generator[None]:
        """The wait is a stage of its own, except under the restart bridge, which starts the engine in the update."""
        if self._config.weights.bridge == "restart":
            yield
            return
        with self._run.stages.stage(WAIT):
            yield
        self._progress.phase(update_phase(self._config))

    def before_update(self) -> None:
        """See `Hooks`."""
        self._sleep_wake.wake()

    def repeats_update(self, error: SlipstreamError) -> bool:
        """See `weight_sync.repeats_update`."""
        return repeats_update(self._config, self._engine, self._log, error)

    def version_applied(self, report: ApplyReport) -> None:
        """Write an event, and numbers of the update and the engine into the step's row."""
        self._log.event(
            "apply",
            version=report.version.name,
            digest=report.version.digest,
            transfer_s=report.transfer_s,
            verify_s=report.verify_s,
            num_bytes=report.num_bytes,
            stall_s=report.stall_s,
        )
        if report.stall_s:
            self._log.note({"update/stall_s": report.stall_s})
        self._log.note(self._engine.take_metrics())

    def version_evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Keep the answers to the first held-out tasks, which are the same in every evaluation."""
        for rollout in evaluation.rollouts[: self._config.run.save_samples]:
            self._log.sample(sample_of(rollout, step, f"{self._log.lineage}.{step}", split="eval"))

    def version_released(self) -> None:
        """Under SFT the engine only evaluates, which is over: it sleeps."""
        if self._config.algorithm.kind == "sft":
            self._sleep_wake.sleep()

    def batch_taken(self) -> None:
        """See `Hooks`."""
        self._sleep_wake.sleep()


async def _start(run: RunContext, children: Children, scorer: ScorerPool, versions: Versions) -> None:
    """Wait until engine, reward workers and teacher are ready, all at once."""

    async def start_engine() -> None:
        health = await children.engine_ready()
        versions.allow_in_flight()
        run.log.event("engine", **{name: getattr(health, name) for name in _HEALTH_SHOWN})

    starts: list[Coroutine[Any, Any, object]] = [scorer.__aenter__()]
    if run.config.weights.bridge != "restart":  # that bridge starts the engine itself, on the first version
        starts.append(start_engine())
    if children.teacher is not None:
        starts.append(children.teacher.start())
    await all_of(starts)


def _runner(run: RunContext, engine: RunEngine, scorer: ScorerPool) -> RolloutRunner:
    prepared, config = run.prepared, run.config
    assert prepared.environment is not None
    assert config.environment is not None
    return RolloutRunner(
        prepared.environment,
        scorer,
        prepared.tokenizer,
        engine,
        request_timeout_s=config.inference.request_timeout_s,
        run_timeout_s=config.environment.run_timeout_s,
        retries=retries_of(config, lambda reason: run.log.count({f"retry/{reason}": 1.0})),
    )


def _ledger(run: RunContext, children: Children, loop: TrainingLoop) -> Ledger:
    """The run's ledger. Called before there is a thread that writes it, so that it is closed after that has ended."""
    config = run.config
    assert config.algorithm.kind != "sft"
    ledger = Ledger(
        run.folder,
        run.log.lineage,
        loop.step,
        staleness=config.training.staleness,
        shape={
            "prompts_per_batch": config.training.prompts_per_batch,
            "staleness": config.training.staleness,
            "order": config.training.order,
            "group_size": config.algorithm.group_size,
            "sampling": run.prepared.sampling(),
            "seed": config.run.seed,
        },
        saved_step=lambda: loop.saved_step,
    )

    def close() -> None:
        try:
            ledger.close(loop.step)
        except SlipstreamError as error:  # the error that ended the run is worth more
            with contextlib.suppress(SlipstreamError):  # a full disk, which takes no warning either
                run.warn(f"the ledger lacks how the last groups ended: {error}")

    children.at_exit(close)
    return ledger


def _batcher(
    run: RunContext, children: Children, runner: RolloutRunner, order: BatchOrder, hooks: Hooks, ledger: Ledger
) -> Batcher:
    config, algorithm = run.config, run.config.algorithm
    assert algorithm.kind != "sft"
    assert config.environment is not None
    return Batcher(
        runner,
        group_size=algorithm.group_size,
        sampling=run.prepared.sampling(),
        seed=config.run.seed,
        max_reward_failures=config.environment.max_reward_failures,
        needs_logprobs=needs_engine_logprobs(algorithm),
        staleness=config.training.staleness,
        refills=order.refills(),
        teacher=children.teacher,
        hooks=hooks,
        ledger=ledger,
    )


def _probe(run: RunContext, engine: RunEngine) -> Probe:
    """Prompts of the first held-out tasks, or of the first training tasks where there are none."""
    config, prepared = run.config, run.prepared
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


async def _evaluate(run: RunContext, runner: RolloutRunner) -> Evaluation:
    prepared, evaluation, section = run.prepared, run.config.evaluation, run.config.environment
    assert section is not None
    assert evaluation is not None
    run.progress.phase("evaluate", len(prepared.eval_tasks))
    try:
        return await evaluate(
            runner,
            prepared.eval_tasks,
            sampling=prepared.sampling(evaluation.temperature),
            threshold=evaluation.threshold,
            seed=evaluation.seed,
            max_failures=section.max_reward_failures,
            on_rollout=run.progress.advance,
            warn=run.warn,
        )
    finally:
        run.progress.end_phase()
