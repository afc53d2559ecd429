"""HTTP servers of tests."""

import contextlib

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(handle):
    """A server on this machine that answers every request with `handle`: its host and port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
