"""The schedule of checkpoints, and asynchronous writing: a snapshot in the training thread, then a thread to write
it.

Guarantees: a checkpoint has the state of the moment of `save`. At most one is being written. An error of a write is
raised by the next call in the training thread. Waiting for a write ends with an error after `QUIET_S` without progress
on the disk. With `beside` false there is no snapshot, and the caller writes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config.planned import PlannedConfig
from slipstream.errors import SlipstreamError
from slipstream.processes.files import cannot_write
from slipstream.runlog import RunLog
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.checkpoints.snapshot import Snapshots
from slipstream.trainer.critic import Critic
from slipstream.trainer.learner import Learner

EVERY_S = 600.0
"""Under `run.checkpoint_every = "10min"`."""
MOST_COST = 0.03
"""Most of training's time to be taken by checkpoints by the clock, as a fraction."""
QUIET_S = 300.0
_POLL_S = 0.5


@dataclass
class Schedule:
    """When a checkpoint is due at the end of a step: every `every` steps, or by the clock, less often if they are slow.
    The one after the last of `num_steps` is not scheduled here."""

    every: int | str
    num_steps: int
    clock: Callable[[], float] = time.monotonic
    interval_s: float = field(default=EVERY_S, init=False)
    _since: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def is_by_clock(self) -> bool:
        """Whether the clock decides rather than steps."""
        return isinstance(self.every, str)

    def is_near(self, step: int) -> bool:
        """Whether a checkpoint will be due soon, and memory for it should be prepared."""
        if isinstance(self.every, int):
            return step - step % self.every + self.every < self.num_steps
        return self.clock() - self._since >= self.interval_s / 2

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        if isinstance(self.every, int):
            return step % self.every == 0
        return self.clock() - self._since >= self.interval_s

    def saved(self, cost_s: float) -> str:
        """Record a checkpoint's cost to training of `cost_s` seconds; returns a warning, or an empty string."""
        before, self._since = self.interval_s, self.clock()
        self.interval_s = max(EVERY_S, cost_s / MOST_COST)
        if not self.is_by_clock or self.interval_s <= 1.5 * before:
            return ""
        return (
            f"a checkpoint took {cost_s:.0f} s from training: they are made every {self.interval_s / 60:.0f} minutes in"
            f" place of {before / 60:.0f}, to take no more than {100 * MOST_COST:g} % of the time; set "
            "run.checkpoint_every to a number of steps to have them whatever they take"
        )


class CheckpointWriter:
    """Writes checkpoints of `learner` and `critic` to `store`; called by the training thread."""

    def __init__(
        self,
        store: CheckpointStore,
        learner: Learner,
        critic: Critic | None,
        log: RunLog,
        schedule: Schedule,
        *,
        beside: bool,
    ) -> None:
        self.store, self._learner, self._critic, self._log = store, learner, critic, log
        self._schedule = schedule
        self._snapshots = Snapshots(learner) if beside else None
        self._critics = Snapshots(critic.learner, deployed=False) if beside and critic is not None else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writes: Path | None = None
        self._prepared = False
        self._num_skipped = 0
        self.saved_step = 0
        """The step of the newest whole checkpoint."""

    def begin(self) -> None:
        """Start the clock: training begins."""
        self._schedule.saved(0.0)

    def is_due(self, step: int) -> bool:
        """Whether to `save` after `step`. By the clock, a checkpoint is skipped and counted while the previous one is
        being written."""
        self._raise_failure()
        due = self._schedule.is_due(step)
        if self._thread is not None and self._thread.is_alive():
            if due and self._schedule.is_by_clock:
                self._num_skipped += 1
                self._log.note({"checkpoint/skipped": float(self._num_skipped)})
                return False
        elif not due and self._schedule.is_near(step):
            self._prepare()
        return due

    def save(self, step: int, extra: dict[str, Any], *, best: float | None = None, last: bool = False) -> None:
        """Start writing checkpoint `step`, after waiting for the previous one. `best`: its accuracy, if it is the best
        so far. The `last` is written synchronously."""
        began = time.monotonic()
        self.wait()
        learner, critic, beside = self._learner, self._critic, self._snapshots is not None and not last
        if self._snapshots is not None and not last:
            learner = self._snapshots.take()
            critic = self._critics.take() if self._critics is not None else None
        source = self._learner.model.folder

        def write() -> None:
            path = self.store.save(step, learner, source, extra, critic, best=best is not None)
            self.saved_step = step
            self._log.event(
                "checkpoint",
                step=step,
                path=str(path.relative_to(self._log.folder)),
                digest=self.store.read_fingerprints(path).digest,
                seconds=round(time.monotonic() - began, 3),
                beside=beside,
            )
            self._log_best(step, best)

        self._writes = self.store.folder / f"step-{step:06d}"
        if beside:
            self._prepared = True
            self._start(write)
        else:
            write()
        text = self._schedule.saved(time.monotonic() - began)
        if text and not last:
            self._log.warning(text, step=step)

    def link_best(self, step: int, accuracy: float) -> None:
        """Mark the existing checkpoint of `step` as the best."""
        self.wait()
        self.store.link_best(step)
        self._log_best(step, accuracy)

    def _log_best(self, step: int, accuracy: float | None) -> None:
        if accuracy is not None:
            self._log.event("best", step=step, accuracy=accuracy)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of the write, or `SlipstreamError` if it makes no
        progress."""
        quiet_s, before = 0.0, -1
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            now = self.store.unfinished_bytes()
            # Counted in polls, not by the clock: while this process was stopped nothing could be written.
            quiet_s, before = (quiet_s + _POLL_S if now == before else 0.0), now
            if quiet_s >= QUIET_S:
                raise cannot_write(self._writes or self.store.folder, f"the disk took nothing for {QUIET_S:g} s")
        self._raise_failure()

    def close(self) -> None:
        """Wait for the write in progress when the run has ended; its errors are only logged."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 (the run's own end is worth more)
            with contextlib.suppress(SlipstreamError):  # a full disk takes no warning either
                self._log.warning(f"the checkpoint under way was not written: {error}")
            return  # the writing thread may still read the snapshot
        for snapshots in (self._snapshots, self._critics):
            if snapshots is not None:
                snapshots.close()

    def _prepare(self) -> None:
        """Allocate the snapshots' memory in the background, once."""
        if self._snapshots is None or self._prepared:
            return
        self._prepared = True
        work = [each.preparation() for each in (self._snapshots, self._critics) if each is not None]
        self._start(lambda: [make() for make in work])

    def _start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised again in the training thread)
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoints", daemon=True)
        self._thread.start()

    def _raise_failure(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def create_writer(
    config: PlannedConfig, store: CheckpointStore, learner: Learner, critic: Critic | None, log: RunLog
) -> CheckpointWriter:
    """The writer of a run's checkpoints, by its schedule."""
    schedule = Schedule(config.run.checkpoint_every, config.training.steps)
    return CheckpointWriter(store, learner, critic, log, schedule, beside=config.run.async_checkpoints is True)
