"""Requests of foreign clients inside vLLM, as an update and the server's watch see them.

Guarantees:
- A request counts as running exactly as long as vLLM computes it. A client may read its answer slowly: that delays
  neither an update nor a new adapter, and no watch takes it for a hang.
- When the engine goes out of service, every request inside vLLM ends. No later token of it is given out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slipstream.inference.plugin.hosts import Host, LoadedAdapter
from slipstream.inference.plugin.service import Service
from slipstream.inference.plugin.version_labels import Spans

POLL_S = 0.02
"""How often an update looks whether vLLM has ended its last foreign request."""


class Exchange:
    """A foreign client's HTTP request: its key, and the version spans of its answers."""

    __slots__ = ("_num_open", "answers", "is_complete", "key")

    def __init__(self, key: str = "") -> None:
        self.key = key
        """The bearer key of the request, empty without one. Recorded sessions are found by it."""
        self.answers: list[Spans] = []
        """The spans of each answer, in order; empty while it is not complete."""
        self.is_complete = False
        """Whether vLLM has given all tokens of all answers."""
        self._num_open = 0

    def begin(self, num_answers: int) -> int:
        """So many more answers begin; returns the index of the first."""
        first = len(self.answers)
        self.answers += [[] for _ in range(num_answers)]
        self._num_open += num_answers
        self.is_complete = False
        return first

    def end(self, first: int, spans: list[Spans]) -> None:
        """The answers from the index `first` on are complete."""
        self.answers[first : first + len(spans)] = spans
        self._num_open -= len(spans)
        self.is_complete = self._num_open == 0

    def names(self) -> set[str]:
        """Names of the versions in all spans."""
        return {name for spans in self.answers for _, name in spans}


exchange_of_task: ContextVar[Exchange | None] = ContextVar("exchange_of_task", default=None)
"""The HTTP request of the current task; set by the listener of foreign clients."""


@dataclass(eq=False)
class Guest:
    """One prompt of a foreign client, answered `num_answers` times."""

    id: str
    num_answers: int
    adapter: LoadedAdapter | None = None
    version: str = ""
    """With an adapter, or under LoRA without one: the version of all tokens."""
    is_restarted: bool = False
    """Its last output comes from an update, after which vLLM computes it again."""
    refusal: str = ""
    """Why it ends before its time."""
    spans: list[Spans] = field(default_factory=list)


class Guests:
    """The foreign requests of an engine."""

    def __init__(self, host: Host, service: Service, num_places: int) -> None:
        self.places = asyncio.Semaphore(num_places)
        """So many are inside vLLM at once; the others wait, and begin with a later version."""
        self._host = host
        self._running: dict[str, Guest] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        service.on_failure.append(self._refuse)

    @property
    def num_running(self) -> int:
        """Requests inside vLLM, without complete ones."""
        return sum(map(self._host.is_computing, self._running))

    def uses(self, adapter_id: int) -> bool:
        """Whether vLLM computes a request with that adapter."""
        return any(
            guest.adapter is not None and guest.adapter.id == adapter_id and self._host.is_computing(guest.id)
            for guest in self._running.values()
        )

    def begin(self, guest: Guest, prompt: Any, params: Any, options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """vLLM's outputs; `end` follows in any case."""
        guest.is_restarted = False
        self._running[guest.id] = guest
        return self._host.stream(guest.id, prompt, params, **options)

    def end(self, guest: Guest) -> None:
        """The last output has come, or nobody wants it any more; safe to call again."""
        if self._running.pop(guest.id, None) is not None:
            spans = self._host.end_stream(guest.id, guest.num_answers)
            guest.spans = [[(0, guest.version)]] * guest.num_answers if guest.version else spans

    async def restart(self, num_tokens: Mapping[Any, int]) -> None:
        """Have vLLM compute requests without a token again; steps are paused."""
        begun = {key[0] for key, count in num_tokens.items() if isinstance(key, tuple) and count}
        again = [guest for guest in self._running.values() if guest.id not in begun]
        again = [guest for guest in again if self._host.is_computing(guest.id)]
        for guest in again:
            guest.is_restarted = True
        if again:
            await self._host.abort([guest.id for guest in again])

    def _refuse(self, reason: str) -> None:
        ended = [guest for guest in self._running.values() if self._host.is_computing(guest.id)]
        for guest in ended:
            guest.refusal = reason
        if ended:
            task = asyncio.get_running_loop().create_task(self._host.abort([guest.id for guest in ended]))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
