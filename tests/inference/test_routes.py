"""The routes of the engine's server over real HTTP: what each hands on, and the status of what fails."""

import asyncio
import stat
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import ClientSession, UnixConnector, web
from aiohttp.test_utils import TestClient, TestServer

from slipstream.errors import EngineError, WeightsError
from slipstream.inference.client import EngineClient
from slipstream.inference.plugin import routes as routes_module
from slipstream.inference.plugin.recording import Sessions
from slipstream.inference.plugin.routes import _Cancelled, errors_as_text, listen, routes
from slipstream.inference.plugin.service import OutOfService, Service
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    SamplingParams,
    SessionOpening,
    Ticket,
    Version,
    decode,
)
from slipstream.weights.bridges.single_copy import SharedWeights

from .fakes import until

TICKET = Ticket(Version(0, 1, "d"), "disk", "/weights", (ParameterSpec("w", (2,), "float32", "aa"),))
REPORT = ApplyReport(TICKET.version, ("w",), num_bytes=8)
SHARED = (SharedWeights((), {}, {"w": "why"}),)


class Server(SimpleNamespace):
    """Notes what it is asked for."""

    def __init__(self):
        super().__init__(service=Service(), calls=[], status="ready", error=None, gates={}, ended=[])
        self.service.started()

    def health(self):
        return EngineHealth(self.status, num_running=3)

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((name, *arguments))
            if self.error:
                raise self.error
            return {"share": SHARED, "apply": REPORT, "verify": REPORT}.get(name)

        return call

    async def generate(self, request):
        self.calls.append(request.id)
        try:
            if request.id in self.gates:
                await self.gates[request.id].wait()
            if self.error:
                raise self.error
            return Completion(request.id, [7], [-1.0], "stop")
        finally:
            self.ended.append(request.id)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
async def client(server):
    app = web.Application(middlewares=[errors_as_text])
    app.add_routes(routes(server))
    async with TestServer(app, handler_cancellation=True) as site, TestClient(site) as found:
        yield found


def ask(*ids):
    return msgspec.msgpack.encode([GenerateRequest(id_, [1], SamplingParams(1)) for id_ in ids])


def frames(body):
    found = []
    while body:
        size = int.from_bytes(body[:4], "big")
        found.append(decode(body[4 : 4 + size], Completion))
        body = body[4 + size :]
    return found


@pytest.mark.parametrize(("status", "code"), [("ready", 200), ("starting", 503), ("out_of_service", 503)])
async def test_health_is_json_for_people_and_a_status_for_probes(status, code, server, client):
    server.status = status
    response = await client.get("/health")
    assert (response.status, response.content_type) == (code, "application/json")
    assert msgspec.json.decode(await response.read(), type=EngineHealth) == EngineHealth(status, num_running=3)


@pytest.mark.parametrize(
    ("path", "sent", "call", "answer"),
    [
        ("/apply", TICKET, ("apply", TICKET), REPORT),
        ("/verify", TICKET, ("verify", TICKET), REPORT),
        ("/share", TICKET.parameters, ("share", TICKET.parameters), SHARED),
        ("/fence", None, ("fence",), True),
        ("/go-on", TICKET.version, ("go_on", TICKET.version), True),
        ("/leave", None, ("leave",), True),
        ("/sleep", None, ("sleep",), True),
        ("/wake", None, ("wake",), True),
    ],
)
async def test_each_call_of_an_update_is_handed_on_and_answered(path, sent, call, answer, server, client):
    response = await client.post(path, data=msgspec.msgpack.encode(sent))
    assert (response.status, server.calls) == (200, [call])
    kind = tuple[SharedWeights, ...] if answer is SHARED else type(answer)
    assert msgspec.msgpack.decode(await response.read(), type=kind) == answer
    server.error = OutOfService("an update is under way")
    response = await client.post(path, data=msgspec.msgpack.encode(sent))
    assert (response.status, await response.text()) == (503, "an update is under way")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (WeightsError("another base"), 409, "another base"),
        (KeyError("w"), 500, "KeyError: 'w'"),
        (web.HTTPConflict(text="no"), 409, "no"),
    ],
)
async def test_what_fails_has_a_status_and_one_sentence(error, status, text, server, client, caplog):
    server.error = error
    response = await client.post("/wake")
    assert (response.status, await response.text()) == (status, text)
    logged = [(each.getMessage(), each.exc_info[1]) for each in caplog.records if each.name == "slipstream.engine"]
    assert logged == ([("/wake failed", error)] if status == 500 else []), "with its traceback"


async def test_what_is_no_request_is_refused(server, client):
    for path in ("/generate", "/apply", "/cancel"):
        response = await client.post(path, data=msgspec.msgpack.encode(3))
        assert response.status == 400
        assert (await response.text()).startswith("not a valid request: Expected `")
    assert server.calls == []


async def test_completions_are_sent_as_they_finish(server, client):
    server.gates = {"a": asyncio.Event(), "c": asyncio.Event()}
    response = await client.post("/generate", data=ask("a", "b", "c"))
    size = int.from_bytes(await response.content.readexactly(4), "big")
    first = decode(await response.content.readexactly(size), Completion)
    assert (response.status, first) == (200, Completion("b", [7], [-1.0], "stop"))
    server.gates["c"].set()
    size = int.from_bytes(await response.content.readexactly(4), "big")
    assert decode(await response.content.readexactly(size), Completion).id == "c"
    server.gates["a"].set()
    assert [each.id for each in frames(await response.read())] == ["a"]
    assert server.calls == ["a", "b", "c"]


async def test_an_id_is_one_requests_at_a_time(server, client):
    server.gates = {"a": asyncio.Event()}
    first = await client.post("/generate", data=ask("a"))
    second = await client.post("/generate", data=ask("b", "a"))
    told = "request a is running already: give each one its own id"
    assert (second.status, await second.text()) == (400, told)
    assert server.calls == ["a"], "none of them begins"
    third = await client.post("/generate", data=ask("c", "d", "d"))
    assert (third.status, (await third.text()).split()[1]) == (400, "d")
    server.gates["a"].set()
    await first.read()
    again = await client.post("/generate", data=ask("a"))
    assert [each.finish_reason for each in frames(await again.read())] == ["stop"]


async def test_a_cancelled_request_is_ended_and_the_others_go_on(server, client):
    server.gates = {id_: asyncio.Event() for id_ in "ab"}
    response = await client.post("/generate", data=ask("a", "b"))
    await until(lambda: len(server.calls) == 2)
    cancelled = await client.post("/cancel", data=msgspec.msgpack.encode(["a", "later"]))
    assert msgspec.msgpack.decode(await cancelled.read()) is True
    await until(lambda: server.ended == ["a"])
    server.gates["b"].set()
    found = {each.id: each for each in frames(await response.read())}
    assert found["a"] == Completion("a", [], None, "abort", error="was cancelled")
    assert found["b"].finish_reason == "stop"
    server.gates = {}
    response = await client.post("/generate", data=ask("later", "a"))
    found = {each.id: each for each in frames(await response.read())}
    assert found["later"] == Completion("later", [], None, "abort", error="was cancelled")
    assert found["a"].finish_reason == "stop", "it was running then"
    response = await client.post("/generate", data=ask("later"))
    assert [each.finish_reason for each in frames(await response.read())] == ["stop"], "one cancellation, one request"


def test_a_cancellation_that_came_first_is_forgotten_after_a_while(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(routes_module.time, "monotonic", lambda: now[0])
    cancelled = _Cancelled()
    cancelled.add("a")
    now[0] += 0.5
    cancelled.add("b")
    now[0] += 599.5
    cancelled.add("c")
    assert [cancelled.take(id_) for id_ in "aabcc"] == [False, False, True, True, False]


async def test_the_socket_is_for_the_user_alone_and_takes_large_bodies(server, tmp_path):
    path = tmp_path / "engine.sock"
    runner = await listen(server, str(path))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with ClientSession(connector=UnixConnector(str(path))) as session:
            assert (await session.get("http://engine/health")).status == 200
            prompt = GenerateRequest("a", [1 << 40] * 400_000, SamplingParams(1))
            answer = await session.post("http://engine/generate", data=msgspec.msgpack.encode([prompt]))
            assert [each.id for each in frames(await answer.read())] == ["a"]
            server.error = OutOfService("asleep")
            answer = await session.post("http://engine/sleep")
            assert (answer.status, await answer.text()) == (503, "asleep")
            server.error, server.gates = None, {"b": asyncio.Event()}
            given_up = await session.post("http://engine/generate", data=ask("b"))
            given_up.close()
            await until(lambda: server.ended == ["a", "b"])
    finally:
        await runner.cleanup()


async def test_sessions_are_opened_and_closed_together(server, tmp_path):
    server.sessions, requests, alive = Sessions(), [], [server]
    opened = server.sessions.open
    server.sessions.open = lambda opening: requests.append(opening.key) or opened(opening)
    socket = str(tmp_path / "engine.sock")
    runner = await listen(server, socket)
    client = EngineClient(socket, is_alive=lambda: bool(alive), describe=lambda: "its log")
    keys = [f"key-{number}" for number in range(300)]
    try:
        await asyncio.gather(*(client.open_session(SessionOpening(key, SamplingParams(4), 1)) for key in keys))
        assert requests == keys
        closed = await asyncio.gather(*map(client.close_session, [*keys, "another"]), return_exceptions=True)
        assert closed[:-1] == [[]] * len(keys)
        assert isinstance(closed[-1], EngineError), "an engine that was started again knows no session"
        assert server.sessions.of([(b"x-api-key", keys[0].encode())]) is None
    finally:
        await client.close()
        await runner.cleanup()
        alive.clear()
    with pytest.raises(EngineError, match="died"):
        await client.close_session(keys[0])
    await client.close()
