"""The control address of an engine: a Unix socket, or the address of a server with its token."""

from __future__ import annotations

import dataclasses
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from slipstream.config.inference import InferenceServer
from slipstream.errors import ConfigError
from slipstream.inference.lending import AGENTS, LEASE_HEADER


@dataclass(frozen=True)
class ControlAddress:
    """Of an engine."""

    url: str
    """`unix:/path`, `http://host:port` or `https://host:port`."""
    token: str = field(default="", repr=False)
    lease: str = field(default="", repr=False)
    """The id of the run that calls."""
    place: str = ""
    """The beginning of paths."""

    @property
    def path(self) -> str:
        """The Unix socket's; empty for others."""
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else ""

    @property
    def base(self) -> str:
        """The beginning of request URLs."""
        return ("http://engine" if self.path else self.url.rstrip("/")) + self.place

    @property
    def headers(self) -> dict[str, str]:
        """Of each request."""
        own = {"authorization": f"Bearer {self.token}"} if self.token else {}
        return own | ({LEASE_HEADER: self.lease} if self.lease else {})

    def for_agents(self, lease: str) -> ControlAddress:
        """The address of agents' requests in a run with this id."""
        return dataclasses.replace(self, lease=lease, place=AGENTS)

    def connector(self) -> aiohttp.BaseConnector:
        """For a session in the running event loop."""
        if self.path:
            return aiohttp.UnixConnector(self.path, limit=0)
        is_tls = self.url.startswith("https:")
        return aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context() if is_tls else False)

    @property
    def own_host(self) -> str:
        """This host's address towards it. Raises ConfigError if there is no way."""
        if self.path:
            return "127.0.0.1"
        parts = urlsplit(self.url)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(f"there is no way to the server at {self.url} ({error}): correct its address") from error


def addresses_of(servers: Sequence[InferenceServer]) -> tuple[ControlAddress, ...]:
    """With their tokens. Raises ConfigError if a variable is not set."""
    found: list[ControlAddress] = []
    for server in servers:
        token = os.environ.get(server.token_variable, "") if server.token_variable else ""
        if server.token_variable and not token:
            raise ConfigError(
                f"{server.token_variable} is not set: give it the token of the server at {server.url} "
                "(inference.servers.token_variable)"
            )
        found.append(ControlAddress(server.url, token))
    return tuple(found)


def own_host_of(servers: Sequence[ControlAddress]) -> str:
    """This host's one address towards all of them. Raises ConfigError for several."""
    hosts = {server.own_host: server.url for server in servers}
    if len(hosts) > 1:
        ways = ", ".join(f"{url} from {host}" for host, url in hosts.items())
        raise ConfigError(f"inference.servers are reached over several networks ({ways}): give addresses of one")
    return next(iter(hosts))
