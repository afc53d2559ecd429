"""`ScriptedEngine`: an engine without a model, which answers from a script at once; for tests of failures, and to
measure everything around the engine.

It has the methods of `SupervisedEngine` and keeps its promises (versions, restarts, errors). Tests set what goes wrong
on the object while it runs, usually in `on_request`, which sees every request before it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from slipstream.errors import DeadlineError, EngineError
from slipstream.records import (
    AbortCause,
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    Ticket,
    ToolCall,
    Version,
    VersionSpan,
)
from slipstream.weights.bridges.single_copy import SharedWeights

Script = Callable[[list[int], int], list[int]]
"""(prompt's tokens, seed) -> the completion's tokens, its end token included."""
Logprobs = Callable[[str, GenerateRequest, list[int]], list[float]]
"""(folder of the weights in service, request, sampled tokens) -> their log-probabilities."""

Parse = Callable[[GenerateRequest, list[int]], tuple[list[ToolCall], str]]
"""(request with tools, sampled tokens) -> the calls in them, and the text apart from these."""


class ScriptedEngine:
    """Answers with the tokens of `script`; without `logprobs` every log-probability is 0."""

    is_server = False
    wants_weights = False

    def __init__(
        self,
        script: Script,
        logprobs: Logprobs | None = None,
        *,
        max_restarts: int = 0,
        on_event: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self._script = script
        self._logprobs = logprobs
        self._max_restarts = max_restarts
        self.on_event = on_event
        self.on_request: Callable[[GenerateRequest], None] = lambda request: None
        self.abort: Callable[[GenerateRequest], AbortCause | None] = lambda request: None
        """Gives up a request for the cause that it returns."""
        self.parse: Parse = lambda request, tokens: ([], "")
        """Calls and content of a completion whose request has tools."""
        self.is_alive = True
        self.is_in_memory_only = False
        """Whether no file holds its weights, so that it cannot be started again."""
        self.is_hanging = False
        self.returns_logprobs = True
        self.logprob_offset = 0.0
        """Added to every log-probability."""
        self.mismatched: tuple[str, ...] = ()
        """Mismatched parameters in the next reports."""
        self.version: Version | None = None
        self.location = ""
        """Folder of the weights in service; empty before the first version."""
        self.num_restarts = 0
        self.num_requests = 0

    @property
    def sockets(self) -> tuple[str, ...]:
        """None: it has no socket."""
        return ()

    @property
    def each(self) -> tuple[ScriptedEngine]:
        """See `Generates`."""
        return (self,)

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """None: it starts at once."""
        return ()

    @property
    def is_up(self) -> bool:
        """See `SupervisedEngine`."""
        return self.is_alive

    def launch(self) -> None:
        """Does nothing: it starts at once."""

    async def wait_ready(self) -> EngineHealth:
        """See `SupervisedEngine`."""
        self._check_alive()
        return EngineHealth("ready", self.version)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `SupervisedEngine`."""
        if not self.is_alive:
            await self.revive()
        self.num_requests += 1
        self.on_request(request)
        if self.is_hanging:
            await asyncio.sleep(request.timeout_s)
            raise DeadlineError(f"the engine did not answer /generate in {request.timeout_s:g} s: it is told to hang")
        self._check_alive()
        if (cause := self.abort(request)) is not None:
            return Completion(request.id, [], None, "abort", error="was told to fail", cause=cause)
        if request.scores_prompt:
            return Completion(request.id, [], None, "length", prompt_logprobs=self._scores(request))
        wanted = self._script(request.prompt_ids, request.seed or 0)
        tokens = wanted[: request.sampling.max_tokens]
        ended = len(tokens) == len(wanted) and tokens[-1:] and tokens[-1] in request.sampling.stop_token_ids
        logprobs = None
        if self.returns_logprobs:
            exact = self._logprobs(self.location, request, tokens) if self._logprobs else [0.0] * len(tokens)
            logprobs = [value + self.logprob_offset for value in exact]
        spans = [VersionSpan(0, self.version.name)] if self.version else []
        completion = Completion(request.id, tokens, logprobs, "stop" if ended else "length", spans)
        if request.tools:
            completion.tool_calls, completion.content = self.parse(request, tokens)
        return completion

    def _scores(self, request: GenerateRequest) -> list[float]:
        first, given = msgspec.structs.replace(request, prompt_ids=request.prompt_ids[:1]), request.prompt_ids[1:]
        return [0.0, *(self._logprobs(self.location, first, given) if self._logprobs else [0.0] * len(given))]

    async def revive(self) -> None:
        """See `SupervisedEngine`."""
        if self.is_alive:
            return
        if self.is_in_memory_only:
            raise EngineError("the engine died, and no file holds the weights that it had: it was told to die")
        if self.num_restarts >= self._max_restarts:
            raise EngineError(
                f"the engine died, and inference.max_restarts = {self._max_restarts} allows no further restart: it was "
                "told to die"
            )
        self.num_restarts += 1
        self.on_event("engine_restart", number=self.num_restarts, reason="it was told to die")
        self.is_alive = True

    async def replace(self) -> bool:
        """See `SupervisedEngine`."""
        await self.revive()
        return False

    async def joined(self) -> int:
        """See `SupervisedEngine`."""
        return self.num_restarts

    def take_metrics(self) -> dict[str, float]:
        """None."""
        return {}

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `SupervisedEngine`."""
        if not self.is_alive:
            await self.revive()
        if not self.mismatched:
            self.version, self.location = ticket.version, ticket.location
        return await self.verify(ticket, timeout_s)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `SupervisedEngine`."""
        self._check_alive()
        return ApplyReport(ticket.version, self.mismatched, num_bytes=ticket.num_bytes)

    async def held(self) -> Version | None:
        """None: it has no weights, so no version can be a delta."""
        return None

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """See `SupervisedEngine`."""
        self.is_alive, self.version, self.location = True, version, model

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Raises `EngineError`: it has no weights."""
        raise EngineError("a scripted engine has no weights to share: use weights.bridge = disk")

    async def fence(self, timeout_s: float) -> None:
        """See `SupervisedEngine`."""
        self._check_alive()

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """See `SupervisedEngine`."""
        self._check_alive()

    async def sleep(self, timeout_s: float) -> None:
        """See `SupervisedEngine`."""

    async def wake(self, timeout_s: float) -> None:
        """See `SupervisedEngine`."""

    async def leave(self, timeout_s: float) -> None:
        """See `SupervisedEngine`."""

    async def stop(self) -> None:
        """See `SupervisedEngine`."""
        self.kill()

    def kill(self) -> None:
        """See `SupervisedEngine`."""
        self.is_alive = False

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineError("the engine died: it is told to")
