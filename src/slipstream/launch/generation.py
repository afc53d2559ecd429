"""The generating side of a run: engine, environment and rewards, put together behind an `Executor`.

It is the same whether the trainer is in this process or in another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from slipstream.algo.algorithm import algorithm_of, write_credit
from slipstream.algo.readiness import signal_rule
from slipstream.atropos.entrance import Entrance
from slipstream.config import PlannedConfig, SFTConfig, needs_engine_logprobs
from slipstream.config.atropos import atropos_settings
from slipstream.config.traits import apply_timeout_s, has_curriculum, num_replicas, publishes_adapter
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.draws import Draws
from slipstream.engine_protocols import Generates
from slipstream.errors import EngineError, SlipstreamError
from slipstream.inference.replicas import EngineReplicas
from slipstream.launch.children import Children, Context
from slipstream.launch.prepare import Prepared
from slipstream.launch.provenance.collect import code_digest
from slipstream.launch.recovery.resume import tasks_digest
from slipstream.orchestrator.batches.batch_order import mixture_weights
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.batches.orders import InDataOrder, ReadyFirst
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.concurrency import all_of, task_group
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.executor import Executor
from slipstream.orchestrator.deadlines import retries_of, silence_limit_s
from slipstream.orchestrator.evaluate import Evaluation, evaluate, refuse_other_versions
from slipstream.orchestrator.failure_rate import check_failures, warn_of_losses
from slipstream.orchestrator.failures import Failures
from slipstream.orchestrator.garbage_collection import fewer_collections
from slipstream.orchestrator.method import method_of, with_figures
from slipstream.orchestrator.probe import Probe, ProbePrompt
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.orchestrator.versions import Versions
from slipstream.records import Batch, Message, Rollout, Version
from slipstream.runlog.ledger import Ledger, end_ledgers
from slipstream.runlog.samples import sample_of
from slipstream.transport import Transport
from slipstream.weights import receiver_of

UNUSED = "unused"
"""The reason of a dropped group: the caller of a session has not trained on it."""
_HEALTH_SHOWN = ("vllm_version", "plugin_version", "patches", "patches_left_out")


def build_executor(context: Context, children: Children, batches: Transport[Batch]) -> Executor:
    """Put the generating side together; the engine is created and starts when it is told to. `batches` takes what is
    made."""
    return _Generation(context, children, batches).executor


class _Generation:
    def __init__(self, context: Context, children: Children, batches: Transport[Batch]) -> None:
        config = context.config
        self._context, self._children, self._batches = context, children, batches
        self._order = context.prepared.batch_order()
        self._engine, self._scorer = children.create_engine(), children.create_scorer()
        receiver, fence = receiver_of("lora" if publishes_adapter(config) else config.weights.bridge, self._engine)
        self._versions = Versions(receiver, apply_timeout_s=apply_timeout_s(config), fence=fence)
        self._held_out: Version | None = None
        """The version that is evaluated, or was last."""
        num_places = config.inference.max_num_seqs * num_replicas(config)
        self._idle = IdleTime(lambda: self._engine.is_up, num_places=num_places)
        self._runner = self._make_runner()
        self._entrance = children.entrance = self._open_entrance()
        self._ledger: Ledger | None = None
        self._asked: Batcher | None = None
        """Makes batches on request."""
        self._asking = asyncio.Lock()
        self.executor = Executor(
            self._engine,
            self._versions,
            probe=self._probe().sample,
            evaluate=self._evaluate,
            roll_out=self._roll_out,
            start=self._start,
            open_ledger=self._open_ledger,
            make_batches=self._make_batches,
            make_batch=self._make_batch,
            settle=self._settle,
            close=self._close,
            num_ended=self._num_ended,
            change_weights=self._order.change,
            teacher_digest=children.teacher.digest if children.teacher is not None else "",
            idle=self._idle,
        )

    def _open_entrance(self) -> Entrance | None:
        """The way in for groups from outside, in a run with the environment `atropos`."""
        context, config, prepared = self._context, self._context.config, self._context.prepared
        if (settings := atropos_settings(config.environment)) is None:
            return None
        return Entrance(
            *(config, settings, self._engine, self._versions, context.log, context.progress),
            servers=prepared.facts.servers,
            vocab_size=prepared.facts.model.vocab_size,
            decode=prepared.tokenizer.decode,
            count=self._count_dropped,
        )

    def _count_dropped(self, reason: str, rollouts: Sequence[Rollout]) -> None:
        """A group from outside is dropped."""
        tokens = {reason: sum(rollout.num_sampled for rollout in rollouts)}
        self._context.log.count(drop_metrics(reason, tokens))

    def _num_ended(self) -> int:
        return self._runner.num_ended + (self._entrance.arrivals.num_arrived if self._entrance else 0)

    def _make_runner(self) -> RolloutRunner:
        context = self._context

        def keep(rollout: Rollout, step: int, is_held_out: bool) -> None:
            version = self._held_out if is_held_out else self._versions.current
            split = {"split": "eval"} if is_held_out else {}
            context.log.sample(sample_of(rollout, step, version.name if version else "", kept="failure", **split))

        def version() -> int:
            return self._held_out.step if self._held_out is not None else 0

        prepared, config = context.prepared, context.config
        assert prepared.environment is not None
        assert config.environment is not None
        num_failures, others = config.run.save_failures, config.run.orchestrators - 1
        own_part = (num_failures + others - context.orchestrator) // (others + 1)
        return RolloutRunner(
            prepared.environment,
            self._scorer,
            prepared.tokenizer,
            self._engine,
            request_timeout_s=config.inference.request_timeout_s,
            run_timeout_s=config.environment.run_timeout_s,
            context_length=config.inference.max_model_len,
            warn=context.log.warning,
            on_ended=Failures(own_part, num_failures, keep, version).ended,
            idle=self._idle,
            retries=retries_of(config, context.log.count),
            control_texts=prepared.tokenizer.special_texts,
            gateway=self._children.gateway,
        )

    def _probe(self) -> Probe:
        """Prompts of the first held-out tasks, or of the first training tasks where there are none."""
        config, prepared = self._context.config, self._context.prepared
        tasks = (prepared.eval_tasks or prepared.train_tasks)[: config.weights.probe_tasks]
        return Probe(
            self._engine,
            [_probe_prompt(prepared.tokenizer, task.prompt) for task in tasks],
            prepared.sampling(),
            max_tokens=config.weights.probe_tokens,
            seed=config.run.seed,
            timeout_s=config.inference.request_timeout_s,
        )

    async def _start(self) -> None:
        """Wait until engine, reward workers and teacher are ready, all at once."""

        async def start_engine() -> None:
            health = await self._engine.wait_ready()
            self._versions.allow_in_flight()
            shown = {name: getattr(health, name) for name in _HEALTH_SHOWN}
            self._context.log.event("engine", **shown)

        starts: list[Coroutine[Any, Any, object]] = [self._scorer.__aenter__(), self._children.set_up_environment()]
        # The restart bridge starts the engine itself, on the first version.
        if self._context.config.weights.bridge != "restart":
            starts.append(start_engine())
        if self._children.teacher is not None:
            starts.append(self._children.teacher.start())
        if self._entrance is not None:
            starts.append(self._entrance.open(self._children.model_urls))
        await all_of(starts)

    def _open_ledger(self, first: int) -> None:
        context, config = self._context, self._context.config
        if context.orchestrator == 0:
            end_ledgers(context.folder, config.run.orchestrators, context.log.lineage, first)
        self._ledger = Ledger(
            context.folder,
            context.log.lineage,
            first,
            staleness=config.training.staleness,
            shape=shape_of_groups(context.prepared),
            # Under a curriculum a draw may be another task in each attempt.
            keeps=not has_curriculum(config),
            orchestrator=context.orchestrator,
            saved_step=lambda: self.executor.saved_step,
            later=asyncio.get_running_loop().call_later,
            keep_bytes=config.run.streams != "memory",
            on_drop=lambda reason, tokens: context.log.count(drop_metrics(reason, tokens)),
        )

    def _batcher(self, *, settles: bool = True) -> Batcher:
        context, config, algorithm = self._context, self._context.config, self._context.config.algorithm
        assert self._ledger is not None
        assert not isinstance(algorithm, SFTConfig)
        assert config.environment is not None
        own = algorithm_of(algorithm, context.prepared.tokenizer)
        if algorithm.max_refills and own.defines("terms"):
            context.log.warning(
                f"algorithm.max_refills = {algorithm.max_refills} leaves out groups whose rewards agree, so "
                f"{own.place('terms')} gets none of them: set it to 0 if they teach there"
            )
        return Batcher(
            self._runner,
            group_size=algorithm.group_size,
            sampling=context.prepared.sampling(),
            seed=config.run.seed,
            max_reward_failures=config.environment.max_reward_failures,
            needs_logprobs=needs_engine_logprobs(algorithm),
            staleness=config.training.staleness,
            has_signal=signal_rule(algorithm),
            credit=partial(write_credit, own, "credit"),
            parts=config.environment.mixture.keys(),
            refills=self._order.refills(),
            teacher=self._children.teacher,
            ledger=self._ledger,
            progress=context.progress,
            warn=context.log.warning,
            share=Share(context.orchestrator, config.run.orchestrators),
            idle=self._runner.idle,
            arrivals=self._entrance.arrivals if self._entrance is not None else None,
            settles=settles,
        )

    async def _make_batch(self, command: commands.MakeBatch) -> Batch:
        """As `InDataOrder` does; tasks of the caller's are not replaced by others."""
        if self._asked is None:
            self._asked = self._batcher(settles=False)
            self._idle.begin(command.step)
        batcher, progress = self._asked, self._context.progress
        if command.tasks:
            batcher = replace(batcher, refills=None)
        if command.group_size:
            batcher = replace(batcher, group_size=command.group_size)
        tasks = command.tasks or self._order.tasks(command.step)
        await self._versions.wait_for(command.oldest)
        async with self._asking:
            version = self._versions.current
            assert version is not None
            progress.phase("generate", batcher.num_rollouts(tasks))
            async with self._versions.generating():
                batch = await batcher.make(command.step, version, tasks, command.first)
            progress.end_phase()
        return batch

    def _settle(self, command: commands.Settle) -> None:
        assert self._ledger is not None
        for group in command.unused:
            self._ledger.drop(group, UNUSED)
        self._ledger.batch(command.step - 1, command.trained)
        self._ledger.trained(command.step)

    async def _make_batches(self, command: commands.MakeBatches) -> None:
        config, batcher = self._context.config, self._batcher()
        self._order.set_changes(command.changes)
        made: InDataOrder | ReadyFirst = InDataOrder(batcher, self._versions, self._order.tasks, config.weights.every)
        if config.training.order == "ready":
            size = config.training.prompts_per_batch // config.run.orchestrators
            draws = Draws.of_state(command.draws)
            further = config.training.overprovision
            made = ReadyFirst(*(batcher, self._versions, self._order.tasks, size, draws, further, config.weights.every))

        async def put(batch: Batch) -> None:
            await self._batches.put_async(batch, silence_limit_s(config))

        try:
            async with task_group() as tasks:
                entering = tasks.create_task(self._entrance.run(command.first)) if self._entrance is not None else None
                with fewer_collections():
                    await made.make_all(command.first, command.num_steps, put)
                if entering is not None:
                    entering.cancel()
        except Exception:
            with contextlib.suppress(SlipstreamError):  # what ended the making is worth more
                await asyncio.to_thread(self._batches.close, "the making of batches failed")
            raise

    async def _evaluate(self, command: commands.Evaluate) -> Evaluation:
        """On all engines, or on one of several that stays on the version meanwhile. Nothing is awaited before it is
        set aside: the next command may be an update."""
        version = self._held_out = self._versions.current
        if version is None or version.step != command.step:
            raise EngineError(f"version {command.step} is to be evaluated, and the engine holds {version}: report this")
        if not command.beside:
            return await self._evaluated(version)
        if not isinstance(self._engine, EngineReplicas):
            raise EngineError("one engine cannot evaluate while it goes on: use evaluation.beside = false")
        async with self._engine.aside(apply_timeout_s(self._context.config)) as engine:
            return await self._evaluated(version, engine)

    async def _evaluated(self, version: Version, engine: Generates | None = None) -> Evaluation:
        """`engine`: one that is aside, whose progress is not shown, as training's is."""
        context, prepared, evaluation = self._context, self._context.prepared, self._context.config.evaluation
        section = context.config.environment
        assert section is not None
        assert evaluation is not None
        if engine is None:
            context.progress.phase("evaluate", len(prepared.eval_tasks) * evaluation.samples_per_task)
        try:
            found = await evaluate(
                self._runner,
                prepared.eval_tasks,
                sampling=prepared.sampling(evaluation.temperature),
                threshold=evaluation.threshold,
                seed=evaluation.seed,
                max_failures=section.max_reward_failures,
                graded_text=section.graded_text,
                samples_per_task=evaluation.samples_per_task,
                version=version,
                engine=engine,
                on_rollout=context.progress.advance if engine is None else lambda: None,
                warn=context.log.warning,
            )
            assert prepared.environment is not None
            method = method_of(context.config)
            found = await asyncio.to_thread(
                with_figures, found, prepared.eval_tasks, prepared.environment, method, prepared.tokenizer
            )
            # The first sample of the first tasks; the others nobody reads.
            shown = found.rollouts[:: found.samples_per_task][: context.config.run.save_samples]
            return replace(found, rollouts=shown)
        finally:
            if engine is None:
                context.progress.end_phase()

    async def _roll_out(self, command: commands.RollOut) -> list[Rollout]:
        """For the method of SFT, one rollout of each task that the command names. Raises
        `EnvironmentFault` or `EngineError` where too many failed, and `IntegrityError` for a token of another
        version."""
        version = self._versions.current
        if version is None or version.step != command.step:
            raise EngineError(f"version {command.step} is to roll out, and the engine holds {version}: report this")
        context, section = self._context, self._context.config.environment
        assert section is not None
        tasks, progress = context.prepared.train_tasks, context.progress
        sampling = context.prepared.sampling(command.temperature)

        async def attempt(place: int, item: int) -> Rollout:
            name = f"{command.step}.{place}"
            seed = max(1, (command.seed + place) & 0x7FFF_FFFF)
            rollout = await self._runner.run(tasks[item], rollout_id=name, group_id=name, sampling=sampling, seed=seed)
            progress.advance()
            return rollout

        progress.phase("generate", len(command.items))
        rollouts = await all_of(attempt(place, item) for place, item in enumerate(command.items))
        progress.end_phase()
        refuse_other_versions(rollouts, version, f"step {command.step}")
        check_failures(rollouts, f"step {command.step}", section.max_reward_failures)
        warn_of_losses(rollouts, f"step {command.step}", context.log.warning)
        return rollouts

    def _close(self, end: commands.Close) -> None:
        """Write how the last groups ended, and why no more are made."""
        ledger, self._ledger = self._ledger, None
        if ledger is None:
            return
        try:
            is_whole = end.step >= self._context.config.training.steps
            ledger.close(end.step, is_whole=is_whole, reason=end.reason, unused=UNUSED if self._asked else "")
            self._context.log.event("generation_ended", step=end.step, reason=end.reason)
        except SlipstreamError as error:  # the error that ended the run is worth more
            with contextlib.suppress(SlipstreamError):  # a full disk, which takes no warning either
                self._context.log.warning(f"the ledger lacks how the last groups ended: {error}")


def shape_of_groups(prepared: Prepared) -> dict[str, Any]:
    """What must be equal for groups of an earlier attempt to be used in this one."""
    config = prepared.config
    assert not isinstance(config.algorithm, SFTConfig)
    return {
        "prompts_per_batch": config.training.prompts_per_batch,
        "staleness": config.training.staleness,
        "order": config.training.order,
        "group_size": config.algorithm.group_size,
        "sampling": prepared.sampling(),
        "seed": config.run.seed,
        "tasks": tasks_digest(prepared.train_tasks),
        "code": code_digest(prepared),
        "orchestrators": config.run.orchestrators,
        # An engine without them has other log-probabilities.
        **({"shared_kernels": True} if config.model.shared_kernels else {}),
        **_mixture_shape(config),
    }


def drop_metrics(reason: str, tokens: Mapping[str, int]) -> dict[str, float]:
    """Metrics of a group that the ledger drops; `tokens` by reason, since rollouts of it may have failed."""
    names = {each: each.replace(" ", "_") for each in (reason, *tokens)}
    found = {f"dropped_tokens/{names[each]}": float(number) for each, number in tokens.items()}
    return {f"dropped_groups/{names[reason]}": 1.0, **found}


def _mixture_shape(config: PlannedConfig) -> dict[str, Any]:
    """What of a mixture decides which task a draw is."""
    section = config.environment
    if section is None or not section.mixture:
        return {}
    return {
        "weights": mixture_weights(config),
        "limits": [(part.group_size, part.max_tokens) for part in section.mixture.values()],
    }


def _probe_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> ProbePrompt:
    token_ids = tokenizer.render(messages)
    media = tokenizer.place_images(messages, token_ids)
    return ProbePrompt(token_ids, media, tokenizer.request(token_ids, media))
