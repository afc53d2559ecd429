"""Idle time of engine and trainer by reason while batches are made, and open requests. Pure, but for a clock.

The engine is idle while it has no request for training. Its reasons: a version is applied (`update`), it is started
again (`restart`), only tools, rewards or the environment itself work (`environment`), or no group may begin before the
trainer releases a version (`trainer`). Requests may also wait in the paused engine for their version (`hold`). The
trainer is idle from the release of a version, or from `go_on`, until its next batch is made.
Its half of the probe counts as idle, too. Its reasons are `generation`, `environment`, `update`, `restart` and
`oldest`: enough groups are ready, and the batch waits for one too old for later batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

ENGINE_REASONS = ("trainer", "environment", "update", "restart")
TRAINER_REASONS = ("generation", "oldest", "environment", "update", "restart")


class Counter:
    """Counts the entered blocks; calls a function after the first was entered and after the last was left.
    Thousands a second may come and go."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.number = 0
        self._on_change = on_change

    def __enter__(self) -> None:
        self.number += 1
        if self.number == 1:
            self._on_change()

    def __exit__(self, *raised: object) -> None:
        self.number -= 1
        if not self.number:
            self._on_change()


class IdleTime:
    """Adds up seconds by reason, from one batch to the next. All methods belong to one event loop."""

    def __init__(
        self,
        is_up: Callable[[], bool] = lambda: True,
        *,
        num_places: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_up`: whether the engine runs, asked when it has no request. `num_places`: requests computed by it at
        once."""
        self._is_up, self._num_places, self._clock = is_up, num_places, clock
        self.requests = Counter(self._count)
        """Entered while the engine has a request."""
        self.groups = Counter(self._count)
        """Entered while a group is generated."""
        self.updates = Counter(self._count)
        """Entered while a version is applied."""
        self._released = -1
        self._step: int | None = None
        """Step of the batch in the making; None before the first."""
        self._is_due = False
        self._is_held = False
        self.went_on = -math.inf
        """When held requests went on last, by the clock."""
        self._engine_reason = ""
        """Why the engine is idle since the last change; empty while it is not."""
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """The making of batches begins, with the batch of `step`."""
        self._count()
        self._step, self._released = step, max(self._released, step)

    def released(self, version: int) -> None:
        """The trainer has released a version, and wants this step's batch next."""
        self._count()
        self._released = max(self._released, version)

    def hold(self) -> None:
        """Requests of the next batch wait in the engine for the trainer, from here on."""
        self._is_held = True
        self._count()

    def go_on(self) -> None:
        """They get their tokens from here on, and the trainer waits for them."""
        if self._is_held:
            self._is_held = False
            self._count()
            self.went_on = self._since
            self._released = max(self._released, self._step or 0)

    def is_due(self, due: bool) -> None:
        """Whether the batch waits for a group too old for later batches, while enough others are ready."""
        if due != self._is_due:
            self._count()
            self._is_due = due

    def queues(self) -> dict[str, float]:
        """As metrics: the engine's requests, and how many of them wait for a place."""
        found = {"rollout/requests_open": float(self.requests.number)}
        if self._num_places is not None:
            found["rollout/requests_waiting"] = float(max(0, self.requests.number - self._num_places))
        return found

    def cut(self, step: int) -> dict[str, float]:
        """The batch of `step` is made. Returns the seconds since the batch before as metrics: of both sides as a whole,
        and by each reason found."""
        self._count()
        taken, self._seconds = self._seconds, {}
        self._step, self._is_due = step + 1, False
        sides = {"idle/engine_s": ENGINE_REASONS, "idle/trainer_s": TRAINER_REASONS}
        named = {whole: [f"{whole[:-2]}_{reason}_s" for reason in reasons] for whole, reasons in sides.items()}
        return {whole: sum(taken.get(name, 0.0) for name in names) for whole, names in named.items()} | taken

    def _count(self) -> None:
        """The time since the last change was spent as things stood then; from here on they stand as they are."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        reason, self._engine_reason = self._engine_reason, self._why_engine_is_idle()
        if self._step is None or not seconds:
            return
        if reason:
            self._add(f"idle/engine_{reason}_s", seconds)
        if self._released >= self._step:
            why = "oldest" if self._is_due else reason
            self._add(f"idle/trainer_{why if why in TRAINER_REASONS else 'generation'}_s", seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _why_engine_is_idle(self) -> str:
        if self.requests.number and not self._is_held:
            return ""
        if self.updates.number:
            return "update"
        if not self._is_up():
            return "restart"
        return "environment" if self.groups.number and not self._is_held else "trainer"
