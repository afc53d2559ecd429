"""Requests of agents that come over a server's control address: they pass through to vLLM's handlers.

The handlers have the parsers of the run with the lease. They listen on a private Unix socket, from the first request
on. A closed connection cancels its request.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

from slipstream.http_listener import Listener
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.settings import INFERENCE_SOCKET
from slipstream.records import REQUEST_HEADER

_PASSED_ON = frozenset(
    {"content-type", "accept", "anthropic-version", "anthropic-beta", "x-api-key", REQUEST_HEADER.lower()}
)
_GIVEN_BACK = frozenset({"content-type", "cache-control"})


class AgentRequests:
    """See the module."""

    def __init__(self, server: EngineServer, name: str) -> None:
        """`name`: the model's, in answers."""
        self._server, self._name = server, name
        self._opening = asyncio.Lock()
        self._parsers: tuple[str, str] | None = None
        self._listener: Listener | None = None
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the handlers."""
        client, self._client, listener, self._listener = self._client, None, self._listener, None
        if client is not None:
            await client.close()
        if listener is not None:
            await listener.close()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer a request as vLLM's handlers do."""
        client, body = await self._opened(), await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() in _PASSED_ON}
        url = f"http://engine/v1/{request.match_info['path']}"
        async with client.request(request.method, url, data=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status)
            response.headers.update({n: v for n, v in answer.headers.items() if n.lower() in _GIVEN_BACK})
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            try:
                while chunk := await answer.content.readany():
                    await response.write(chunk)
            except aiohttp.ClientError:  # only a broken connection can still say so
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response

    async def _opened(self) -> aiohttp.ClientSession:
        from slipstream.inference.plugin.http.listener import listen_inference  # it imports vLLM's front end

        async with self._opening:
            parsers = (self._server.settings.tool_parser, self._server.settings.reasoning_parser)
            if self._client is None or parsers != self._parsers:
                await self.close()
                path = str(Path(tempfile.gettempdir()) / INFERENCE_SOCKET)
                self._listener = await listen_inference(self._server, socket=path, names=[self._name])
                self._parsers = parsers
                self._client = aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path, limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                    auto_decompress=False,
                )
            return self._client
