"""One client of OpenAI-compatible servers, for judges, a teacher's server and an evaluated address.

Guarantees: the key goes into the header of requests to the given address and nowhere else: no redirect is followed, and
no message shows it. All tries of a request end by its deadline. A lost connection and a status that may pass (408, 425,
429, 5xx) are tried again, after a doubling wait with jitter, or when `Retry-After` says. Answers are bounded in bytes.
Variables for proxies are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httpx

from slipstream.errors import ConfigError
from slipstream.patience import Patience
from slipstream.runlog.redaction import hide_userinfo

_TRANSIENT = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which a request is repeated."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0
_SHOWN = 200
"""Characters of an answer that a message shows."""


class Unanswered(Exception):
    """A request got no usable answer. The message has no key."""

    def __init__(self, message: str, *, status: int = 0, is_late: bool = False) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of a refusal that no repetition changes; 0 for any other reason."""
        self.is_late = is_late
        """Whether time ran out, so that a later request may be answered."""


class OpenAIClient:
    """See the module. Belongs to one event loop; use as `async with`, or call `close`."""

    def __init__(self, url: str, key: str = "", *, max_bytes: int = 256 << 20) -> None:
        """`url`: up to `/v1`; `max_bytes` bounds an answer. Raises `ConfigError` for what is no address, for a key that
        no header can hold, and for a key beside a password in the address."""
        self.url = url.rstrip("/")
        self.shown = hide_userinfo(self.url)
        """The address without names and passwords, for messages."""
        self._max_bytes, key = max_bytes, key.strip()
        if not (key.isascii() and key.isprintable()):  # a library's error would show it
            raise ConfigError(f"the key for {self.shown} has characters that no header can hold: correct it")
        if not _is_address(self.url):
            raise ConfigError(f"{self.shown} is no address: write it as https://host/v1")
        address = httpx.URL(self.url)
        if key and address.userinfo:
            raise ConfigError(f"the address {self.shown} holds a name or password beside the key: leave one out")
        self._secret = key or address.password
        self._http = httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # `Patience` bounds all tries
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            verify=address.scheme == "https",  # reading certificates takes long
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_s: float,
        patience_s: float | None = None,
        on_try: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises `Unanswered`, and what `on_try` raises before a try.

        `path` is appended to the address. No try begins later than `patience_s`, by default `deadline_s`.
        """
        content = None if body is None else json.dumps(body).encode()
        url, last, num_tries = self.url + path, "no answer", 0
        begun = time.monotonic()
        give_up_at = begun + (deadline_s if patience_s is None else patience_s)
        try:
            async with Patience(deadline_s):
                for num_tries in itertools.count(1):
                    on_try()
                    wait = random.uniform(0.5, 1.0) * min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (num_tries - 1))
                    try:
                        answer, data = await self._once(method, url, content)
                    except httpx.RequestError as error:
                        last = f"{type(error).__name__}: {self._safe(str(error))}"
                    else:
                        if answer.is_success:
                            return self._object(data)
                        last = f"status {answer.status_code}: {self._safe(data.decode(errors='replace'))}"
                        if answer.status_code < 500 and answer.status_code not in _TRANSIENT:
                            raise Unanswered(f"refused: {last}", status=answer.status_code)
                        asked = _seconds(answer.headers.get("Retry-After", ""))
                        last += f", and to ask again in {asked:.0f} s" if asked > 0 else ""
                        wait = max(wait, asked)
                    if time.monotonic() + wait >= give_up_at:
                        break
                    await asyncio.sleep(wait)
        except TimeoutError:
            last = f"no answer, before that {last}" if num_tries > 1 else last
        waited_s = time.monotonic() - begun
        raise Unanswered(f"no answer in {waited_s:.3g} s and {num_tries} tries (the last: {last})", is_late=True)

    async def _once(self, method: str, url: str, content: bytes | None) -> tuple[httpx.Response, bytes]:
        """The answer to one try, with its content."""
        data = bytearray()
        async with self._http.stream(method, url, content=content) as answer:
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > self._max_bytes:
                    raise Unanswered(f"an answer has more than {self._max_bytes >> 20} MiB: ask for less")
            return answer, bytes(data)

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Unanswered(f"an answer is no JSON object: {self._safe(data.decode(errors='replace'))!r}")
        return cast("dict[str, Any]", found)

    def _safe(self, text: str) -> str:
        """The beginning of a text of the server, on one line and without the key or password."""
        if self._secret:
            text = text.replace(self._secret, "***")
        return hide_userinfo(" ".join(text.split()))[:_SHOWN]


def _is_address(url: str) -> bool:
    try:
        return httpx.URL(url).scheme in ("http", "https") and bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except (ValueError, httpx.InvalidURL):  # `port` raises, too
        return False


def _seconds(retry_after: str) -> float:
    """Parse a Retry-After header, a number of seconds or a date; 0 where it is neither."""
    try:
        return float(retry_after)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, TypeError):
        return 0.0
