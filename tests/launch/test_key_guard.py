"""Nothing is answered without the key, whatever the path."""

from __future__ import annotations

import pytest

from slipstream.inference.openai_server import KEY_VARIABLE, KeyGuard


@pytest.fixture
def status(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def ask(path, *keys, kind="http"):
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", key) for key in keys]
        await KeyGuard(app)({"type": kind, "path": path, "headers": headers}, None, send)
        return sent[0].get("status", sent[0]["type"])

    return ask


async def test_every_path_but_health_needs_the_key(status):
    for path in ("/v1/chat/completions", "/invocations", "/tokenize", "/metrics", "/", "/health/x"):
        assert await status(path) == 401
        assert await status(path, b"Bearer secret") == 200
    assert await status("/health") == 200
    assert await status("/v1/realtime", kind="websocket") == "websocket.close"


@pytest.mark.parametrize("keys", [[b"Bearer secre"], [b"secret"], [b"bearer secret"], [b"Bearer x", b"Bearer secret"]])
async def test_a_wrong_key(status, keys):
    assert await status("/v1/models", *keys) == 401
