"""Addresses in settings: buckets of S3 that keep environments, and hosts that are this machine."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from slipstream.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_FORM = "write s3://bucket or s3://bucket/prefix"
_MAX_PREFIX_BYTES = 800
"""A key has at most 1,024, of which an environment's name and digest take 133."""


@dataclass(frozen=True)
class Bucket:
    """A bucket, or what lies in it below a prefix, which is empty or ends with a slash."""

    name: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


def is_address(text: str) -> bool:
    """Whether a setting is meant as an address and not as a path."""
    return "://" in text or text.startswith("s3:")


def bucket_of(text: str, setting: str = "") -> Bucket:
    """The bucket at an address, which is named `setting` in errors. Raises ConfigError for any other text, which it
    does not show where it may hold a key."""
    what = f"{setting} = " if setting else ""
    scheme, _, rest = text.partition("://")
    if not {*"@?:"}.isdisjoint(rest):
        raise ConfigError(
            f"{setting or 'the address of a bucket'} has '@', '?' or ':' in it, as addresses with keys have, which "
            f"logs would show: {_FORM}, and give keys as environment variables or in a profile"
        )
    name, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if scheme != "s3" or not _NAME.fullmatch(name):
        raise ConfigError(f"{what}{text!r:.80} is neither a folder nor a bucket of S3: {_FORM}")
    parts = prefix.split("/") if prefix else []
    if not {"", ".", ".."}.isdisjoint(parts) or not prefix.isprintable() or "\\" in prefix or "#" in prefix:
        raise ConfigError(f"{what}{text!r:.80} has a prefix that cannot be one: {_FORM}, of plain names")
    if len(prefix.encode()) > _MAX_PREFIX_BYTES:
        raise ConfigError(f"{what}{text!r:.80} has a prefix of more than {_MAX_PREFIX_BYTES} bytes: use a shorter one")
    return Bucket(name, "".join(f"{part}/" for part in parts))


def is_loopback(host: str) -> bool:
    """Whether a host can be nothing but this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_this_machine(host: str) -> bool:
    """Whether the `Host` of a request means this machine by a name that nobody else can give it. A web page whose own
    name was pointed here (DNS rebinding) sends that name."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback(name) or name.endswith(".localhost")
