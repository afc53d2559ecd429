"""Addresses in settings: registries of environments, loopback hosts, and environment variables with keys."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from slipstream.errors import ConfigError

_FORM = "write s3://bucket or s3://bucket/prefix"


RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


@dataclass(frozen=True)
class RunReference:
    """`run:ID` or `run:ID/step-N` in place of a model's path."""

    text: str
    run: str
    step: int | None


def run_reference(text: str) -> RunReference | None:
    """The run that a model's path names; None for another path. Raises ConfigError for a reference of another form."""
    if not text.startswith("run:"):
        return None
    found = re.fullmatch(rf"run:({RUN_NAME})(?:/step-(\d{{1,9}}))?", text)
    if found is None:
        raise ConfigError(f"{text!r:.120} names no run: write run:ID or run:ID/step-N, as in slipstream checkpoints ID")
    return RunReference(text, found[1], int(found[2]) if found[2] else None)


@dataclass(frozen=True)
class HubReference:
    """`hub:OWNER/NAME@REVISION` in place of a model's path."""

    text: str
    repo: str
    revision: str


def hub_reference(text: str) -> HubReference | None:
    """The repository of the hub that a path names; None for another path. Raises ConfigError for another form."""
    if not text.startswith("hub:"):
        return None
    found = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)@(\w[\w./-]{0,99})", text, re.ASCII)
    if found is None or ".." in text:
        raise ConfigError(
            f"{text!r:.120} names no repository of the hub: write hub:OWNER/NAME@REVISION, with a commit or a tag"
        )
    return HubReference(text, found[1], found[2])


def check_port(port: int) -> None:
    """Raises ConfigError for an impossible port."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is no port: use 1 to 65535, or 0 for a free one")


def is_address(text: str) -> bool:
    """Whether a setting is meant as an address and not as a path."""
    return "://" in text or text.startswith("s3:")


def check_address(text: str, setting: str = "") -> str:
    """An address without a slash at its end. Raises ConfigError, which names `setting`, for any other text, and for an
    address that may hold a key."""
    scheme, colon, rest = text.partition("://")
    if not {*"@?:"}.isdisjoint(rest):
        raise ConfigError(
            f"{setting or 'the address of a registry'} has '@', '?' or ':' in it, as addresses with keys have, which "
            f"logs would show: {_FORM}, and give keys as environment variables or in a profile"
        )
    rest = rest.rstrip("/")
    parts = (rest.removeprefix("/") if scheme == "file" else rest).split("/")
    is_plain = {"", ".", ".."}.isdisjoint(parts) and rest.isprintable() and {*"\\# "}.isdisjoint(rest)
    if not (colon and re.fullmatch(r"[a-z][a-z0-9]*", scheme) and is_plain):
        what = f"{setting} = " if setting else ""
        raise ConfigError(f"{what}{text!r:.80} is neither a folder nor an address of plain names: {_FORM}")
    return f"{scheme}://{rest}"


def key_variable_problem(setting: str, *names: str) -> str:
    """The fault of a setting for names of environment variables; empty if there is none. It does not show a key given
    instead of a name."""
    if all(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) for name in names if name):
        return ""
    return f"{setting} is no name of an environment variable: give the name of the key's variable, not the key"


def is_loopback(host: str) -> bool:
    """Whether a host can be nothing but this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def family_of(host: str) -> socket.AddressFamily:
    """Of the socket that listens on this interface."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_of(host: str, port: int) -> str:
    """The address of a server on this interface; of one that listens on all, by this machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def names_this_machine(host: str) -> bool:
    """Whether the `Host` of a request means this machine by a name that nobody else can give it. A web page whose own
    name was pointed here (DNS rebinding) sends that name."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback(name) or name.endswith(".localhost")
