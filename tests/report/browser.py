"""A headless Chromium, driven over its DevTools protocol: what a page looks like and says, in a real browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import aiohttp
import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60.0
TEXT = "document.body.innerText"


def find():
    """The browser's path, or None; CHROMIUM names one that is not on the search path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


needs_browser = pytest.mark.skipif(
    find() is None and "SLIPSTREAM_REQUIRE_BROWSER" not in os.environ,
    reason="no Chromium: apt-get install chromium-headless-shell, or name one in CHROMIUM",
)


class Page:
    """One tab. `errors` collects exceptions, console errors and failed requests."""

    def __init__(self, socket, session):
        self._socket = socket
        self._session = session
        self._ids = itertools.count(1)
        self._waiting = {}
        self._loaded = asyncio.Event()
        self.errors = []
        self.requests = []

    async def listen(self):
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            else:
                self._hear(told["method"], told["params"])

    def _hear(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")) or (
            method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
        ):
            self.errors.append(str(params))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded.set()

    async def call(self, method, **params):
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params} | session)
        told = await asyncio.wait_for(self._waiting[number], WAIT_S)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    async def attach(self):
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, path, width, *, dark=False):
        """Open a file, or a URL."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        url = path if "://" in str(path) else Path(path).resolve().as_uri()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), WAIT_S)

    async def ask(self, expression):
        """The value of a JavaScript expression."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def act(self, expression):
        """Evaluate what leads to another page, and wait for that."""
        self._loaded.clear()
        await self.ask(f"void setTimeout(() => {{ {expression} }}, 0)")
        await asyncio.wait_for(self._loaded.wait(), WAIT_S)

    async def until(self, expression, timeout_s=WAIT_S):
        """Wait until an expression is true; the page may load itself again meanwhile. Its value."""
        due = asyncio.get_running_loop().time() + timeout_s
        while True:
            with contextlib.suppress(AssertionError):  # between two pages
                if found := await self.ask(expression):
                    return found
            if asyncio.get_running_loop().time() > due:
                raise AssertionError(f"not within {timeout_s:g} s: {expression}: {await self.ask(TEXT)}")
            await asyncio.sleep(0.2)

    async def picture(self, path):
        """A PNG of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser(program):
    """A page in a browser of its own, which is gone afterwards."""
    # Chromium writes there until it is gone, and its folder is only scratch.
    with tempfile.TemporaryDirectory(prefix="slipstream-browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            address = await asyncio.wait_for(_address(process), WAIT_S)
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket, "")
                listening = asyncio.create_task(page.listen())
                try:
                    await page.attach()
                    yield page
                finally:
                    listening.cancel()
                    # A socket that somebody still reads from would wait for that reader for ever.
                    await asyncio.wait([listening])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(process):
    said = ""
    while line := (await process.stderr.readline()).decode(errors="replace"):
        said += line
        if found := re.search(r"listening on (ws://\S+)", line):
            return found[1]
    raise AssertionError(f"the browser ended before it listened: {said}")
