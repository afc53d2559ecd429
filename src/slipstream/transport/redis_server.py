"""A connection to a Redis server: what is refused, and what its failures mean.

The password comes from an environment variable and stands in no setting, log or error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from slipstream.config.addresses import is_loopback
from slipstream.errors import ConfigError, SlipstreamError, first_line
from slipstream.transport.base import TransportLost
from slipstream.transport.polled import Unreachable

LOST = b"lost"
"""First part of a script's answer: its queue is gone. The value that was set before it is removed."""
MISSING = b"missing"
"""First part of a script's answer: the value that was to be set before it is not there."""
Runs = Callable[[Sequence[str], Sequence[str | int]], Any]
"""A function of keys and arguments."""

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
    """Runs scripts on a server. Any thread may use it."""

    def __init__(self, url: str, password_variable: str, environment: Mapping[str, str] = os.environ) -> None:
        """Connects to nothing yet. Raises `ConfigError` for a URL or password that is refused."""
        self._name, password = _checked(url, password_variable, environment)
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
        # The default only since version 6 of the client.
        checks = {"ssl_check_hostname": True} if url.startswith("rediss:") and "ssl_cert_reqs=none" not in url else {}
        try:
            self._client = redis.Redis.from_url(
                url,
                password=password,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                retry=Retry(NoBackoff(), 0),  # whether a command may be sent again, its caller knows
                protocol=2,
                socket_read_size=_READ_BYTES,
                **checks,
            )
            self._client.connection_pool.make_connection()  # does not connect, but looks at the options
        except (ValueError, TypeError, redis.exceptions.RedisError) as error:
            raise ConfigError(
                f"{self._name} has options that are refused ({first_line(error)}): correct them"
            ) from error

    def __repr__(self) -> str:
        return self._name

    def check_version(self) -> None:
        """Raises `ConfigError` for a server that is too old."""

        def ask() -> tuple[str, tuple[int, ...]]:
            text = str(self._client.info("server")["redis_version"])
            return text, tuple(int(part) for part in text.split(".")[:2])

        version, numbers = self._call(ask)
        if numbers < _OLDEST:
            raise ConfigError(
                f"{self._name} is Redis {version}, which cannot hand on what a dead reader held (XAUTOCLAIM): "
                "use Redis 6.2 or newer"
            )

    def script(self, text: str) -> Script:
        """A function of keys and arguments that runs this Lua script."""
        return Script(text, self._client, self._errors, self._call)

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
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
                raise lost(self._name) from error
            raise SlipstreamError(
                f"{self._name} refuses a record or a request ({first_line(error)}): correct the server's settings"
            ) from error
        except (self._errors.RedisError, RecursionError, ValueError, LookupError, TypeError) as error:
            raise SlipstreamError(
                f"{self._name} answers as no Redis server does ({first_line(error)}): correct its address"
            ) from error


class Script:
    """Runs a Lua script on a server, in one step for everyone else. Raises `Unreachable` if its result is unknown,
    `TransportLost` if the server lost its stream, and another `SlipstreamError` if the server refuses."""

    def __init__(self, text: str, client: Any, errors: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        """`errors`: the client's module of them. `call` runs a call of the client and translates what it raises."""
        self._text, self._client, self._errors, self._call = text, client, errors, call
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """What it answers."""
        return self._call(lambda: self._run(keys, arguments))

    def after_setting(self, key: str, value: bytes, seconds: int) -> Runs:
        """The script, run right after `key` was set to `value` for so many seconds; both are sent at once. Where the
        server refuses the value, the script decides: it fails unless it answers something else than `MISSING`."""

        def run(keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
            try:
                is_set, answer = self._send(
                    ("SET", key, value, "EX", seconds), ("EVALSHA", self._digest, len(keys), *keys, *arguments)
                )
                if isinstance(answer, self._errors.NoScriptError):
                    answer = self._run(keys, arguments)
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(is_set, Exception) and answer[0] == MISSING:
                    raise is_set
                if answer[0] == LOST:
                    self._client.delete(key)
            except self._errors.ResponseError:
                self._client.delete(key)
                raise
            return answer

        return lambda keys, arguments: self._call(lambda: run(keys, arguments))

    def _send(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Sends commands at once; what each answers, or the error with which the server refuses it. The client's
        pipeline does the same, and takes as long as sending a record."""
        pool = self._client.connection_pool
        try:
            connection = pool.get_connection()
        except TypeError:  # a client before 5.3
            connection = pool.get_connection(commands[0][0])
        try:
            *pieces, last = [piece for command in commands for piece in connection.pack_command(*command)]
            if pieces:  # the end of one command and the beginning of the next
                last = pieces.pop() + last
            connection.send_packed_command([*pieces, last])
            return [self._received(connection) for _ in commands]
        finally:
            pool.release(connection)

    def _received(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except self._errors.ResponseError as error:
            return error

    def _run(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        try:
            return self._client.evalsha(self._digest, len(keys), *keys, *arguments)
        except self._errors.NoScriptError:
            self._client.script_load(self._text)
            return self._client.evalsha(self._digest, len(keys), *keys, *arguments)


def lost(name: str) -> TransportLost:
    """The error of a queue that the server no longer has as it was."""
    return TransportLost(
        f"{name} has lost records of a queue, because it was restarted without all of its data or they were removed: "
        "resume, which makes them again, and give the server persistence (appendonly yes)"
    )


def _checked(url: str, password_variable: str, environment: Mapping[str, str]) -> tuple[str, str | None]:
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
    password = environment.get(password_variable) if password_variable else None
    if password_variable and not password:
        raise ConfigError(f"{password_variable} is to hold the password of {name}, and is not set: set it")
    if parts.scheme == "unix" or is_loopback(parts.hostname or ""):
        return name, password
    if parts.scheme != "rediss" or password is None:
        missing = " and ".join(
            [*(["TLS"] if parts.scheme != "rediss" else []), *(["a password"] if password is None else [])]
        )
        raise ConfigError(
            f"{name} is another machine's, where anybody on the network could read and write the queues without "
            f"{missing}: use rediss:// and name the variable that holds the password"
        )
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
