"""A session: the parts of a run in the caller's process, in the caller's order.

`rollouts` are made by the engine, `train` changes the trainer's weights, and `sync` brings these to the engine,
verified as in every run. Guarantees: no rollout and no batch is older than `training.staleness` allows; every wait has
a deadline; the end of the `with` block ends engine, ranks and reward workers, also by an exception; the ledger knows
of each group whether it was trained on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from slipstream.config.sft import SFTConfig
from slipstream.errors import ConfigError, SlipstreamError, TrainingError, one_line
from slipstream.python.groups import Groups, Trained, as_rollouts
from slipstream.records import Batch, Message, Rollout, Task, Version

if TYPE_CHECKING:
    from concurrent.futures import Future

    from slipstream.config import Loaded, PlannedConfig
    from slipstream.launch.run import Parts
    from slipstream.launch.session import OpenSession
    from slipstream.orchestrator.control.commands import AnyAnswer, MakeBatch
    from slipstream.orchestrator.control.handle import Orchestrator
    from slipstream.progress import Progress
    from slipstream.trainer.chosen_loss import Loss
    from slipstream.trainer.learner import Scores
    from slipstream.trainer.loss import Objective
    from slipstream.trainer.steps import Steps


class Session:
    """See `slipstream.session`. Its calls belong to one thread at a time."""

    def __init__(self, loaded: Loaded, progress: Progress) -> None:
        self._loaded, self._progress = loaded, progress
        self._exits = ExitStack()
        self._open: OpenSession | None = None
        self._ended: tuple[int, Path] | None = None
        """Step and folder of a session that has ended."""
        self._steps: Steps | None = None
        self._objectives: dict[str | int, Objective] = {}
        """By the name of the loss, or the identity of the function; the objective keeps it alive."""
        self._groups = Groups()
        self._row: dict[str, float] | None = {}
        """Metrics of the step, until its row is written."""
        self._made: dict[str, float] = {}
        """Metrics of the rollouts since the last step."""
        self._dropped: dict[str, int] = {}
        """Failed rollouts since the last step, by reason."""
        self._synced = -1
        """The step of the engine's version; -1 without one."""
        self._num_asked: dict[int, int] = {}
        """Groups asked for, by step."""
        self.state: dict[str, Any] = {}
        """The caller's own: `save` keeps it, and `resume` brings it back; JSON types."""

    def __enter__(self) -> Self:
        """Start the engine and load the model."""
        from slipstream.launch.session import open_session

        if self._open is not None or self._ended is not None:
            raise ConfigError("a session is opened once: call slipstream.session(...) again")
        self._open = self._exits.enter_context(open_session(self._loaded, self._progress))
        # When the functions of `atexit` are called, no thread can be used any more, and the end needs some.
        at_exit: Any = getattr(threading, "_register_atexit", atexit.register)
        at_exit(partial(_close, weakref.ref(self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """End everything; an exception of the caller's is the reason in `exit.json`."""
        try:
            self._end(error)
        except BaseException as own:
            self._exits.__exit__(type(own), own, own.__traceback__)
            raise
        finally:
            self._ended = (self.step if self._steps else 0, self.folder)
            # The trainer's memory is free with the last reference to the model.
            self._open, self._steps = None, None
            self._objectives.clear()
        return self._exits.__exit__(kind, error, trace)

    def _end(self, error: BaseException | None) -> None:
        """Settle the last groups and write the last row."""
        if self._steps is None:
            return
        # The error of the caller is worth more.
        quietly = contextlib.suppress(SlipstreamError) if error is not None else contextlib.nullcontext()
        try:
            with quietly:
                self._settle(self._groups.take_all())
                self._write_row()
        finally:
            self._steps.close()

    @property
    def step(self) -> int:
        """Batches trained on."""
        if self._ended is not None:
            return self._ended[0]
        return 0 if self._steps is None and self._opened.resumed_step is None else self._begun.step

    @property
    def folder(self) -> Path:
        """The run folder, as `slipstream.load_run` opens it."""
        return self._ended[1] if self._ended is not None else self._parts.run.folder

    @property
    def tasks(self) -> list[Task]:
        """The training tasks of the run file."""
        return self._parts.run.prepared.train_tasks

    @property
    def eval_tasks(self) -> list[Task]:
        """The held-out tasks of the run file."""
        return self._parts.run.prepared.eval_tasks

    def resume(self) -> int:
        """Go on after the last checkpoint in the folder: weights, optimizer, counters and `state` are as they were at
        `save`. Returns its step, 0 without one. The caller finds his place in his program himself. Raises
        ConfigError after the first other call."""
        if self._steps is not None:
            raise ConfigError(f"s.resume() was called at step {self._steps.step}: call it before anything else")
        resumes = self._opened.resumed_step is not None
        self._steps = self._parts.session(resume=resumes)
        self._steps.begin()
        if resumes:
            self.state = self._steps.state
        return self._steps.step

    def rollouts(
        self, tasks: Iterable[Task | Mapping[str, Any]] | None = None, n: int | None = None
    ) -> list[list[Rollout]]:
        """Make `n` rollouts of each task by the engine's weights, and grade them: one list for each task.

        `tasks`: tasks of `s.tasks`, or dictionaries with `prompt` and perhaps `answer`; by default the run's own
        `training.prompts_per_batch` tasks of this step. `n`: by default `algorithm.group_size`. Failed rollouts are
        left out, and counted as `dropped/...`; the list of a given task may be empty. Raises ConfigError if the
        engine's version is too old."""
        steps, engine = self._synchronised(), self._engine
        self._refuse_old_engine()
        self._write_row()
        self._settle(self._groups.take_older(self._oldest))
        command = self._command(steps.step, self._synced, self._tasks_of(tasks), n)
        return self._taken(engine.ask(command), command)

    def stream(
        self, tasks: Iterable[Task | Mapping[str, Any]] | None = None, n: int | None = None
    ) -> Generator[list[list[Rollout]]]:
        """Make rollouts ahead of training: as `rollouts`, one batch after the other, `training.staleness` of them ahead
        of the one in training. Train on each and call `sync` before the next.

        `tasks`: an endless iterator or a list, taken `training.prompts_per_batch` at a time; by default the run's own
        up to `training.steps`. Rollouts in the making are cancelled at the end of the loop."""
        steps, engine = self._synchronised(), self._engine
        training, source = self._config.training, None if tasks is None else iter(tasks)
        asked: deque[tuple[Future[AnyAnswer], MakeBatch]] = deque()
        number, first = steps.step, steps.resumed.step
        try:
            while True:
                # A caller who takes several batches in a step gets more for this step.
                while number < training.steps and (number <= steps.step + training.staleness or not asked):
                    step = min(number, steps.step + training.staleness)
                    batch = (
                        []
                        if source is None
                        else self._tasks_of(islice(source, training.prompts_per_batch), may_be_empty=True)
                    )
                    if source is not None and not batch:
                        break
                    command = self._command(step, max(first, step - training.staleness), batch, n)
                    asked.append((engine.ask(command), command))
                    number = step + 1
                if not asked:
                    return
                self._refuse_old_engine()
                self._write_row()
                self._settle(self._groups.take_older(self._oldest))
                yield self._taken(*asked.popleft())
        finally:
            for answer, _ in asked:
                answer.cancel()

    def train(self, data: Trained, loss: Loss | None = None) -> dict[str, float]:
        """Make one step on rollouts, on groups of them, or on sequences; returns its metrics.

        `loss`: the run's algorithm by default; "sft" (cross-entropy of all trained tokens); the name of a loss as in
        `algorithm.loss`; or a function `(LossInputs) -> Tensor` with the loss of each token, `[N]`. A rollout gets its
        advantage from `[algorithm]`, unless its sequences have a stream `advantages`; sequences without a rollout need
        one. Raises ConfigError for an unusable loss, and TrainingError for tokens beyond the staleness bound, or if
        training fails."""
        steps = self._begun
        num_steps = self._config.training.steps
        if steps.step >= num_steps:
            raise ConfigError(f"the session has made its training.steps = {num_steps} steps: raise it")
        objective = self._objective(loss)
        rollouts = as_rollouts(data, steps.step, needs_advantages=loss != "sft")
        if loss != "sft":
            self._refuse_old(rollouts)
        self._write_row()
        dropped, self._dropped = self._dropped, {}
        batch = Batch(steps.step, Version(steps.log.lineage, steps.step), rollouts, dropped)
        made, self._made = self._made, {}
        self._rest_engine()
        try:
            self._row = made | steps.train(batch, objective)
        except TrainingError:
            steps.learner.optimizer.discard_gradients()  # the caller may go on with another loss
            raise
        self._engine.settle(steps.step, trained=self._groups.take(rollouts))
        return dict(self._row)

    def forward(self, data: Trained) -> Scores:
        """Log-probabilities and entropies of the trained tokens by the trainer's weights, in nats under the run's
        sampling: `logprobs` and `entropies`, one `[N]` for each sequence."""
        sequences = [each for rollout in as_rollouts(data, 0) for each in rollout.sequences]
        self._rest_engine()
        return self._begun.learner.forward(sequences, self._begun.sampling)

    def prompt_tokens(self, messages: str | Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation by the model's chat template, up to the start of the answer: of messages as a task's
        prompt has them. A text is a user's message."""
        from slipstream.envs.single_turn import as_messages

        return self._parts.run.prepared.tokenizer.render(as_messages(messages, "prompt_tokens"))

    def credit(self, groups: Trained) -> list[float]:
        """Compute the advantage of each rollout by the run's algorithm, and write it to the stream `advantages` of its
        sequences. 0 if tokens have their own already."""
        from slipstream.trainer.credit_assignment import assign_credit

        steps, algorithm = self._begun, self._config.algorithm
        assert not isinstance(algorithm, SFTConfig)
        rollouts = as_rollouts(groups, steps.step)
        batch = Batch(steps.step, Version(steps.log.lineage, steps.step), rollouts)
        credit = assign_credit(batch, algorithm, steps.sampling.max_tokens)
        found = [advantage or 0.0 for advantage in credit.advantages]
        for rollout, advantage in zip(rollouts, found, strict=True):
            for sequence in rollout.sequences:
                if "advantages" not in sequence.streams:
                    sequence.put("advantages", [advantage] * len(sequence))
        return found

    def sync(self) -> dict[str, float]:
        """Bring the trainer's weights to the engine, and verify every parameter there; returns metrics of the update
        and of the probe."""
        steps = self._begun
        metrics = steps.synchronise(False, is_last=False)
        self._synced = steps.step
        return self._put(metrics)

    def evaluate(self) -> dict[str, float]:
        """Measure held-out accuracy by the engine's weights; returns metrics, `eval/accuracy` among them. Raises
        ConfigError without [evaluation], or if the trainer has newer weights."""
        steps = self._synchronised()
        if self._config.evaluation is None:
            raise ConfigError("s.evaluate() needs [evaluation], and held-out tasks: turn it on")
        if self._synced != steps.step:
            raise ConfigError(f"the engine has version {self._synced} at step {steps.step}: call s.sync() first")
        return self._put(steps.evaluations.make(self._engine, steps.step, is_last=True))

    def save(self) -> Path:
        """Write a checkpoint: deployable weights, and the resume state with `state`. Returns the folder of the weights,
        once it is whole. Raises ConfigError if `state` is no JSON."""
        steps = self._begun
        try:
            json.dumps(self.state, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            kept = "texts, finite numbers, lists and dictionaries"
            raise ConfigError(f"s.state cannot be kept ({one_line(error)}): use {kept}") from None
        self._write_row()
        steps.state = self.state
        steps.save(last=True)
        latest = self._parts.store.latest(resumable=False)
        assert latest is not None
        return latest / "weights"

    def stop_waiting(self) -> None:
        """Have a call in another thread end its wait within a second, with `Interrupted`."""
        if self._open is not None:
            self._open.stop.request()

    @property
    def _opened(self) -> OpenSession:
        if self._open is None:
            how = "has ended" if self._ended is not None else "is not open"
            raise ConfigError(f"the session {how}: use it inside `with slipstream.session(...) as s:`")
        return self._open

    @property
    def _parts(self) -> Parts:
        return self._opened.parts

    @property
    def _config(self) -> PlannedConfig:
        return self._begun.config

    @property
    def _begun(self) -> Steps:
        """The steps; they begin with the first call."""
        if self._steps is None:
            if (found := self._opened.resumed_step) is not None:
                at = f"{self.folder} holds a run at step {found}"
                raise ConfigError(f"{at}: call s.resume() before anything else, or give another folder")
            self.resume()
        assert self._steps is not None
        return self._steps

    @property
    def _engine(self) -> Orchestrator:
        return cast("Orchestrator", self._begun.engine)

    @property
    def _oldest(self) -> int:
        """The oldest version to be trained on in this step."""
        return self._begun.step - self._config.training.staleness

    def _synchronised(self) -> Steps:
        """The steps, once the engine has weights: it has none at the beginning, and while it sleeps."""
        if self._synced < 0:
            self.sync()
        return self._begun

    def _rest_engine(self) -> None:
        """Under `inference.sleep`, give the engine's memory to the trainer, unless it has it."""
        if self._config.inference.sleep and self._synced >= 0:
            self._engine.hooks.batch_taken()
            self._synced = -1

    def _refuse_old_engine(self) -> None:
        from slipstream.config.traits import shares_weights

        step, config = self._begun.step, self._config
        is_written = self._synced != step and shares_weights(config)
        if is_written or self._synced < self._oldest:
            why = "its weights are being written" if is_written else f"training.staleness = {config.training.staleness}"
            raise ConfigError(f"the engine has version {self._synced} at step {step} ({why}): call s.sync() first")

    def _refuse_old(self, rollouts: Sequence[Rollout]) -> None:
        from slipstream.orchestrator.batches.staleness import refuse_stale

        steps = self._begun
        refuse_stale(rollouts, steps.step, steps.log.lineage, self._config.training.staleness)

    def _command(self, step: int, oldest: int, tasks: list[Task], n: int | None) -> MakeBatch:
        from slipstream.orchestrator.control.commands import MakeBatch

        if n is not None and n < 1:
            raise ConfigError(f"n = {n} rollouts of a task: ask for at least one")
        algorithm, training = self._config.algorithm, self._config.training
        assert not isinstance(algorithm, SFTConfig)
        first, rounds = self._num_asked.get(step, 0), 1 if tasks else 1 + (algorithm.max_refills or 0)
        self._num_asked[step] = first + rounds * (len(tasks) or training.prompts_per_batch)
        return MakeBatch(step, oldest, tasks, n or 0, first)

    def _tasks_of(self, tasks: Iterable[Task | Mapping[str, Any]] | None, *, may_be_empty: bool = False) -> list[Task]:
        from slipstream.envs.single_turn import as_task, with_schemas

        if tasks is None:
            return []
        if isinstance(tasks, str | Mapping):
            raise ConfigError(f"tasks is a {type(tasks).__name__}: give a list of tasks")
        given, environment = [*tasks], self._parts.run.prepared.environment
        if not given and not may_be_empty:
            raise ConfigError("tasks is empty: give at least one task, or none for the run's own")
        new = [as_task(each, f"session/{n}", f"task {n} of s.rollouts()") for n, each in enumerate(given)]
        assert environment is not None
        made = with_schemas(environment, new)
        return [own if isinstance(raw, Task) else other for raw, own, other in zip(given, new, made, strict=True)]

    def _taken(self, answer: Future[AnyAnswer], command: MakeBatch) -> list[list[Rollout]]:
        """The groups of a batch, once it is made; of given tasks one for each."""
        with self._begun.log.phase("batch"):
            batch = self._engine.take(answer, self._begun.step)
        if self._config.inference.sleep:
            self._synced = -1  # the engine has given its memory to the trainer
        groups = [list(group) for _, group in groupby(batch.rollouts, key=lambda rollout: rollout.group_id)]
        self._groups.add(groups, batch.version.step)
        self._made |= batch.metrics
        for reason, count in batch.dropped.items():
            self._dropped[reason] = self._dropped.get(reason, 0) + count
        if not command.tasks:
            return groups
        from slipstream.orchestrator.batches.batcher import group_name

        found = {group[0].group_id: group for group in groups}
        names = (group_name(command.step, command.first + place) for place in range(len(command.tasks)))
        return [found.get(name, []) for name in names]

    def _objective(self, loss: Loss | None) -> Objective | None:
        from slipstream.trainer.chosen_loss import objective_of
        from slipstream.trainer.loss import PolicyObjective

        if loss is None:
            return None
        key = loss if isinstance(loss, str) else id(loss)
        if key not in self._objectives:
            base = self._begun.objective
            assert isinstance(base, PolicyObjective)
            self._objectives[key] = objective_of(loss, base, self._config.training.ranks)
        return self._objectives[key]

    def _settle(self, unused: Sequence[list[Rollout]]) -> None:
        """Count groups as not trained on."""
        if not unused or self._steps is None:
            return
        self._engine.settle(self._steps.step, unused=[group[0].group_id for group in unused])
        tokens = sum(rollout.num_sampled for group in unused for rollout in group)
        self._put({"dropped_groups/unused": float(len(unused)), "dropped_tokens/unused": float(tokens)})

    def _put(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add metrics to the row of the step."""
        steps = self._begun
        if self._row is None:
            steps.log.add_metrics(steps.step, metrics)
        else:
            self._row |= metrics
        return dict(metrics)

    def _write_row(self) -> None:
        row, self._row = self._row, None
        if row:
            self._begun.report(row)
            self._begun.observe(row)


def _close(session: weakref.ref[Session]) -> None:
    """Close a session that is open at the end of the program."""
    if (left := session()) is not None and left._open is not None:
        warnings.warn("a session was open at the end of the program, and is closed: use `with`", stacklevel=1)
        left.__exit__(None, None, None)
