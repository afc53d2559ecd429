"""The steps of a training program: train on a batch, update the engine, evaluate, report, save.

`Steps` counts the steps and holds everything for one. Two programs call it: `loop.TrainingLoop` in the order of a run,
and the caller of a session (`slipstream.session`) in any order.

Guarantees: an update is verified by the engine before rollouts with it are answered, and probed before `synchronise`
returns: both sides compute the log-probabilities of the engine's own samples. Rollouts may be made meanwhile, and are
trained on only afterwards. A batch of rollouts older than `training.staleness` allows is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from slipstream import records
from slipstream.config.planned import PlannedConfig
from slipstream.config.schema import RLConfig
from slipstream.config.traits import num_engines, update_phase
from slipstream.data.curriculum import Change, MixtureCurriculum
from slipstream.data.examples import Examples
from slipstream.errors import MismatchError, TrainingError
from slipstream.progress import Progress
from slipstream.runlog import RunLog, sample_of
from slipstream.runlog.batches import BatchKeeper
from slipstream.trainer.batch_trainer import BatchTrainer, NoSignal, Weighs
from slipstream.trainer.checkpoints.resumed import Identity, Resumed
from slipstream.trainer.checkpoints.writer import CheckpointWriter
from slipstream.trainer.credit_assignment import Credit
from slipstream.trainer.critic import Critic
from slipstream.trainer.evaluations import Evaluates, Evaluations, Meanwhile, nothing
from slipstream.trainer.learner import Learner, Scorer
from slipstream.trainer.loss import Objective, PolicyObjective
from slipstream.trainer.metrics import (
    OTHER_BITS,
    explain_difference,
    held_out_loss,
    logprob_differences,
    prompt_of,
    refuse_difference,
    skipped_batch,
    worst_engine_mean,
)
from slipstream.trainer.signal_watch import SignalWatch

_ROWS_AT_ONCE = 16
"""Rows of held-out sequences in flight before their results are read."""


class Engine(Evaluates, Protocol):
    """The inference engine and its weight sync, as the loop uses them."""

    def update(self, step: int) -> None:
        """Publish the live weights as version `step`, and wait until they are applied and verified."""
        ...

    def probe(self) -> list[records.Sequence]:
        """Sequences sampled with the version applied last."""
        ...

    def fence(self) -> None:
        """Called before live weights are written: an engine with the same memory must not compute until the next
        `update`."""
        ...

    def begin(self, step: int) -> None:
        """Let the requests of the next batch wait in the engine, paused as by `fence`, for version `step`."""
        ...

    def release(self, step: int, change: Change | None = None) -> None:
        """Allow rollouts by version `step`; `change`: of a mixture's weights."""
        ...


@dataclass(kw_only=True)
class Steps:
    """See the module. `engine`: None for SFT without evaluation. `writer`: writes this run's checkpoints."""

    config: PlannedConfig
    learner: Learner
    objective: Objective
    engine: Engine | None
    writer: CheckpointWriter
    log: RunLog
    progress: Progress
    sampling: records.SamplingParams
    reference: Scorer | None = None
    method: Weighs | None = None
    critic: Critic | None = None
    held_out: Examples = field(default_factory=Examples)
    """Under SFT, sequences to measure the loss of with every evaluation; none is trained on."""
    identity: Identity = field(default_factory=Identity)
    resumed: Resumed = field(default_factory=Resumed)
    curriculum: MixtureCurriculum | None = None
    """Changes the weights of a mixture's parts."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """The caller of a session keeps this in checkpoints; JSON types."""

    step: int = field(init=False)
    """Number of batches trained on."""
    is_training: bool = field(default=False, init=False)
    """Whether a step has begun and not ended."""
    held_out_loss: dict[str, float] = field(default_factory=dict[str, float], init=False)
    """Metrics of the held-out sequences, measured last."""
    evaluations: Evaluations = field(init=False)
    """Due evaluations, concurrent ones, and whether they end the run."""

    _probed: tuple[float, float] | None = field(default=None, init=False)
    """Mean differences of this process's first probe and of the last one."""
    _started: float | None = field(default=None, init=False)
    _begun: int = field(default=-1, init=False)
    """The batch begun last before its version, by step."""
    _no_signal: NoSignal = field(default=NoSignal.NO_VARIANCE, init=False)

    def __post_init__(self) -> None:
        resumed = self.resumed
        self.step = self.writer.saved_step = resumed.step
        self._saved_step = -1 if resumed.checkpoint is None else resumed.step
        self._trained_steps, self._steps_without_signal = resumed.trained_steps, resumed.steps_without_signal
        self.evaluations = Evaluations(self.config, self.log, self.progress, self._keep_best)
        if resumed.evaluations:
            self.evaluations.load(resumed.evaluations, self.step)
        if (watch := self.evaluations.early_stop).keeps_best:
            self.writer.store.best_step = watch.best_step
        own = self.objective.algorithm if isinstance(self.objective, PolicyObjective) else None
        self._signal_watch = SignalWatch(self.config, has_terms=own is not None and own.defines("terms"))
        self._trainer = BatchTrainer(
            self.config,
            self.learner,
            self.objective,
            self.sampling,
            self.reference,
            self.critic,
            on_optimizer_steps=lambda count: self.progress.phase("train", count),
            before_write=self._fence,
            method=self.method,
        )
        self._batches = None
        if (number := self.config.run.keep_batches) and isinstance(self.config.algorithm, RLConfig):
            device, folder = self.learner.model.device.type, self.log.folder
            self._batches = BatchKeeper(folder, number, device, self._replay_starts, self.log.warning)

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, including earlier attempts."""
        return self.resumed.trained_s + (time.monotonic() - self._started if self._started is not None else 0.0)

    @property
    def is_rl(self) -> bool:
        """Whether batches are rollouts."""
        return isinstance(self.config.algorithm, RLConfig)

    def begin(self) -> None:
        """The first step begins."""
        self.writer.begin()
        self._started = time.monotonic()

    def close(self) -> None:
        """No step follows."""
        self.writer.close()
        if self._batches is not None:
            self._batches.close()

    def train(self, batch: records.Batch, objective: Objective | None = None) -> dict[str, float]:
        """Train on one batch and count the outcome; returns its metrics. See `BatchTrainer` for the stages.
        `objective`: in place of the run's."""
        self.is_training = True
        with self.log.phase("train"):
            metrics = self._train(batch, objective)
        self.step += 1
        self.is_training = False
        return metrics

    def _train(self, batch: records.Batch, objective: Objective | None) -> dict[str, float]:
        self._check_version(batch)
        # With a loss of its own a session may not train on rewards.
        is_judged = batch.step == 0 and objective is None
        if is_judged and (judgement := self._signal_watch.judge_first(batch.rollouts)) is not None:
            self.log.event("readiness", verdict=judgement.verdict, text=judgement.text)
            text = f"first batch: {judgement.verdict}: {judgement.text}"
            if judgement.is_ready:
                self.progress.message(text)
            else:
                self.log.warning(text, step=self.step)
        if self._batches is not None and objective is None:  # a replay has the run's
            self._batches.keep(batch)
        result = self._trainer.train(batch, objective)
        self.resumed.draws.use(batch.draws)
        if result.no_signal is not None:
            return result.metrics | skipped_batch(batch, result.metrics) | self._skip(batch.step, result.no_signal)
        self._trained_steps += 1
        self.log.repeats("train")
        if not result.is_critic_only:
            self._steps_without_signal = 0
        if result.credit is not None:
            self._keep_samples(batch, result.credit)
        return result.metrics

    def adapt(self, batch: records.Batch, metrics: dict[str, float]) -> Change | None:
        """Have the curriculum, if any, observe a batch; adds its metrics."""
        if self.curriculum is None:
            return None
        drawn = max(batch.draws) // self.config.training.prompts_per_batch if batch.draws else batch.step
        metrics |= self.curriculum.metrics(drawn)
        return self.curriculum.observe(batch, self.step, self.resumed.draws)

    def _replay_starts(self) -> set[int]:
        """The steps at which a replay can start: of the start model, of a checkpoint in the making, and of all
        resumable ones."""
        return {0, self._saved_step, *self.writer.store.resumable_steps()}

    def _fence(self) -> None:
        if self.engine is not None:
            self.engine.fence()

    def _check_version(self, batch: records.Batch) -> None:
        staleness = self.config.training.staleness
        is_new_enough = self.step - staleness <= batch.version.step <= self.step
        if self.is_rl and not is_new_enough:
            raise TrainingError(
                f"the batch for step {self.step} was begun by version {batch.version.name}: training.staleness = "
                f"{staleness} allows none before {self.step - staleness} and none after {self.step}"
            )

    def _skip(self, step: int, no_signal: NoSignal) -> dict[str, float]:
        """Count and log a batch without signal; raises TrainingError after `run.max_steps_without_signal` in a row."""
        self._steps_without_signal += 1
        self._no_signal = no_signal
        limit = self.config.run.max_steps_without_signal
        text = f"step {step} teaches nothing: {no_signal.reason}"
        if self._steps_without_signal == 1:
            self.log.warning(text, step=step)
        else:  # said once for steps in a row; the terminal's line of each has `skipped`
            self.log.event("skipped", step=step, reason=no_signal.reason)
        if self._steps_without_signal >= limit:
            raise TrainingError(
                f"{no_signal.reason} in {self._steps_without_signal} consecutive steps (run.max_steps_without_signal = "
                f"{limit}): {no_signal.advice}"
            )
        return {"train/skipped": 1.0}

    def check_learned(self) -> None:
        """Raise TrainingError if no batch taught anything."""
        if self._trained_steps == 0:
            raise TrainingError(
                f"nothing was trained in {self.step} steps: {self._no_signal.reason}: {self._no_signal.advice}"
                if self.step
                else "nothing was trained: the run made no step"
            )

    def synchronise(
        self, evaluate: bool, *, is_last: bool, change: Change | None = None, meanwhile: Meanwhile = nothing
    ) -> dict[str, float]:
        """Update the engine's weights, probe it, evaluate if asked, and release the version; returns metrics. Without
        an evaluation rollouts begin before the trainer's half of the probe, but in this process's first call.
        `is_last`: no step follows; `change`: see `Engine.release`; `meanwhile`: done while the engine evaluates."""
        engine = self.engine
        assert engine is not None
        # A resume uses rollouts of the version it starts with: none may be from before that version's comparison.
        is_early = self.is_rl and not evaluate and self._probed is not None
        self.progress.phase(update_phase(self.config))
        with self.log.phase("update"):
            engine.update(self.step)
        # Beside the next batch, the time until the probe is a part of the time until the batch.
        with self.log.phase("batch" if self._begun == self.step else "update"):
            sequences = engine.probe()
        if is_early:
            engine.release(self.step, change)
        with self.log.phase("probe"):
            metrics = self._probe(sequences)
        if evaluate:
            metrics |= self.evaluations.make(engine, self.step, is_last=is_last, meanwhile=meanwhile)
        if not is_early:
            engine.release(self.step, change)
        return metrics

    def measure_held_out(self) -> dict[str, float]:
        """Measure the loss of the held-out sequences, if any; returns metrics. Before the engine takes the GPU: under
        sleep mode its turn comes afterwards, and at the start there is room for one sequence only."""
        if not self.held_out:
            return {}
        tokens = self.learner.micro_batch_tokens
        if self.config.inference.sleep is True:
            tokens = max(map(len, self.held_out))
        self.progress.phase("evaluate", len(self.held_out))
        with self.log.phase("held_out_loss"):
            of_method = None
            if self.method is not None:
                of_method = self.method.held_out(self.held_out, self.learner, self.reference)
            self.held_out_loss = of_method or held_out_loss(
                partial(self.learner.forward, micro_batch_tokens=tokens),
                self.held_out,
                _ROWS_AT_ONCE * tokens * self.config.training.ranks,
                self.progress.advance,
            )
        if self.engine is None:
            self.evaluations.done_step = self.step
        return dict(self.held_out_loss)

    def _probe(self, sequences: list[records.Sequence]) -> dict[str, float]:
        """Compare the engine's log-probabilities of the sequences it just sampled with the trainer's, by the same
        weights: small differences are numerics. Raises MismatchError above `weights.probe_stop`."""
        # Under sleep mode the engine holds the GPU: the rest of its memory may fit one sequence only, not a full row.
        row = max(map(len, sequences)) if self.config.inference.sleep is True else None
        ours = self.learner.forward(sequences, self.sampling, micro_batch_tokens=row).logprobs
        differences = [logprob_differences(s, logprobs) for s, logprobs in zip(sequences, ours, strict=True)]
        # An engine in a concurrent evaluation is not probed: all probed ones have begun with the first prompt.
        first = prompt_of(sequences[0])
        num_probed = min(num_engines(self.config), sum(prompt_of(sequence) == first for sequence in sequences))
        mean = worst_engine_mean(differences, num_probed)
        limits = self.config.weights
        if self.config.run.exact:
            refuse_difference(mean, f"version {self.step}")
        if not mean <= limits.probe_warn:
            forward = partial(self.learner.forward, micro_batch_tokens=row)
            is_small = self.config.model.shared_kernels and 4 * mean <= limits.probe_stop
            cause = OTHER_BITS if is_small else explain_difference(forward, sequences, self.sampling, self._probed)
            text = f"engine and trainer differ by {mean:.3f} in log-probability per token at version {self.step}"
            if not mean <= limits.probe_stop:
                raise MismatchError(f"{text}, above weights.probe_stop = {limits.probe_stop:g}; {cause}")
            self.log.warning(f"{text}, above weights.probe_warn = {limits.probe_warn:g}; {cause}", step=self.step)
        self._probed = (mean if self._probed is None else self._probed[0], mean)
        return {"probe/abs_logprob_diff": mean, "probe/max_logprob_diff": max(map(max, differences))}

    def _keep_samples(self, batch: records.Batch, credit: Credit) -> None:
        for place, rollout in enumerate(batch.rollouts[: self.config.run.save_samples]):
            self.log.sample(sample_of(rollout, batch.step, batch.version.name, **credit.of(place)))

    def report(self, metrics: Mapping[str, float]) -> None:
        """Write the step's row of metrics."""
        row = self.log.metrics(self.step, metrics)
        present = {name: value for name, value in row.items() if value is not None}
        self.progress.step(self.step, present)
        for text in self._signal_watch.observe(present):
            self.log.warning(text, step=self.step)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Pass an evaluation to early stopping; save the best version's checkpoint if `patience` asks for it, and
        the checkpoint of a possible best one."""
        watch = self.evaluations.early_stop
        if watch.observe(self.step, metrics) and watch.keeps_best:
            self.save(best=watch.best)
        elif watch.keeps_best and self.evaluations.running == self.step:
            self.save()

    def _keep_best(self, step: int, accuracy: float) -> None:
        """A late evaluation was the best so far; one beside training had its step saved before."""
        if step == self.step:
            self.save(best=accuracy)
        else:
            self.writer.link_best(step, accuracy)

    def save(self, *, best: float | None = None, last: bool = False) -> None:
        """Start writing a checkpoint: deployable weights and the resume state. `best`: its accuracy, if it is the best
        so far. With `last`, wait until it is written."""
        with self.log.phase("checkpoint"):
            if self._saved_step != self.step:
                self.writer.store.candidate_step = self.evaluations.running
                extra: dict[str, Any] = {
                    "step": self.step,
                    "lineage": self.log.lineage,
                    "trained_steps": self._trained_steps,
                    "quiet_steps": self._steps_without_signal,
                    "num_items": self.identity.num_items,
                    "identity": dict(self.identity.digests),
                    **self.evaluations.state(),
                }
                if self.config.training.order == "ready":
                    extra["draws"] = self.resumed.draws.state()
                if self.curriculum is not None:
                    extra["curriculum"] = self.curriculum.state()
                if self.state:
                    extra["state"] = self.state
                self.writer.save(self.step, extra, best=best, last=last)
                self._saved_step = self.step
            elif best is not None:
                self.writer.link_best(self.step, best)
            if last:
                self.writer.wait()
