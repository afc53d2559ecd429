"""Nothing is answered without the key, whatever the path."""

from __future__ import annotations

import pytest

from slipstream.inference.openai_server import KEY_VARIABLE, HostGuard, KeyGuard


async def answered(guard, path, headers, kind="http"):
    """The status that comes from behind `guard`, or from itself; of a websocket what is sent."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    await guard(app)({"type": kind, "path": path, "headers": headers}, None, send)
    return sent[0].get("status", sent[0]["type"])


@pytest.fixture
def status(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    return lambda path, *keys, **kind: answered(KeyGuard, path, [(b"authorization", key) for key in keys], **kind)


async def test_every_path_but_health_needs_the_key(status):
    for path in ("/v1/chat/completions", "/invocations", "/tokenize", "/metrics", "/", "/health/x"):
        assert await status(path) == 401
        assert await status(path, b"Bearer secret") == 200
        assert await status(path, b"bearer secret") == 200  # the scheme's case does not matter
    assert await status("/health") == 200
    assert await status("/v1/realtime", kind="websocket") == "websocket.close"


WRONG = (b"Bearer secre", b"secret", b"Bearer", b"Basic secret", b"Bearer Secret")


@pytest.mark.parametrize("keys", [*([key] for key in WRONG), [b"Bearer x", b"Bearer secret"]])
async def test_a_wrong_key(status, keys):
    assert await status("/v1/models", *keys) == 401


OURS = ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "a.localhost", "box:8000")
FOREIGN = ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "10.0.0.1", "", "[::2]")


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [([], 200), *(([host], 200) for host in OURS), *(([host], 421) for host in FOREIGN), (["localhost", "evil"], 421)],
)
async def test_without_a_key_the_host_is_this_machine(hosts, wanted, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOST", "Box")  # as `--host Box` says
    headers = [(b"host", host.encode()) for host in hosts]
    assert await answered(HostGuard, "/v1/models", headers) == wanted
