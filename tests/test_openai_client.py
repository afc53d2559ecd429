"""The client of OpenAI-compatible servers, against a real HTTP server on this machine."""

import asyncio
import contextlib
import gzip
import time
from email.utils import formatdate

import aiohttp
import pytest
from aiohttp import web

from slipstream import openai_client
from slipstream.errors import ConfigError
from slipstream.openai_client import OpenAIClient, Unanswered

from .web_server import serving

KEY = "sk-very-secret"
DONE = {"done": True}


class Server:
    """Answers what its script says, the last entry for ever, and keeps what it was asked."""

    def __init__(self, *script):
        self.script, self.requests, self.times, self.bodies, self.connections = list(script), [], [], [], set()

    async def answer(self, request):
        self.times.append(time.monotonic())
        self.requests.append(request)
        self.connections.add(request.transport)
        self.bodies.append(await request.text())
        found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        found = found(request) if callable(found) else found
        if asyncio.iscoroutine(found):
            return await found
        if isinstance(found, int):
            return web.Response(status=found, text=f"failed with\n{KEY} {'x' * 1000}")
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)


@contextlib.asynccontextmanager
async def asked_of(*script, key=KEY, user="", **options):
    server = Server(*script)
    async with serving(server.answer) as address, OpenAIClient(f"http://{user}{address}/v1/", key, **options) as client:
        yield client, server


async def failure(client, **options):
    with pytest.raises(Unanswered) as caught:
        await client.ask("POST", "/x", {}, **{"deadline_s": 60.0, **options})
    assert KEY not in str(caught.value)
    return caught.value


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(openai_client, "_FIRST_WAIT_S", 0.02)


async def test_what_is_sent_and_answered():
    async with asked_of(DONE) as (client, server):
        assert await client.ask("GET", "/models", deadline_s=60.0) == DONE
        assert await client.ask("POST", "/../tokenize", {"text": "\ud800ü"}, deadline_s=60.0) == DONE
    assert [(each.method, each.path) for each in server.requests] == [("GET", "/v1/models"), ("POST", "/tokenize")]
    assert server.bodies == ["", '{"text": "\\ud800\\u00fc"}']
    assert {each.headers["Authorization"] for each in server.requests} == {f"Bearer {KEY}"}
    assert len(server.connections) == 1


async def test_a_password_of_the_address_is_sent_and_not_shown():
    async with asked_of(DONE, 401, key="", user=f"me:{KEY}@") as (client, server):
        await client.ask("GET", "/models", deadline_s=60.0)
        await failure(client)
        assert KEY not in client.shown
    assert server.requests[0].headers["Authorization"] == aiohttp.BasicAuth("me", KEY).encode()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("localhost:8000/v1", ""),
        ("http://h:99999/v1", ""),
        ("http://[::1/v1", ""),
        ("http://me:open-sesame@h/v1", "open-sesame"),
        ("http://h/v1", "open-sesame\nX: y"),
        ("http://h/v1", "open-sesame-ü"),
    ],
)
def test_addresses_and_keys_that_cannot_work(url, key):
    with pytest.raises(ConfigError) as caught:
        OpenAIClient(url, key)
    assert "open-sesame" not in str(caught.value)


async def test_no_redirect_is_followed():
    def away(request):
        raise web.HTTPTemporaryRedirect(f"http://localhost:{request.url.port}/elsewhere")

    async with asked_of(away) as (client, server):
        assert (await failure(client)).status == 307
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_not_repeated(status):
    async with asked_of(status) as (client, server):
        error = await failure(client)
    assert (error.status, error.is_late, len(server.requests)) == (status, False, 1)
    assert "failed with ***" in str(error)
    assert len(str(error)) < 300


def drop(request):
    request.transport.abort()


@pytest.mark.parametrize("trouble", [408, 425, 429, 500, 503, drop])
async def test_a_trouble_that_may_pass_is_tried_again_less_and_less_often(trouble):
    tries = []
    async with asked_of(trouble, trouble, trouble, DONE) as (client, server):
        assert await client.ask("POST", "/x", {}, deadline_s=60.0, on_try=lambda: tries.append(1)) == DONE
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert len(tries) == len(waits) + 1 == 4
    assert all(wait >= least for wait, least in zip(waits, (0.01, 0.02, 0.04), strict=True))


def refuse_until(asked, kind=web.HTTPServiceUnavailable):
    def refuse(request):
        raise kind(headers={"Retry-After": asked() if callable(asked) else asked})

    return refuse


@pytest.mark.parametrize("asked", ["0.6", lambda: formatdate(time.time() + 2.0, usegmt=True)], ids=["seconds", "date"])
async def test_retry_after_is_heeded(asked):
    async with asked_of(refuse_until(asked, web.HTTPTooManyRequests), DONE) as (client, server):
        assert await client.ask("POST", "/x", {}, deadline_s=60.0) == DONE
    assert server.times[1] - server.times[0] >= 0.55


@pytest.mark.parametrize("asked", ["100", "inf", "Fri, 31 Dec 2100 23:59:59 GMT"])
async def test_a_server_that_asks_for_too_long_is_given_up_at_once(asked):
    async with asked_of(refuse_until(asked)) as (client, server):
        error = await failure(client)
    assert error.is_late
    assert "ask again in" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("asked", ["soon", "", "nan", "-5", formatdate(0, usegmt=True)])
async def test_an_odd_retry_after_changes_nothing(asked):
    async with asked_of(refuse_until(asked), DONE) as (client, _):
        assert await client.ask("POST", "/x", {}, deadline_s=60.0) == DONE


async def slow(request):
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(600):
        await answer.write(b" ")
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("what", [lambda request: asyncio.sleep(600), slow, 503, "patience"])
async def test_the_deadline_and_the_end_of_patience_bound_all_tries(what):
    limit = {"patience_s": 0.2} if what == "patience" else {"deadline_s": 0.5}
    async with asked_of(503 if what == "patience" else what) as (client, _server):
        began = time.monotonic()
        error = await failure(client, **limit)
        assert error.is_late or (what == "patience" and "status 503" in str(error))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["", "<html>", "[1]", "[" * 100_000, '{"half": '])
async def test_an_answer_that_is_no_json_object(text):
    async with asked_of(text + KEY) as (client, server):
        error = await failure(client)
    assert (error.status, error.is_late, len(server.requests)) == (0, False, 1)


@pytest.mark.parametrize("packed", [False, True])
async def test_an_answer_has_a_bound(packed):
    body = b"x" * (9 << 20)

    async def answer(request):
        headers = {"Content-Encoding": "gzip"} if packed else {}
        return web.Response(body=gzip.compress(body) if packed else body, headers=headers)

    async with asked_of(answer, max_bytes=8 << 20) as (client, server):
        assert "8 MiB" in str(await failure(client))
    assert len(server.requests) == 1
