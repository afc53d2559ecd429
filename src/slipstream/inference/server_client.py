"""HTTP client of an engine server, with a token and a lease."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.config.inference import InferenceServer
from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.inference.addresses import ControlAddress, addresses_of
from slipstream.inference.client import EngineClient
from slipstream.inference.lending import LEASE_HEADER, Held, Loan, Refusal, ServerFacts, Sight, Terms
from slipstream.progress import printable
from slipstream.records import EngineHealth

CALL_S = 5.0
LEND_S = 60.0
"""A loan waits for the end of an update by the run before."""
_PAUSE_S = 0.5
_SAY_S = 1.0
"""A longer wait is told."""
T = TypeVar("T")


class Unreached(EngineError):
    """No usable answer, for the reason `why`."""

    def __init__(self, server: str, why: str, *, is_gone: bool = False, is_loading: bool = False) -> None:
        """`is_gone`: nobody listens there. A server listens from its start to its end. `is_loading`: it says so."""
        super().__init__(f"{server} {why}")
        self.why, self.is_gone, self.is_loading = why, is_gone, is_loading


class ServerClient(EngineClient):
    """Talks to one server from one event loop."""

    def __init__(
        self,
        address: ControlAddress,
        run_id: str = "",
        *,
        is_alive: Callable[[], bool] = lambda: True,
        describe: Callable[[], str] | None = None,
        give_up: Callable[[], Awaitable[None]] | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
        silence_s: float = 60.0,
    ) -> None:
        """`look`: finds out whether the server is lost, after a broken connection."""
        super().__init__(
            address,
            is_alive=is_alive,
            describe=describe or (lambda: self._name),
            silence_s=silence_s,
            headers={LEASE_HEADER: run_id},
            **({} if give_up is None else {"give_up": give_up}),
        )
        self._look = look
        self._name = f"the server at {address.url}"

    async def _explain(self, path: str, error: Exception) -> EngineError:
        if self._look is not None:
            await self._look()
        fate = "lost its connection" if self._is_alive() else "was lost"
        return EngineError(f"the engine {fate} during {path} ({error}): {self._describe()}")

    async def _call(self, path: str, body: bytes = b"", *, get: bool = False, timeout_s: float = CALL_S) -> bytes:
        """One short call. Raises `Unreached`, and `Held`."""
        try:
            async with asyncio.timeout(timeout_s):
                session = self._open()
                asked = session.get(self._base + path) if get else session.post(self._base + path, data=body)
                async with asked as response:
                    answer, status = await response.read(), response.status
        except aiohttp.ClientSSLError as error:
            raise ConfigError(
                f"{self._name} cannot be trusted ({error}): name its certificate, or that of its authority, in "
                "SSL_CERT_FILE"
            ) from error
        except (TimeoutError, OSError) as error:
            reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            is_gone = isinstance(reason, ConnectionRefusedError | FileNotFoundError)
            why = f"does not answer ({type(error).__name__}: {error})"
            raise Unreached(self._name, why, is_gone=is_gone) from error
        except Exception as error:
            raise Unreached(self._name, f"does not answer ({error})") from error
        if status == 423:
            raise Held(msgspec.json.decode(answer, type=Refusal))
        if status == 401:
            raise ConfigError(f"{self._name} refuses the token: give its own by token_variable")
        if status == 503 and b'"starting"' in answer:
            raise Unreached(self._name, "still loads its weights", is_loading=True)
        if status != 200:
            raise Unreached(self._name, f"answers with status {status}: {answer[:200].decode(errors='replace')}")
        return answer

    def _decoded(self, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise Unreached(self._name, "answers, and is no control address of slipstream engine") from error

    async def lend(self, terms: Terms, timeout_s: float = LEND_S) -> Loan:
        """Take the engine, or renew the lease."""
        return self._decoded(await self._call("/lease", msgspec.msgpack.encode(terms), timeout_s=timeout_s), Loan)

    async def end_lease(self) -> None:
        """Give the engine back."""
        await self._call("/lease-end")

    async def facts(self) -> ServerFacts:
        """How the engine was started."""
        return self._decoded(await self._call("/facts", get=True), ServerFacts)

    async def sees(self, folder: Path) -> bool:
        """Whether the server sees this folder. A file is made in it for a moment."""
        content = secrets.token_bytes(32)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".slipstream-seen-") as file:
            file.write(content)
            file.flush()
            sight = Sight(file.name, hashlib.sha256(content).hexdigest())
            return self._decoded(await self._call("/sees", msgspec.msgpack.encode(sight)), bool)

    async def known_health(self) -> EngineHealth:
        """The health. Raises `Unreached`."""
        try:
            async with asyncio.timeout(CALL_S):
                health = await self._ask_health()
        except TimeoutError as error:
            raise Unreached(self._name, f"said nothing for {CALL_S:g} s") from error
        if health is None:
            raise Unreached(self._name, "does not answer")
        return health


def read_facts(
    servers: Sequence[InferenceServer], wait_s: float, load_s: float, folder: Path | None = None
) -> tuple[tuple[ServerFacts, ...], tuple[str, ...]]:
    """Of all servers, and the addresses of those blind to `folder`. A server has `wait_s` to appear, and `load_s` to
    load its weights. Raises ConfigError after these."""

    async def read(address: ControlAddress) -> tuple[ServerFacts, bool]:
        client, began = ServerClient(address), time.monotonic()
        heard, is_said = began, False
        try:
            while True:
                try:
                    return await client.facts(), folder is None or await client.sees(folder)
                except Unreached as error:
                    now = time.monotonic()
                    heard = now if error.is_loading else heard
                    if now - began > load_s and error.is_loading:
                        raise ConfigError(f"{error} after {load_s:g} s: raise inference.start_timeout_s") from error
                    if now - heard > wait_s:
                        raise ConfigError(
                            f"{error} within {wait_s:g} s: start it with slipstream engine, or correct "
                            "inference.servers.url"
                        ) from error
                    if not is_said and now - began > _SAY_S:
                        is_said, limit_s = True, load_s if error.is_loading else wait_s
                        text = printable(f"{error}: the run waits up to {limit_s:g} s for it")
                        print(text, file=sys.stderr, flush=True)
                await asyncio.sleep(_PAUSE_S)
        finally:
            await client.close()

    async def read_all() -> list[tuple[ServerFacts, bool]]:
        return await asyncio.gather(*(read(address) for address in addresses_of(servers)))

    try:
        found = asyncio.run(read_all())
    except DeadlineError as error:
        raise ConfigError(str(error)) from error
    blind = tuple(server.url for server, (_, sees) in zip(servers, found, strict=True) if not sees)
    return tuple(facts for facts, _ in found), blind
