"""Gives each rollout of an agent an address and a key, and forwards its requests to the engine that records them.

Guarantees:
- A request needs the key of its episode, until that episode ends. The port is one of this host's loopback.
- All requests of an episode go to one engine. When it dies, the episode ends as `SessionLost`.
- An answer counts as delivered once all of it was written to an open connection, or once a later request continues it.
  It counts no more when its request is repeated (`openai` and `anthropic` count repetitions in a header). No other
  answer is trained.
- A closed connection cancels its request, inside the engine too.

vLLM's answers pass through as they are. The engine's side is `inference/plugin/recording.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from slipstream.config import PlannedConfig
from slipstream.config.traits import agent_settings, serves_agents
from slipstream.data.images.processor import ImageProcessor
from slipstream.engine_protocols import RecordsAgents, RequestsAddress
from slipstream.envs.base import Address
from slipstream.errors import ConfigError, DataError, EngineError
from slipstream.orchestrator.agent_images import with_scaled_images
from slipstream.records import REQUEST_HEADER, SamplingParams, SessionOpening, SessionTurn

MODEL = "policy"
"""The model's name in requests of agents."""
MAX_BODY_BYTES = 16 * 2**20
_ROUTES = frozenset(
    {
        ("GET", "models"),
        *(("POST", path) for path in ("chat/completions", "completions", "responses", "messages")),
        ("POST", "messages/count_tokens"),
    }
)
_RETRY = "x-stainless-retry-count"
_PASSED_ON = frozenset({"content-type", "accept", "anthropic-version", "anthropic-beta"})
_GIVEN_BACK = frozenset({"content-type", "cache-control"})
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
_TAIL_BYTES, _START_BYTES = 64, 4096
_GRACE_S = 0.5
"""For open requests at the end of an episode: their last bytes may be on their way."""
_BODY_S = 60.0
_CONNECT_S, _CONNECT_PAUSE_S = 30.0, 0.02
_BACKLOG = 4096
"""Connections that wait to be accepted: all agents begin at once, and beyond it a client tries again after a second."""
_OVERLONG = b"maximum context length"


class SessionLost(Exception):
    """An episode's engine died with its records; the text says how."""


@dataclass
class AgentSession:
    """An episode's requests."""

    address: Address
    engine: RequestsAddress
    max_requests: int
    busy: Callable[[], AbstractContextManager[Any]]
    """Entered around each request."""
    turns: list[SessionTurn] = field(default_factory=list[SessionTurn])
    """Delivered answers; known once the session has ended."""
    num_requests: int = 0
    num_undelivered: int = 0
    """Answers of the engine that did not reach the agent; known once it has ended."""
    filled_context: bool = False
    """Whether a request was refused for the length of its conversation."""
    met_limit: bool = False
    """Whether there were more requests than allowed."""
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    delivered: set[int] = field(default_factory=set[int])
    asked: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """The last request of each content."""

    @property
    def overridden(self) -> dict[str, float | str]:
        """Sampling values of the agent's requests with others in the run."""
        return {name: value for turn in self.turns for name, value in turn.overridden.items()}

    def take(self, turns: Sequence[SessionTurn]) -> None:
        """Keep delivered turns, with places of continued turns among them."""
        kept = {number for number, turn in enumerate(turns) if turn.request in self.delivered}
        for number in sorted(kept, reverse=True):
            while (number := turns[number].continues) >= 0 and number not in kept:
                kept.add(number)
        places = {number: place for place, number in enumerate(sorted(kept))}
        self.turns = [
            msgspec.structs.replace(turn, continues=places.get(turn.continues, -1))
            for number, turn in enumerate(turns)
            if number in kept
        ]
        self.num_undelivered = len(turns) - len(kept)


def gateway_of(config: PlannedConfig, images: Callable[[], ImageProcessor | None]) -> Gateway | None:
    """The gateway of a run; it listens from the first episode on. None without an agent. `images`: see `Gateway`."""
    section = config.environment
    if section is None or not serves_agents(config):
        return None
    return Gateway(
        request_timeout_s=config.inference.request_timeout_s,
        max_requests=section.max_turns,
        names=[str(name) for settings in agent_settings(config) for name in settings.get("models", ())],
        template_kwargs=config.model.chat_template_kwargs,
        system_prompt=section.system_prompt,
        images=images(),
    )


class _Written:
    """Bytes written of an answer: a client may close its connection as soon as it has all it needs."""

    def __init__(self, length: int | None) -> None:
        self.start = b""
        self._length, self._num_bytes = length, 0
        self._tail = b""
        self._has_end = False

    def is_whole_with(self, chunk: bytes) -> bool:
        """Whether nothing is missing once `chunk` is written: by its length, or a stream's last event."""
        self.start = self.start if len(self.start) > _START_BYTES else self.start + chunk
        self._num_bytes += len(chunk)
        if self._length is not None:
            return self._num_bytes == self._length
        seen = self._tail + chunk
        self._has_end = self._has_end or any(end in seen for end in _ENDS)
        self._tail = seen[-_TAIL_BYTES:]
        return self._has_end and seen.endswith(b"\n\n")


class Gateway:
    """One HTTP server for the agents of all rollouts."""

    def __init__(
        self,
        *,
        request_timeout_s: float,
        max_requests: int,
        names: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        images: ImageProcessor | None = None,
    ) -> None:
        """`max_requests`: of an episode. `names`: more names for the model. `images`: scales those in requests; None
        where they are refused. The rest as in `SessionOpening`."""
        self._request_timeout_s, self._max_requests = request_timeout_s, max_requests
        self._names = (MODEL, *names)
        self._template_kwargs, self._system_prompt = dict(template_kwargs or {}), system_prompt
        self._images = images
        self._sessions: dict[bytes, AgentSession] = {}
        """By the digest of the key: the time of a lookup tells nothing of keys."""
        self._clients: dict[RequestsAddress, aiohttp.ClientSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen; the port is free until then."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=_BACKLOG)
            await site.start()
            self._runner, self._port = runner, runner.addresses[0][1]

    async def close(self) -> None:
        """Answer nothing more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    @contextlib.asynccontextmanager
    async def session(
        self,
        engine: RecordsAgents,
        sampling: SamplingParams,
        seed: int,
        group_id: str,
        busy: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        is_urgent: bool = False,
    ) -> AsyncGenerator[AgentSession]:
        """An episode's session; afterwards its `turns` are known. Raises `SessionLost` if the engine died meanwhile,
        and `EngineError` if it cannot come back."""
        await self.start()
        key = f"sk-{secrets.token_urlsafe(32)}"
        opening = SessionOpening(
            key,
            sampling,
            seed,
            is_urgent,
            self._template_kwargs,
            self._system_prompt,
            self._names,
        )
        engine_address = await engine.open_session(opening, group_id)
        address = Address(f"http://127.0.0.1:{self._port}/v1", key, MODEL)
        session = AgentSession(address, engine_address, self._max_requests, busy)
        self._sessions[_digest(key)] = session
        try:
            yield session
        finally:
            del self._sessions[_digest(key)]
            if session.running:
                await asyncio.wait(session.running, timeout=_GRACE_S)
            if running := [*session.running]:
                for task in running:
                    task.cancel()
                await asyncio.wait(running, timeout=_GRACE_S)
            try:
                session.take(await engine.close_session(key))
            except EngineError as error:
                raise SessionLost(f"the engine ended within the episode ({error})") from error

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(_digest(_key_of(request)))
        if session is None:
            return _error(401, "authentication_error", "the key is missing, wrong, or of an episode that has ended")
        path = request.path.removeprefix("/v1/")
        if not request.path.startswith("/v1/") or (request.method, path) not in _ROUTES:
            return _error(404, "not_found_error", f"{request.method} {request.path:.80} is not answered here")
        task = asyncio.current_task()
        assert task is not None
        session.running.add(task)
        try:
            try:
                async with asyncio.timeout(_BODY_S):
                    body = await request.read()
            except TimeoutError:
                return _error(408, "request_timeout", f"the body did not arrive within {_BODY_S:g} s")
            with session.busy():
                scaled = await asyncio.to_thread(with_scaled_images, body, self._images) if b"image" in body else body
                return await self._forward(session, request, path, body, scaled)
        except (DataError, ConfigError) as error:
            return _error(400, "invalid_request_error", str(error))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
        finally:
            session.running.discard(task)

    async def _forward(
        self, session: AgentSession, request: web.Request, path: str, body: bytes, scaled: bytes
    ) -> web.StreamResponse:
        """`scaled`: the body with scaled images."""
        is_turn = request.method == "POST" and path != "messages/count_tokens"
        number = session.num_requests
        if is_turn:
            if number >= session.max_requests:
                session.met_limit = True
                text = f"the episode has made {number} requests (environment.max_turns): no more are answered"
                return _error(400, "invalid_request_error", text)
            session.num_requests += 1
            content = hashlib.blake2b(path.encode() + b"\n" + body).digest()
            if request.headers.get(_RETRY, "0") not in ("", "0"):
                session.delivered.discard(session.asked.get(content, -1))
            session.asked[content] = number
        headers = {name: value for name, value in request.headers.items() if name.lower() in _PASSED_ON}
        headers |= {"x-api-key": session.address.api_key, REQUEST_HEADER: str(number)}
        try:
            async with asyncio.timeout(self._request_timeout_s):
                answer = await self._ask(session.engine, request.method, path, scaled, headers)
        except TimeoutError:
            text = f"the engine did not answer within {self._request_timeout_s:g} s (inference.request_timeout_s)"
            return _error(504, "timeout_error", text)
        except aiohttp.ClientError as error:
            return _error(503, "service_unavailable", f"the engine is gone ({type(error).__name__})", retry=False)
        async with answer:
            response = web.StreamResponse(status=answer.status)
            response.headers.update({n: v for n, v in answer.headers.items() if n.lower() in _GIVEN_BACK})
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            written = _Written(answer.content_length)
            try:
                while chunk := await _next(answer, self._request_timeout_s):
                    await response.write(chunk)
                    is_open = request.transport is not None and not request.transport.is_closing()
                    if written.is_whole_with(chunk) and is_turn and answer.status == 200 and is_open:
                        session.delivered.add(number)
            except (aiohttp.ClientError, TimeoutError):  # the engine has died: the agent sees a broken connection
                if request.transport is not None:
                    request.transport.abort()
                return response
            session.filled_context |= answer.status == 400 and _OVERLONG in written.start
            await response.write_eof()
            return response

    async def _ask(
        self, engine: RequestsAddress, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The engine's response; a socket with too many waiting connections is tried again."""
        due = asyncio.get_running_loop().time() + _CONNECT_S
        while True:
            try:
                return await self._client(engine).request(
                    method, f"{engine.base}/v1/{path}", data=body, headers=headers
                )
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno != errno.EAGAIN or asyncio.get_running_loop().time() > due:
                    raise
            await asyncio.sleep(_CONNECT_PAUSE_S)

    def _client(self, engine: RequestsAddress) -> aiohttp.ClientSession:
        if engine not in self._clients:
            timeout = aiohttp.ClientTimeout(total=None)
            self._clients[engine] = aiohttp.ClientSession(
                connector=engine.connector(), headers=engine.headers, timeout=timeout, auto_decompress=False
            )
        return self._clients[engine]


async def _next(answer: aiohttp.ClientResponse, within_s: float) -> bytes:
    """The next bytes of an answer; empty at its end. Streams have signs of life, also during an update."""
    if answer.content.is_eof():  # a deadline costs more than the read
        return await answer.content.readany()
    async with asyncio.timeout(within_s):
        return await answer.content.readany()


def _key_of(request: web.Request) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _error(status: int, kind: str, text: str, *, retry: bool = True) -> web.Response:
    """An error for clients of OpenAI and Anthropic. `retry`: whether they may send it again."""
    error = {"type": kind, "message": text, "code": status}
    headers = {} if retry else {"x-should-retry": "false"}
    return web.json_response({"type": "error", "error": error}, status=status, headers=headers)
