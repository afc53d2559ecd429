"""Chats with deployments through the service: OpenAI's requests passed on to the address of the deployments."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.runs import NoSuchRun

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_MAX_TOKENS = 1024
_GIVEN_BACK = frozenset({"content-type", "retry-after"})


async def answered(there: LocalDeployments, body: bytes) -> Response:
    """The answer to a chat request for a deployment of `there`. Raises NoSuchRun, ConfigError and SlipstreamError."""
    try:
        name = msgspec.json.decode(body, type=dict[str, Any]).get("model")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON object: {error}") from None
    if not isinstance(name, str):
        raise NoSuchRun("the request names no model: slipstream deployments lists them")
    url, key = await asyncio.to_thread(_place, there, name)
    client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = client.build_request("POST", f"{url}/chat/completions", content=body, headers=headers)
        answer = await client.send(request, stream=True)
    except httpx.HTTPError as error:
        await client.aclose()
        raise SlipstreamError(f"the address of {name} gave no answer ({type(error).__name__}): ask again") from None

    async def pieces() -> AsyncGenerator[bytes]:
        with contextlib.suppress(httpx.HTTPError):
            async for piece in answer.aiter_raw():
                yield piece

    async def close() -> None:
        await answer.aclose()
        await client.aclose()

    given = {name: value for name, value in answer.headers.items() if name in _GIVEN_BACK}
    return StreamingResponse(pieces(), answer.status_code, given, background=BackgroundTask(close))


def say(there: LocalDeployments, name: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    """The answer to a conversation, and its fault; one of them is empty. It leaves room for more of them. Raises
    NoSuchRun."""
    url, key = _place(there, name)
    body = {"model": name, "messages": messages, "max_tokens": min(_MAX_TOKENS, max(1, there.one(name).context // 4))}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=_TIMEOUT, trust_env=False)
        found = answer.json()
        if answer.is_error:
            return "", str(found["error"]["message"])
        return str(found["choices"][0]["message"]["content"] or ""), ""
    except httpx.HTTPError as error:
        return "", f"the address of {name} gave no answer ({type(error).__name__}): ask again"
    except (json.JSONDecodeError, LookupError, TypeError):
        return "", f"the answer of {name} cannot be read"


def _place(there: LocalDeployments, name: str) -> tuple[str, str]:
    found, url = there.one(name), there.near_address()
    if not url:
        raise SlipstreamError(f"{name} is {found.state}: it has no address yet")
    return url, there.key()
