"""Whether the engine may answer requests, and whether vLLM makes steps: the two state machines of `EngineServer`.

Nothing here knows vLLM. An illegal transition raises `IllegalTransition` and keeps the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slipstream.inference.plugin.hosts import Host


class OutOfService(Exception):
    """The engine may not answer now; the text says why."""


class IllegalTransition(OutOfService):
    """A call not allowed in the engine's state, such as an update during another one."""


class State(Enum):
    """Service state of the engine. Requests are answered in SERVING alone; during an update they wait."""

    STARTING = "starting"
    """The loaded weights are not verified yet."""
    SERVING = "serving"
    FENCED = "fenced"
    """The trainer writes the live weights in place: vLLM makes no step."""
    PROVING = "proving"
    """vLLM computes with weights written in place and not verified yet; answers are held back."""
    APPLYING = "applying"
    """A version is being loaded or verified."""
    FAILED = "failed"
    """An update failed, or an answer contradicted itself. A successful update leads back to SERVING."""
    ASLEEP = "asleep"
    """The GPU's memory is free; the weights wait in the CPU's memory."""


_UPDATING = frozenset({State.FENCED, State.PROVING, State.APPLYING})
_UPDATABLE = frozenset({State.SERVING, State.FENCED, State.PROVING, State.FAILED})
_LEGAL_FROM: Mapping[State, frozenset[State]] = {
    State.SERVING: frozenset({State.STARTING, State.APPLYING, State.ASLEEP}),
    State.FENCED: _UPDATABLE,
    State.PROVING: _UPDATABLE,
    State.APPLYING: _UPDATABLE,
    State.FAILED: _UPDATABLE | {State.APPLYING},
    State.ASLEEP: frozenset({State.SERVING}),
}
"""For each state its possible predecessors."""


class Service:
    """The engine's service state, its explanation, and the version without its proof."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = "starting"
        """Why requests are not answered; empty in SERVING."""
        self.unproved = ""
        """Name of the version vLLM computes with before it is verified."""
        self.num_discarded = 0
        """Versions used by vLLM and never verified; answers made with them are withheld."""
        self.on_failure: list[Callable[[str], None]] = []
        """Called when the engine goes out of service, with the reason."""
        self._settled = asyncio.Event()
        self._settled.set()
        self._admits = asyncio.Event()
        """Requests may enter vLLM."""
        self._admits.set()

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return self.state is State.SERVING

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way; at its end waiting requests go on or are refused."""
        return self.state in _UPDATING

    @property
    def status(self) -> Literal["starting", "ready", "out_of_service"]:
        """The state as `/health` tells it."""
        if self.is_serving:
            return "ready"
        return "starting" if self.state is State.STARTING else "out_of_service"

    def started(self) -> None:
        """The loaded weights are verified."""
        self._change(State.SERVING, of=State.STARTING)

    def fence(self) -> None:
        """The trainer is about to write the live weights. A version without proof stays so until the next update."""
        self._change(State.FENCED, "the trainer is writing the weights")

    def admit(self) -> None:
        """Requests may enter vLLM before the update ends: it is paused, or computes with whole weights."""
        self._admits.set()

    def begin_proof(self, version: str) -> None:
        """The trainer has written `version` in place; `compute_unproved` follows once vLLM may compute with it."""
        self._change(State.PROVING, f"proving version {version}")
        self._discard()

    def compute_unproved(self, version: str) -> None:
        """Tokens come from `version` from here on: answers are held back until it is verified."""
        if self.state is not State.PROVING:
            raise self._illegal(State.PROVING)
        self.unproved = version

    def begin_apply(self, version: str, *, proves_running: bool = False) -> None:
        """An update to `version` begins. `proves_running`: it only verifies `unproved`, and does not discard it."""
        admits = proves_running and self._admits.is_set()
        self._change(State.APPLYING, f"applying version {version}")
        if admits:
            self.admit()
        if not proves_running:
            self._discard()

    def proved(self) -> None:
        """The update has succeeded, and its version is verified: held answers are given."""
        self._change(State.SERVING, of=State.APPLYING)
        self.unproved = ""

    def fail(self, reason: str) -> None:
        """The update has failed: waiting requests are refused, held answers are withheld."""
        self._change(State.FAILED, reason)
        self._discard()

    def contradict(self, reason: str) -> None:
        """An answer contradicted itself. An update under way goes on, and its outcome decides."""
        if self.is_updating:
            self.reason = reason
        else:
            self._change(State.FAILED, reason)

    def sleep(self) -> None:
        """The engine's memory is about to be freed."""
        self._change(State.ASLEEP, "asleep")

    def wake(self) -> None:
        """The memory is taken back."""
        self._change(State.SERVING, of=State.ASLEEP)

    async def until_serving(self) -> None:
        """Wait for the end of an update, with its own deadline; raises `OutOfService` unless requests are
        answered then."""
        while self.is_updating:  # the next update may begin before the last one's waiters run again
            await self._settled.wait()
        if not self.is_serving:
            raise OutOfService(self.reason)

    async def until_admitted(self) -> None:
        """As `until_serving`, but a request may also enter vLLM during an update (`admit`)."""
        while self.is_updating and not self._admits.is_set():
            await self._admits.wait()
        if not self.is_serving and not self.is_updating:
            raise OutOfService(self.reason)

    async def until_proved(self, num_discarded: int) -> None:
        """Hold an answer back while a version lacks its proof. Raises `OutOfService` when one was discarded since the
        request began, at `num_discarded`."""
        while self.unproved:
            await self._settled.wait()
        if self.num_discarded != num_discarded:
            raise OutOfService(f"it ran with a version that had no proof ({self.reason or 'another is in service'})")

    def _discard(self) -> None:
        self.num_discarded += self.unproved != ""
        self.unproved = ""

    def _change(self, state: State, reason: str = "", of: State | None = None) -> None:
        if self.state not in _LEGAL_FROM[state] or of not in (None, self.state):
            raise self._illegal(state)
        self.state, self.reason = state, reason
        for event in (self._settled, self._admits):
            if self.is_updating:
                event.clear()
            else:
                event.set()
        if state is State.FAILED:
            for tell in self.on_failure:
                tell(reason)

    def _illegal(self, to: State) -> IllegalTransition:
        return IllegalTransition(
            f"the engine cannot go from {self.state.value} to {to.value} ({self.reason or 'it serves requests'}): "
            "wait for the call before to end"
        )


class StepState(Enum):
    """Whether vLLM makes steps."""

    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"
    """A pause or a resume is under way, or was cut short."""


class Steps:
    """Pauses and resumes vLLM, once each. After an interrupted call the state is unknown: the next one is made
    in any case."""

    def __init__(self, host: Host) -> None:
        self.state = StepState.RUNNING
        self._host = host

    @property
    def is_running(self) -> bool:
        """Whether steps are made for certain."""
        return self.state is StepState.RUNNING

    @property
    def is_paused(self) -> bool:
        """Whether no step is made for certain."""
        return self.state is StepState.PAUSED

    async def pause(self) -> None:
        """Make no step from now on."""
        if not self.is_paused:
            self.state = StepState.UNKNOWN
            await self._host.pause()
            self.state = StepState.PAUSED

    async def resume(self) -> None:
        """Make steps again."""
        if not self.is_running:
            self.state = StepState.UNKNOWN
            await self._host.resume()
            self.state = StepState.RUNNING
