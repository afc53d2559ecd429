"""Deployments as commands, the service and agents use them: `deployments_here().deploy(run, step)`."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from slipstream.config.addresses import url_of
from slipstream.errors import ConfigError, DeadlineError
from slipstream.processes.exits import last_error
from slipstream.processes.identity import handle_of, is_alive
from slipstream.processes.launchers import LOCAL
from slipstream.processes.temporary import temporary
from slipstream.runlog import holds_run
from slipstream.runlog.files import read_record
from slipstream.service.client import ADDRESS, TOKEN, RemoteRuns
from slipstream.service.deployments.making import Answer, Asked, make
from slipstream.service.deployments.records import Deployment, Options, stated
from slipstream.service.deployments.registry import Listening, Registry
from slipstream.service.runs import LocalRuns, NoSuchRun
from slipstream.service.store import Store, name_from
from slipstream.service.submission import unix_user

HOST = "slipstream.service.deployments.host"
PORT = 8701
"""Default of the address; a free one if it is taken."""
WAIT_S = 1800.0
_MAKE_S = 600.0
_LAUNCHES = 5
_AGAIN = "its host is gone, and starts again"
_POLL_S = 0.2
DEFAULTS = Options()


class ShownDeployment(msgspec.Struct, frozen=True):
    """A deployment as commands and the service show it."""

    name: str
    """The model's name for clients."""
    run: str
    step: int
    kind: str
    """`adapter` or `model`."""
    state: str
    reason: str
    url: str
    """The OpenAI address, up to `/v1`; empty until there is one."""
    base: str
    rank: int
    digest: str
    owner: str
    system_prompt: str
    context: int
    """Most tokens of a conversation."""
    changed: float


class Deployments(Protocol):
    """The interface."""

    def deploy(self, run: str, step: int | None = None, options: Options = DEFAULTS) -> ShownDeployment:
        """Deploy a run's checkpoint, by default its best, or else its newest. Returns before it is ready. Raises
        ConfigError for an unusable checkpoint."""
        ...

    def undeploy(self, name: str) -> ShownDeployment:
        """Refuse new requests from now on; those under way are answered."""
        ...

    def all(self) -> list[ShownDeployment]:
        """All deployments, the oldest first."""
        ...

    def one(self, name: str) -> ShownDeployment:
        """A deployment. Raises NoSuchRun."""
        ...

    def address(self, found: ShownDeployment) -> str:
        """The OpenAI address for a client here, up to `/v1`."""
        ...

    def key(self) -> str:
        """The key of a client here."""
        ...


class LocalDeployments:
    """See `Deployments`. With `owner` one user's alone."""

    def __init__(self, store: Store, owner: str = "", *, is_service: bool = False) -> None:
        self._store, self._owner, self._is_service = store, owner, is_service
        self._registry = Registry(store)

    def deploy(self, run: str, step: int | None = None, options: Options = DEFAULTS) -> ShownDeployment:
        """See `Deployments`. A service has it made in another process."""
        asked = self._asked(run, step, options)
        name = self._made(asked) if self._is_service else make(self._store, asked).name
        self.keep_going()
        return self.one(name)

    def undeploy(self, name: str) -> ShownDeployment:
        """See `Deployments`."""
        self._find(name)
        with self._registry.locked():
            record = self._registry.one(name)
            if record is None:
                raise _missing(name)
            record = stated(record, "undeploying", "", time.time())
            if self._registry.has_host():
                self._registry.put(record)
            else:
                self._registry.remove(record)
        return self._shown(record)

    def all(self) -> list[ShownDeployment]:
        """See `Deployments`."""
        return [self._shown(each) for each in self._registry.all() if self._owner in ("", each.owner)]

    def one(self, name: str) -> ShownDeployment:
        """See `Deployments`."""
        return self._shown(self._find(name))

    def address(self, found: ShownDeployment) -> str:
        """See `Deployments`."""
        return found.url

    def key(self) -> str:
        """See `Deployments`."""
        return self._registry.key()

    def near_address(self) -> str:
        """The address as this machine reaches it, up to `/v1`; empty without one."""
        now = self._registry.listening()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(now.host, now.host)
        return f"{url_of(host, now.port)}/v1" if now.handle is not None and now.port else ""

    @property
    def key_file(self) -> Path:
        """The key's file."""
        return self._registry.root / "key"

    def listen(self, host: str | None, port: int | None) -> None:
        """Choose the address before the first deployment. Raises ConfigError for another one than there is,
        and for one without a free port."""
        if host is None and port is None:
            return
        from slipstream.commands.serve import free_port

        with self._registry.locked():
            now = self._registry.listening()
            if self._registry.has_host():
                if host not in (None, now.host) or port not in (None, 0, now.port):
                    raise ConfigError(
                        f"--host {host or now.host} --port {port or now.port} was asked for, and deployments are at "
                        f"{url_of(now.host, now.port or 0)}: undeploy all first, or leave both out"
                    )
                return
            free_port(host or now.host, port or 0)
            self._registry.put_listening(Listening(host or now.host, now.port if port is None else port))

    def keep_going(self) -> None:
        """Start the host, if it is needed and not there. After `_LAUNCHES` starts in vain deployments have failed."""
        with self._registry.locked():
            records = [each for each in self._registry.all() if each.state != "failed"]
            now = self._registry.listening()
            if not records or self._registry.has_host() or (now.handle is not None and is_alive(now.handle)):
                return
            if now.launches >= _LAUNCHES:
                log = self._registry.root / "host.log"
                for record in records:
                    reason = f"the host of deployments does not start ({last_error(log)}): see {log}"
                    self._registry.put(stated(record, "failed", reason, time.time()))
                self._registry.put_listening(msgspec.structs.replace(now, launches=0))
                return
            if now.port is None:
                now = msgspec.structs.replace(now, port=_usual_port(now.host))
            for record in records:
                if record.state == "ready":
                    self._registry.put(stated(record, "deploying", _AGAIN, time.time()))
            child = LOCAL.launch(HOST, output=self._registry.root / "host.log")
            launched = msgspec.structs.replace(now, handle=handle_of(child.pid), launches=now.launches + 1)
            self._registry.put_listening(launched)

    def _asked(self, run: str, step: int | None, options: Options) -> Asked:
        runs = LocalRuns(self._store, self._owner, is_service=self._is_service)
        owner = self._owner or unix_user()
        try:
            shown = runs.one(run)
        except NoSuchRun:
            folder = Path(run).expanduser().absolute()
            if not self._is_service and holds_run(folder):
                return Asked(name_from(folder.name), owner, str(folder), step, options)
            if self._is_service or name_from(run) != run:
                raise
            return Asked(run, owner, "", step, options)  # of the store
        return Asked(shown.id, shown.owner, shown.folder, step, options)

    def _made(self, asked: Asked) -> str:
        with temporary("deploy") as place:
            answer, log = place / "answer.json", place / "log"
            arguments = [msgspec.json.encode(asked).decode(), str(answer)]
            child = LOCAL.launch("slipstream.service.deployments.making", arguments, output=log)
            try:
                code = child.wait(_MAKE_S)
            except subprocess.TimeoutExpired:
                raise ConfigError(f"{asked.run} was not checked within {_MAKE_S:g} s: deploy it by command") from None
            finally:
                child.end(0.0)
            found = read_record(answer, Answer)
            if found is None or found.error:
                raise ConfigError(
                    found.error if found else f"the check of {asked.run} ended ({last_error(log) or code}): try again"
                )
            return found.name

    def _find(self, name: str) -> Deployment:
        record = self._registry.one(name)
        if record is None or self._owner not in ("", record.owner):
            raise _missing(name)
        return record

    def _shown(self, record: Deployment) -> ShownDeployment:
        now = self._registry.listening()
        port = now.port if now.handle is not None else None
        if record.state == "ready" and not (now.handle is not None and is_alive(now.handle)):
            record = stated(record, "deploying", _AGAIN, record.changed)
        return ShownDeployment(
            name=record.name,
            run=record.run,
            step=record.step,
            kind=record.kind,
            state=record.state,
            reason=record.reason,
            url=f"{url_of(now.host, port)}/v1" if port else "",
            base=record.base,
            rank=record.rank,
            digest=record.digest,
            owner=record.owner,
            system_prompt=record.system_prompt,
            context=record.context,
            changed=record.changed,
        )


class RemoteDeployments:
    """See `Deployments`: those of a service; it also passes on chats."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._service, self._token = RemoteRuns(address, token), token

    def deploy(self, run: str, step: int | None = None, options: Options = DEFAULTS) -> ShownDeployment:
        """See `Deployments`."""
        body = {"run": run, "step": step, "options": msgspec.to_builtins(options)}
        return self._service.ask("POST", "/v1/deployments", ShownDeployment, json=body, timeout=_MAKE_S + 60)

    def undeploy(self, name: str) -> ShownDeployment:
        """See `Deployments`."""
        return self._service.ask("POST", f"/v1/deployments/{quote(name, safe='')}/undeploy", ShownDeployment)

    def all(self) -> list[ShownDeployment]:
        """See `Deployments`."""
        return self._service.ask("GET", "/v1/deployments", list[ShownDeployment])

    def one(self, name: str) -> ShownDeployment:
        """See `Deployments`."""
        return self._service.ask("GET", f"/v1/deployments/{quote(name, safe='')}", ShownDeployment)

    def address(self, found: ShownDeployment) -> str:
        """See `Deployments`: the service's own, since a deployment's may be its machine's alone."""
        return f"{self._service.address}/v1"

    def key(self) -> str:
        """See `Deployments`: the user's token."""
        return os.environ.get(TOKEN, "") if self._token is None else self._token


def deployments_here(*, is_service: bool = False) -> Deployments:
    """The deployments of the service in SLIPSTREAM_SERVICE, or of this machine, made in this process or, as a service
    does, in another."""
    if address := os.environ.get(ADDRESS):
        return RemoteDeployments(address)
    return LocalDeployments(Store(), is_service=is_service)


def wait_ready(there: Deployments, name: str, timeout_s: float = WAIT_S) -> ShownDeployment:
    """Wait until a deployment is ready, or has failed. Raises DeadlineError, and NoSuchRun after its end."""
    due = time.monotonic() + timeout_s
    while (found := there.one(name)).state not in ("ready", "failed"):
        if time.monotonic() > due:
            raise DeadlineError(f"{name} is {found.state} after {timeout_s:g} s: look at slipstream deployments")
        if isinstance(there, LocalDeployments):
            there.keep_going()
        time.sleep(_POLL_S)
    return found


def _missing(name: str) -> NoSuchRun:
    return NoSuchRun(f"there is no deployment {name!r:.120}: slipstream deployments lists them")


def _usual_port(host: str) -> int:
    from slipstream.commands.serve import free_port

    try:
        return free_port(host, PORT)
    except ConfigError:
        return free_port(host)
