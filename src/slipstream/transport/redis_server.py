"""A connection to a Redis server: what is refused, and what its failures mean.

The password comes from an environment variable and stands in no setting, log or error. A server without one is refused,
unless only this user can open its socket: any user of this machine could read and write the queues.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from slipstream.config.addresses import is_loopback
from slipstream.errors import ConfigError, SlipstreamError, first_line
from slipstream.transport.base import TransportLost
from slipstream.transport.polled import Unreachable

T = TypeVar("T")

_OLDEST = (6, 2)
_ANSWER_S = 10.0
"""How long one answer may take, and one record be on its way."""
_READ_BYTES = 1 << 20
_SCHEMES = ("redis", "rediss", "unix")
_CHECKS = {"ssl_cert_reqs": ("required",), "ssl_check_hostname": ("true", "yes", "1")}
"""Options of a URL that could turn the check of a certificate off, with the values that do not."""


def check_redis(url: str, password_variable: str) -> None:
    """Raises `ConfigError` for a URL or password that is refused, or without the client's package; does not connect."""
    RedisServer(url, password_variable)


class RedisServer:
    """Runs commands on one start of a server. Any thread may use it."""

    def __init__(self, url: str, password_variable: str) -> None:
        """Connects to nothing yet. Raises `ConfigError` for a URL or password that is refused."""
        self._name, password = _checked(url, password_variable)
        self._start = ""
        """Redis's name for this start of the server; empty before the first connection."""
        try:
            import redis
            import redis.exceptions
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(
                f"the queues are on {self._name}, and the Python package redis is missing: pip install redis"
            ) from error
        self._errors = redis.exceptions
        try:
            self._client = redis.Redis.from_url(
                url,
                password=password,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                retry=Retry(NoBackoff(), 0),  # `PolledTransport` tries again, with its deadline
                protocol=2,
                socket_read_size=_READ_BYTES,
                redis_connect_func=self._connected,
            )
            self._client.connection_pool.make_connection()  # does not connect, but looks at the options
        except (ValueError, TypeError, redis.exceptions.RedisError) as error:
            raise ConfigError(
                f"{self._name} has options that are refused ({first_line(error)}): correct them"
            ) from error

    def __repr__(self) -> str:
        return self._name

    def _connected(self, connection: Any) -> None:
        """Logs in, and refuses a server that is too old or was started again. A server that was started again has an
        older state of the queues, or none: by default Redis saves its data once in some minutes."""
        try:
            connection.on_connect()
            connection.send_command("INFO", "server")
            found = dict(re.findall(r"(\w+):(\S*)", connection.read_response().decode()))
            version = found["redis_version"]
            if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
                raise ConfigError(f"{self._name} is Redis {version}: use Redis 6.2 or newer")
            if (self._start or found["run_id"]) != found["run_id"]:
                raise self.lost()
            self._start = found["run_id"]
        except BaseException:
            connection.disconnect()
            raise

    def ask(self, call: Callable[[Any], T]) -> T:
        """The result of a call of the client. Raises `Unreachable` if it is unknown, `TransportLost` if the server lost
        the queue, `ConfigError` if it refuses the password, and `SlipstreamError` if it refuses more."""
        try:
            return call(self._client)
        except (self._errors.AuthenticationError, self._errors.AuthorizationError) as error:
            raise ConfigError(
                f"{self._name} refuses the password ({first_line(error)}): correct the environment variable that "
                "holds it, and name that in the settings"
            ) from error
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            raise Unreachable(
                f"{self._name} does not answer ({first_line(error)}): start it, or correct its address"
            ) from error
        except self._errors.ResponseError as error:
            if "NOGROUP" in str(error):
                raise self.lost() from error
            raise SlipstreamError(
                f"{self._name} refuses a record or a request ({first_line(error)}): correct the server's settings"
            ) from error
        except (self._errors.RedisError, RecursionError, ValueError, LookupError, TypeError) as error:
            raise SlipstreamError(
                f"{self._name} answers as no Redis server does ({first_line(error)}): correct its address"
            ) from error

    def together(self, add: Callable[[Any], None]) -> list[Any]:
        """The answers to the commands that `add` queues, which are carried out as one."""

        def call(client: Any) -> list[Any]:
            with client.pipeline() as pipe:
                add(pipe)
                return pipe.execute()

        return self.ask(call)

    def make_group(self, stream: str, group: str) -> bool:
        """Makes a stream with a consumer group, unless it is there."""

        def make(client: Any) -> bool:
            try:
                client.xgroup_create(stream, group, id="0", mkstream=True)
            except self._errors.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            return True

        return self.ask(make)

    def lost(self) -> TransportLost:
        """The error of a queue that the server no longer has as it was."""
        return TransportLost(
            f"{self._name} has lost records of a queue, because it was started again or they were removed: resume, "
            "which makes them again"
        )


def _checked(url: str, password_variable: str) -> tuple[str, str | None]:
    """The server's name in messages, and its password."""
    try:
        parts = urlsplit(url)
        place = parts.path if parts.scheme == "unix" else _host_and_port(parts)
    except ValueError:
        raise ConfigError(
            "the Redis URL cannot be read: write redis://host:port, rediss://... or unix:///path"
        ) from None
    options = parse_qs(parts.query)
    if parts.password is not None or "password" in options:
        raise ConfigError(
            "the Redis URL holds a password, which logs would show: put it into an environment variable, and name that"
        )
    if parts.scheme not in _SCHEMES or not place:
        raise ConfigError(f"{parts.scheme}://{place} names no Redis server: write redis://, rediss:// or unix:///path")
    name = f"the Redis server {parts.scheme}://{place}"
    password = os.environ.get(password_variable) if password_variable else None
    if password_variable and not password:
        raise ConfigError(f"{password_variable} is to hold the password of {name}, and is not set: set it")
    is_here = parts.scheme == "unix" or is_loopback(parts.hostname or "")
    missing = [] if is_here or parts.scheme == "rediss" else ["TLS"]
    if password is None and not (parts.scheme == "unix" and _is_private(place)):
        missing.append("a password")
    if missing:
        raise ConfigError(
            f"{name} needs {' and '.join(missing)}, without which others could read and write the queues: give the "
            "server a password (requirepass), name the variable that holds it as redis.password_variable, and use "
            "rediss:// off this machine"
        )
    if is_here:
        return name, password
    for option, checked in _CHECKS.items():
        for value in options.get(option, ()):
            if value.lower() not in checked:
                raise ConfigError(
                    f"{name} could be anybody with {option}={value}: leave it out, and name the authority with "
                    "ssl_ca_certs=PATH"
                )
    return name, password


def _host_and_port(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]:{parts.port or 6379}" if ":" in host else f"{host}:{parts.port or 6379}" if host else ""


def _is_private(socket: str) -> bool:
    """Whether only its owner may open a socket."""
    try:
        return not os.stat(socket).st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    except OSError:  # connecting will say so
        return True
