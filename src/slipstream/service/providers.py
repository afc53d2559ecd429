"""All providers, by the name in a record's `to`."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.service.local import Local
from slipstream.service.provider import Provider

Providers = Mapping[str, Provider]


def all_providers(*, plans_apart: bool = False) -> Providers:
    """Each provider; `plans_apart`: a plan is made in a process of its own, as it imports the user's code."""
    return {"local": Local(plans_apart=plans_apart)}
