"""`environment.settings` of the environment `atropos` (docs/atropos.md)."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from slipstream.config.addresses import is_loopback, key_variable_problem
from slipstream.config.bounds import Section
from slipstream.config.environment import EnvironmentConfig
from slipstream.errors import ConfigError, did_you_mean

NAME = "atropos"
_SETTINGS = "environment.settings"


class AtroposSettings(Section):
    """With `url` the run is the trainer of that `run-api`. Without, it serves the API itself."""

    url: str = ""
    """Address of a `run-api`, such as `http://127.0.0.1:8000`."""
    host: str = "127.0.0.1"
    """Interface of the API and of the model's server."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of the API; 0 for a free one."""
    model_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of the model's server, of several engines the first one's; 0 for free ones."""
    token_variable: str = ""
    """The environment variable with the token for both. Loopback needs none."""


def atropos_settings(section: EnvironmentConfig | None) -> AtroposSettings | None:
    """The settings, checked; None for another environment. Raises `ConfigError`."""
    if section is None or section.name != NAME:
        return None
    for name in section.settings:
        if name not in AtroposSettings.model_fields:
            raise ConfigError(f"{_SETTINGS}.{name} is no setting{did_you_mean(name, AtroposSettings.model_fields)}")
    try:
        settings = AtroposSettings.model_validate(section.settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{_SETTINGS}.{first['loc'][0]} = {first['input']!r:.80}: {first['msg']}") from None
    if problem := key_variable_problem(f"{_SETTINGS}.token_variable", settings.token_variable):
        raise ConfigError(problem)
    if settings.url:
        parts = urlsplit(settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"{_SETTINGS}.url is no address of a run-api: write http://HOST:PORT, without a key in it"
            )
    if not is_loopback(settings.host) and not settings.token_variable:
        raise ConfigError(
            f"{_SETTINGS}.host = {settings.host!r} can be reached from other machines, and nothing asks for a token: "
            "set token_variable, or leave host out"
        )
    return settings
