"""The training loop of supervised fine-tuning and reinforcement learning.

A step takes a batch and trains on it (`steps.py`). When an engine generates with these weights, the step publishes the
new version and waits until the engine has applied and verified it. It then releases the version for rollouts, and
compares both sides' log-probabilities (the probe).
Policy version k is the result of k steps; with staleness 0 version k generated the batch of the update k -> k + 1.

The loop waits for the reader's next batch and for the engine's update, both with their own deadlines. It ends after the
last step, at the time limit, when `should_stop` is true (after writing a checkpoint), when evaluations say so
(`evaluations.py`), or with an error. A lost engine leaves a checkpoint of the steps made. A run in which no batch had
any signal is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slipstream import records
from slipstream.config.traits import generates_for
from slipstream.errors import EngineError, Interrupted, one_line
from slipstream.trainer import garbage_collection
from slipstream.trainer.evaluations import Meanwhile, nothing
from slipstream.trainer.steps import Engine, Steps

__all__ = ["Engine", "Reader", "TrainingLoop"]


class Reader(Protocol):
    """The source of batches."""

    def take(self, step: int) -> records.Batch:
        """Wait for the batch of the update `step -> step + 1`, with a deadline."""
        ...


@dataclass(kw_only=True)
class TrainingLoop(Steps):
    """See the module."""

    reader: Reader
    should_stop: Callable[[], bool] = lambda: False
    prepare: Meanwhile = nothing
    """Prepares the trainer's first steps while the engine evaluates the start model."""
    begins_early: bool = False
    """Whether a batch's requests may wait in the engine while its version is trained."""

    def run(self) -> None:
        """Train until the run ends; see the module."""
        try:
            self._run()
        except Interrupted:
            # A stop request interrupts waits between two updates only: the weights are consistent.
            self.save(last=True)
            raise
        except EngineError:
            self._save_without_engine()
            raise
        finally:
            self.close()
            garbage_collection.unfreeze()

    def _run(self) -> None:
        # Here while an engine starts, for the one after the first step to be short.
        garbage_collection.freeze()
        training = self.config.training
        evaluate = self.evaluations.is_due_at_start(self.step)
        metrics = self.measure_held_out() if evaluate else {}
        if self.engine is not None:
            metrics |= self.synchronise(evaluate, is_last=self.step >= training.steps, meanwhile=self.prepare)
        if metrics:
            self.report(metrics)
            self.observe(metrics)
        self.begin()
        updates = self.learner.step
        is_last = is_warm = False
        while self.step < training.steps and not is_last:
            if reason := self.evaluations.early_stop.reason:
                self.log.event("early_stop", step=self.step, reason=reason)
                self.progress.message(f"the run ends at step {self.step}: {reason}")
                if self.engine is not None:
                    self.evaluations.make_last(self.engine, self.step)
                break
            if self.should_stop():
                raise Interrupted(f"stopped at step {self.step} of {training.steps}: continue with --resume")
            is_last = self._one_step()
            if not is_warm and self.learner.step > updates:
                garbage_collection.freeze()
                is_warm = True
        if self.step or not self.evaluations.early_stop.reason:
            self.check_learned()
        self.save(last=True)

    def _save_without_engine(self) -> None:
        """Save the steps made, if the loss of the engine leaves them whole."""
        if not self.step or self.is_training or self.config.weights.bridge == "single_copy":
            return
        try:
            self.save(last=True)
        except Exception as error:  # noqa: BLE001 - the engine's loss matters more, and the GPU may be lost with it
            self.log.warning(f"step {self.step} is in no checkpoint: {one_line(error)}")

    def _one_step(self) -> bool:
        """Train on one batch, and synchronise the engine; returns whether it was the last, by number or by time."""
        with self.log.phase("batch"):
            batch = self.reader.take(self.step)
        begun = time.monotonic()
        if self.engine is not None and self._next_begins_early():
            self._begun = self.step + 1
            self.engine.begin(self._begun)
        metrics = dict(batch.metrics) | self.train(batch)
        change = self.adapt(batch, metrics)
        training = self.config.training
        is_late = training.max_seconds is not None and self.trained_s >= training.max_seconds
        if is_late:
            self.log.event("time_limit", step=self.step, max_seconds=training.max_seconds)
            self.progress.message(f"the run ends at step {self.step}: training.max_seconds = {training.max_seconds:g}")
        is_last = is_late or self.step >= training.steps
        evaluate = self.evaluations.is_due(self.step, is_last=is_last)
        if evaluate:
            metrics |= self.measure_held_out()
        try:
            if self.engine is not None and (evaluate or self._next_needs_engine(is_last=is_last)):
                if evaluate or is_last or not self.step % self.config.weights.every or not self.is_rl:
                    metrics |= self.synchronise(evaluate, is_last=is_last, change=change)
                else:
                    self.engine.release(self.step, change)
        except (Interrupted, EngineError):
            # The step was made and will be in the checkpoint: write its metrics too.
            self.report(metrics)
            raise
        metrics["time/after_batch_s"] = time.monotonic() - begun
        self.report(metrics)
        self.observe(metrics)
        if self.engine is not None:
            self.evaluations.take(self.engine, self.step, waits=False)
        if not is_last and self.writer.is_due(self.step):
            self.save()
        return is_last

    def _next_begins_early(self) -> bool:
        """Whether the next batch's requests are made during training, and wait in the engine for its version."""
        step, training = self.step + 1, self.config.training
        # Any step may meet the time limit, and an evaluation comes then.
        may_be_last = step >= training.steps or (
            training.max_seconds is not None and self.config.evaluation is not None
        )
        return self.begins_early and not may_be_last and not self.evaluations.is_due(step, is_last=False)

    def _next_needs_engine(self, *, is_last: bool) -> bool:
        """Whether the engine must have the weights that the step just made has left."""
        return self.is_rl or (not is_last and generates_for(self.config, self.step))
