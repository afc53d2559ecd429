"""Who is let in to an engine's handlers, and what an answer gets on its way out: real sockets, no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest

from slipstream import http_listener
from slipstream.errors import ConfigError
from slipstream.inference.plugin.guests import exchange_of_task
from slipstream.inference.plugin.http import gate as gates
from slipstream.inference.plugin.http import listener as listeners
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.settings import EngineSettings
from slipstream.records import Version

from .fakes import Host

NUM_HALF_OPEN = 2000


class App:
    """Answers in the way that its test asks for."""

    def __init__(self):
        self.keys, self.num_ended = [], 0
        self.gap = asyncio.Event()

    async def __call__(self, scope, receive, send):
        exchange = exchange_of_task.get()
        self.keys.append(exchange.key)
        message = await receive()
        assert not message["more_body"]
        try:
            await getattr(self, scope["path"].strip("/") or "echo")(message["body"], exchange, send)
        finally:
            self.num_ended += 1

    async def echo(self, body, exchange, send):
        first = exchange.begin(1)
        exchange.end(first, [[(0, "0.1"), (7, "0.2")]])
        text = json.dumps({"size": len(body)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def stream(self, body, exchange, send):
        first = exchange.begin(2)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(text):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await say('data: {"n":1}\n\n')
        await self.gap.wait()
        exchange.end(first, [[(0, "0.1")]])
        await say('data: {"n":2}\n\n')
        exchange.end(first + 1, [[(0, "0.2")]])
        await say('data: {"n":3}\n\n')
        await say('data: {"n":4}\n\n')
        if not body:
            await say("data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def flood(self, body, exchange, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})

    async def breaks(self, body, exchange, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise ValueError("secret")


@pytest.fixture
def server():
    made = EngineServer(EngineSettings("", "float32", 8, 8), Host())
    made.service.started()
    made.digests = {"0.1": "aa", "0.2": "bb"}
    return made


@contextlib.asynccontextmanager
async def listening(server, app, key="", *, is_local=True, serves_run=None):
    bound = http_listener.tcp_socket("", 0)
    listener = await listeners.serve(gates.Gate(app, server, key, is_local=is_local, serves_run=serves_run), bound)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.port}", connector=connector) as client:
        yield client, listener.port
    await listener.close()


async def status(client, path="/", *, data=b"{}", **headers):
    async with client.post(path, data=data, headers=headers) as answer:
        return answer.status


async def test_nothing_without_the_key_and_sessions_see_it(server):
    app = App()
    async with listening(server, app, "secret") as (client, _):
        assert await status(client) == 401
        assert await status(client, **{"x-api-key": "other"}) == 401
        assert await status(client, Authorization="Basic secret") == 401
        assert await status(client, **{"x-api-key": "secret", "Authorization": "Bearer other"}) == 401
        assert await status(client, "/anything", data=b"0" * (1 << 20), Authorization="Bearer other") == 401
        assert app.keys == []
        assert await status(client, **{"x-api-key": "secret"}) == 200
        assert await status(client, Authorization="bearer secret") == 200
        assert await status(client, **{"x-api-key": "secret", "Authorization": "Bearer secret"}) == 200
        assert app.keys == ["secret"] * 3
        async with client.get("/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (200, "ready")
    async with listening(server, app) as (client, _):
        assert await status(client, Authorization="Bearer a-rollout") == 200
        assert app.keys[-1] == "a-rollout"
        assert await status(client, Host="attacker.example") == 421
    with pytest.raises(ConfigError, match="give a key"):
        await listeners.listen_inference(server, host="0.0.0.0")


async def test_the_address_of_a_run_has_its_weights_alone(server):
    app, held = App(), {"ab"}
    async with listening(server, app, "secret", serves_run=held.__contains__) as (client, _):
        key = {"x-api-key": "secret"}
        assert [await status(client, f"/runs/{place}/echo", **key) for place in ("ab", "cd", "")] == [200, 503, 200]
        assert await status(client, "/runs/ab/echo") == 401
        for path, expected in (("/runs/ab/health", 200), ("/runs/cd/health", 503), ("/health", 200)):
            async with client.get(path) as answer:
                assert answer.status == expected
        server.service.begin_apply("0.2")
        waiting = asyncio.create_task(status(client, "/runs/ab/echo", **key))
        await asyncio.sleep(0.2)
        held.clear()
        server.service.proved()
        assert await waiting == 503
    async with listening(server, app) as (client, _):
        assert await status(client, "/runs/ab/echo") == 500, "no route"


async def test_a_request_waits_for_an_update_and_is_refused_after_its_failure(server, monkeypatch):
    app = App()
    async with listening(server, app) as (client, _):
        server.service.begin_apply("0.2")
        waiting = asyncio.create_task(status(client))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        async with client.get("/health") as answer:
            assert answer.status == 503
        server.service.proved()
        assert await waiting == 200
        server.service.begin_apply("0.3")
        waiting = asyncio.create_task(status(client))
        await asyncio.sleep(0.1)
        server.service.fail("version 0.3 did not verify")
        assert await waiting == 503
        assert await status(client) == 503
        server.service.begin_apply("0.4")
        monkeypatch.setattr(gates, "QUIET_S", 0.05)
        assert await status(client) == 200, "the handler has it, and waits itself"
        server.version = Version(0, 4, "cc")


async def test_versions_are_in_the_last_event_and_a_stream_that_waits_stays_alive(server, monkeypatch):
    monkeypatch.setattr(listeners, "KEEP_ALIVE_S", 0.05)
    app = App()
    fields = ',"versions":[[[0,"0.1"]],[[0,"0.2"]]],"digests":{"0.1": "aa", "0.2": "bb"}'
    async with listening(server, app) as (client, _):
        async with client.post("/", data=b"abc") as answer:
            found = await answer.json()
        versions = [[[0, "0.1"], [7, "0.2"]]]
        assert found == {"size": 3, "versions": versions, "digests": {"0.1": "aa", "0.2": "bb"}}
        for body, end in ((b"", "data: [DONE]\n\n"), (b"x", "")):
            app.gap.clear()
            async with client.post("/stream", data=body) as answer:
                text = ""
                while text.count(": keep-alive\n\n") < 2:
                    text += (await answer.content.readany()).decode()
                app.gap.set()
                text += (await answer.read()).decode()
            events = "".join(event + "\n\n" for event in text.split("\n\n")[:-1] if event != ": keep-alive")
            said = [f'data: {{"n":{n}{fields if n == 4 else ""}}}\n\n' for n in (1, 2, 3, 4)]
            assert events == "".join(said) + end
        async with client.post("/breaks") as answer:
            text = (await answer.read()).decode()
        assert text.startswith("event: error\ndata: {")
        assert "secret" not in text


async def test_bodies_headers_and_connections_have_limits(server, monkeypatch):
    monkeypatch.setattr(gates, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(gates, "BODY_S", 0.3)
    monkeypatch.setattr(http_listener, "HEADER_S", 1.0)
    monkeypatch.setattr(http_listener, "UNREAD_S", 0.3)
    app = App()

    async def pieces():
        for _ in range(10):
            yield b"0" * (1 << 18)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async with listening(server, app) as (client, port), asyncio.timeout(60):
        assert await status(client, data=b"0" * (2 << 20)) == 413
        with contextlib.suppress(aiohttp.ClientError):
            assert await status(client, data=pieces()) == 413
        with contextlib.suppress(aiohttp.ClientError):
            assert await status(client, data=slow()) == 408
        assert app.keys == []

        open_ = []
        for number in range(NUM_HALF_OPEN):
            each = socket.create_connection(("127.0.0.1", port))
            each.send((b"", b"GET", b"POST / HTTP/1.1\r\nhost: localhost\r\nx: ")[number % 3])
            open_.append(each)
            if number % 100 == 0:
                assert await status(client) == 200
        begun = asyncio.get_running_loop().time()
        assert await status(client) == 200
        for each in open_:
            each.setblocking(False)
            with contextlib.suppress(OSError):
                assert await asyncio.get_running_loop().sock_recv(each, 1) == b""
            each.close()
        assert asyncio.get_running_loop().time() - begun < 30

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(200):
                writer.write(b"x: " + b"y" * 1000 + b"\r\n")
                await writer.drain()
            assert b"200" not in await reader.read()

        ended = app.num_ended
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /flood HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        while app.num_ended == ended:
            await asyncio.sleep(0.05)
        writer.close()
        assert await status(client) == 200
