"""The two seams of an inference engine: `Generates` for rollouts, `TakesWeights` for weight bridges.

`inference.engine.RunEngine` is both, and the engine's lifetime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.records import (
    ApplyReport,
    Completion,
    GenerateRequest,
    ParameterSpec,
    SessionOpening,
    SessionTurn,
    Ticket,
    Version,
)


class Generates(Protocol):
    """Answers requests, and can be started again when it died."""

    @property
    def num_restarts(self) -> int:
        """How often it was started again."""
        ...

    @property
    def each(self) -> Sequence[Generates]:
        """The engines in service behind this one; itself where it is one."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Tokens in, tokens out. Raises `EngineError` when the engine died or refuses."""
        ...

    async def revive(self) -> None:
        """Start a dead engine again; nothing when it is alive. Raises `EngineError` when it may not be started."""
        ...


class RequestsAddress(Protocol):
    """The address of an engine for an agent's requests. Hashable."""

    @property
    def base(self) -> str:
        """The beginning of request URLs, up to `/v1`."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Of each request."""
        ...

    def connector(self) -> Any:
        """aiohttp's, for a session in the running event loop."""
        ...


class RecordsAgents(Generates, Protocol):
    """Answers an agent's own requests too, and records the tokens of its answers."""

    async def open_session(self, opening: SessionOpening, group_id: str) -> RequestsAddress:
        """Begin to record requests with a key, in `x-api-key`. Sessions of a group have one prompt prefix. Raises
        `EngineError` when the engine cannot come back."""
        ...

    async def close_session(self, key: str) -> list[SessionTurn]:
        """The recorded turns, in the order of the answers; the key is unknown from here on. Raises `EngineError` when
        they are lost with the engine."""
        ...


class TakesWeights(Protocol):
    """Loads and verifies published versions of the weights. Timeouts raise `DeadlineError`."""

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Load the ticket's version in place and verify it; the caller checks the report."""
        ...

    async def fence(self, timeout_s: float) -> None:
        """Stop computing with the weights, which are about to be written in place, until the next `apply`."""
        ...

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """Compute with what was written since the fence, as `version`; answers are held back until `apply` has
        verified it."""
        ...

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Compare the live weights with the ticket, changing nothing."""
        ...

    async def held(self) -> Version | None:
        """The version that is verified and in service; None when there is none."""
        ...

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """Start anew on a model folder; returns once the loaded weights are verified."""
        ...
