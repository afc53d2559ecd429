"""A service's runs from another process or machine: `RemoteRuns`."""

from __future__ import annotations

import os
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from slipstream.artifacts.facts import STORE_VARIABLE
from slipstream.config import Loaded, dump_given
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.processes.identity import this_machine
from slipstream.runlog.redaction import hide_userinfo
from slipstream.service import bundles
from slipstream.service.checkpoints import ShownCheckpoint
from slipstream.service.records import NO_OPTIONS, Asked
from slipstream.service.runs import Chunk, NoSuchRun, Shown, ShownPlace

ADDRESS, TOKEN = "SLIPSTREAM_SERVICE", "SLIPSTREAM_SERVICE_TOKEN"
"""Environment variables: a service's address, and the user's token there."""
_TIMEOUT_S = 30.0
_PLAN_S = 660.0
_TRIES = 3
T = TypeVar("T")


class _Health(msgspec.Struct):
    status: str
    machine: str = ""


class RemoteRuns:
    """See `service.runs.Runs`. An unreachable service is one sentence; reading is tried three times."""

    def __init__(self, address: str, token: str | None = None) -> None:
        token = os.environ.get(TOKEN, "") if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.address = address.rstrip("/")
        transport = httpx.HTTPTransport(retries=_TRIES)
        self._client = httpx.Client(base_url=self.address, headers=headers, timeout=_TIMEOUT_S, transport=transport)

    def submit(
        self,
        loaded: Loaded,
        name: str,
        *,
        resume: bool = False,
        store: str = "",
        to: str = "local",
        asked: Asked = NO_OPTIONS,
    ) -> Shown:
        """See `Runs`. To another machine the code goes along; data and models go by path or address, as the service's
        machine sees them."""
        if resume or loaded.config.run.folder is not None:
            raise ConfigError("the service chooses run.folder: leave --run.folder and --resume out")
        if store and store != os.environ.get(STORE_VARIABLE):
            raise ConfigError(f"the service chooses its store: leave --store out, and set {STORE_VARIABLE} there")
        settings, code = dump_given(loaded), {}
        if self.ask("GET", "/v1/health", _Health).machine != this_machine():
            settings, code = bundles.pack(settings)
        body = {"name": name, "settings": settings, "code": bundles.encoded(code), "digest": bundles.digest_of(code)}
        body |= {"to": to, "asked": msgspec.to_builtins(asked)}
        return self.ask("POST", "/v1/runs", Shown, json=body, timeout=_PLAN_S)

    def all(self) -> list[Shown]:
        """See `Runs`."""
        return self.ask("GET", "/v1/runs", list[Shown])

    def one(self, name: str) -> Shown:
        """See `Runs`."""
        return self.ask("GET", f"/v1/runs/{quote(name, safe='')}", Shown)

    def log(self, name: str, offset: int) -> Chunk:
        """See `Runs`."""
        return self.ask("GET", f"/v1/runs/{quote(name, safe='')}/logs", Chunk, params={"offset": offset})

    def cancel(self, name: str) -> Shown:
        """See `Runs`."""
        return self.ask("POST", f"/v1/runs/{quote(name, safe='')}/cancel", Shown)

    def checkpoints(self, name: str) -> list[ShownCheckpoint]:
        """See `Runs`."""
        return self.ask("GET", f"/v1/runs/{quote(name, safe='')}/checkpoints", list[ShownCheckpoint])

    def places(self) -> list[ShownPlace]:
        """See `Runs`."""
        return self.ask("GET", "/v1/gpus", list[ShownPlace])

    def keep_going(self) -> None:
        """See `Runs`: the service does."""

    def ask(self, method: str, path: str, kind: type[T], **options: Any) -> T:
        """A request to the service, and its answer. Raises SlipstreamError."""
        shown = hide_userinfo(self.address)
        try:
            answer = self._client.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SlipstreamError(
                f"the service at {shown} does not answer ({error}): look at slipstream serve, and at {ADDRESS}"
            ) from None
        if answer.status_code == 401:
            raise ConfigError(f"the service at {shown} does not know the token: set {TOKEN}")
        if answer.status_code == 503:
            raise SlipstreamError(f"the service at {shown} has too many clients: try again later")
        if answer.is_error:
            message = _message(answer)
            raise NoSuchRun(message) if answer.status_code == 404 else ConfigError(message)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise SlipstreamError(f"{shown} is no service of this version ({error}): look at {ADDRESS}") from None


def _message(answer: httpx.Response) -> str:
    try:
        found = answer.json()
        return str(found["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {answer.status_code}"
