"""All providers, by the name in a record's `to`."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.service.local import Local
from slipstream.service.provider import Provider
from slipstream.service.ray import Ray
from slipstream.service.slurm import Slurm

Providers = Mapping[str, Provider]


def all_providers(*, plans_apart: bool = False) -> Providers:
    """Each provider; `plans_apart`: a plan is made in a process of its own, as it imports the user's code."""
    every: list[Provider] = [kind(plans_apart=plans_apart) for kind in (Local, Slurm, Ray)]
    return dict(zip(("local", "slurm", "ray"), every, strict=True))
